"""Text to packed records that are proven: a module for each stage."""
