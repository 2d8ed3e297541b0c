"""The same training step by Hugging Face's transformers on PyTorch: padded rows, as most people pretrain BERT."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
import transformers

from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.input.batches import Batch

IGNORED = -100


class TransformersTrainer:
    """`BertForPreTraining` with its default attention, AdamW, dropout on.

    Args:
        config: of the model, the same as ours.
        batches: unpacked batches; they are turned into tensors once, so reading costs nothing here.
        masked_positions_only: compute the masked-LM head where a token is masked, not at every position.
    """

    def __init__(self, config: BertConfig, batches: Sequence[Batch], masked_positions_only: bool) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        torch.manual_seed(1)
        self._model = transformers.BertForPreTraining(transformers.BertConfig(**config.to_json()))
        self._model.train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, weight_decay=0.01)
        self._batches = [_as_tensors(batch) for batch in batches]
        self._loss = self._loss_at_masked if masked_positions_only else self._loss_everywhere
        self._update = 0

    def run(self, updates: int) -> None:
        """Do so many updates."""
        for _ in range(updates):
            batch = self._batches[self._update % len(self._batches)]
            self._update += 1
            self._optimizer.zero_grad()
            self._loss(batch).backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()

    def _loss_everywhere(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            token_type_ids=batch["token_type_ids"],
            labels=batch["labels"],
            next_sentence_label=batch["next_sentence_label"],
        ).loss

    def _loss_at_masked(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden, pooled = self._model.bert(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            token_type_ids=batch["token_type_ids"],
        )[:2]
        masked = hidden.flatten(0, 1)[batch["masked_places"]]
        words = self._model.cls.predictions(masked)
        sentences = self._model.cls.seq_relationship(pooled)
        cross_entropy = torch.nn.functional.cross_entropy
        return cross_entropy(words, batch["masked_labels"]) + cross_entropy(sentences, batch["next_sentence_label"])


def _as_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    ids_BL = batch["input_ids"]
    length = ids_BL.shape[1]
    rows, slots = np.nonzero(batch["masked_lm_weights"] > 0)
    positions, labels = batch["masked_lm_positions"][rows, slots], batch["masked_lm_ids"][rows, slots]
    labels_BL = np.full(ids_BL.shape, IGNORED)
    labels_BL[rows, positions] = labels
    arrays = {
        "input_ids": ids_BL,
        "attention_mask": batch["input_mask"],
        "token_type_ids": batch["segment_ids"],
        "labels": labels_BL,
        "masked_places": rows * length + positions,
        "masked_labels": labels,
        "next_sentence_label": batch["next_sentence_labels"][:, 0],
    }
    return {name: torch.from_numpy(np.ascontiguousarray(value, dtype=np.int64)) for name, value in arrays.items()}
