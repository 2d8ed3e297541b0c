"""BERT for packed sequences: its variables, the encoder that every model has, and the two heads of pretraining.

Letters: B packs, L positions, T = B * L tokens, P positions of a pack that are read, H hidden size, Q masked slots,
S depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.tensorflow.attention import attention_bias, self_attention
from gaudi_bert.engines.tensorflow.dropout import ForwardPass
from gaudi_bert.engines.tensorflow.operations import (
    activation,
    dense,
    dropout,
    gather_rows,
    layer_norm,
    pick_tokens,
    residual_layer_norm,
    widen,
)
from gaudi_bert.model.config import BertConfig, ParameterSpec, initial_value, layer_scope, misfit, parameter_specs
from gaudi_bert.model.features import check_batch

# --- Embeddings: token, segment and position (Devlin et al., 2019, section 3; packed positions: Krell et al., 2021, 3.2.1)
#
# Positions restart in every sequence of a pack, so they are looked up by the feature `positions` rather than added as a
# slice.

_EMBEDDINGS_DROPOUT_SITE = 0


def _embed(
    batch: Mapping[str, tf.Tensor],
    parameters: Mapping[str, tf.Tensor],
    config: BertConfig,
    compute_dtype: tf.DType,
    forward_pass: ForwardPass,
) -> tf.Tensor:
    """The input of the encoder, [T, H] in `compute_dtype`."""
    scope = "bert/embeddings"
    words_TH = gather_rows(parameters[f"{scope}/word_embeddings"], tf.reshape(batch["input_ids"], [-1]))
    positions_TH = gather_rows(parameters[f"{scope}/position_embeddings"], tf.reshape(batch["positions"], [-1]))
    # Two rows are picked faster, and their gradient summed faster, by a product with 0 and 1 than by a gather.
    types_YH = parameters[f"{scope}/token_type_embeddings"]
    segments_TY = tf.one_hot(tf.reshape(batch["segment_ids"], [-1]), config.type_vocab_size, dtype=types_YH.dtype)
    total_TH = words_TH + positions_TH + tf.matmul(segments_TY, types_YH)
    normal_TH = layer_norm(
        total_TH,
        parameters[f"{scope}/LayerNorm/gamma"],
        parameters[f"{scope}/LayerNorm/beta"],
        config.layer_norm_eps,
        forward_pass.compiled,
    )
    rate = config.hidden_dropout_prob
    drawn = forward_pass.draw(normal_TH.shape, rate, _EMBEDDINGS_DROPOUT_SITE)
    return tf.cast(dropout(normal_TH, drawn, rate, forward_pass.compiled), compute_dtype)


# --- The Transformer encoder with layer norm after each residual sum (Vaswani et al., 2017; Devlin et al., 2019)
#
# Where only some positions of a pack are read, as pretraining reads masked tokens and [CLS], the last layer is computed for
# these alone: its keys and values come from all tokens, its queries and all that follows from those that are read. The
# result is the same; of a pack of 512 tokens, about 80 of which are read, it takes less than a third of the layer's
# operations.

_DROPOUT_SITES_PER_LAYER = 3


def encode(
    hidden_TH: tf.Tensor,
    bias_B1LL: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    config: BertConfig,
    forward_pass: ForwardPass,
    positions_BP: tf.Tensor | None = None,
) -> tf.Tensor:
    """The output of the last layer: [B * P, H], or [T, H] where all positions are read.

    `positions_BP`, int32, are the positions of each pack that are read; None for all.
    """
    for layer in range(config.num_hidden_layers):
        query_RH, bias_B1PL = hidden_TH, bias_B1LL
        if positions_BP is not None and layer == config.num_hidden_layers - 1:
            query_RH, bias_B1PL = _at_positions(hidden_TH, bias_B1LL, positions_BP)
        scope, first_site = layer_scope(layer), 1 + _DROPOUT_SITES_PER_LAYER * layer
        hidden_TH = _encoder_layer(query_RH, hidden_TH, bias_B1PL, parameters, scope, config, forward_pass, first_site)
    return hidden_TH


def _at_positions(hidden_TH: tf.Tensor, bias_B1LL: tf.Tensor, positions_BP: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows of the hidden states and of the bias that belong to `positions_BP`: [R, H] and [B, 1, P, L]."""
    packs, _, length, _ = bias_B1LL.shape
    bias_RL = pick_tokens(tf.reshape(bias_B1LL, [packs * length, length]), positions_BP, length)
    return pick_tokens(hidden_TH, positions_BP, length), tf.reshape(bias_RL, [packs, 1, positions_BP.shape[1], length])


