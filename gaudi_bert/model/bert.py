"""BERT for packed sequences: its variables, the encoder that every model has, and the two heads of pretraining.

Letters: B packs, L positions, T = B * L tokens, P places of a pack that are read, H hidden size, Q masked slots,
S depth, V vocabulary.
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
from gaudi_bert.model.heads import masked_lm_logits, next_sentence_logits, pool
from gaudi_bert.model.inputs import check_batch
from gaudi_bert.model.operations import pick_tokens, widen
from gaudi_bert.model.parameters import ParameterSpec, initializer_seed, parameter_specs

__all__ = ["BertForPretraining", "PackedBert", "PretrainingOutputs", "encode_packs"]

COMPUTE_DTYPES = ("float32", "bfloat16", "float64")


class PretrainingOutputs(NamedTuple):
    """What the heads give, all float32 (float64 where the model computes in that)."""

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
    places_BP: tf.Tensor | None = None,
) -> tf.Tensor:
    """Hidden states, [B * P, H] or of every token [B * L, H]: embeddings and encoder, each sequence of a pack by itself.

    Args:
        batch: `input_ids`, `input_mask`, `segment_ids` and `positions`, int32 [B, L].
        parameters: from `PackedBert.parameters`.
        config: of the model.
        compute_dtype: of the matrix products.
        forward_pass: how it is run.
        places_BP: int32, the positions of each pack that are read; None for all.
    """
    wide_dtype = tf.float64 if compute_dtype == tf.float64 else tf.float32
    bias_B1LL = attention_bias(batch["input_mask"], config.attention == "causal", wide_dtype)
    embedded_TH = embed(batch, parameters, config, compute_dtype, forward_pass)
    length = batch["input_ids"].shape[1]
    if places_BP is not None and places_BP.shape[1] >= length:
        hidden_TH = encode(embedded_TH, bias_B1LL, parameters, config, forward_pass)
        return pick_tokens(hidden_TH, places_BP, length)
    return encode(embedded_TH, bias_B1LL, parameters, config, forward_pass, places_BP)


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
        """Run the model on a batch of packs; the last layer is computed where a head reads it.

        Args:
            batch: the `PACKED_FEATURES` (unpacked features through `as_packed`), shapes static.
            dropout_seed: int32 [2], another one for every pass of a training run; None for no dropout.

        Raises:
            InputError: the batch does not fit (see `check_batch`); raised while the graph is traced.
        """
        sizes, parameters = check_batch(batch, self.config), self.parameters()
        places_BP = tf.concat([batch["next_sentence_positions"], batch["masked_lm_positions"]], axis=1)
        forward_pass = ForwardPass(dropout_seed, self.compiled)
        read = encode_packs(batch, parameters, self.config, self.compute_dtype, forward_pass, places_BP)
        read_BPH = tf.reshape(read, [sizes.packs, sizes.depth + sizes.masked_slots, self.config.hidden_size])
        first_BSH, masked_BQH = tf.split(read_BPH, [sizes.depth, sizes.masked_slots], axis=1)
        return self._heads(first_BSH, masked_BQH, parameters)

    def with_hidden_states(self, batch: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, PretrainingOutputs]:
        """The hidden state of every token too, wide, [B, L, H]; no dropout.

        Args:
            batch: as for `__call__`.

        Raises:
            InputError: as `__call__`.
        """
        sizes, parameters = check_batch(batch, self.config), self.parameters()
        hidden_TH = encode_packs(batch, parameters, self.config, self.compute_dtype, ForwardPass(None, self.compiled))
        first_BSH, masked_BQH = (
            tf.reshape(pick_tokens(hidden_TH, batch[name], sizes.positions), [*batch[name].shape, self.config.hidden_size])
            for name in ("next_sentence_positions", "masked_lm_positions")
        )
        hidden_BLH = tf.reshape(widen(hidden_TH), [sizes.packs, sizes.positions, self.config.hidden_size])
        return hidden_BLH, self._heads(first_BSH, masked_BQH, parameters)

    def _heads(self, first_BSH: tf.Tensor, masked_BQH: tf.Tensor, parameters: Mapping[str, tf.Tensor]) -> PretrainingOutputs:
        """Both heads, on the hidden states of every [CLS] and of every masked slot."""
        packs, depth, hidden = first_BSH.shape
        slots, words = masked_BQH.shape[1], self.config.vocab_size
        pooled_PH = pool(tf.reshape(first_BSH, [packs * depth, hidden]), parameters)
        masked_PH = tf.reshape(masked_BQH, [packs * slots, hidden])
        logits_PV = masked_lm_logits(masked_PH, parameters, self.config, self.compiled)
        return PretrainingOutputs(
            pooled_output_BSH=tf.reshape(widen(pooled_PH), [packs, depth, hidden]),
            masked_lm_logits_BQV=tf.reshape(logits_PV, [packs, slots, words]),
            next_sentence_logits_BS2=tf.reshape(next_sentence_logits(pooled_PH, parameters), [packs, depth, 2]),
        )


def _initial_value(name: str, spec: ParameterSpec, config: BertConfig, seed: int) -> tf.Tensor:
    """Truncated normal noise, zeros or ones; made on the CPU, so that every device starts from the same numbers."""
    with tf.device("/CPU:0"):
        if spec.start == "normal":
            return tf.random.stateless_truncated_normal(
                spec.shape, seed=initializer_seed(seed, name), stddev=config.initializer_range
            )
        return tf.zeros(spec.shape) if spec.start == "zeros" else tf.ones(spec.shape)
