"""The speed-up that packing really brings, measured in the run itself, before its first update.

The same model passes forward and backward over a micro-batch of packs, and over as many rows that hold one sequence each.
With s_packed and s_unpacked seconds per micro-batch, and f sequences per pack,

    realized speed-up = f * s_unpacked / s_packed

which falls short of f by what block masks, gathered positions and the larger heads cost (Krell et al. 2021, table 2). Times
are the medians of alternating passes; no variable is changed. It takes two more graphs, so it has to be requested.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from gaudi_bert.model.bert import BertForPretraining
from gaudi_bert.model.losses import Loss, pretraining_sums
from gaudi_bert.model.sequences import join_sequences, split_packs
from gaudi_bert.training.input.batches import Batch

_PASSES = 5


@dataclass(frozen=True)
class _Speedup:
    """What was measured.

    Seconds are those of a micro-batch of packs, and of as many rows of one sequence.
    """

    packing_factor: float
    packed_seconds: float
    unpacked_seconds: float

    @property
    def realized(self) -> float:
        """Sequences per second, packed over unpacked."""
        return self.packing_factor * self.unpacked_seconds / self.packed_seconds

    def line(self) -> str:
        """For people."""
        return (
            f"realized speed-up {self.realized:.3f} at {self.packing_factor:.3f} sequences per pack "
            f"({self.realized / self.packing_factor:.1%} of it): a micro-batch takes "
            f"{1000 * self.packed_seconds:.1f} ms packed, {1000 * self.unpacked_seconds:.1f} ms with one sequence per row"
        )


def measure_speedup(
    model: BertForPretraining, loss: Loss, batch: Batch, max_predictions: int, packing_factor: float
) -> _Speedup:
    """Time both kinds of passes."""
    rows, length = batch["input_ids"].shape
    singles = [[placed.sequence] for placed in split_packs(batch)][:rows]
    batches = (batch, join_sequences(singles, length, max_predictions, 1))
    inputs = [{name: tf.constant(values) for name, values in each.items()} for each in batches]
    passes = [_pass(model, loss) for _ in inputs]
    seconds = np.array([[_time(run, each) for run, each in zip(passes, inputs, strict=True)] for _ in range(_PASSES + 1)])
    packed, unpacked = np.median(seconds[1:], axis=0)  # the first pass builds the graph
    return _Speedup(packing_factor, float(packed), float(unpacked))


def _pass(model: BertForPretraining, loss: Loss) -> tf.types.experimental.PolymorphicFunction:
    variables = list(model.variables_by_name.values())
    seed = tf.constant([1, 2], tf.int32)

    def forward_and_backward(batch: Batch) -> tf.Tensor:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            sums = pretraining_sums(model(batch, dropout_seed=seed), batch, loss)
            total = sums.masked_lm_sum + sums.next_sentence_sum
        gradients = tape.gradient(total, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # All of them are needed for this one number, so none is left out.
        return tf.reduce_sum(tf.stack([tf.reduce_sum(tf.convert_to_tensor(gradient)) for gradient in gradients]))

    return tf.function(forward_and_backward, autograph=False, reduce_retracing=False)


def _time(run: tf.types.experimental.PolymorphicFunction, inputs: Batch) -> float:
    started = time.perf_counter()
    run(inputs).numpy()
    return time.perf_counter() - started
