"""A model over the packs of a window, in batches of static shapes; what it says comes back in the order of the sequences.

A batch has about TOKENS_OF_A_BATCH tokens, where a CPU is as fast as it gets; what does not fill one is run pack by pack, so
that nothing empty is computed. A device that compiles a graph for one shape (`one_shape`) gets empty packs instead.

Letters: B packs, L positions, S depth, C values of an answer, N sequences, T tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.tasks.packs import BatchShape, place_packs
from gaudi_bert.tasks.rows.types import Sequences
from gaudi_bert.training.prediction.shapes import Part, WindowPlan

__all__ = ["Compute", "PackRunner"]

Compute: TypeAlias = Callable[[Mapping[str, tf.Tensor]], tf.Tensor]
"""From the features of a batch (`Placement.features`) to [B, S, C] or [B, L, C]."""

TOKENS_OF_A_BATCH = 1024


class PackRunner:
    """Runs one model.

    Args:
        compute: traced once for each shape.
        per: whether it answers for each sequence or for each token.
        width: values of an answer (C).
        device: TensorFlow's name.
        one_shape: fill batches up with empty packs, rather than running what is left in smaller ones.
        batch_tokens: tokens of a batch.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        per: Literal["sequence", "token"],
        width: int,
        device: str = "/device:CPU:0",
        one_shape: bool = False,
        batch_tokens: int = TOKENS_OF_A_BATCH,
    ) -> None:
        self._function = tf.function(lambda features: compute(features), autograph=False, reduce_retracing=False)
        self._traced: dict[BatchShape, tf.types.experimental.ConcreteFunction] = {}
        self._per, self._width, self._device = per, width, device
        self._one_shape, self._batch_tokens = one_shape, batch_tokens

    def run(self, sequences: Sequences, plan: WindowPlan) -> Float32Array:
        """What the model says of each sequence, [N, C], or of each token, [T, C].

        Args:
            sequences: of a window.
            plan: how they are packed.
        """
        rows = len(sequences) if self._per == "sequence" else len(sequences.input_ids)
        out: Float32Array = np.zeros((rows, self._width), np.float32)
        for part in plan.parts:
            batch = max(1, self._batch_tokens // part.length)
            first = 0
            while first < len(part.packs):
                left = len(part.packs) - first
                packs = batch if left >= batch or self._one_shape else 1
                self._run_batch(sequences, part, first, packs, out)
                first += packs
        return out

    def _run_batch(self, sequences: Sequences, part: Part, first: int, packs: int, out: Float32Array) -> None:
        chosen = np.arange(first, min(first + packs, len(part.packs)))
        shape = BatchShape(packs, part.length, part.depth)
        placed = place_packs(sequences, part.packs, chosen, shape)
        with tf.device(self._device):
            features = {name: tf.constant(values) for name, values in placed.features(sequences).items()}
            if shape not in self._traced:
                self._traced[shape] = self._function.get_concrete_function(features)
            values = self._traced[shape](features).numpy()
        if self._per == "sequence":
            placed.scatter_sequences(values, out)
        else:
            placed.scatter_tokens(values, out)
