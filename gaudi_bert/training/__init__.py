"""Training: input, optimisers, the update, the loop, checkpoints, metrics, evaluation. TensorFlow."""

import os

# TensorFlow reports every step of its graph optimisers, and quotes damaged records; our own errors say it in one line.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
