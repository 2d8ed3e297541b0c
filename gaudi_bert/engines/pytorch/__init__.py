"""PyTorch: BERT and any other encoder, updates, torch.distributed, the Gaudi of today, GPUs."""

from gaudi_bert.engines.pytorch.gaudi import prepare_gaudi, prepare_torch

prepare_torch()
prepare_gaudi()
