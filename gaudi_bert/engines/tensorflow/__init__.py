"""The TensorFlow engine: BERT with its heads and losses, updates, Horovod, and Gaudi cards with software release 1.14.

TensorFlow reads environment variables while it is imported. Importing this package sets them, and does not import
TensorFlow.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping

from gaudi_bert.common.processor import count_cores_if_limited

# By default, TensorFlow logs every step of its graph optimizers, and prints the contents of damaged records. Suppress this
# output, because our own error messages report such problems in one line.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}

# By default, TensorFlow uses oneDNN only on processors with AVX512_VNNI or better. On AVX2, oneDNN is faster too, because
# TensorFlow's own kernels do not use FMA. It computes matrix products 1.5 times as fast, and batched products nearly 3 times
# as fast. Therefore turn on oneDNN for all processors.
_ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "1"}

# TensorFlow ignores the CPU limit of a container, and would start one thread for every core on which it may run. This
# environment variable sets the number of threads.
INTRA_OP_THREADS = "TF_NUM_INTRAOP_THREADS"


def set_tensorflow_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variables that TensorFlow reads, except those that are already set.

    This has no effect after TensorFlow was imported. If the Gaudi software is installed, oneDNN is not turned on, because
    its graph rewrites are not meant for the card, and the vendor's TensorFlow chooses the kernels.
    """
    has_gaudi = importlib.util.find_spec("habana_frameworks") is not None
    cores = count_cores_if_limited()
    threads = {} if cores is None else dict.fromkeys((INTRA_OP_THREADS, "TF_NUM_INTEROP_THREADS"), str(cores))
    for name, value in {**_QUIET, **threads, **({} if has_gaudi else _ONEDNN)}.items():
        environment.setdefault(name, value)


set_tensorflow_environment()
