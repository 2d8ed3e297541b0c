"""What each task is: rows, head, loss, metrics, answers."""
