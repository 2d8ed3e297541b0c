"""Self-attention that keeps the sequences of a pack apart (Krell et al., 2021, section 3.2.2).

The mask is block-diagonal: position i may attend to j where both carry the same sequence number. It is
computed on the device from `input_mask`, at any depth, by comparing numbers; padding has the number 0 and so
attends to padding, which keeps its rows finite. Nothing reads them. "Causal" allows in addition only j <= i;
as positions of a sequence are consecutive, that is causal within each sequence.

Forbidden scores are lowered by 10,000. The largest score of a row is an allowed one, so a forbidden
probability is exp(less than -9,000) = exactly 0 in float32, for every row: other sequences add exact zeros,
and a sequence's outputs do not change by one bit when its neighbours do.

Letters: B packs, L positions, T = B * L tokens, H hidden size, N heads, D head size (H = N * D), K = 3 * H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import tensorflow as tf

from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.dropout import kept_places, kept_scale
from gaudi_bert.model.forward_pass import ForwardPass
from gaudi_bert.model.operations import dense, kernel, widen, without_gradient

__all__ = ["attend", "attention_bias", "self_attention"]

FORBIDDEN_SCORE = -10000.0


def attention_bias(input_mask_BL: tf.Tensor, causal: bool, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """What is added to the scores, [B, 1, L, L]: 0 where a position may attend, -10,000 where not.

    Args:
        input_mask_BL: int32, the number of the sequence at each position, 0 for padding.
        causal: allow only positions up to the own one.
        dtype: float32, or float64 for proofs.
    """
    same_BLL = tf.cast(tf.equal(input_mask_BL[:, :, tf.newaxis], input_mask_BL[:, tf.newaxis, :]), dtype)
    if causal:
        order_L = tf.range(input_mask_BL.shape[1], dtype=tf.int32)
        same_BLL *= tf.cast(order_L[:, tf.newaxis] >= order_L[tf.newaxis, :], dtype)
    return ((1.0 - same_BLL) * FORBIDDEN_SCORE)[:, tf.newaxis]


def self_attention(
    hidden_TH: tf.Tensor,
    bias_B1LL: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    scope: str,
    config: BertConfig,
    forward_pass: ForwardPass,
    dropout_site: int,
) -> tf.Tensor:
    """The context of every token, [T, H], before the output projection.

    Args:
        hidden_TH: the layer's input.
        bias_B1LL: from `attention_bias`.
        parameters: all variables; those of this attention begin with `scope`.
        scope: for example `bert/encoder/layer_0/attention/self`.
        config: the model's.
        forward_pass: how it is run.
        dropout_site: number of this dropout in the model.
    """
    packs, _, length, _ = bias_B1LL.shape
    heads, size = config.num_attention_heads, config.head_size
    kernel_HK, bias_K = _fused_projection(parameters, scope, size)
    fused_TK = dense(hidden_TH, kernel_HK, bias_K, forward_pass.compiled)
    fused_3BNLD = tf.transpose(tf.reshape(fused_TK, [packs, length, 3, heads, size]), [2, 0, 3, 1, 4])
    query_BNLD, key_BNLD, value_BNLD = tf.unstack(fused_3BNLD)
    rate = config.attention_probs_dropout_prob
    drawn = forward_pass.draw(tf.TensorShape([packs, heads, length, length]), rate, dropout_site)
    context_BNLD = attend(query_BNLD, key_BNLD, value_BNLD, bias_B1LL, drawn, rate, forward_pass.compiled)
    return tf.reshape(tf.transpose(context_BNLD, [0, 2, 1, 3]), [packs * length, heads * size])


def attend(
    query_BNLD: tf.Tensor,
    key_BNLD: tf.Tensor,
    value_BNLD: tf.Tensor,
    bias_B1LL: tf.Tensor,
    drawn: tf.Tensor | None,
    rate: float,
    compiled: bool,
) -> tf.Tensor:
    """softmax(query key^T + bias) value, with dropout of the shares: [B, N, L, D].

    The backward pass is written out to go over [B, N, L, L] as seldom as possible: the dropout's scale is
    applied to the context, which is smaller by L / D, and what is elementwise is one kernel.

    Args:
        query_BNLD: already divided by the square root of D.
        key_BNLD: in the same type.
        value_BNLD: in the same type.
        bias_B1LL: from `attention_bias`.
        drawn: from `ForwardPass.draw`; None for no dropout.
        rate: of dropout.
        compiled: whether kernels are.
    """
    scale = kept_scale(drawn, rate)

    @tf.custom_gradient
    def core(query_BNLD: tf.Tensor, key_BNLD: tf.Tensor, value_BNLD: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        dtype = query_BNLD.dtype
        scores_BNLL = widen(tf.matmul(query_BNLD, key_BNLD, transpose_b=True)) + bias_B1LL
        shares_BNLL = tf.cast(tf.nn.softmax(scores_BNLL), dtype)
        used_BNLL = shares_BNLL if drawn is None else kernel(_drop_shares, compiled)(shares_BNLL, drawn, rate)
        context_BNLD = tf.matmul(used_BNLL, value_BNLD) * scale

        def backward(gradient_BNLD: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            scaled_BNLD = gradient_BNLD * scale
            value_gradient_BNLD = tf.matmul(used_BNLL, scaled_BNLD, transpose_a=True)
            used_gradient_BNLL = tf.matmul(scaled_BNLD, value_BNLD, transpose_b=True)
            scores_gradient_BNLL = kernel(_scores_gradient, compiled)(used_gradient_BNLL, shares_BNLL, drawn, rate)
            query_gradient_BNLD = tf.matmul(scores_gradient_BNLL, key_BNLD)
            key_gradient_BNLD = tf.matmul(scores_gradient_BNLL, query_BNLD, transpose_a=True)
            return query_gradient_BNLD, key_gradient_BNLD, value_gradient_BNLD

        return context_BNLD, backward

    return core(query_BNLD, key_BNLD, value_BNLD)


def _drop_shares(shares_BNLL: tf.Tensor, drawn: tf.Tensor, rate: float) -> tf.Tensor:
    return shares_BNLL * kept_places(drawn, shares_BNLL.shape, rate, shares_BNLL.dtype)


def _scores_gradient(
    used_gradient_BNLL: tf.Tensor,
    shares_BNLL: tf.Tensor,
    drawn: tf.Tensor | None,
    rate: float,
) -> tf.Tensor:
    """Softmax's gradient, behind dropout's. Where one share is 1 it is exactly 0, as it should be.

    (The sums over rows could be had cheaper, from the context and its gradient; but only to within rounding.)
    """
    if drawn is not None:
        used_gradient_BNLL = _drop_shares(used_gradient_BNLL, drawn, rate)
    weighted_BNLL = widen(shares_BNLL) * widen(used_gradient_BNLL)
    sums_BNL1 = tf.reduce_sum(weighted_BNLL, axis=-1, keepdims=True)
    return tf.cast(weighted_BNLL - widen(shares_BNLL) * sums_BNL1, shares_BNLL.dtype)


def _fused_projection(parameters: Mapping[str, tf.Tensor], scope: str, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Kernel [H, K] and bias [K] of query, key and value side by side: one product instead of three.

    The queries' part carries the division by the square root of the head size, which saves a pass over
    the scores. The keys' bias adds the same number to all scores of a row, to which softmax is blind: its
    true gradient is zero, and zero it is given, not the rounding noise that an adaptive optimiser would
    take for a direction.
    """
    scale = 1.0 / math.sqrt(size)
    kernels = [parameters[f"{scope}/{part}/kernel"] for part in ("query", "key", "value")]
    biases = [parameters[f"{scope}/{part}/bias"] for part in ("query", "key", "value")]
    kernel_HK = tf.concat([kernels[0] * scale, kernels[1], kernels[2]], axis=1)
    bias_K = tf.concat([biases[0] * scale, without_gradient(biases[1]), biases[2]], axis=0)
    return kernel_HK, bias_K
