"""The thread that computes: it opens the model, computes every shape once and measures it, then takes batch after batch.

A batch that fails fails the requests in it. Then the smallest shape is tried again: where that fails too, the device is
lost, and the thread ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from gaudi_bert.common.arrays import Float32Array, IntArray
from gaudi_bert.common.dealing import Packs
from gaudi_bert.common.errors import FailedError, GaudiBertError
from gaudi_bert.rows.packs import BatchShape, lay_out_packs
from gaudi_bert.rows.types import Sequences, separate_sequences
from gaudi_bert.rows.window_plan import deepest
from gaudi_bert.serving.ladder import Shape
from gaudi_bert.serving.model import ServedModel
from gaudi_bert.serving.queue import Batch, Queue, gathered

_TRIED_TOKENS = 16  # of each text of a batch that is computed to measure it
_FAILURES = (GaudiBertError, RuntimeError, ValueError, IndexError, ArithmeticError, MemoryError)
"""What a model raises on a batch; the errors of a lost device are among them."""


def run_packs(model: ServedModel, sequences: Sequences, rows: Sequence[int], shape: Shape) -> Float32Array:
    """Return the outputs of sequences, [N, C] or [T, C], of which each row holds so many, one after the other."""
    starts: IntArray = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)])
    packs = Packs(np.arange(len(sequences), dtype=np.int64), starts)
    batch = BatchShape(shape.rows, shape.length, deepest(shape.length))
    placed = lay_out_packs(sequences, packs, np.arange(len(rows)), batch)
    values = model.outputs(placed.features(sequences))
    out = np.zeros((len(sequences.input_ids) if model.is_per_token else len(sequences), model.width), np.float32)
    (placed.scatter_tokens if model.is_per_token else placed.scatter_sequences)(values, out)
    return out


def compute(model: ServedModel, batch: Batch) -> None:
    """Compute a batch, and put its outputs where the works of its texts keep them."""
    sequences = gathered(batch)
    out = run_packs(model, sequences, [len(row) for row in batch.rows], batch.shape)
    for index, (work, number) in enumerate(each for row in batch.rows for each in row):
        if model.is_per_token:
            work.outputs[work.slice_of(number)] = out[sequences.offsets[index] : sequences.offsets[index + 1]]
        else:
            work.outputs[number] = out[index]


def full_batch(model: ServedModel, shape: Shape) -> tuple[Sequences, list[int]]:
    """Return short texts that fill a shape, and how many of them each row holds."""
    tokens = min(_TRIED_TOKENS, shape.length)
    per_row = shape.length // tokens
    count = per_row * shape.rows
    ids = np.resize(np.array(model.loaded.tokenizer.tokenizer.encode("a").ids, np.int32), tokens)
    texts = separate_sequences([ids] * count, [np.zeros(tokens, np.int8)] * count)
    return texts, [per_row] * shape.rows


def measured(model: ServedModel, shapes: Sequence[Shape]) -> dict[Shape, float]:
    """Compute each shape, the first time to have it compiled, and return its seconds.

    Shapes that the device's memory does not hold are omitted, if they have several rows.
    """
    costs: dict[Shape, float] = {}
    for shape in shapes:
        sequences, rows = full_batch(model, shape)
        try:
            run_packs(model, sequences, rows, shape)
            seconds = []
            for _ in range(2):
                begun = time.perf_counter()
                run_packs(model, sequences, rows, shape)
                seconds.append(time.perf_counter() - begun)
        except RuntimeError as error:
            if shape.rows == 1:
                raise FailedError(f"shape {shape}: cannot be computed: {error}; set a smaller --row-length") from error
            break
        costs[shape] = min(seconds)
    for larger, smaller in pairwise(reversed(costs)):
        costs[smaller] = min(costs[smaller], costs[larger])  # what was measured more was disturbed
    return costs


class DeviceThread(threading.Thread):
    """Computes batches of a queue until it is closed.

    Args:
        open_model: opens the model and measures its shapes.
        queue: where works wait.
        ready: called when the model is open and all shapes are computed.
        computed: called after each batch, with its seconds.
        ended: called when the thread ends, with the reason unless the queue was closed.
    """

    def __init__(
        self,
        open_model: Callable[[], tuple[ServedModel, dict[Shape, float]]],
        queue: Queue,
        *,
        ready: Callable[[ServedModel, dict[Shape, float]], None],
        computed: Callable[[Batch, float], None],
        ended: Callable[[Exception | None], None],
    ) -> None:
        super().__init__(name="device", daemon=True)
        self._open_model, self._queue = open_model, queue
        self._ready, self._computed, self._ended = ready, computed, ended
        self.busy_since: float | None = None

    def run(self) -> None:
        """Open the model, then compute what waits."""
        reason: Exception | None = FailedError("the thread that computes has ended; this is a defect")
        try:
            model, costs = self._open_model()
            self._ready(model, costs)
            smallest = min(costs)
            while (batch := self._queue.take()) is not None:
                self._compute(model, batch, smallest)
            reason = None
        except _FAILURES as error:
            reason = error
        finally:
            self._ended(reason)

    def _compute(self, model: ServedModel, batch: Batch, smallest: Shape) -> None:
        begun = self.busy_since = time.monotonic()
        try:
            compute(model, batch)
        except _FAILURES as error:
            for work in batch.works():
                self._queue.remove(work)
                work.finished(work, error)
            try:
                run_packs(model, *full_batch(model, smallest), smallest)
            except _FAILURES as lost:
                raise FailedError(f"the device is lost: {type(lost).__name__}: {lost}; start the server again") from lost
            return
        finally:
            self.busy_since = None
        self._computed(batch, time.monotonic() - begun)
        for work in batch.works():
            work.unfinished -= sum(1 for row in batch.rows for each, _ in row if each is work)
            if not work.unfinished:
                work.finished(work, None)
