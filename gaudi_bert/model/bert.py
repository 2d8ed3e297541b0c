"""BERT for packed sequences: its variables, the encoder that every model has, and the two heads of pretraining.

Letters: B packs, L positions, T = B * L tokens, H hidden size, Q masked slots, S depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.model.attention import attention_bias
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.embeddings import embed
from gaudi_bert.model.encoder import encode
from gaudi_bert.model.forward_pass import ForwardPass
from gaudi_bert.model.heads import masked_lm_logits, next_sentence_logits, pick_tokens, pool
from gaudi_bert.model.inputs import check_batch
from gaudi_bert.model.operations import widen
from gaudi_bert.model.parameters import ParameterSpec, initializer_seed, parameter_specs

__all__ = ["BertForPretraining", "PackedBert", "PretrainingOutputs", "encode_packs"]

COMPUTE_DTYPES = ("float32", "bfloat16", "float64")


class PretrainingOutputs(NamedTuple):
    """What the forward pass gives, all float32 (float64 where the model computes in that)."""

    sequence_output_BLH: tf.Tensor
    pooled_output_BSH: tf.Tensor
    masked_lm_logits_BQV: tf.Tensor
    next_sentence_logits_BS2: tf.Tensor


class PackedBert(tf.Module):
    """The variables of a BERT, whatever its heads; those that compute with them are its subclasses.

    Args:
        config: sizes and form.
        specs: the variables by name.
        seed: of the initial weights; a variable's values depend on the seed and its name alone.
        compute_dtype: type of the matrix products. With bfloat16, variables, layer norm, softmax and
            logits stay float32; float64 is for proofs.
        compiled: compile chains of elementwise operations by XLA: a tenth faster on a CPU, once a few seconds
            of compiling are over. Dropout then draws other places. On Gaudi leave it off: its graph compiler
            fuses by itself.

    Raises:
        InputError: `compute_dtype` is none of these.
    """

    def __init__(
        self,
        config: BertConfig,
        specs: Mapping[str, ParameterSpec],
        *,
        seed: int,
        compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32",
        compiled: bool = False,
    ) -> None:
        super().__init__(name="bert")
        if compute_dtype not in COMPUTE_DTYPES:
            raise InputError(f"model: compute_dtype = {compute_dtype!r}; it must be one of {', '.join(COMPUTE_DTYPES)}")
        self.config = config
        self.compute_dtype = tf.as_dtype(compute_dtype)
        self.compiled = compiled
        self.variables_by_name: dict[str, tf.Variable] = {
            name: tf.Variable(_initial_value(name, spec, config, seed), name=name, dtype=tf.float32)
            for name, spec in specs.items()
        }

    def parameters(self) -> dict[str, tf.Tensor]:
        """The variables by name, as a forward pass reads them."""
        parameters = {name: tf.convert_to_tensor(variable) for name, variable in self.variables_by_name.items()}
        if self.compute_dtype == tf.float64:
            parameters = {name: tf.cast(value, tf.float64) for name, value in parameters.items()}
        return parameters

    def load_values(self, values: WeightArrays) -> None:
        """Set variables by name; those that `values` does not name keep what they hold.

        Raises:
            InputError: a name or a shape is not the model's.
        """
        for name, value in values.items():
            variable = self.variables_by_name.get(name)
            if variable is None:
                raise InputError(f"model: it has no variable {name}; load the weights of a model of the same config")
            if tuple(np.shape(value)) != tuple(variable.shape):
                raise InputError(
                    f"model: {name} has the shape {tuple(variable.shape)}, the weights have {tuple(np.shape(value))}; "
                    "load the weights of a model of the same config"
                )
            variable.assign(np.asarray(value, dtype=np.float32))


def encode_packs(
    batch: Mapping[str, tf.Tensor],
    parameters: Mapping[str, tf.Tensor],
    config: BertConfig,
    compute_dtype: tf.DType,
    forward_pass: ForwardPass,
) -> tf.Tensor:
    """The hidden state of every token, [B * L, H]: embeddings and encoder, each sequence of a pack by itself.

    Args:
        batch: `input_ids`, `input_mask`, `segment_ids` and `positions`, int32 [B, L].
        parameters: from `PackedBert.parameters`.
        config: of the model.
        compute_dtype: of the matrix products.
        forward_pass: how it is run.
    """
    wide_dtype = tf.float64 if compute_dtype == tf.float64 else tf.float32
    bias_B1LL = attention_bias(batch["input_mask"], config.attention == "causal", wide_dtype)
    embedded_TH = embed(batch, parameters, config, compute_dtype, forward_pass)
    return encode(embedded_TH, bias_B1LL, parameters, config, forward_pass)


class BertForPretraining(PackedBert):
    """BERT with its masked-LM and next-sentence heads, for packs of any depth; arguments as `PackedBert`."""

    def __init__(
        self,
        config: BertConfig,
        *,
        seed: int,
        compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32",
        compiled: bool = False,
    ) -> None:
        super().__init__(config, parameter_specs(config), seed=seed, compute_dtype=compute_dtype, compiled=compiled)

    def __call__(self, batch: Mapping[str, tf.Tensor], *, dropout_seed: tf.Tensor | None = None) -> PretrainingOutputs:
        """Run the model on a batch of packs.

        Args:
            batch: the `PACKED_FEATURES` (unpacked features through `as_packed`), shapes static.
            dropout_seed: int32 [2], another one for every pass of a training run; None for no dropout.

        Raises:
            InputError: the batch does not fit (see `check_batch`); raised while the graph is traced.
        """
        config = self.config
        sizes = check_batch(batch, config)
        parameters = self.parameters()
        hidden_TH = encode_packs(batch, parameters, config, self.compute_dtype, ForwardPass(dropout_seed, self.compiled))
        first_PH = pick_tokens(hidden_TH, batch["next_sentence_positions"], sizes.positions)
        pooled_PH = pool(first_PH, parameters)
        masked_PH = pick_tokens(hidden_TH, batch["masked_lm_positions"], sizes.positions)
        words_PV = masked_lm_logits(masked_PH, parameters, config, self.compiled)
        sentences_P2 = next_sentence_logits(pooled_PH, parameters)
        packs, hidden = sizes.packs, config.hidden_size
        return PretrainingOutputs(
            sequence_output_BLH=tf.reshape(widen(hidden_TH), [packs, sizes.positions, hidden]),
            pooled_output_BSH=tf.reshape(widen(pooled_PH), [packs, sizes.depth, hidden]),
            masked_lm_logits_BQV=tf.reshape(words_PV, [packs, sizes.masked_slots, config.vocab_size]),
            next_sentence_logits_BS2=tf.reshape(sentences_P2, [packs, sizes.depth, 2]),
        )


def _initial_value(name: str, spec: ParameterSpec, config: BertConfig, seed: int) -> tf.Tensor:
    """Truncated normal noise, zeros or ones; made on the CPU, so that every device starts from the same numbers."""
    with tf.device("/CPU:0"):
        if spec.start == "normal":
            return tf.random.stateless_truncated_normal(
                spec.shape, seed=initializer_seed(seed, name), stddev=config.initializer_range
            )
        return tf.zeros(spec.shape) if spec.start == "zeros" else tf.ones(spec.shape)
