"""Self-attention that keeps the sequences of a pack apart (Krell et al., 2021, section 3.2.2).

The mask is block-diagonal: position i may attend to j where both carry the same sequence number. It is
computed on the device from `input_mask`, at any depth, by comparing numbers; padding has the number 0 and so
attends to padding, which keeps its rows finite. Nothing reads them. "Causal" allows in addition only j <= i;
as positions of a sequence are consecutive, that is causal within each sequence.

Forbidden scores are lowered by 10,000. The largest score of a row is an allowed one, so a forbidden
probability is exp(less than -9,000) = exactly 0 in float32, for every row: other sequences add exact zeros,
and a sequence's outputs do not change by one bit when its neighbours do.

Letters: B packs, L positions, T = B * L tokens, H hidden size, N heads, D head size (H = N * D), P query positions of
a pack (L, or in the last layer fewer), R = B * P, O = H for each of query, key and value that a product makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from gaudi_bert.engines.tensorflow.dropout import ForwardPass, keep_mask, keep_scale
from gaudi_bert.engines.tensorflow.operations import dense, kernel, widen, without_gradient
from gaudi_bert.model.config import BertConfig

_FORBIDDEN_SCORE = -10000.0


def attention_bias(input_mask_BL: tf.Tensor, causal: bool, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """What is added to the scores, [B, 1, L, L]: 0 where a position may attend, -10,000 where not.

    `input_mask_BL` is the number of the sequence at each position, int32, 0 for padding; with `causal`, only positions up to
    the own one are allowed.
    """
    same_BLL = tf.cast(tf.equal(input_mask_BL[:, :, tf.newaxis], input_mask_BL[:, tf.newaxis, :]), dtype)
    if causal:
        order_L = tf.range(input_mask_BL.shape[1], dtype=tf.int32)
        same_BLL *= tf.cast(order_L[:, tf.newaxis] >= order_L[tf.newaxis, :], dtype)
    return ((1.0 - same_BLL) * _FORBIDDEN_SCORE)[:, tf.newaxis]


def self_attention(
    query_RH: tf.Tensor,
    hidden_TH: tf.Tensor,
    bias_B1PL: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    scope: str,
    config: BertConfig,
    forward_pass: ForwardPass,
    dropout_site: int,
) -> tf.Tensor:
    """The context of every query, [R, H], before the output projection.

    `query_RH` are the rows of `hidden_TH` at the query positions, `bias_B1PL` their rows of the bias; `scope` is for
    example `bert/encoder/layer_0/attention/self`, `dropout_site` the number of this dropout in the model.
    """
    packs, _, queries, length = bias_B1PL.shape
    heads, size = config.num_attention_heads, config.head_size

    def project(inputs: tf.Tensor, positions: int, *parts: str) -> list[tf.Tensor]:
        """Of each of `parts` what the heads see of `inputs`, [B, N, positions, D]: one product for all parts."""
        kernel_HO, bias_O = _fused_projection(parameters, scope, size, parts)
        fused = dense(inputs, kernel_HO, bias_O, forward_pass.compiled)
        return tf.unstack(tf.transpose(tf.reshape(fused, [packs, positions, len(parts), heads, size]), [2, 0, 3, 1, 4]))

    if query_RH is hidden_TH:
        query_BNPD, key_BNLD, value_BNLD = project(hidden_TH, length, "query", "key", "value")
    else:
        (query_BNPD,) = project(query_RH, queries, "query")
        key_BNLD, value_BNLD = project(hidden_TH, length, "key", "value")
    rate = config.attention_probs_dropout_prob
    drawn = forward_pass.draw(tf.TensorShape([packs, heads, queries, length]), rate, dropout_site)
    context_BNPD = attend(query_BNPD, key_BNLD, value_BNLD, bias_B1PL, drawn, rate, forward_pass.compiled)
    return tf.reshape(tf.transpose(context_BNPD, [0, 2, 1, 3]), [packs * queries, heads * size])


def attend(
    query_BNPD: tf.Tensor,
    key_BNLD: tf.Tensor,
    value_BNLD: tf.Tensor,
    bias_B1PL: tf.Tensor,
    drawn: tf.Tensor | None,
    rate: float,
    compiled: bool,
) -> tf.Tensor:
    """softmax(query key^T + bias) value, with dropout of the shares: [B, N, P, D].

    The backward pass is written out to go over [B, N, P, L] as seldom as possible: the dropout's scale is
    applied to the context, which is smaller by L / D, and what is elementwise is one kernel.

    `query_BNPD` is divided by the square root of D already; `bias_B1PL` is from `attention_bias`, `drawn` from
    `ForwardPass.draw`.
    """
    scale = keep_scale(drawn, rate)

    @tf.custom_gradient
    def core(query_BNPD: tf.Tensor, key_BNLD: tf.Tensor, value_BNLD: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        dtype = query_BNPD.dtype
        scores_BNPL = widen(tf.matmul(query_BNPD, key_BNLD, transpose_b=True)) + bias_B1PL
        shares_BNPL = tf.cast(tf.nn.softmax(scores_BNPL), dtype)
        used_BNPL = shares_BNPL if drawn is None else kernel(_drop_shares, compiled)(shares_BNPL, drawn, rate)
        context_BNPD = tf.matmul(used_BNPL, value_BNLD) * scale

        def backward(gradient_BNPD: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            scaled_BNPD = gradient_BNPD * scale
            value_gradient_BNLD = tf.matmul(used_BNPL, scaled_BNPD, transpose_a=True)
            used_gradient_BNPL = tf.matmul(scaled_BNPD, value_BNLD, transpose_b=True)
            scores_gradient_BNPL = kernel(_scores_gradient, compiled)(used_gradient_BNPL, shares_BNPL, drawn, rate)
            query_gradient_BNPD = tf.matmul(scores_gradient_BNPL, key_BNLD)
            key_gradient_BNLD = tf.matmul(scores_gradient_BNPL, query_BNPD, transpose_a=True)
            return query_gradient_BNPD, key_gradient_BNLD, value_gradient_BNLD

        return context_BNPD, backward

    return core(query_BNPD, key_BNLD, value_BNLD)


def _drop_shares(shares_BNPL: tf.Tensor, drawn: tf.Tensor, rate: float) -> tf.Tensor:
    return shares_BNPL * keep_mask(drawn, shares_BNPL.shape, rate, shares_BNPL.dtype)


def _scores_gradient(
    used_gradient_BNPL: tf.Tensor,
    shares_BNPL: tf.Tensor,
    drawn: tf.Tensor | None,
    rate: float,
) -> tf.Tensor:
    """Softmax's gradient, behind dropout's. Where one share is 1 it is exactly 0, as it should be.

    (The sums over rows could be had cheaper, from the context and its gradient; but only to within rounding.)
    """
    if drawn is not None:
        used_gradient_BNPL = _drop_shares(used_gradient_BNPL, drawn, rate)
    weighted_BNPL = widen(shares_BNPL) * widen(used_gradient_BNPL)
    sums_BNP1 = tf.reduce_sum(weighted_BNPL, axis=-1, keepdims=True)
    return tf.cast(weighted_BNPL - widen(shares_BNPL) * sums_BNP1, shares_BNPL.dtype)


def _fused_projection(
    parameters: Mapping[str, tf.Tensor], scope: str, size: int, parts: Sequence[str]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Kernel [H, O] and bias [O] of some of query, key and value side by side.

    The queries' part carries the division by the square root of the head size, which saves a pass over
    the scores. The keys' bias adds the same number to all scores of a row, to which softmax is blind: its
    true gradient is zero, and zero it is given, not the rounding noise that an adaptive optimizer would
    take for a direction.
    """
    scale = 1.0 / math.sqrt(size)
    kernels, biases = [], []
    for part in parts:
        kernel_HH, bias_H = parameters[f"{scope}/{part}/kernel"], parameters[f"{scope}/{part}/bias"]
        if part == "query":
            kernel_HH, bias_H = kernel_HH * scale, bias_H * scale
        elif part == "key":
            bias_H = without_gradient(bias_H)
        kernels.append(kernel_HH)
        biases.append(bias_H)
    return tf.concat(kernels, axis=1), tf.concat(biases, axis=0)
