"""PyTorch: BERT and any other encoder, updates, torch.distributed, the Gaudi of today, GPUs.

Here is what torch and Gaudi's software read from the environment while they are loaded. On the vendor's images
`import torch` loads that software, so these variables are set before anything imports torch: when this package is
imported. What is already set belongs to the user (or the image, or the launcher) and stays.

The vendor's autocast computes softmax, layer norm, products of elements and means in bfloat16 unless it is given lists: what
`bfloat16.txt` names is computed in bfloat16, what `float32.txt` names in float32, anything else in the type of its inputs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from gaudi_bert.common.threads import limited_cores

_FOLDER = Path(__file__).parent
VARIABLES = {
    "PT_HPU_LAZY_MODE": "0",
    "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST": str(_FOLDER / "bfloat16.txt"),
    "PT_HPU_AUTOCAST_FP32_OPS_LIST": str(_FOLDER / "float32.txt"),
}
"""Eager mode, which torch.compile needs, and the lists of autocast, an operation per line."""


# Each lost connection would be a trace of C++; an error of ours reports it in one line.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL"}

# Threads of a CPU wait for one another at the end of every operation. By default they do it for milliseconds at full speed:
# where another program uses one of two cores, a step takes 1.4 times as long, and 1.8 times the CPU time.
_SHORT_WAIT = {"GOMP_SPINCOUNT": "1000"}


def has_gaudi() -> bool:
    """Whether the vendor's software is installed, without importing it."""
    return importlib.util.find_spec("habana_frameworks") is not None


def _prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is not set; it has no effect once torch, or the vendor's software, is imported."""
    # PyTorch counts the cores that it may run on, and knows nothing of a container's share of their time.
    cores = limited_cores()
    threads = {} if cores is None else {"OMP_NUM_THREADS": str(cores)}
    wait = {} if "OMP_WAIT_POLICY" in environment else _SHORT_WAIT
    of_gaudi = VARIABLES if has_gaudi() and "habana_frameworks.torch" not in sys.modules else {}
    for name, value in {**_QUIET, **threads, **wait, **of_gaudi}.items():
        environment.setdefault(name, value)


def environment_notes() -> tuple[str, ...]:
    """A note for each variable that is not as we would set it."""
    notes = []
    for name, value in VARIABLES.items():
        present = os.environ.get(name)
        if present is None:
            notes.append(f"note: {name} was not set when torch was imported; set it to {value} before that")
        elif present != value:
            notes.append(f"note: {name}={present} is set in the environment and stays (the default here is {value})")
    return tuple(notes)


_prepare()
