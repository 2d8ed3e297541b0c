"""What the vendor's software reads from the environment while it is loaded.

On the vendor's images `import torch` loads it, so these variables are set before anything imports torch
(`engines/pytorch/__init__.py`). What is already set belongs to the user (or the image, or the launcher) and stays.

The vendor's autocast computes softmax, layer norm, products of elements and means in bfloat16 unless it is given lists: what
`bfloat16.txt` names is computed in bfloat16, what `float32.txt` names in float32, anything else in the type of its inputs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

_FOLDER = Path(__file__).parent
VARIABLES = {
    "PT_HPU_LAZY_MODE": "0",
    "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST": str(_FOLDER / "bfloat16.txt"),
    "PT_HPU_AUTOCAST_FP32_OPS_LIST": str(_FOLDER / "float32.txt"),
}
"""Eager mode, which torch.compile needs, and the lists of autocast, an operation per line."""


def has_gaudi() -> bool:
    """Whether the vendor's software is installed, without importing it."""
    return importlib.util.find_spec("habana_frameworks") is not None


def prepare_gaudi(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is not set, unless it is too late; call it before torch is imported."""
    if has_gaudi() and "habana_frameworks.torch" not in sys.modules:
        for name, value in VARIABLES.items():
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
