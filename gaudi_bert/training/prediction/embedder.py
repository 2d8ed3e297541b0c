"""A text's vector: the hidden states of its tokens pooled, each sequence of a pack by itself.

`cls` is the hidden state of [CLS], `mean` the mean over all tokens of the sequence ([CLS] and [SEP] too, as
sentence-transformers has it), `max` the largest value of each feature. Normalised vectors have length 1.

Letters: B packs, L positions, S depth, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import tensorflow as tf

from gaudi_bert.common.arrays import WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.model.bert import PackedBert, encode_packs
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.forward_pass import ForwardPass
from gaudi_bert.model.operations import widen
from gaudi_bert.model.parameters import parameter_specs

__all__ = ["Embedder", "Pooling"]

Pooling = Literal["cls", "mean", "max"]

# Below any hidden state; a sequence that is not there has nothing else.
LOWEST = -3.0e38


class Embedder(PackedBert):
    """An encoder that gives one vector for each sequence.

    Args:
        config: of the encoder.
        weights: by our names; heads and pooler are left alone.
        pooling: how tokens become one vector.
        normalize: divide each vector by its length.
        compute_dtype: of the matrix products.

    Raises:
        InputError: the weights hold no whole encoder.
    """

    def __init__(
        self,
        config: BertConfig,
        weights: WeightArrays,
        *,
        pooling: Pooling,
        normalize: bool,
        compute_dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        specs = {
            name: spec
            for name, spec in parameter_specs(config).items()
            if name.startswith("bert/") and not name.startswith("bert/pooler/")
        }
        missing = [name for name in specs if name not in weights]
        if missing:
            raise InputError(f"weights: {missing[0]} is missing; give the weights of a whole encoder")
        super().__init__(config, specs, seed=0, compute_dtype=compute_dtype)
        self.load_values({name: weights[name] for name in specs})
        self.pooling, self.normalize = pooling, normalize

    def __call__(self, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Vectors of the sequences of a batch, float32 [B, S, H]; those that are not there are meaningless.

        Args:
            batch: `Placement.features`, shapes static.
        """
        places_BS = batch["sequence_positions"] if self.pooling == "cls" else None
        hidden = encode_packs(batch, self.parameters(), self.config, self.compute_dtype, ForwardPass(), places_BS)
        packs, depth = batch["sequence_positions"].shape
        if self.pooling == "cls":
            vectors_BSH = tf.reshape(widen(hidden), [packs, depth, self.config.hidden_size])
        else:
            hidden_BLH = tf.reshape(widen(hidden), [*batch["input_ids"].shape, self.config.hidden_size])
            vectors_BSH = _pooled(hidden_BLH, batch["input_mask"], depth, self.pooling)
        return tf.math.l2_normalize(vectors_BSH, axis=-1, epsilon=1e-24) if self.normalize else vectors_BSH


def _pooled(hidden_BLH: tf.Tensor, input_mask_BL: tf.Tensor, depth: int, pooling: Pooling) -> tf.Tensor:
    """Mean or maximum over the tokens of each sequence, [B, S, H].

    The mean is a product with 0 and 1; the maximum goes over flat tokens by the number of their sequence.
    """
    packs, length, hidden = hidden_BLH.shape
    if pooling == "mean":
        belongs_BSL = tf.one_hot(input_mask_BL - 1, depth, axis=1, dtype=hidden_BLH.dtype)
        tokens_BS1 = tf.reduce_sum(belongs_BSL, axis=2, keepdims=True)
        return tf.matmul(belongs_BSL, hidden_BLH) / tf.maximum(tokens_BS1, 1.0)
    first_B1 = tf.range(0, packs * (depth + 1), depth + 1, dtype=tf.int32)[:, tf.newaxis]
    segments_T = tf.reshape(input_mask_BL + first_B1, [-1])
    flat_TH = tf.reshape(hidden_BLH, [packs * length, hidden])
    most = tf.math.unsorted_segment_max(flat_TH, segments_T, packs * (depth + 1))
    return tf.maximum(tf.reshape(most, [packs, depth + 1, hidden])[:, 1:], LOWEST)
