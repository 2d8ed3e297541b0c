"""Several cards."""
