"""Run the device thread, which opens the model, measures the time of every batch shape, and then computes batch after batch.

If a batch fails, its requests fail. The thread then computes a batch of the smallest shape as a test. If the test fails too,
the device is lost, and the thread ends.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from gaudi_bert.common.arrays import Float32Array, IntArray
from gaudi_bert.common.errors import FailedError, GaudiBertError
from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.rows.packs import BatchShape, PackedSequences
from gaudi_bert.rows.types import Sequences, sequences_from_ids
from gaudi_bert.rows.window_plan import max_depth
from gaudi_bert.serving.ladder import Shape
from gaudi_bert.serving.model import ServedModel
from gaudi_bert.serving.queue import Batch, Queue, join_batch

_TRIED_TOKENS = 16  # the number of tokens of each text in a batch that measures a shape
_FAILURES = (GaudiBertError, RuntimeError, ValueError, IndexError, ArithmeticError, MemoryError)
"""Errors that a model raises for a batch, including those of a lost device."""


def run_packs(model: ServedModel, sequences: Sequences, rows: Sequence[int], shape: Shape) -> Float32Array:
    """Compute sequences in one batch, and return their outputs in the order of the sequences.

    Args:
        model: The model.
        sequences: N sequences with T tokens in all.
        rows: The number of sequences in each row. The sequences of a row are consecutive.
        shape: The static shape of the batch.

    Returns:
        float32 [N, C], or [T, C] for a model with outputs for each token. C is the model's `width`.
    """
    starts: IntArray = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)])
    packed = PackedSequences(sequences, SampledPacks(np.arange(len(sequences), dtype=np.int64), starts))
    batch = packed.lay_out(np.arange(len(rows)), BatchShape(shape.rows, shape.length, max_depth(shape.length)))
    out = np.zeros((len(sequences.input_ids) if model.is_per_token else len(sequences), model.width), np.float32)
    batch.scatter_outputs(model.outputs(batch.features()), out, per_token=model.is_per_token)
    return out


def compute_batch(model: ServedModel, batch: Batch) -> None:
    """Compute a batch, and write the outputs of its texts into their requests."""
    sequences = join_batch(batch)
    out = run_packs(model, sequences, [len(row) for row in batch.rows], batch.shape)
    for index, (request, number) in enumerate(batch.texts()):
        if model.is_per_token:
            request.outputs[request.token_slice(number)] = out[sequences.offsets[index] : sequences.offsets[index + 1]]
        else:
            request.outputs[number] = out[index]


def make_full_batch(model: ServedModel, shape: Shape) -> tuple[Sequences, list[int]]:
    """Return short texts that fill a shape, and the number of texts in each row."""
    tokens = min(_TRIED_TOKENS, shape.length)
    per_row = shape.length // tokens
    count = per_row * shape.rows
    ids = np.resize(np.array(model.loaded.tokenizer.tokenizer.encode("a").ids, np.int32), tokens)
    texts = sequences_from_ids([ids] * count, [np.zeros(tokens, np.int8)] * count)
    return texts, [per_row] * shape.rows


def measure_costs(model: ServedModel, shapes: Sequence[Shape]) -> dict[Shape, float]:
    """Measure how many seconds a batch of each shape takes.

    Each shape is computed three times, and the first time, in which it is compiled, does not count. If a shape with several
    rows does not fit into the memory of the device, this shape and all larger shapes are left out.

    Args:
        model: The model.
        shapes: The shapes in ascending order.

    Returns:
        The seconds of a batch of each shape. They do not decrease from a shape to the next larger shape.

    Raises:
        FailedError: A shape with one row cannot be computed.
    """
    costs: dict[Shape, float] = {}
    for shape in shapes:
        sequences, rows = make_full_batch(model, shape)
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
        # A smaller shape cannot take longer. If it does, another process has disturbed its measurement.
        costs[smaller] = min(costs[smaller], costs[larger])
    return costs


class DeviceThread(threading.Thread):
    """Computes the batches of a queue until the queue is closed.

    The callbacks are called in this thread.

    Args:
        open_model: Opens the model and measures its shapes.
        queue: The queue.
        ready: Called when the model is open and all shapes are measured.
        computed: Called after each batch with the seconds that it took.
        ended: Called when the thread ends, with None if the queue was closed, and otherwise with the error.

    Attributes:
        busy_since: The time at which the current batch began, or None while the device is free.
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
        self._batch: Batch | None = None
        self._interrupted_seconds = 0.0

    def run(self) -> None:
        """Open the model, and compute batches until the queue is closed or the device is lost."""
        reason: Exception | None = FailedError("the thread that computes has ended; this is a defect")
        try:
            model, costs = self._open_model()
            self._ready(model, costs)
            smallest = min(costs)
            model.call_between_layers(lambda: self._compute_small(model, smallest))
            while (batch := self._queue.take()) is not None:
                self._compute(model, batch, smallest)
            reason = None
        except _FAILURES as error:
            reason = error
        finally:
            self._ended(reason)

    def _compute_small(self, model: ServedModel, smallest: Shape) -> None:
        """Compute a batch of small requests, if any wait, between two layers of the current batch of bulks.

        The time of this batch does not count for the interrupted batch.
        """
        interrupted, begun, earlier = self._batch, time.monotonic(), self._interrupted_seconds
        if interrupted is None or (batch := self._queue.take_between_layers(interrupted)) is None:
            return
        self._compute(model, batch, smallest)
        self._batch, self.busy_since = interrupted, begun
        self._interrupted_seconds = earlier + time.monotonic() - begun

    def _compute(self, model: ServedModel, batch: Batch, smallest: Shape) -> None:
        """Compute a batch, and finish those of its requests that are complete.

        Raises:
            FailedError: The batch failed, and so did the test with the smallest shape.
        """
        begun = self.busy_since = time.monotonic()
        self._batch, self._interrupted_seconds = batch, 0.0
        try:
            compute_batch(model, batch)
            seconds = time.monotonic() - begun - self._interrupted_seconds
        except _FAILURES as error:
            self._batch = None
            for request in batch.requests():
                self._queue.remove(request)
                request.finished(request, error)
            try:
                run_packs(model, *make_full_batch(model, smallest), smallest)
            except _FAILURES as lost:
                raise FailedError(f"the device is lost: {type(lost).__name__}: {lost}; start the server again") from lost
            return
        finally:
            self._batch = self.busy_since = None
        self._computed(batch, seconds)
        for request, texts in Counter(request for request, _ in batch.texts()).items():
            request.unfinished -= texts
            if not request.unfinished:
                request.finished(request, None)
