"""The kinds of training runs.

`records.py` trains a BERT on pretraining records, and `tables.py` trains a masked or causal language model on packed tables.
`finetune.py` is the stage that fine-tunes a model for a task. `rows.py` contains its job for tasks whose loss is a sum over
rows, and `pairs.py` its job for tasks with one loss over all rows of an update.
"""
