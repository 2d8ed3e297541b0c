"""The pooler and the two heads of pretraining, each computed only where it is read (Krell et al., 2021,
section 3.2.3).

The masked-LM head sees the Q masked slots of a pack, not its L positions; the pooler sees the [CLS] of every
sequence.
Letters: B packs, H hidden size, Q masked slots, S depth, V vocabulary, P = B * (Q or S) picked tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.operations import activation, dense, layer_norm, widen

__all__ = ["masked_lm_logits", "next_sentence_logits", "pool"]


def pool(first_PH: tf.Tensor, parameters: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """BERT's pooler, [P, H]: a dense layer and tanh on the hidden state of every [CLS]."""
    scope = "bert/pooler/dense"
    return tf.tanh(dense(first_PH, parameters[f"{scope}/kernel"], parameters[f"{scope}/bias"]))


def next_sentence_logits(pooled_PH: tf.Tensor, parameters: Mapping[str, tf.Tensor]) -> tf.Tensor:
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
