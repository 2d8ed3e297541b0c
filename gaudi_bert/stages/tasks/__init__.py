"""Fine-tuning a task, and what its model answers."""
