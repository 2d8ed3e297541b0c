"""Downstream tasks: their rows, heads, losses, metrics and predictions, with one file per task in `kinds/`."""
