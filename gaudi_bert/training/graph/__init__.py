"""The training step as a graph, looked at without running it."""
