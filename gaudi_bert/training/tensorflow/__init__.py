"""The training step in TensorFlow, and its device."""