def _encoder_layer(
    query_RH: tf.Tensor,
    hidden_TH: tf.Tensor,
    bias_B1PL: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    scope: str,
    config: BertConfig,
    forward_pass: ForwardPass,
    first_site: int,
) -> tf.Tensor:
    def project(inputs: tf.Tensor, name: str) -> tf.Tensor:
        kernel_IO, bias_O = parameters[f"{scope}/{name}/kernel"], parameters[f"{scope}/{name}/bias"]
        return dense(inputs, kernel_IO, bias_O, forward_pass.compiled)

    def add_and_normalise(new_RH: tf.Tensor, old_RH: tf.Tensor, name: str, site: int) -> tf.Tensor:
        gamma_H, beta_H = parameters[f"{scope}/{name}/LayerNorm/gamma"], parameters[f"{scope}/{name}/LayerNorm/beta"]
        rate = config.hidden_dropout_prob
        drawn = forward_pass.draw(new_RH.shape, rate, site)
        return residual_layer_norm(
            new_RH, old_RH, gamma_H, beta_H, drawn, rate, config.layer_norm_eps, forward_pass.compiled
        )

    context_RH = self_attention(
        query_RH, hidden_TH, bias_B1PL, parameters, f"{scope}/attention/self", config, forward_pass, first_site
    )
    attended_RH = add_and_normalise(
        project(context_RH, "attention/output/dense"), query_RH, "attention/output", first_site + 1
    )
    activate = activation(config.hidden_act, forward_pass.compiled)
    intermediate = activate(project(attended_RH, "intermediate/dense"))
    return add_and_normalise(project(intermediate, "output/dense"), attended_RH, "output", first_site + 2)


# --- The pooler and the two heads of pretraining, each computed only where it is read (Krell et al., 2021, section 3.2.3)
#
# The masked-LM head sees the Q masked slots of a pack, not its L positions; the pooler sees the [CLS] of every sequence.


