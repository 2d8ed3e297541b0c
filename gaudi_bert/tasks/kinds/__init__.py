"""The tasks: the rows, head, loss, metrics and predictions of each."""
