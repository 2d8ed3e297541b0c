"""BERT for packed sequences in TensorFlow: embeddings, self-attention, encoder, pooler, and the logits of pretraining.

Positions restart in every sequence of a pack (Krell et al., 2021, section 3.2.1). A token attends only to tokens of the same
sequence (section 3.2.2), because the attention mask compares the sequence numbers in `input_mask`. Padding has the number 0
and attends to padding, so that its outputs are finite. In a causal model, a token attends only to itself and to earlier
tokens.

Heads are computed only at the positions that they need (section 3.2.3). If a head needs only some positions of a pack, as
pretraining needs the masked tokens and [CLS], then the last layer also computes only these positions. Its keys and values
come from all tokens, but its queries and everything after them only from the needed positions.

Letters in shapes: B packs, L positions, T = B * L tokens, P needed positions of a pack (at most L), R = B * P, H hidden
size, I intermediate size, N heads, D head size (H = N * D), O = H times the number of parts that a product computes together
(query, key, value), Q masked slots, S depth, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gaudi_bert.engines.tensorflow.operations import (
    ForwardPass,
    compile_kernel_if_enabled,
    compute_keep_scale,
    copy_with_zero_gradient,
    dense,
    dropout,
    gather_rows,
    gather_tokens,
    get_activation_function,
    layer_norm,
    make_keep_mask,
    residual_layer_norm,
    upcast_to_float32,
)
from gaudi_bert.model.config import BertConfig, layer_name_prefix
from gaudi_bert.model.heads import FORBIDDEN_SCORE, check_logit_count

# Each dropout in the model has a number, called its site, which determines its random numbers. The first site belongs to the
# embeddings, and each layer has the next three.
_EMBEDDINGS_DROPOUT_SITE = 0
_DROPOUT_SITES_PER_LAYER = 3

Batch = Mapping[str, tf.Tensor]


@dataclass(frozen=True)
class Network:
    """The config, the variables and the options that all layers of a BERT need for one forward pass.

    Attributes:
        config: The sizes of the model.
        parameters: The variables by name.
        compute_dtype: The dtype of the matrix products.
        forward_pass: The dropout seed, and whether kernels are compiled.
    """

    config: BertConfig
    parameters: Mapping[str, tf.Tensor]
    compute_dtype: tf.DType
    forward_pass: ForwardPass

    def get_kernel_and_bias(self, name_prefix: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the kernel and the bias of the dense layer whose variable names begin with `name_prefix`."""
        return self.parameters[f"{name_prefix}/kernel"], self.parameters[f"{name_prefix}/bias"]

    def get_gamma_and_beta(self, name_prefix: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Return gamma and beta of the layer normalization whose variable names begin with `name_prefix`."""
        return self.parameters[f"{name_prefix}/LayerNorm/gamma"], self.parameters[f"{name_prefix}/LayerNorm/beta"]

    def apply_dropout(self, inputs: tf.Tensor, site: int) -> tf.Tensor:
        """Apply dropout to hidden states.

        `site` is the number of this dropout in the model, from which its random numbers are derived.
        """
        rate = self.config.hidden_dropout_prob
        return dropout(inputs, self.forward_pass.draw_dropout(inputs.shape, rate, site), rate, self.forward_pass.compiled)


def encode_packs(network: Network, batch: Batch, positions_BP: tf.Tensor | None = None) -> tf.Tensor:
    """Run the embeddings and all encoder layers, and return the last layer's hidden states at the positions that the head
    needs.

    Args:
        network: The model.
        batch: The features of the batch.
        positions_BP: The needed positions of each pack. None for all positions.

    Returns:
        [B * P, H], or [B * L, H] for all positions.
    """
    config, (packs, length) = network.config, batch["input_ids"].shape
    wide_dtype = tf.float64 if network.compute_dtype == tf.float64 else tf.float32
    bias_B1LL = _make_additive_attention_mask(batch["input_mask"], config.attention == "causal", wide_dtype)
    hidden_TH = _embed_tokens(network, batch)
    restricts_last_layer = positions_BP is not None and positions_BP.shape[1] < length
    for layer in range(config.num_hidden_layers):
        query_RH, bias_B1PL = hidden_TH, bias_B1LL
        if positions_BP is not None and restricts_last_layer and layer == config.num_hidden_layers - 1:
            bias_RL = gather_tokens(tf.reshape(bias_B1LL, [packs * length, length]), positions_BP, length)
            query_RH = gather_tokens(hidden_TH, positions_BP, length)
            bias_B1PL = tf.reshape(bias_RL, [packs, 1, positions_BP.shape[1], length])
        hidden_TH = _run_encoder_layer(network, layer, query_RH, hidden_TH, bias_B1PL)
    if positions_BP is not None and not restricts_last_layer:
        return gather_tokens(hidden_TH, positions_BP, length)
    return hidden_TH


def _make_additive_attention_mask(input_mask_BL: tf.Tensor, is_causal: bool, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Return the attention mask that is added to the scores. It is 0 where attention is allowed, and -10,000 elsewhere.

    The mask has the shape [B, 1, L, L].
    """
    same_BLL = tf.cast(tf.equal(input_mask_BL[:, :, tf.newaxis], input_mask_BL[:, tf.newaxis, :]), dtype)
    if is_causal:
        order_L = tf.range(input_mask_BL.shape[1], dtype=tf.int32)
        same_BLL *= tf.cast(order_L[:, tf.newaxis] >= order_L[tf.newaxis, :], dtype)
    return ((1.0 - same_BLL) * FORBIDDEN_SCORE)[:, tf.newaxis]


def _embed_tokens(network: Network, batch: Batch) -> tf.Tensor:
    """Compute the input of the first encoder layer for all tokens, in the dtype of the matrix products.

    The input, [T, H], is the sum of the word, position and type embeddings, after layer normalization and dropout (Devlin et
    al., 2019, section 3).
    """
    name_prefix, parameters, config = "bert/embeddings", network.parameters, network.config
    words_TH = gather_rows(parameters[f"{name_prefix}/word_embeddings"], tf.reshape(batch["input_ids"], [-1]))
    positions_TH = gather_rows(parameters[f"{name_prefix}/position_embeddings"], tf.reshape(batch["positions"], [-1]))
    # The table of type embeddings has only a few rows. Multiplying it by a one-hot matrix is faster than looking up its
    # rows, and so is computing the gradient.
    types_YH = parameters[f"{name_prefix}/token_type_embeddings"]
    segments_TY = tf.one_hot(tf.reshape(batch["segment_ids"], [-1]), config.type_vocab_size, dtype=types_YH.dtype)
    total_TH = words_TH + positions_TH + tf.matmul(segments_TY, types_YH)
    compiled = network.forward_pass.compiled
    normal_TH = layer_norm(total_TH, *network.get_gamma_and_beta(name_prefix), config.layer_norm_eps, compiled)
    return tf.cast(network.apply_dropout(normal_TH, _EMBEDDINGS_DROPOUT_SITE), network.compute_dtype)


def _run_encoder_layer(
    network: Network, layer: int, query_RH: tf.Tensor, hidden_TH: tf.Tensor, bias_B1PL: tf.Tensor
) -> tf.Tensor:
    """Compute one encoder layer, with layer normalization after each residual sum (Vaswani et al., 2017; Devlin et al.,
    2019).

    Args:
        network: The model.
        layer: The number of the layer, from 0.
        query_RH: The input at the positions to compute.
        hidden_TH: The input at all positions.
        bias_B1PL: The attention mask, in which P are the positions to compute.

    Returns:
        [R, H].
    """
    config, forward_pass = network.config, network.forward_pass
    name_prefix, first_site = layer_name_prefix(layer), 1 + _DROPOUT_SITES_PER_LAYER * layer

    def project(inputs: tf.Tensor, name: str) -> tf.Tensor:
        return dense(inputs, *network.get_kernel_and_bias(f"{name_prefix}/{name}/dense"), forward_pass.compiled)

    def add_and_normalize(new_RH: tf.Tensor, old_RH: tf.Tensor, name: str, site: int) -> tf.Tensor:
        """Apply dropout to the new hidden states, add the old ones, and apply layer normalization."""
        rate = config.hidden_dropout_prob
        dropout_draw = forward_pass.draw_dropout(new_RH.shape, rate, site)
        variables = network.get_gamma_and_beta(f"{name_prefix}/{name}")
        return residual_layer_norm(
            new_RH, old_RH, *variables, dropout_draw, rate, config.layer_norm_eps, forward_pass.compiled
        )

    context_RH = _run_self_attention(network, f"{name_prefix}/attention/self", first_site, query_RH, hidden_TH, bias_B1PL)
    output_RH = project(context_RH, "attention/output")
    attended_RH = add_and_normalize(output_RH, query_RH, "attention/output", first_site + 1)
    inner_RI = get_activation_function(config.hidden_act, forward_pass.compiled)(project(attended_RH, "intermediate"))
    return add_and_normalize(project(inner_RI, "output"), attended_RH, "output", first_site + 2)


def _run_self_attention(
    network: Network, name_prefix: str, dropout_site: int, query_RH: tf.Tensor, hidden_TH: tf.Tensor, bias_B1PL: tf.Tensor
) -> tf.Tensor:
    """Compute self-attention without the output projection, and return the context of every query.

    The result has the shape [R, H].
    """
    config, forward_pass, (packs, _, queries, length) = network.config, network.forward_pass, bias_B1PL.shape
    heads, size = config.num_attention_heads, config.head_size

    def project(inputs: tf.Tensor, positions: int, projection_names: tuple[str, ...]) -> list[tf.Tensor]:
        """Compute the named projections of the inputs, such as ("key", "value"), with one matrix product. `positions` is the
        number of positions that the inputs contain for each pack.

        Each projection has the shape [B, N, positions, D].
        """
        fused = dense(inputs, *_concatenate_projections(network, name_prefix, projection_names), forward_pass.compiled)
        projections = tf.reshape(fused, [packs, positions, len(projection_names), heads, size])
        return tf.unstack(tf.transpose(projections, [2, 0, 3, 1, 4]))

    if query_RH is hidden_TH:
        query_BNPD, key_BNLD, value_BNLD = project(hidden_TH, length, ("query", "key", "value"))
    else:
        (query_BNPD,) = project(query_RH, queries, ("query",))
        key_BNLD, value_BNLD = project(hidden_TH, length, ("key", "value"))
    rate = config.attention_probs_dropout_prob
    dropout_draw = forward_pass.draw_dropout(tf.TensorShape([packs, heads, queries, length]), rate, dropout_site)
    context_BNPD = compute_attention(query_BNPD, key_BNLD, value_BNLD, bias_B1PL, dropout_draw, rate, forward_pass.compiled)
    return tf.reshape(tf.transpose(context_BNPD, [0, 2, 1, 3]), [packs * queries, heads * size])


def _concatenate_projections(network: Network, name_prefix: str, parts: Sequence[str]) -> tuple[tf.Tensor, tf.Tensor]:
    """Concatenate the kernels and the biases of several projections, so that one matrix product computes them all.

    The results have the shapes [H, O] and [O].

    `parts` contains some of "query", "key" and "value". The query projection is divided by the square root of the head size
    here, which saves a pass over the scores. The key bias does not affect the softmax, so its true gradient is zero. Its
    computed gradient would be rounding noise, so it is set to zero.
    """
    scale = 1.0 / math.sqrt(network.config.head_size)
    kernels, biases = [], []
    for part in parts:
        kernel_HH, bias_H = network.get_kernel_and_bias(f"{name_prefix}/{part}")
        if part == "query":
            kernel_HH, bias_H = kernel_HH * scale, bias_H * scale
        elif part == "key":
            bias_H = copy_with_zero_gradient(bias_H)
        kernels.append(kernel_HH)
        biases.append(bias_H)
    return tf.concat(kernels, axis=1), tf.concat(biases, axis=0)


def compute_attention(
    query_BNPD: tf.Tensor,
    key_BNLD: tf.Tensor,
    value_BNLD: tf.Tensor,
    bias_B1PL: tf.Tensor,
    dropout_draw: tf.Tensor | None,
    rate: float,
    compiled: bool,
) -> tf.Tensor:
    """Compute attention as softmax(query key^T + bias) value, with dropout of the attention probabilities.

    TensorFlow's gradient would make many passes over tensors of the shape [B, N, P, L], so the backward pass is implemented
    here. The scale of the dropout is applied to the context, which is smaller by the factor L / D, and elementwise
    operations are combined in one kernel.

    Args:
        query_BNPD: The queries, already divided by the square root of D.
        key_BNLD: The keys.
        value_BNLD: The values.
        bias_B1PL: The attention mask.
        dropout_draw: The random numbers from `ForwardPass.draw_dropout`, or None for no dropout.
        rate: The dropout rate.
        compiled: Whether XLA compiles the elementwise kernels.

    Returns:
        The context of every query, [B, N, P, D].
    """
    scale = compute_keep_scale(dropout_draw, rate)

    @tf.custom_gradient
    def core(query_BNPD: tf.Tensor, key_BNLD: tf.Tensor, value_BNLD: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        dtype = query_BNPD.dtype
        scores_BNPL = upcast_to_float32(tf.matmul(query_BNPD, key_BNLD, transpose_b=True)) + bias_B1PL
        probabilities_BNPL = tf.cast(tf.nn.softmax(scores_BNPL), dtype)
        kept_BNPL = (
            probabilities_BNPL
            if dropout_draw is None
            else compile_kernel_if_enabled(_drop_probabilities, compiled)(probabilities_BNPL, dropout_draw, rate)
        )
        context_BNPD = tf.matmul(kept_BNPL, value_BNLD) * scale

        def backward(gradient_BNPD: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            scaled_BNPD = gradient_BNPD * scale
            value_gradient_BNLD = tf.matmul(kept_BNPL, scaled_BNPD, transpose_a=True)
            kept_gradient_BNPL = tf.matmul(scaled_BNPD, value_BNLD, transpose_b=True)
            scores_gradient_BNPL = compile_kernel_if_enabled(_compute_attention_scores_gradient, compiled)(
                kept_gradient_BNPL, probabilities_BNPL, dropout_draw, rate
            )
            query_gradient_BNPD = tf.matmul(scores_gradient_BNPL, key_BNLD)
            key_gradient_BNLD = tf.matmul(scores_gradient_BNPL, query_BNPD, transpose_a=True)
            return query_gradient_BNPD, key_gradient_BNLD, value_gradient_BNLD

        return context_BNPD, backward

    return core(query_BNPD, key_BNLD, value_BNLD)


def _drop_probabilities(probabilities_BNPL: tf.Tensor, dropout_draw: tf.Tensor, rate: float) -> tf.Tensor:
    """Set the dropped attention probabilities to zero, and leave the others unchanged."""
    return probabilities_BNPL * make_keep_mask(dropout_draw, probabilities_BNPL.shape, rate, probabilities_BNPL.dtype)


def _compute_attention_scores_gradient(
    kept_gradient_BNPL: tf.Tensor, probabilities_BNPL: tf.Tensor, dropout_draw: tf.Tensor | None, rate: float
) -> tf.Tensor:
    """Return the gradient of the attention scores, given the gradient of the attention probabilities after dropout.

    If one probability of a row is 1, the gradient of the row is exactly 0.
    """
    if dropout_draw is not None:
        kept_gradient_BNPL = _drop_probabilities(kept_gradient_BNPL, dropout_draw, rate)
    weighted_BNPL = upcast_to_float32(probabilities_BNPL) * upcast_to_float32(kept_gradient_BNPL)
    sums_BNP1 = tf.reduce_sum(weighted_BNPL, axis=-1, keepdims=True)
    return tf.cast(weighted_BNPL - upcast_to_float32(probabilities_BNPL) * sums_BNP1, probabilities_BNPL.dtype)


# --- Layers after the encoder


def apply_pooler(network: Network, cls_PH: tf.Tensor) -> tf.Tensor:
    """Apply BERT's pooler, a dense layer and tanh, to the hidden states of [CLS] tokens.

    The result has the shape [sequences, H].
    """
    return tf.tanh(dense(cls_PH, *network.get_kernel_and_bias("bert/pooler/dense")))


def compute_masked_lm_logits(network: Network, hidden_PH: tf.Tensor) -> tf.Tensor:
    """Compute the masked-LM logits of hidden states, in at least float32.

    The logits have the shape [P, V]. The output matrix is tied to the word embeddings.
    """
    name_prefix, config, compiled = "cls/predictions/transform", network.config, network.forward_pass.compiled
    changed_PH = dense(hidden_PH, *network.get_kernel_and_bias(f"{name_prefix}/dense"))
    changed_PH = get_activation_function(config.hidden_act, compiled)(changed_PH)
    changed_PH = layer_norm(changed_PH, *network.get_gamma_and_beta(name_prefix), config.layer_norm_eps, compiled)
    words_VH = tf.cast(network.parameters["bert/embeddings/word_embeddings"], changed_PH.dtype)
    logits_PV = upcast_to_float32(tf.matmul(changed_PH, words_VH, transpose_b=True))
    return tf.nn.bias_add(logits_PV, tf.cast(network.parameters["cls/predictions/output_bias"], logits_PV.dtype))


def compute_pretraining_logits(network: Network, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute the masked-LM logits and the next-sentence logits of a batch, in at least float32.

    The results have the shapes [B, Q, V] and [B, S, 2].
    """
    (packs, depth), slots = batch["next_sentence_positions"].shape, batch["masked_lm_positions"].shape[1]
    check_logit_count(packs, slots, network.config.vocab_size)
    hidden, parameters = network.config.hidden_size, network.parameters
    positions_BP = tf.concat([batch["next_sentence_positions"], batch["masked_lm_positions"]], axis=1)
    read_BPH = tf.reshape(encode_packs(network, batch, positions_BP), [packs, depth + slots, hidden])
    first_BSH, masked_BQH = tf.split(read_BPH, [depth, slots], axis=1)
    pooled_PH = upcast_to_float32(apply_pooler(network, tf.reshape(first_BSH, [packs * depth, hidden])))
    words_PV = compute_masked_lm_logits(network, tf.reshape(masked_BQH, [packs * slots, hidden]))
    # Next-sentence class 0 means that the second text follows the first, and class 1 that it was chosen at random.
    weights_2H, bias_2 = (
        tf.cast(parameters[f"cls/seq_relationship/output_{name}"], pooled_PH.dtype) for name in ("weights", "bias")
    )
    # On Gaudi, operations with this name are excluded from the conversion to bfloat16, so the product and its gradient stay
    # in float32.
    with tf.name_scope("KEEP_FP32_PRECISION"):
        sentences_P2 = tf.matmul(pooled_PH, weights_2H, transpose_b=True)
    sentences_BS2 = tf.reshape(tf.nn.bias_add(sentences_P2, bias_2), [packs, depth, 2])
    return tf.reshape(words_PV, [packs, slots, network.config.vocab_size]), sentences_BS2
