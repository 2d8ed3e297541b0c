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
from collections.abc import Mapping

import tensorflow as tf

from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.operations import dense, dropout, widen, without_gradient

__all__ = ["attention_bias", "self_attention"]

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
    dropout_seed: tf.Tensor | None,
    dropout_site: int,
) -> tf.Tensor:
    """The context of every token, [T, H], before the output projection.

    Args:
        hidden_TH: the layer's input.
        bias_B1LL: from `attention_bias`.
        parameters: all variables; those of this attention begin with `scope`.
        scope: for example `bert/encoder/layer_0/attention/self`.
        config: the model's.
        dropout_seed: int32 [2], or None for none.
        dropout_site: number of this dropout in the model.
    """
    packs, _, length, _ = bias_B1LL.shape
    heads, size = config.num_attention_heads, config.head_size
    kernel_HK, bias_K = _fused_projection(parameters, scope, size)
    fused_TK = dense(hidden_TH, kernel_HK, bias_K)
    fused_3BNLD = tf.transpose(tf.reshape(fused_TK, [packs, length, 3, heads, size]), [2, 0, 3, 1, 4])
    query_BNLD, key_BNLD, value_BNLD = tf.unstack(fused_3BNLD)
    scores_BNLL = widen(tf.matmul(query_BNLD, key_BNLD, transpose_b=True)) + bias_B1LL
    shares_BNLL = tf.cast(tf.nn.softmax(scores_BNLL), hidden_TH.dtype)
    shares_BNLL = dropout(shares_BNLL, config.attention_probs_dropout_prob, dropout_seed, dropout_site)
    context_BNLD = tf.matmul(shares_BNLL, value_BNLD)
    return tf.reshape(tf.transpose(context_BNLD, [0, 2, 1, 3]), [packs * length, heads * size])


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
