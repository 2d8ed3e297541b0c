"""What waits for the device: the texts of requests, bounded, in turns.

Requests take turns, a text each, in the order in which they came; so the oldest text is always in the next batch, and a
request of a thousand texts does not hold up one of a single text. While such single ones come, what is taken of a bulk at
once is kept small.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.rows.types import Sequences, separate_sequences
from gaudi_bert.serving.ladder import Fill, Shape, choose

_MOST_LOOKED_AT = 1024  # texts: a batch holds fewer, and to look at more would keep the device waiting
_LATELY = 5.0  # seconds


class Work:
    """The tokenized texts of one request, and what has been computed of them.

    Attributes:
        outputs: of each sequence, or of each token of all of them; complete when `finished` is called.
        finished: called once, with the reason if it failed.
        started_at: when its first text was computed.
    """

    def __init__(
        self, sequences: Sequences, outputs: Float32Array, finished: Callable[[Work, Exception | None], None]
    ) -> None:
        self.sequences, self.outputs, self.finished = sequences, outputs, finished
        self.lengths: list[int] = sequences.lengths.tolist()
        self.waiting = dict.fromkeys(range(len(self.lengths)))
        self.waiting_tokens, self.unfinished = sum(self.lengths), len(self.lengths)
        self.accepted_at, self.started_at = time.monotonic(), 0.0

    def slice_of(self, number: int) -> slice:
        """Return where the tokens of a sequence are among those of all of them."""
        return slice(self.sequences.offsets[number], self.sequences.offsets[number + 1])


class Batch(NamedTuple):
    """Texts that are computed together: for each row of the shape, works and the numbers of their sequences."""

    shape: Shape
    rows: list[list[tuple[Work, int]]]
    tokens: int

    def works(self) -> list[Work]:
        """Return the works that have a text in the batch, each once."""
        return list(dict.fromkeys(work for row in self.rows for work, _ in row))


class Queue:
    """Works that wait, for one thread that computes and another one that accepts.

    Attributes:
        most_tokens: that wait at once.
        costs: seconds of a batch of each shape.
        texts, tokens: that wait now.
    """

    def __init__(self, most_texts: int) -> None:
        self._most_texts, self.most_tokens = most_texts, 0
        self._works: dict[Work, None] = {}
        self._changed, self._closed = threading.Condition(), False
        self.costs: Mapping[Shape, float] = {}
        self.texts = self.tokens = 0
        self._single_at = -_LATELY  # when a request of one text came

    @property
    def is_full(self) -> bool:
        """Whether not even a short text may come."""
        return self.texts >= self._most_texts or self.tokens >= self.most_tokens

    def wait_seconds(self) -> float:
        """Seconds until what waits now is computed, by the measured cost of the largest shape."""
        largest = max(self.costs)
        return self.tokens / largest.slots * self.costs[largest]

    def add(self, work: Work) -> bool:
        """Let a work wait; False where it does not fit any more."""
        texts, tokens = len(work.waiting), work.waiting_tokens
        with self._changed:
            if self.texts + texts > self._most_texts or self.tokens + tokens > self.most_tokens:
                return False
            self._works[work] = None
            self._single_at = work.accepted_at if texts == 1 else self._single_at
            self.texts += texts
            self.tokens += tokens
            self._changed.notify()
        return True

    def remove(self, work: Work) -> bool:
        """Take out what waits of a work; whether something did."""
        with self._changed:
            if work not in self._works:
                return False
            del self._works[work]
            self.texts -= len(work.waiting)
            self.tokens -= work.waiting_tokens
            work.waiting_tokens = 0
            work.waiting.clear()
        return True

    def close(self) -> None:
        """Have `take` return None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self) -> Batch | None:
        """Wait for texts and take the next batch of them; None once the queue is closed."""
        with self._changed:
            while not self._works and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            largest = max(self.costs)
            offered, tokens = [], 0
            for work, number in self._turns():
                offered.append((work, number))
                tokens += work.lengths[number]
                if len(offered) == _MOST_LOOKED_AT or tokens > 4 * largest.slots:
                    break
            has_bulk = any(work.waiting_tokens > largest.slots for work in self._works)
            is_mixed = has_bulk and time.monotonic() - self._single_at < _LATELY
            urgent = len(self._works) if is_mixed else 0  # a turn of each request
            fill = choose([work.lengths[number] for work, number in offered], self.costs, urgent)
            return self._taken(fill, offered)

    def _turns(self) -> Iterator[tuple[Work, int]]:
        """Waiting texts, one of each work by turns, from the oldest work on."""
        turns = [(work, iter(work.waiting)) for work in self._works]
        while turns:
            remaining = []
            for work, numbers in turns:
                number = next(numbers, None)
                if number is not None:
                    yield work, number
                    remaining.append((work, numbers))
            turns = remaining

    def _taken(self, fill: Fill, offered: list[tuple[Work, int]]) -> Batch:
        batch = Batch(fill.shape, [[offered[index] for index in row] for row in fill.rows], fill.tokens)
        now = time.monotonic()
        for row in batch.rows:
            for work, number in row:
                del work.waiting[number]
                work.waiting_tokens -= work.lengths[number]
                work.started_at = work.started_at or now
                if not work.waiting:
                    del self._works[work]
        self.texts -= sum(map(len, batch.rows))
        self.tokens -= fill.tokens
        return batch


def gathered(batch: Batch) -> Sequences:
    """Return the sequences of a batch as one, in the order of its rows."""
    parts = [(work.sequences, work.slice_of(number)) for row in batch.rows for work, number in row]
    return separate_sequences([of.input_ids[part] for of, part in parts], [of.segment_ids[part] for of, part in parts])
