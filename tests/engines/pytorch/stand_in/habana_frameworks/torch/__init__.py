"""The bridge between PyTorch and the cards."""
