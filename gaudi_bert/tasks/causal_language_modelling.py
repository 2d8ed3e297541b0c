"""Causal language modelling: the next token, within each sequence of a pack (Radford et al., 2018).

Attention is causal: a token sees those before it in its own sequence. Every token but the last of a sequence has a next
one. Head: that of masked language modelling. Loss: negative log likelihood, mean over tokens. Metrics: loss, accuracy,
perplexity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import masked_lm_logits
from gaudi_bert.model.parameters import ParameterSpec
from gaudi_bert.tasks.heads import classified
from gaudi_bert.tasks.masked_language_modelling import word_head_specs
from gaudi_bert.tasks.packs import Placement
from gaudi_bert.tasks.rows.types import Sequences
from gaudi_bert.tasks.task import Draw, Encoded, Task, Weighed

__all__ = ["CausalLanguageModelling"]


class CausalLanguageModelling(Task):
    """The next token."""

    name = "causal-language-modelling"
    architecture = "BertLMHeadModel"
    keeps_logits = False
    is_causal = True
    best_metric = "loss"
    metric_names = ("loss", "accuracy", "perplexity")

    def head_specs(self, config: BertConfig) -> dict[str, ParameterSpec]:
        """The head of pretraining."""
        return word_head_specs(config)

    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """`targets` [B, L], the next token; `target_weights` 0 where there is none."""
        del draw
        following = np.append(sequences.input_ids[1:], np.int32(0))
        has_next = np.ones(len(following), np.float32)
        has_next[sequences.offsets[1:] - 1] = 0.0
        return {"targets": placed.tokens(following), "target_weights": placed.tokens(has_next)}

    def logits(self, encoded: Encoded, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Wide scores of all words at every token, [B * L, V]."""
        del batch
        return masked_lm_logits(encoded.hidden_RH, encoded.parameters, encoded.config, encoded.forward_pass.compiled)

    def loss(self, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> Weighed:
        """Negative log likelihood over tokens that have a next one."""
        return classified(logits, batch["targets"], batch["target_weights"])

    def config_json(self) -> dict[str, Any]:
        """A decoder, as transformers calls what attends backwards only."""
        return {**super().config_json(), "is_decoder": True}
