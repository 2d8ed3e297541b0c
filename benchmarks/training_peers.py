"""The same training step in other PyTorch programs: transformers on padded rows, and Habana's BERT on packs."""

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
import transformers
from torch.nn.functional import cross_entropy

from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.batches import Batch

IGNORED = -100
Tensors = dict[str, torch.Tensor]


class _PeerTrainer:
    """A training loop with AdamW, gradient clipping and dropout. All batches are tensors in memory before training starts,
    so reading data costs no time.
    """

    _is_bfloat16 = False

    def __init__(self, model: Any, batches: Sequence[Tensors]) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self._model, self._batches, self._update = model.train(), batches, 0
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    def run(self, updates: int) -> None:
        """Train for a number of updates."""
        for _ in range(updates):
            batch = self._batches[self._update % len(self._batches)]
            self._update += 1
            self._optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=self._is_bfloat16):
                loss = self._loss(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()

    def _loss(self, batch: Tensors) -> torch.Tensor:
        """Return the loss of a batch."""
        raise NotImplementedError


class TransformersTrainer(_PeerTrainer):
    """Train `BertForPreTraining` with its default attention.

    Args:
        config: The config of the model, the same as for gaudi-bert.
        batches: Unpacked batches.
        masked_positions_only: Compute the masked-LM head only at masked positions instead of all positions.
        precision: With bfloat16, the loss is computed under autocast.
    """

    def __init__(
        self, config: BertConfig, batches: Sequence[Batch], masked_positions_only: bool, precision: str = "float32"
    ) -> None:
        torch.manual_seed(1)
        model = transformers.BertForPreTraining(transformers.BertConfig(**config.to_json()))
        super().__init__(model, [convert_unpacked_batch(batch) for batch in batches])
        self._masked_only, self._is_bfloat16 = masked_positions_only, precision == "bfloat16"

    def _loss(self, batch: Tensors) -> torch.Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
        if not self._masked_only:
            targets = {name: batch[name] for name in ("labels", "next_sentence_label")}
            return self._model(**inputs, **targets).loss
        hidden, pooled = self._model.bert(**inputs)[:2]
        words = self._model.cls.predictions(hidden.flatten(0, 1)[batch["masked_places"]])
        sentences = self._model.cls.seq_relationship(pooled)
        return cross_entropy(words, batch["masked_labels"]) + cross_entropy(sentences, batch["next_sentence_label"])


class VendorTrainer(_PeerTrainer):
    """Train `BertForPreTraining` of Habana's `PyTorch/nlp/bert` in the way in which `run_pretraining.py` of Habana calls it.
    The code is in a local checkout.

    Args:
        folder: The folder that contains `modeling.py`.
        config: The config of the model, the same as for gaudi-bert.
        batches: Packed batches of depth 3.
    """

    def __init__(self, folder: Path, config: BertConfig, batches: Sequence[Batch]) -> None:
        if not (folder / "modeling.py").is_file():
            raise SystemExit(
                f"--vendor {folder}: no modeling.py in it; give the folder PyTorch/nlp/bert of Model-References"
            )
        # modeling.py imports a module that downloads weights. The module is not needed here, so replace it with an empty
        # one.
        downloads = types.ModuleType("file_utils")
        downloads.cached_path = None  # type: ignore[attr-defined]
        sys.modules["file_utils"] = downloads
        sys.path.insert(0, str(folder))
        modeling = importlib.import_module("modeling")
        torch.manual_seed(1)
        facts = config.to_json()
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
        sizes = modeling.BertConfig(config.vocab_size, **{name: facts[name] for name in names})
        super().__init__(modeling.BertForPreTraining(sizes), [convert_packed_batch(batch) for batch in batches])

    def _loss(self, batch: Tensors) -> torch.Tensor:
        targets = ("masked_lm_labels", "next_sentence_labels")
        inputs = {name: tensor for name, tensor in batch.items() if name not in targets}
        words, sentences = self._model(enable_packed_data_mode=True, **inputs)
        return sum(
            cross_entropy(scores.flatten(0, -2), batch[labels].flatten(), ignore_index=IGNORED)
            for scores, labels in zip((words, sentences), targets, strict=True)
        )


def convert_unpacked_batch(batch: Batch) -> Tensors:
    """Return an unpacked batch as the inputs of transformers, and the positions of its masked tokens."""
    rows, slots = np.nonzero(batch["masked_lm_weights"] > 0)
    return _tensors(
        input_ids=batch["input_ids"],
        attention_mask=batch["input_mask"],
        token_type_ids=batch["segment_ids"],
        labels=_labels(batch),
        masked_places=rows * batch["input_ids"].shape[1] + batch["masked_lm_positions"][rows, slots],
        masked_labels=batch["masked_lm_ids"][rows, slots],
        next_sentence_label=batch["next_sentence_labels"][:, 0],
    )


def convert_packed_batch(batch: Batch) -> Tensors:
    """Return a packed batch as the inputs of Habana's model."""
    return _tensors(
        input_ids=batch["input_ids"],
        token_type_ids=batch["segment_ids"],
        attention_mask=batch["input_mask"],
        positions=batch["positions"],
        next_sentence_positions=batch["next_sentence_positions"],
        masked_lm_labels=_labels(batch),
        next_sentence_labels=np.where(batch["next_sentence_weights"] > 0, batch["next_sentence_labels"], IGNORED),
    )


def _labels(batch: Batch) -> np.ndarray:
    """Return the original ids of masked tokens at their positions, and -100 elsewhere: int64 [B, L]."""
    rows, slots = np.nonzero(batch["masked_lm_weights"] > 0)
    labels_BL = np.full(batch["input_ids"].shape, IGNORED)
    labels_BL[rows, batch["masked_lm_positions"][rows, slots]] = batch["masked_lm_ids"][rows, slots]
    return labels_BL


def _tensors(**arrays: np.ndarray) -> Tensors:
    return {name: torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)) for name, array in arrays.items()}
