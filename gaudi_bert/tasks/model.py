"""BERT with the head of a task, for packed sequences.

Letters: B packs, L positions, S depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.model.bert import PackedBert, encode_packs
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.forward_pass import ForwardPass
from gaudi_bert.model.inputs import MOST_LOGITS
from gaudi_bert.model.parameters import ParameterSpec, parameter_specs
from gaudi_bert.tasks.task import Encoded, Task

__all__ = ["BertForTask", "task_specs"]


def task_specs(config: BertConfig, task: Task) -> dict[str, ParameterSpec]:
    """The variables of a BERT with the head of `task`: no more than transformers' class of the same architecture has."""
    encoder = {
        name: spec
        for name, spec in parameter_specs(config).items()
        if name.startswith("bert/") and (task.pools or not name.startswith("bert/pooler/"))
    }
    return {**encoder, **task.head_specs(config)}


class BertForTask(PackedBert):
    """BERT for a task; arguments as `PackedBert`."""

    def __init__(
        self,
        config: BertConfig,
        task: Task,
        *,
        seed: int,
        compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32",
        compiled: bool = False,
    ) -> None:
        specs = task_specs(config, task)
        super().__init__(config, specs, seed=seed, compute_dtype=compute_dtype, compiled=compiled)
        self.task = task

    def __call__(self, batch: Mapping[str, tf.Tensor], *, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """The logits of the task, wide.

        Args:
            batch: features of `Placement.features` and `Task.target_features`, shapes static.
            dropout_seed: int32 [2], another one for every pass of a training run; None for no dropout.

        Raises:
            InputError: the packs are too long for the model; raised while the graph is traced.
        """
        packs, length = batch["input_ids"].shape
        if length > self.config.max_position_embeddings:
            raise InputError(
                f"finetune.max_sequence_length = {length}: the model has {self.config.max_position_embeddings} positions; "
                "set it to no more"
            )
        if not self.task.keeps_logits and packs * length * self.config.vocab_size > MOST_LOGITS:
            raise InputError(
                f"batch: {packs} packs of {length} have more than {MOST_LOGITS:,} logits of {self.config.vocab_size} words; "
                "make finetune.micro_batch_packs smaller"
            )
        parameters, forward_pass = self.parameters(), ForwardPass(dropout_seed, self.compiled)
        places_BP = None if self.task.places is None else batch[self.task.places]
        hidden_RH = encode_packs(batch, parameters, self.config, self.compute_dtype, forward_pass, places_BP)
        return self.task.logits(Encoded(hidden_RH, parameters, self.config, forward_pass), batch)
