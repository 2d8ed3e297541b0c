"""Training runs: input, training loop, schedule, checkpoints, metrics and evaluation.

This package imports no framework. The computation itself is done by one of the engines (`gaudi_bert/engines`).
"""
