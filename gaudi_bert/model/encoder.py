"""The Transformer encoder with layer norm after each residual sum (Vaswani et al., 2017; Devlin et al., 2019).

Letters: B packs, L positions, T = B * L tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from gaudi_bert.model.attention import self_attention
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.operations import activation, dense, dropout, layer_norm
from gaudi_bert.model.parameters import layer_scope

__all__ = ["encode"]

DROPOUT_SITES_PER_LAYER = 3


def encode(
    hidden_TH: tf.Tensor,
    bias_B1LL: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    config: BertConfig,
    dropout_seed: tf.Tensor | None,
) -> tf.Tensor:
    """The output of the last layer, [T, H].

    Args:
        hidden_TH: the embeddings.
        bias_B1LL: from `attention_bias`.
        parameters: all variables by name.
        config: the model's.
        dropout_seed: int32 [2], or None for none.
    """
    for layer in range(config.num_hidden_layers):
        first_site = 1 + DROPOUT_SITES_PER_LAYER * layer
        hidden_TH = _encoder_layer(hidden_TH, bias_B1LL, parameters, layer_scope(layer), config, dropout_seed, first_site)
    return hidden_TH


def _encoder_layer(
    hidden_TH: tf.Tensor,
    bias_B1LL: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    scope: str,
    config: BertConfig,
    dropout_seed: tf.Tensor | None,
    first_site: int,
) -> tf.Tensor:
    def project(inputs: tf.Tensor, name: str) -> tf.Tensor:
        return dense(inputs, parameters[f"{scope}/{name}/kernel"], parameters[f"{scope}/{name}/bias"])

    def add_and_normalise(new_TH: tf.Tensor, old_TH: tf.Tensor, name: str, site: int) -> tf.Tensor:
        total_TH = dropout(new_TH, config.hidden_dropout_prob, dropout_seed, site) + old_TH
        gamma_H, beta_H = parameters[f"{scope}/{name}/LayerNorm/gamma"], parameters[f"{scope}/{name}/LayerNorm/beta"]
        return layer_norm(total_TH, gamma_H, beta_H, config.layer_norm_eps)

    context_TH = self_attention(
        hidden_TH, bias_B1LL, parameters, f"{scope}/attention/self", config, dropout_seed, first_site
    )
    attended_TH = add_and_normalise(
        project(context_TH, "attention/output/dense"), hidden_TH, "attention/output", first_site + 1
    )
    intermediate = activation(config.hidden_act)(project(attended_TH, "intermediate/dense"))
    return add_and_normalise(project(intermediate, "output/dense"), attended_TH, "output", first_site + 2)