def pool(first_PH: tf.Tensor, parameters: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """BERT's pooler, [P, H]: a dense layer and tanh on the hidden state of every [CLS]."""
    scope = "bert/pooler/dense"
    return tf.tanh(dense(first_PH, parameters[f"{scope}/kernel"], parameters[f"{scope}/bias"]))


def _next_sentence_logits(pooled_PH: tf.Tensor, parameters: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Wide scores [P, 2]: 0 = the second text really follows the first, 1 = it is a random one."""
    pooled_PH = widen(pooled_PH)
    weights_2H = tf.cast(parameters["cls/seq_relationship/output_weights"], pooled_PH.dtype)
    # Gaudi's conversion to bfloat16 goes by names; those of gradients contain the name of what they are of.
    with tf.name_scope("KEEP_FP32_PRECISION"):
        logits_P2 = tf.matmul(pooled_PH, weights_2H, transpose_b=True)
    return tf.nn.bias_add(logits_P2, tf.cast(parameters["cls/seq_relationship/output_bias"], logits_P2.dtype))


def masked_lm_logits(
    picked_PH: tf.Tensor, parameters: Mapping[str, tf.Tensor], config: BertConfig, compiled: bool
) -> tf.Tensor:
    """Wide scores [P, V] of every word at the masked slots; the output matrix is the word embeddings."""
    scope = "cls/predictions/transform"
    changed_PH = dense(picked_PH, parameters[f"{scope}/dense/kernel"], parameters[f"{scope}/dense/bias"])
    changed_PH = activation(config.hidden_act, compiled)(changed_PH)
    gamma_H, beta_H = parameters[f"{scope}/LayerNorm/gamma"], parameters[f"{scope}/LayerNorm/beta"]
    changed_PH = layer_norm(changed_PH, gamma_H, beta_H, config.layer_norm_eps, compiled)
    words_VH = tf.cast(parameters["bert/embeddings/word_embeddings"], changed_PH.dtype)
    logits_PV = widen(tf.matmul(changed_PH, words_VH, transpose_b=True))
    return tf.nn.bias_add(logits_PV, tf.cast(parameters["cls/predictions/output_bias"], logits_PV.dtype))


class PretrainingOutputs(NamedTuple):
    """What the heads give, all float32 (float64 where the model computes in that)."""

    pooled_output_BSH: tf.Tensor
    masked_lm_logits_BQV: tf.Tensor
    next_sentence_logits_BS2: tf.Tensor


class PackedBert(tf.Module):
    """The variables of a BERT, whatever its heads; those that compute with them are its subclasses.

    Args:
        specs: the variables by name.
        seed: of the initial weights (`model.config.initial_value`); None where all of them are loaded at once.
        compute_dtype: type of the matrix products. With bfloat16, variables, layer norm, softmax and
            logits stay float32; float64 is for proofs.
        compiled: compile chains of elementwise operations by XLA: a tenth faster on a CPU, once a few seconds
            of compiling are over. Dropout then draws other masks. On Gaudi leave it off: its graph compiler
            fuses by itself.
    """

    def __init__(
        self,
        config: BertConfig,
        specs: Mapping[str, ParameterSpec],
        *,
        seed: int | None,
        compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32",
        compiled: bool = False,
    ) -> None:
        super().__init__(name="bert")
        self.config = config
        self.compute_dtype = tf.as_dtype(compute_dtype)
        self.compiled = compiled
        self.variables_by_name: dict[str, tf.Variable] = {
            name: tf.Variable(initial_value(name, spec, config.initializer_range, seed), name=name, dtype=tf.float32)
            for name, spec in specs.items()
        }

    def parameters(self) -> dict[str, tf.Tensor]:
        """The variables by name, as a forward pass reads them."""
        parameters = {name: tf.convert_to_tensor(variable) for name, variable in self.variables_by_name.items()}
        if self.compute_dtype == tf.float64:
            parameters = {name: tf.cast(value, tf.float64) for name, value in parameters.items()}
        return parameters

    def load_values(self, values: WeightArrays) -> None:
        """Set variables by name; those that `values` does not name keep what they hold."""
        problem = misfit({n: tuple(v.shape) for n, v in self.variables_by_name.items()}, values, may_lack="")
        if problem is not None:
            raise InputError(f"model: {problem}; load the weights of a model of the same config")
        for name, value in values.items():
            self.variables_by_name[name].assign(np.asarray(value, dtype=np.float32))


def encode_packs(
    batch: Mapping[str, tf.Tensor],
    parameters: Mapping[str, tf.Tensor],
    config: BertConfig,
    compute_dtype: tf.DType,
    forward_pass: ForwardPass,
    positions_BP: tf.Tensor | None = None,
) -> tf.Tensor:
    """Hidden states, [B * P, H] or of every token [B * L, H]: embeddings and encoder, each sequence of a pack by itself.

    `batch` holds `input_ids`, `input_mask`, `segment_ids` and `positions`, int32 [B, L]; `positions_BP` as in `encode`.
    """
    wide_dtype = tf.float64 if compute_dtype == tf.float64 else tf.float32
    bias_B1LL = attention_bias(batch["input_mask"], config.attention == "causal", wide_dtype)
    embedded_TH = _embed(batch, parameters, config, compute_dtype, forward_pass)
    length = batch["input_ids"].shape[1]
    if positions_BP is not None and positions_BP.shape[1] >= length:
        hidden_TH = encode(embedded_TH, bias_B1LL, parameters, config, forward_pass)
        return pick_tokens(hidden_TH, positions_BP, length)
    return encode(embedded_TH, bias_B1LL, parameters, config, forward_pass, positions_BP)


class BertForPretraining(PackedBert):
    """BERT with its masked-LM and next-sentence heads, for packs of any depth; arguments as `PackedBert`."""

    def __init__(
        self,
        config: BertConfig,
        *,
        seed: int | None,
        compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32",
        compiled: bool = False,
    ) -> None:
        super().__init__(config, parameter_specs(config), seed=seed, compute_dtype=compute_dtype, compiled=compiled)

    def __call__(self, batch: Mapping[str, tf.Tensor], *, dropout_seed: tf.Tensor | None = None) -> PretrainingOutputs:
        """Run the model on a batch of packs; the last layer is computed where a head reads it.

        Args:
            batch: the `PACKED_FEATURES` (unpacked features through `as_packed`), shapes static.
            dropout_seed: int32 [2], another one for every pass of a training run; None for no dropout.
        """
        sizes, parameters = check_batch(batch, self.config), self.parameters()
        positions_BP = tf.concat([batch["next_sentence_positions"], batch["masked_lm_positions"]], axis=1)
        forward_pass = ForwardPass(dropout_seed, self.compiled)
        read = encode_packs(batch, parameters, self.config, self.compute_dtype, forward_pass, positions_BP)
        read_BPH = tf.reshape(read, [sizes.packs, sizes.depth + sizes.masked_slots, self.config.hidden_size])
        first_BSH, masked_BQH = tf.split(read_BPH, [sizes.depth, sizes.masked_slots], axis=1)
        return self._heads(first_BSH, masked_BQH, parameters)

    def with_hidden_states(self, batch: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, PretrainingOutputs]:
        """The hidden state of every token too, wide, [B, L, H]; no dropout."""
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
            next_sentence_logits_BS2=tf.reshape(_next_sentence_logits(pooled_PH, parameters), [packs, depth, 2]),
        )
