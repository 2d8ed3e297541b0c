"""Models of tasks as folders."""
