"""Packs for PyTorch: data set, loader, collator, heads that gather, a probe for leaks. The only room that knows torch."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from gaudi_bert.common.errors import InputError

if TYPE_CHECKING:
    from gaudi_bert.pytorch.collate import PackCollator, model_inputs
    from gaudi_bert.pytorch.dataset import PackedDataset, PackedLoader
    from gaudi_bert.pytorch.heads import PackedBertForPreTraining, update_counts
    from gaudi_bert.pytorch.hyperparameters import translate_arguments
    from gaudi_bert.pytorch.loading import load_model
    from gaudi_bert.pytorch.probe import probe_model
    from gaudi_bert.pytorch.trainer import PackedTrainerMixin

__all__ = [
    "PackCollator",
    "PackedBertForPreTraining",
    "PackedDataset",
    "PackedLoader",
    "PackedTrainerMixin",
    "load_model",
    "model_inputs",
    "probe_model",
    "translate_arguments",
    "update_counts",
]

_HOMES = {
    "PackCollator": "collate",
    "PackedBertForPreTraining": "heads",
    "PackedDataset": "dataset",
    "PackedLoader": "dataset",
    "PackedTrainerMixin": "trainer",
    "load_model": "loading",
    "model_inputs": "collate",
    "probe_model": "probe",
    "translate_arguments": "hyperparameters",
    "update_counts": "heads",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, and torch with it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for needed in ("torch", "transformers"):
        if importlib.util.find_spec(needed) is None:
            raise InputError(f"{__name__}.{name} needs {needed}; install it with: pip install 'gaudi-bert[pytorch]'")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
