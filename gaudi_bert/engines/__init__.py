"""Frameworks that compute a run: what a run asks of one (`protocol.py`), TensorFlow, and PyTorch."""
