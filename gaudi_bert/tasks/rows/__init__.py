"""Labelled (or plain) text: files to rows, rows to token numbers. No TensorFlow."""
