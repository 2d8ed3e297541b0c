"""From records to checked batches."""
