"""PyTorch: BERT and any other encoder, updates, torch.distributed, the Gaudi of today, GPUs."""

import os

from gaudi_bert.engines.pytorch.gaudi import prepare_gaudi

# Each lost connection would be a trace of C++; an error of ours reports it in one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
prepare_gaudi()
