"""Rows of text: reading them from files, tokenizing and packing them, and turning model outputs into predictions per row."""
