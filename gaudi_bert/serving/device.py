"""Run the device thread, which opens the model, measures the time of every batch shape, and then computes batch after batch.

If a batch fails, its requests fail. The thread then computes a batch of the smallest shape as a test. If the test fails too,
the device is lost, and the thread ends.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from gaudi_bert.common.arrays import Float32Array, IntArray
from gaudi_bert.common.errors import FailedError, GaudiBertError
from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.rows.packs import BatchShape, PackedSequences
from gaudi_bert.rows.types import Sequences, sequences_from_ids
from gaudi_bert.rows.window_plan import compute_max_sequences_per_row
from gaudi_bert.serving.batch_shapes import Shape
from gaudi_bert.serving.model import ServedModel
from gaudi_bert.serving.queue import Batch, Queue, collect_sequences

_SHORTEST_ROW = 8  # the minimum number of slots of a shortened row
# If a short row takes at most 1.2 times as long on one CPU thread as on all threads, only one thread computes it. This saves
# CPU time. On an AMD EPYC, one thread took 6.1 ms for a row of 16 slots of MiniLM. Two threads took 5.6 ms, but 9.1 ms of
# CPU time.
_NEARLY_AS_FAST = 1.2
_TEXT_TOKENS = 16  # the number of tokens of each text in a batch that measures a shape
# Errors that a model may raise while it computes a batch, for example because the device is lost.
_FAILURES = (GaudiBertError, RuntimeError, ValueError, IndexError, ArithmeticError, MemoryError)


def trim_shape_to_tokens(model: ServedModel, batch_shape: Shape, token_count: int) -> Shape:
    """If a batch has a single row, return a shorter shape without the empty slots at the end of the row. Return other shapes
    unchanged.

    Rows are shortened only on a CPU, where an uncompiled model can compute any shape. oneDNN prepares the matrix products
    for each new row length, which takes some milliseconds. Therefore only a few dozen row lengths are used.

    Args:
        model: The model.
        batch_shape: The shape that was chosen for the batch.
        token_count: The number of tokens of all texts in the batch.
    """
    if batch_shape.rows > 1 or not model.is_eager_on_cpu:
        return batch_shape
    step = max(2, (1 << (token_count - 1).bit_length()) // 16)
    return Shape(1, min(batch_shape.length, max(_SHORTEST_ROW, math.ceil(token_count / step) * step)))


def compute_rows(model: ServedModel, sequences: Sequences, rows: Sequence[int], shape: Shape) -> Float32Array:
    """Run the model on one batch of packed sequences, and return its outputs in the order of the sequences.

    Args:
        model: The model.
        sequences: N sequences with T tokens in all.
        rows: The number of sequences in each row. The sequences of a row are consecutive.
        shape: The shape that was chosen for the batch. See `trim_shape_to_tokens`.

    Returns:
        float32 [N, C], or [T, C] for a model with outputs for each token. C is the model's `output_size`.
    """
    # The texts were chosen for a row of the original length. A shortened row contains the same texts, so allow as many texts
    # in it as in the original row.
    depth = compute_max_sequences_per_row(shape.length)
    shape = trim_shape_to_tokens(model, shape, len(sequences.input_ids))
    starts: IntArray = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)])
    packed = PackedSequences(sequences, SampledPacks(np.arange(len(sequences), dtype=np.int64), starts))
    batch = packed.build_batch(np.arange(len(rows)), BatchShape(shape.rows, shape.length, depth))
    out = np.zeros((len(sequences.input_ids) if model.is_per_token else len(sequences), model.output_size), np.float32)
    batch.scatter_outputs(model.compute_outputs(batch.features()), out, per_token=model.is_per_token)
    return out


def compute_batch(model: ServedModel, batch: Batch) -> None:
    """Run the model on a batch, and copy the outputs of each text into the request that contains the text."""
    sequences = collect_sequences(batch)
    out = compute_rows(model, sequences, [len(row) for row in batch.rows], batch.shape)
    for index, (request, number) in enumerate(batch.list_texts()):
        if model.is_per_token:
            request.outputs[request.token_slice(number)] = out[sequences.offsets[index] : sequences.offsets[index + 1]]
        else:
            request.outputs[number] = out[index]


def make_full_batch(model: ServedModel, shape: Shape) -> tuple[Sequences, list[int]]:
    """Make an artificial batch that fills all rows of a shape. Return its token sequences, and the number of sequences in
    each row.
    """
    tokens = min(_TEXT_TOKENS, shape.length)
    per_row = shape.length // tokens
    count = per_row * shape.rows
    ids = np.resize(np.array(model.loaded.tokenizer.tokenizer.encode("a").ids, np.int32), tokens)
    return sequences_from_ids([ids] * count, [np.zeros(tokens, np.int8)] * count), [per_row] * shape.rows


def measure_batch_seconds(model: ServedModel, shapes: Sequence[Shape]) -> dict[Shape, float]:
    """Measure how many seconds the model takes to compute a full batch of each shape.

    If a shape with several rows does not fit into the memory of the device, the result contains neither this shape nor any
    larger one.

    Args:
        model: The model.
        shapes: The shapes in ascending order.

    Returns:
        The seconds of a batch of each shape. They do not decrease from a shape to the next larger shape.

    Raises:
        FailedError: A shape with one row cannot be computed.
    """
    batch_seconds: dict[Shape, float] = {}
    for shape in shapes:
        try:
            batch_seconds[shape] = _measure_seconds(model, shape)
        except RuntimeError as error:
            if shape.rows == 1:
                raise FailedError(
                    f"batch shape {shape}: the model cannot compute this shape ({error}); pass a smaller --row-length"
                ) from error
            break
    for larger, smaller in pairwise(reversed(batch_seconds)):
        # A smaller batch cannot take longer than a larger one. If it seems to, another process disturbed the measurement, so
        # use the time of the larger batch.
        batch_seconds[smaller] = min(batch_seconds[smaller], batch_seconds[larger])
    return batch_seconds


def measure_longest_single_thread_row(model: ServedModel, shapes: Sequence[Shape]) -> int:
    """Return the length of the longest row that one CPU thread computes nearly as fast as all threads, in slots.

    A short row takes much less CPU time on one thread, because threads that share an operation wait for each other. Return 0
    if the model does not run on a CPU, or is compiled.

    Args:
        model: The model.
        shapes: The shapes in ascending order. Only shapes with one row are measured.
    """
    if not model.is_eager_on_cpu:
        return 0
    slots = 0
    for shape in (shape for shape in shapes if shape.rows == 1):
        one_thread_seconds = _measure_seconds(replace(model, max_single_thread_slots=shape.slots), shape)
        all_threads_seconds = _measure_seconds(replace(model, max_single_thread_slots=0), shape)
        if one_thread_seconds > _NEARLY_AS_FAST * all_threads_seconds:
            break
        slots = shape.slots
    return slots


def _measure_seconds(model: ServedModel, shape: Shape) -> float:
    """Measure how many seconds the model takes to compute a full batch of one shape.

    The batch is computed three times. The first time is ignored, because the model may be compiled for a new shape. The
    result is the shorter one of the other two times.
    """
    sequences, rows = make_full_batch(model, shape)
    compute_rows(model, sequences, rows, shape)
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        compute_rows(model, sequences, rows, shape)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


class DeviceThread(threading.Thread):
    """A thread that opens the model, and then computes batches of waiting requests until the queue is closed.

    All callbacks are called on this thread.

    Args:
        open_model: Opens the model and measures its shapes.
        queue: The queue.
        on_ready: Called with the model and the measured seconds of each shape when both are available.
        on_computed: Called after each batch with the seconds that it took.
        on_ended: Called when the thread ends. The argument is the error, or None if the queue was closed.

    Attributes:
        busy_since: The time when the current batch began or was last interrupted, or None while the device is free.
    """

    def __init__(
        self,
        open_model: Callable[[], tuple[ServedModel, dict[Shape, float]]],
        queue: Queue,
        *,
        on_ready: Callable[[ServedModel, dict[Shape, float]], None],
        on_computed: Callable[[Batch, float], None],
        on_ended: Callable[[Exception | None], None],
    ) -> None:
        super().__init__(name="device", daemon=True)
        self._open_model, self._queue = open_model, queue
        self._on_ready, self._on_computed, self._on_ended = on_ready, on_computed, on_ended
        self.busy_since: float | None = None
        self._batch: Batch | None = None
        self._interrupted_seconds = 0.0

    def run(self) -> None:
        """Open the model, and compute batches until the queue is closed or the device is lost."""
        reason: Exception | None = FailedError("the device thread ended without an error; please report this as a bug")
        try:
            model, batch_seconds = self._open_model()
            self._on_ready(model, batch_seconds)
            smallest_shape = min(batch_seconds)
            model.call_between_layers(lambda: self._interrupt_for_small_requests(model, smallest_shape))
            while (batch := self._queue.wait_for_batch()) is not None:
                self._compute_batch(model, batch, smallest_shape)
            reason = None
        except _FAILURES as error:
            reason = error
        finally:
            self._on_ended(reason)

    def _interrupt_for_small_requests(self, model: ServedModel, smallest_shape: Shape) -> None:
        """If small requests are waiting, compute a batch of them between two layers of the current batch of large requests.

        The time for this batch is not counted as time of the interrupted batch.
        """
        interrupted, begun, earlier = self._batch, time.monotonic(), self._interrupted_seconds
        if interrupted is None or (batch := self._queue.take_interrupting_batch(interrupted)) is None:
            return
        self._compute_batch(model, batch, smallest_shape)
        self._batch, self.busy_since = interrupted, begun
        self._interrupted_seconds = earlier + time.monotonic() - begun

    def _compute_batch(self, model: ServedModel, batch: Batch, smallest_shape: Shape) -> None:
        """Compute a batch, and call `on_finished` for each request that has no more texts to compute.

        Raises:
            FailedError: The batch failed, and a test batch of the smallest shape failed too.
        """
        begun = self.busy_since = time.monotonic()
        self._batch, self._interrupted_seconds = batch, 0.0
        try:
            compute_batch(model, batch)
            seconds = time.monotonic() - begun - self._interrupted_seconds
        except _FAILURES as error:
            self._batch = None
            for request in batch.list_requests():
                self._queue.remove(request)
                request.on_finished(request, error)
            try:
                compute_rows(model, *make_full_batch(model, smallest_shape), smallest_shape)
            except _FAILURES as lost:
                raise FailedError(f"the device is lost ({type(lost).__name__}: {lost}); start the server again") from lost
            return
        finally:
            self._batch = self.busy_since = None
        self._on_computed(batch, seconds)
        for request, texts in Counter(request for request, _ in batch.list_texts()).items():
            request.unfinished -= texts
            if not request.unfinished:
                request.on_finished(request, None)
