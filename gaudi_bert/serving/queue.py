"""The queue between the event loop, which accepts requests, and the device thread, which computes them in batches.

There are two kinds of requests. A request is *small* if all of its texts together fit into one row of the longest shape, and
otherwise it is a *bulk*. A batch contains texts of one kind only. Requests of the same kind take turns with one text each,
and each batch contains the oldest text of its kind.

If both kinds wait, they share the time of the device equally. Small requests are computed first, until they have taken as
much time as the last batch of bulks. Then the next batch of bulks is computed. On a CPU, a batch of small requests is even
computed between two layers of a batch of bulks.

Therefore no text waits forever. Let C be the seconds of a batch of the largest shape, and p the number of texts of the same
kind that precede a text, in older requests and in its own request. The text is computed within (p + 2) * 4 * C seconds, no
matter what arrives later.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.rows.types import Sequences, sequences_from_ids
from gaudi_bert.serving.batch_shapes import Shape, choose_and_fill_shape, choose_efficient_shape

# The device is idle while the texts of a batch are chosen. To keep this time short, at most this many texts are considered.
_MAX_TEXTS_CONSIDERED = 1024


class PendingRequest:
    """The token sequences of one request, and the outputs that have been computed for them so far.

    Attributes:
        sequences: The N sequences of the request.
        outputs: float32 [N, C] with one row for each sequence, or [T, C] with one row for each token. They are complete when
            `on_finished` is called.
        on_finished: Called once with this request and an error. The error is None if all outputs have been computed.
        lengths: The number of tokens of each sequence.
        waiting: The indices of the sequences that still wait, in ascending order, as the keys of a dictionary.
        waiting_tokens: The number of tokens of the sequences that still wait.
        unfinished: The number of sequences that are not yet computed.
        accepted_at: The time when the queue accepted the request, in seconds of the queue's clock.
        started_at: The time when the first batch with one of its texts was taken, or 0.
    """

    def __init__(
        self,
        sequences: Sequences,
        outputs: Float32Array,
        on_finished: Callable[[PendingRequest, Exception | None], None],
    ) -> None:
        self.sequences, self.outputs, self.on_finished = sequences, outputs, on_finished
        self.lengths: list[int] = sequences.lengths.tolist()
        self.waiting = dict.fromkeys(range(len(self.lengths)))
        self.waiting_tokens, self.unfinished = sum(self.lengths), len(self.lengths)
        self.accepted_at = self.started_at = 0.0

    def token_slice(self, number: int) -> slice:
        """Return the slice of one sequence in arrays that contain all tokens of the request."""
        return slice(self.sequences.offsets[number], self.sequences.offsets[number + 1])


class Batch(NamedTuple):
    """Texts from one or several requests that are computed together.

    Attributes:
        shape: The number of rows of the batch, and of slots in a row.
        rows: The texts in each row. A text is given as (request, index of the sequence in the request).
        tokens: The number of tokens in all rows.
        is_bulk: Whether the texts belong to bulks. Between two layers of such a batch, small requests may be computed.
    """

    shape: Shape
    rows: list[list[tuple[PendingRequest, int]]]
    tokens: int
    is_bulk: bool

    def list_texts(self) -> list[tuple[PendingRequest, int]]:
        """Return the texts of the batch, row by row. Each text is given as (request, sequence index)."""
        return [text for row in self.rows for text in row]

    def list_requests(self) -> list[PendingRequest]:
        """Return all requests that have a text in the batch."""
        return list(dict.fromkeys(request for request, _ in self.list_texts()))


class Queue:
    """The requests that wait for the device. The event loop adds requests, and the device thread removes their texts in
    batches.

    Args:
        max_texts: The maximum number of texts that may wait at once.
        clock: Returns the current time in seconds.

    Attributes:
        max_tokens: The maximum number of tokens that may wait at once.
        batch_seconds: The measured seconds that a batch of each shape takes.
        texts: The number of texts that wait now.
        tokens: The number of tokens that wait now.
        forecast: Forecasts how many requests will arrive while the free device waits.
        count_arriving: Returns the number of requests that have been accepted but are not in the queue yet, because their
            texts are still being tokenized.
    """

    def __init__(self, max_texts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_texts, self.max_tokens, self._clock = max_texts, 0, clock
        self.batch_seconds: Mapping[Shape, float] = {}
        self.texts = self.tokens = 0
        self.count_arriving: Callable[[], int] = lambda: 0
        self._small: dict[PendingRequest, None] = {}
        self._bulks: dict[PendingRequest, None] = {}
        self._changed, self._is_closed = threading.Condition(), False
        self.forecast, self._has_window = ArrivalForecast(), False
        # While small and large requests both wait, they share the device time equally. This number is how many more device
        # seconds the small requests have used than the large ones. If the number is positive, the next batch contains large
        # requests, otherwise small ones.
        self._lead_seconds = 0.0

    @property
    def is_full(self) -> bool:
        """Whether the queue has reached its limit for texts or for tokens."""
        return self.texts >= self._max_texts or self.tokens >= self.max_tokens

    def estimate_wait_seconds(self) -> float:
        """Estimate how many seconds the device needs for all waiting tokens."""
        largest = max(self.batch_seconds)
        return self.tokens / largest.slots * self.batch_seconds[largest]

    def add(self, request: PendingRequest) -> bool:
        """Add a request and return True. If it would exceed the text or token limit, return False without adding it."""
        texts, tokens = len(request.waiting), request.waiting_tokens
        with self._changed:
            if self.texts + texts > self._max_texts or self.tokens + tokens > self.max_tokens:
                return False
            request.accepted_at = self._clock()
            if tokens > max(self.batch_seconds).length:
                self._bulks[request] = None
            else:
                self._small[request] = None
                self.forecast.add_arrival(request.accepted_at, tokens, self.batch_seconds)
            self.texts += texts
            self.tokens += tokens
            self._changed.notify()
        return True

    def remove(self, request: PendingRequest) -> bool:
        """Remove all waiting texts of a request. Return False if the request was not in the queue."""
        with self._changed:
            if request not in self._small and request not in self._bulks:
                return False
            self._small.pop(request, None)
            self._bulks.pop(request, None)
            self.texts -= len(request.waiting)
            self.tokens -= request.waiting_tokens
            request.waiting_tokens = 0
            request.waiting.clear()
        return True

    def close(self) -> None:
        """Close the queue. From now on, `wait_for_batch` returns None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def wait_for_batch(self) -> Batch | None:
        """Wait until a batch should be computed, and return it. Return None if the queue is closed."""
        with self._changed:
            self.forecast.end_counting_window()
            while not self._is_closed:
                seconds = self.compute_wait_seconds()
                if seconds == 0.0:
                    return self.take_batch()
                self._changed.wait(seconds)
        return None

    def compute_wait_seconds(self) -> float | None:
        """Return how many more seconds the free device should wait for further requests. Return None if no text is waiting.

        The result is 0 if the device should compute the next batch now.
        """
        if not self.texts:
            return None
        if self._bulks:
            return 0.0
        now = self._clock()
        if not self._has_window:
            self.forecast.start_counting_window(now)
            self._has_window = True
        return max(0.0, self.forecast.compute_wait_deadline(self.tokens, self.count_arriving(), self.batch_seconds) - now)

    def take_batch(self) -> Batch:
        """Choose the texts of the next batch, remove them from the queue, and return the batch. At least one text must be
        waiting.
        """
        self._has_window = False
        if not self._bulks:
            self._lead_seconds = 0.0
            return self._take_batch_from(self._small)
        if self._small and self._lead_seconds <= 0.0:
            return self._take_small_batch()
        batch = self._take_batch_from(self._bulks)
        self._lead_seconds = max(0.0, self._lead_seconds) - self.batch_seconds[batch.shape]
        return batch

    def take_interrupting_batch(self, batch: Batch) -> Batch | None:
        """Return a batch of small requests that should be computed between two layers of `batch`. Return None to continue
        with `batch`.
        """
        if not batch.is_bulk or not self._small:
            return None
        with self._changed:
            return self._take_small_batch() if self._small and self._lead_seconds <= 0.0 else None

    def _take_small_batch(self) -> Batch:
        """Take a batch of small requests from the queue, and add its expected time to the device time used by small
        requests.
        """
        batch = self._take_batch_from(self._small)
        self._lead_seconds += self.batch_seconds[batch.shape]
        return batch

    def _take_batch_from(self, requests: dict[PendingRequest, None]) -> Batch:
        """Choose texts for a batch from the given requests, remove the texts from the queue, and return the batch.

        The requests must be either all small or all bulks.
        """
        offered, tokens, largest = list[tuple[PendingRequest, int]](), 0, max(self.batch_seconds)
        for request, number in _iterate_texts_round_robin(requests):
            offered.append((request, number))
            tokens += request.lengths[number]
            if len(offered) == _MAX_TEXTS_CONSIDERED or tokens > 4 * largest.slots:
                break
        fill = choose_and_fill_shape([request.lengths[number] for request, number in offered], self.batch_seconds)
        rows, now = [[offered[index] for index in row] for row in fill.rows], self._clock()
        batch = Batch(fill.shape, rows, fill.tokens, requests is self._bulks)
        for request, number in batch.list_texts():
            del request.waiting[number]
            request.waiting_tokens -= request.lengths[number]
            request.started_at = request.started_at or now
            if not request.waiting:
                del requests[request]
        self.texts -= len(batch.list_texts())
        self.tokens -= batch.tokens
        return batch


