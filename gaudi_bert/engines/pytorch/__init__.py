"""PyTorch: BERT and any other encoder, updates, torch.distributed, the Gaudi of today, GPUs."""

import os

from gaudi_bert.engines.pytorch.gaudi import prepare_gaudi

# torch.distributed reports each lost connection with a trace of C++; what follows from it is an error of ours, in one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

prepare_gaudi()
