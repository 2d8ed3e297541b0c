"""PyTorch: BERT and any other encoder, updates, torch.distributed, the Gaudi of today, GPUs."""
