"""Token, segment and position embeddings (Devlin et al., 2019, section 3; packed positions: Krell et al.,
2021, 3.2.1).

Positions restart in every sequence of a pack, so they are looked up by the feature `positions` rather than
added as a slice.
Letters: B packs, L positions, T = B * L tokens, H hidden size, Y segment types.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.forward_pass import ForwardPass
from gaudi_bert.model.operations import dropout, gather_rows, layer_norm

__all__ = ["EMBEDDINGS_DROPOUT_SITE", "embed"]

EMBEDDINGS_DROPOUT_SITE = 0


def embed(
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
    drawn = forward_pass.draw(normal_TH.shape, rate, EMBEDDINGS_DROPOUT_SITE)
    return tf.cast(dropout(normal_TH, drawn, rate, forward_pass.compiled), compute_dtype)