def _iterate_texts_round_robin(requests: Iterable[PendingRequest]) -> Iterator[tuple[PendingRequest, int]]:
    """Yield the waiting texts of the requests in turn, one text per request at a time. A text is given as (request, sequence
    index).

    The first text of each request comes first, then the second text of each request, and so on.
    """
    turns = [(request, iter(request.waiting)) for request in requests]
    while turns:
        remaining = []
        for request, numbers in turns:
            number = next(numbers, None)
            if number is not None:
                yield request, number
                remaining.append((request, numbers))
        turns = remaining


def collect_sequences(batch: Batch) -> Sequences:
    """Return the token sequences of all texts of a batch, row by row."""
    parts = [(request.sequences, request.token_slice(number)) for request, number in batch.list_texts()]
    return sequences_from_ids([of.input_ids[part] for of, part in parts], [of.segment_ids[part] for of, part in parts])


# --- Forecast how many requests will arrive in the next milliseconds, and decide how long the free device waits for them.
#
# Clients that wait for their answers send their next requests soon after a batch is done. Computing a short row takes nearly
# as long as computing a row of twice its length, so it saves time to compute these requests together with those that already
# wait. The forecast is the average number of requests in the last windows. A window is a short time that begins when the
# device is free and a request waits.

# The server expects as many requests as arrived on average in this many past time windows. With few windows, it notices
# sooner that a client has left. However, a single window is too few. In a simulation of eight clients, each query took 3.56
# ms of device time with one window, and 3.34 to 3.36 ms with 2 to 32 windows.
_WINDOWS = 8


