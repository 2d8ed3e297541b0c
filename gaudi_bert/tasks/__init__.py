"""What a downstream task is: its rows, its head, its loss, its metrics, its answers. One task, one file."""
