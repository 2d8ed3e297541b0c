"""The public API for PyTorch: a data set and a loader of packs, a collator, BERT heads, an encoder, and a mixin for
`Trainer`.

The names are imported when they are first used, because they need torch and transformers (the extra `pytorch`).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from gaudi_bert.common.errors import InputError, install_command

if TYPE_CHECKING:  # for type checkers; at run time `__getattr__` imports torch when a name is first used
    from gaudi_bert.pytorch.collate import PackCollator as PackCollator
    from gaudi_bert.pytorch.collate import model_inputs as model_inputs
    from gaudi_bert.pytorch.dataset import PackedDataset as PackedDataset
    from gaudi_bert.pytorch.dataset import PackedLoader as PackedLoader
    from gaudi_bert.pytorch.encoder import PackedEncoder as PackedEncoder
    from gaudi_bert.pytorch.heads import PackedBertForPreTraining as PackedBertForPreTraining
    from gaudi_bert.pytorch.heads import PackedBertForSequenceClassification as PackedBertForSequenceClassification
    from gaudi_bert.pytorch.heads import update_counts as update_counts
    from gaudi_bert.pytorch.heads import update_loss as update_loss
    from gaudi_bert.pytorch.training import PackedTrainerMixin as PackedTrainerMixin
    from gaudi_bert.pytorch.training import translate_arguments as translate_arguments

_NAMES = {
    "collate": ("PackCollator", "model_inputs"),
    "dataset": ("PackedDataset", "PackedLoader"),
    "encoder": ("PackedEncoder",),
    "heads": ("PackedBertForPreTraining", "PackedBertForSequenceClassification", "update_counts", "update_loss"),
    "training": ("PackedTrainerMixin", "translate_arguments"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing this package does not import torch and transformers.

    Raises:
        InputError: torch or transformers is not installed.
        AttributeError: The package has no such name.
    """
    module = next((module for module, names in _NAMES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for needed in ("torch", "transformers"):
        if importlib.util.find_spec(needed) is None:
            raise InputError(f"{__name__}.{name} needs {needed}, which is not installed; run: {install_command('pytorch')}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
