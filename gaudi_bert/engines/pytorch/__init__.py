"""The PyTorch engine: BERT and other encoders, updates, torch.distributed, CPUs, GPUs, and current Gaudi software.

PyTorch and the Gaudi software read environment variables while they are imported, and on the vendor's images `import torch`
also imports the Gaudi software. Therefore importing this package sets these variables before torch is imported. Variables
that the user, the image or the launcher has already set are not changed.

By default, the vendor's autocast computes softmax, layer normalization, elementwise products and means in bfloat16. We pass
our own lists instead: operations in `bfloat16.txt` are computed in bfloat16, operations in `float32.txt` in float32, and all
others in the dtype of their inputs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from gaudi_bert.common.processor import count_cores_if_limited

_FOLDER = Path(__file__).parent
# Environment variables for the Gaudi software. The first turns off lazy mode, which torch.compile does not support. The
# other two name the files that list the operations that autocast runs in bfloat16 and in float32.
VARIABLES = {
    "PT_HPU_LAZY_MODE": "0",
    "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST": str(_FOLDER / "bfloat16.txt"),
    "PT_HPU_AUTOCAST_FP32_OPS_LIST": str(_FOLDER / "float32.txt"),
}

# By default, PyTorch prints a C++ stack trace for every lost connection. Suppress it, because our own error message reports
# the loss in one line.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL"}

# CPU threads wait for each other at the end of every operation, by default in a busy loop that lasts milliseconds. If
# another program occupies one core of two, an update takes 1.4 times as long and 1.8 times the CPU time. Therefore let the
# threads sleep sooner.
_SHORT_WAIT = {"GOMP_SPINCOUNT": "1000"}


def is_habana_frameworks_installed() -> bool:
    """Return whether `habana_frameworks`, the Gaudi software, is installed, without importing it."""
    return importlib.util.find_spec("habana_frameworks") is not None


def _set_environment_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variables of PyTorch and of the Gaudi software, except those that are already set.

    This has no effect on software that was already imported.
    """
    # PyTorch ignores the CPU limit of a container, and would start one thread for every core on which it may run. Therefore
    # set the number of threads if there is a limit.
    cores = count_cores_if_limited()
    threads = {} if cores is None else {"OMP_NUM_THREADS": str(cores)}
    wait = {} if "OMP_WAIT_POLICY" in environment else _SHORT_WAIT
    of_gaudi = VARIABLES if is_habana_frameworks_installed() and "habana_frameworks.torch" not in sys.modules else {}
    for name, value in {**_QUIET, **threads, **wait, **of_gaudi}.items():
        environment.setdefault(name, value)


def describe_nondefault_environment_variables() -> tuple[str, ...]:
    """Return a note for the user about each environment variable of the Gaudi software that differs from our default."""
    notes = []
    for name, value in VARIABLES.items():
        present = os.environ.get(name)
        if present is None:
            notes.append(f"note: {name} was not set when torch was imported; set it to {value} before importing torch")
        elif present != value:
            notes.append(f"note: the environment sets {name}={present}, which replaces the default, {value}")
    return tuple(notes)


_set_environment_defaults()
