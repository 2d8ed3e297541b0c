"""What TensorFlow reads from the environment while it is loaded: set by the rooms that import it, before they do.

What the user, an image or a launcher has set is left alone.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping

__all__ = ["prepare_tensorflow"]

# TensorFlow reports every step of its graph optimisers, and quotes damaged records; our own errors say it in one line.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}

# TensorFlow's own default is to use oneDNN only where the processor has AVX512_VNNI or better. Its own products are compiled
# for AVX without FMA: where there is AVX2, oneDNN's are one and a half times as fast, and batched ones nearly three times.
ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "1"}


def prepare_tensorflow(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is not set; call it before TensorFlow is imported, it has no effect later.

    On a host with the Gaudi software the choice of kernels is left to the vendor's TensorFlow: what oneDNN rewrites in a
    graph is not for the card.
    """
    has_gaudi = importlib.util.find_spec("habana_frameworks") is not None
    for name, value in (QUIET if has_gaudi else {**QUIET, **ONEDNN}).items():
        environment.setdefault(name, value)
