"""The same training step by the model of Habana's `PyTorch/nlp/bert`, from a checkout of it that the user fetched."""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.input.batches import Batch

IGNORED = -1


class VendorTrainer:
    """Its `BertForPreTraining` on packed rows as its `run_pretraining.py` calls it, with AdamW, dropout on.

    Args:
        folder: holds `modeling.py`.
        config: of the model, the same as ours.
        batches: packed batches of depth 3; they are turned into tensors once, so reading costs nothing here.
    """

    def __init__(self, folder: Path, config: BertConfig, batches: Sequence[Batch]) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        torch.manual_seed(1)
        modeling = load_modeling(folder)
        facts = config.to_json()
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
        self._model = modeling.BertForPreTraining(
            modeling.BertConfig(config.vocab_size, **{name: facts[name] for name in names})
        )
        self._model.train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, weight_decay=0.01)
        self._batches = [_as_tensors(batch) for batch in batches]
        self._update = 0

    def run(self, updates: int) -> None:
        """Do so many updates."""
        for _ in range(updates):
            batch = self._batches[self._update % len(self._batches)]
            self._update += 1
            self._optimizer.zero_grad()
            words, sentences = self._model(enable_packed_data_mode=True, **batch["inputs"])
            losses = [
                functional.cross_entropy(scores.flatten(0, -2), batch[labels].flatten(), ignore_index=IGNORED)
                for scores, labels in ((words, "masked_lm_labels"), (sentences, "next_sentence_labels"))
            ]
            sum(losses).backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()


def load_modeling(folder: Path) -> Any:
    """Its module `modeling`; the module that it downloads weights with is not needed, and stood in for."""
    if not (folder / "modeling.py").is_file():
        raise SystemExit(f"--vendor {folder}: no modeling.py in it; give the folder PyTorch/nlp/bert of Model-References")
    downloads = types.ModuleType("file_utils")
    downloads.cached_path = None  # type: ignore[attr-defined]
    sys.modules["file_utils"] = downloads
    sys.path.insert(0, str(folder))
    return importlib.import_module("modeling")


def _as_tensors(batch: Batch) -> dict[str, Any]:
    ids_BL = batch["input_ids"]
    rows, slots = np.nonzero(batch["masked_lm_weights"] > 0)
    labels_BL = np.full(ids_BL.shape, IGNORED)
    labels_BL[rows, batch["masked_lm_positions"][rows, slots]] = batch["masked_lm_ids"][rows, slots]
    sentences_BS = np.where(batch["next_sentence_weights"] > 0, batch["next_sentence_labels"], IGNORED)

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))

    inputs = {
        "input_ids": ids_BL,
        "token_type_ids": batch["segment_ids"],
        "attention_mask": batch["input_mask"],
        "positions": batch["positions"],
        "next_sentence_positions": batch["next_sentence_positions"],
    }
    return {
        "inputs": {name: tensor(array) for name, array in inputs.items()},
        "masked_lm_labels": tensor(labels_BL),
        "next_sentence_labels": tensor(sentences_BS),
    }
