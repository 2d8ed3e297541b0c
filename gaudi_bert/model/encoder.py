"""The Transformer encoder with layer norm after each residual sum (Vaswani et al., 2017; Devlin et al., 2019).

Where only some places of a pack are read, as pretraining reads masked tokens and [CLS], the last layer is computed for
these alone: its keys and values are made of all tokens, its queries and all that follows of those that are read. What
comes out is the same; of a pack of 512 tokens, about 80 of which are read, it takes less than a third of the
layer's operations.

Letters: B packs, L positions, T = B * L tokens, P places of a pack that are read, R = B * P (or T) tokens that a layer is
computed for, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from gaudi_bert.model.attention import self_attention
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.forward_pass import ForwardPass
from gaudi_bert.model.operations import activation, dense, pick_tokens, residual_layer_norm
from gaudi_bert.model.parameters import layer_scope

__all__ = ["encode"]

DROPOUT_SITES_PER_LAYER = 3


def encode(
    hidden_TH: tf.Tensor,
    bias_B1LL: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    config: BertConfig,
    forward_pass: ForwardPass,
    places_BP: tf.Tensor | None = None,
) -> tf.Tensor:
    """The output of the last layer: [B * P, H], or [T, H] where all places are read.

    Args:
        hidden_TH: the embeddings.
        bias_B1LL: from `attention_bias`.
        parameters: all variables by name.
        config: the model's.
        forward_pass: how it is run.
        places_BP: int32, the positions of each pack that are read; None for all.
    """
    for layer in range(config.num_hidden_layers):
        asking_RH, bias_B1PL = hidden_TH, bias_B1LL
        if places_BP is not None and layer == config.num_hidden_layers - 1:
            asking_RH, bias_B1PL = _at_places(hidden_TH, bias_B1LL, places_BP)
        scope, first_site = layer_scope(layer), 1 + DROPOUT_SITES_PER_LAYER * layer
        hidden_TH = _encoder_layer(asking_RH, hidden_TH, bias_B1PL, parameters, scope, config, forward_pass, first_site)
    return hidden_TH


def _at_places(hidden_TH: tf.Tensor, bias_B1LL: tf.Tensor, places_BP: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows of the hidden states and of the bias that belong to `places_BP`: [R, H] and [B, 1, P, L]."""
    packs, _, length, _ = bias_B1LL.shape
    bias_RL = pick_tokens(tf.reshape(bias_B1LL, [packs * length, length]), places_BP, length)
    return pick_tokens(hidden_TH, places_BP, length), tf.reshape(bias_RL, [packs, 1, places_BP.shape[1], length])


def _encoder_layer(
    asking_RH: tf.Tensor,
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
        asking_RH, hidden_TH, bias_B1PL, parameters, f"{scope}/attention/self", config, forward_pass, first_site
    )
    attended_RH = add_and_normalise(
        project(context_RH, "attention/output/dense"), asking_RH, "attention/output", first_site + 1
    )
    activate = activation(config.hidden_act, forward_pass.compiled)
    intermediate = activate(project(attended_RH, "intermediate/dense"))
    return add_and_normalise(project(intermediate, "output/dense"), attended_RH, "output", first_site + 2)