class _Window(NamedTuple):
    """Counts the requests that arrived within one time window, and their tokens.

    Attributes:
        requests: The number of requests.
        tokens: The number of tokens of all these requests.
        last_seconds: The seconds from the start of the window to the last request.
    """

    requests: int = 0
    tokens: int = 0
    last_seconds: float = 0.0


class ArrivalForecast:
    """Counts the requests that arrive in short time windows, and forecasts how many more will arrive in the current window.

    A window begins whenever the device is free and a request waits. It ends after the time that the device takes to compute
    one row of the shortest shape, so the device never waits longer than this. If the batch is computed sooner, the window
    ends with the batch.
    """

    def __init__(self) -> None:
        self._windows: deque[_Window] = deque(maxlen=_WINDOWS)
        self._current, self._started_at, self._is_open = _Window(), float("-inf"), False

    def start_counting_window(self, now: float) -> None:
        """Start a new time window at the time `now`, and keep what was counted in the previous window for the forecast."""
        if self._started_at > float("-inf"):
            self._windows.append(self._current)
        self._current, self._started_at, self._is_open = _Window(), now, True

    def end_counting_window(self) -> None:
        """Stop counting requests in the current window, because the device has finished its batch.

        From now on, clients that have received their answers send their next requests. If these requests counted, the
        device would wait for a second client although there is only one.
        """
        self._is_open = False

    def add_arrival(self, now: float, tokens: int, batch_seconds: Mapping[Shape, float]) -> None:
        """Count a request in the current window. Do nothing if the window has already ended.

        Args:
            now: The time at which the request arrived, in seconds.
            tokens: The number of tokens of the request.
            batch_seconds: The seconds that a batch of each shape takes.
        """
        seconds = now - self._started_at
        if self._is_open and seconds <= batch_seconds[min(batch_seconds)]:
            self._current = _Window(self._current.requests + 1, self._current.tokens + tokens, seconds)

    def compute_wait_deadline(
        self, waiting_tokens: int, arriving_requests: int, batch_seconds: Mapping[Shape, float]
    ) -> float:
        """Return the time when the free device should stop waiting for more requests and compute the next batch.

        Args:
            waiting_tokens: The number of tokens that already wait.
            arriving_requests: The number of requests that were accepted and will be in the queue in a moment.
            batch_seconds: The seconds that a batch of each shape takes.

        Returns:
            The start of the window if the device should not wait. Waiting pays if the device then computes more tokens per
            second, including the waiting time. In this case, the time after which waiting would no longer pay, but at most
            the end of the window.
        """
        requests, tokens, last_seconds = (sum(values) for values in zip(_Window(), *self._windows, strict=True))
        usual = requests / len(self._windows) if self._windows else 0.0
        expected = max(round(usual - self._current.requests), arriving_requests)
        gap = last_seconds / requests if requests else 0.0
        tokens_each = tokens / requests if requests else waiting_tokens
        shape, tokens_now = _choose_shape_for_tokens(waiting_tokens, batch_seconds)
        rate_now, longest = tokens_now / batch_seconds[shape], 0.0
        for number in range(1, expected + 1):
            shape, filled = _choose_shape_for_tokens(waiting_tokens + number * tokens_each, batch_seconds)
            if filled / (batch_seconds[shape] + number * gap) > rate_now:
                longest = max(longest, filled / rate_now - batch_seconds[shape])
        return self._started_at + min(longest, batch_seconds[min(batch_seconds)])


def _choose_shape_for_tokens(tokens: float, batch_seconds: Mapping[Shape, float]) -> tuple[Shape, float]:
    """Estimate which batch shape would be chosen for a number of waiting tokens. Return the shape, and how many of the
    tokens fit into it.

    The estimate assumes that the texts can fill all slots of a shape.
    """
    filled = {shape: min(tokens, shape.slots) for shape in batch_seconds}
    shape = choose_efficient_shape(filled, batch_seconds)
    return shape, filled[shape]
