"""What the heads of several tasks share: a dense layer on top, weighted sums of losses.

Letters: B packs, L positions, S depth, P = B * S sequences (or B * L tokens), H hidden size, C values of a head.
"""

from __future__ import annotations

import tensorflow as tf

from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.losses import cross_entropy
from gaudi_bert.model.operations import dense, dropout, widen
from gaudi_bert.model.parameters import ParameterSpec
from gaudi_bert.tasks.task import Encoded, Weighed

__all__ = ["classified", "dense_head", "head_scores"]

# Beyond the places of any encoder.
HEAD_DROPOUT_SITE = 1 << 20


def dense_head(scope: str, config: BertConfig, width: int) -> dict[str, ParameterSpec]:
    """The variables of a dense layer on hidden states."""
    return {
        f"{scope}/kernel": ParameterSpec((config.hidden_size, width), "normal"),
        f"{scope}/bias": ParameterSpec((width,), "zeros"),
    }


def head_scores(inputs_PH: tf.Tensor, encoded: Encoded, scope: str, *, drops: bool = True) -> tf.Tensor:
    """Wide scores [P, C] of the dense layer `scope`, with the dropout that BERT's heads have before it."""
    if drops:
        rate = encoded.config.hidden_dropout_prob
        drawn = encoded.forward_pass.draw(inputs_PH.shape, rate, HEAD_DROPOUT_SITE)
        inputs_PH = dropout(inputs_PH, drawn, rate, encoded.forward_pass.compiled)
    with tf.name_scope("KEEP_FP32_PRECISION"):
        return dense(widen(inputs_PH), encoded.parameters[f"{scope}/kernel"], encoded.parameters[f"{scope}/bias"])


def classified(logits: tf.Tensor, classes: tf.Tensor, weights: tf.Tensor) -> Weighed:
    """Negative log likelihood of the right classes; logits [..., C], the others [...]."""
    weights_P = tf.cast(tf.reshape(weights, [-1]), logits.dtype)
    classes_P = tf.reshape(classes, [-1])
    losses_P, guesses_P = cross_entropy(tf.reshape(logits, [-1, logits.shape[-1]]), classes_P)
    right_P = tf.cast(tf.equal(guesses_P, classes_P), logits.dtype)
    return Weighed(tf.reduce_sum(losses_P * weights_P), tf.reduce_sum(weights_P), tf.reduce_sum(right_P * weights_P))
