"""The Transformer encoder with layer norm after each residual sum (Vaswani et al., 2017; Devlin et al., 2019).

Letters: B packs, L positions, T = B * L tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from gaudi_bert.model.attention import self_attention
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.forward_pass import ForwardPass
from gaudi_bert.model.operations import activation, dense, residual_layer_norm
from gaudi_bert.model.parameters import layer_scope

__all__ = ["encode"]

DROPOUT_SITES_PER_LAYER = 3


def encode(
    hidden_TH: tf.Tensor,
    bias_B1LL: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    config: BertConfig,
    forward_pass: ForwardPass,
) -> tf.Tensor:
    """The output of the last layer, [T, H].

    Args:
        hidden_TH: the embeddings.
        bias_B1LL: from `attention_bias`.
        parameters: all variables by name.
        config: the model's.
        forward_pass: how it is run.
    """
    for layer in range(config.num_hidden_layers):
        first_site = 1 + DROPOUT_SITES_PER_LAYER * layer
        hidden_TH = _encoder_layer(hidden_TH, bias_B1LL, parameters, layer_scope(layer), config, forward_pass, first_site)
    return hidden_TH


def _encoder_layer(
    hidden_TH: tf.Tensor,
    bias_B1LL: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    scope: str,
    config: BertConfig,
    forward_pass: ForwardPass,
    first_site: int,
) -> tf.Tensor:
    def project(inputs: tf.Tensor, name: str) -> tf.Tensor:
        kernel_IO, bias_O = parameters[f"{scope}/{name}/kernel"], parameters[f"{scope}/{name}/bias"]
        return dense(inputs, kernel_IO, bias_O, forward_pass.compiled)

    def add_and_normalise(new_TH: tf.Tensor, old_TH: tf.Tensor, name: str, site: int) -> tf.Tensor:
        gamma_H, beta_H = parameters[f"{scope}/{name}/LayerNorm/gamma"], parameters[f"{scope}/{name}/LayerNorm/beta"]
        rate = config.hidden_dropout_prob
        drawn = forward_pass.draw(new_TH.shape, rate, site)
        return residual_layer_norm(
            new_TH, old_TH, gamma_H, beta_H, drawn, rate, config.layer_norm_eps, forward_pass.compiled
        )

    context_TH = self_attention(
        hidden_TH, bias_B1LL, parameters, f"{scope}/attention/self", config, forward_pass, first_site
    )
    attended_TH = add_and_normalise(
        project(context_TH, "attention/output/dense"), hidden_TH, "attention/output", first_site + 1
    )
    activate = activation(config.hidden_act, forward_pass.compiled)
    intermediate = activate(project(attended_TH, "intermediate/dense"))
    return add_and_normalise(project(intermediate, "output/dense"), attended_TH, "output", first_site + 2)
