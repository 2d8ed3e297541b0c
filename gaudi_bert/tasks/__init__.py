"""The fine-tuning tasks with their targets, losses, metrics and predictions, and the stages predict, embed and export."""
