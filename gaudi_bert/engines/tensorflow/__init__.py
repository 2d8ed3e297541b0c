"""TensorFlow: BERT, its heads and losses, updates, Horovod, the Gaudi of release 1.14.

What it reads from the environment while it is loaded is set when this package is imported, before anything imports it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping

from gaudi_bert.common.threads import limited_cores

# It reports every step of its graph optimisers, and quotes damaged records; our own errors say it in one line.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}

# TensorFlow's own default is to use oneDNN only where the processor has AVX512_VNNI or better. Its own products are compiled
# for AVX without FMA: where there is AVX2, oneDNN's are one and a half times as fast, and batched ones nearly three times.
_ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "1"}

# TensorFlow counts the cores that it may run on, and knows nothing of a container's share of their time.
INTRA_OP_THREADS = "TF_NUM_INTRAOP_THREADS"


def prepare_tensorflow(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what no user, image or launcher has set; call it before TensorFlow is imported, it has no effect later.

    On a host with the Gaudi software the choice of kernels belongs to the vendor's TensorFlow: what oneDNN rewrites in a
    graph is not for the card.
    """
    has_gaudi = importlib.util.find_spec("habana_frameworks") is not None
    cores = limited_cores()
    threads = {} if cores is None else dict.fromkeys((INTRA_OP_THREADS, "TF_NUM_INTEROP_THREADS"), str(cores))
    for name, value in {**_QUIET, **threads, **({} if has_gaudi else _ONEDNN)}.items():
        environment.setdefault(name, value)


prepare_tensorflow()
