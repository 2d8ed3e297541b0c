"""The queue: turns, limits, and bounded waits on a simulated device, with a table of costs and a virtual clock."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gaudi_bert.rows.types import Sequences
from gaudi_bert.serving.batch_shapes import Shape, list_batch_shapes
from gaudi_bert.serving.queue import Batch, PendingRequest, Queue, collect_sequences
from tests.builders.agree import agree

COSTS = {shape: 0.001 + 0.0001 * shape.slots for shape in list_batch_shapes(64, 1)}


def request_of(*lengths: int, first_id: int = 0) -> PendingRequest:
    tokens = sum(lengths)
    sequences = Sequences(
        row=np.arange(len(lengths)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        input_ids=np.arange(first_id, first_id + tokens, dtype=np.int32),
        segment_ids=np.zeros(tokens, np.int8),
    )
    return PendingRequest(sequences, np.zeros((len(lengths), 1), np.float32), lambda request, error: None)


def queue_of(*requests: PendingRequest, max_texts: int = 100, max_tokens: int = 10_000) -> Queue:
    queue = Queue(max_texts)
    queue.batch_seconds, queue.max_tokens = COSTS, max_tokens
    for request in requests:
        assert queue.add(request)
    return queue


def take_texts(queue: Queue) -> list[tuple[PendingRequest, int]]:
    batch = queue.wait_for_batch()
    return batch.list_texts()


def test_small_requests_take_turns() -> None:
    three, pair = request_of(20, 20, 20), request_of(20, 20)
    queue = queue_of(three, pair)
    assert take_texts(queue) == [(three, 0), (pair, 0), (three, 1)]
    assert take_texts(queue) == [(three, 2), (pair, 1)]
    assert (queue.texts, queue.tokens) == (0, 0)


def test_the_oldest_text_is_in_the_next_batch_however_long() -> None:
    queries = [request_of(7) for _ in range(40)]
    old = request_of(64)
    assert (old, 0) in take_texts(queue_of(old, *queries))


def test_what_exceeds_a_limit_is_not_accepted() -> None:
    queue = queue_of(request_of(5, 5), max_texts=3, max_tokens=30)
    assert not queue.add(request_of(1, 1))
    assert not queue.add(request_of(21))
    assert not queue.is_full
    assert queue.add(request_of(20))
    assert queue.is_full


def test_a_request_that_goes_takes_its_texts_along() -> None:
    gone, other = request_of(*[30] * 5), request_of(11)
    queue = queue_of(gone, other)
    assert queue.remove(gone)
    assert not queue.remove(gone)
    assert not queue.remove(request_of(3))
    assert (queue.texts, queue.tokens) == (1, 11)
    assert take_texts(queue) == [(other, 0)]
    assert (queue.texts, queue.tokens) == (0, 0)


def test_the_sequences_of_a_batch_come_in_the_order_of_its_rows() -> None:
    one, other = request_of(3, 4, first_id=0), request_of(2, first_id=50)
    batch = queue_of(one, other).wait_for_batch()
    sequences = collect_sequences(batch)
    assert sequences.lengths.tolist() == [3, 2, 4]
    assert sequences.input_ids.tolist() == [0, 1, 2, 50, 51, 3, 4, 5, 6]


def test_a_queue_that_is_closed_gives_nothing_to_a_thread_that_waits() -> None:
    queue, found = queue_of(), []
    thread = threading.Thread(target=lambda: found.append(queue.wait_for_batch()))
    thread.start()
    queue.close()
    thread.join()
    assert found == [None]


# --- a simulated device


ROW_COSTS = {Shape(1, 16): 8, Shape(1, 32): 12, Shape(1, 64): 20, Shape(1, 128): 36, Shape(1, 256): 68}
CPU_COSTS = {shape: cost / 1000 for shape, cost in {**ROW_COSTS, Shape(2, 256): 136, Shape(8, 256): 540}.items()}
"""Seconds as measured for MiniLM, rounded."""
SHORTEST = CPU_COSTS[Shape(1, 16)]
LARGEST = CPU_COSTS[Shape(8, 256)]


class Arrival(NamedTuple):
    """A request that a client sends at a time; `again` is the pause after its answer before it sends the next one."""

    at: float
    lengths: tuple[int, ...]
    again: float | None = None


def _time(arrival: Arrival) -> float:
    return arrival.at


class Simulation:
    """Runs a queue as the device's thread does, on a virtual clock; `layers` are those at which a batch is interrupted.

    The device is `speed` times as fast as measured, as it is where empty slots of a row are left out.
    """

    def __init__(
        self, arrivals: Iterable[Arrival], until: float = float("inf"), layers: int = 6, speed: float = 1.0
    ) -> None:
        self.speed = speed
        self.now, self.until, self.layers = 0.0, until, layers
        self.coming = sorted(arrivals, key=_time)
        self.sent: dict[PendingRequest, Arrival] = {}
        self.done_at: dict[tuple[PendingRequest, int], float] = {}
        self.batches: list[tuple[float, Batch]] = []
        self.queue = Queue(100_000, clock=lambda: self.now)
        self.queue.batch_seconds, self.queue.max_tokens = CPU_COSTS, 10_000_000

    def run(self) -> Simulation:
        while self.now < self.until:
            seconds = self.queue.compute_wait_seconds()
            if seconds == 0.0:
                self._compute(self.queue.take_batch())
                self.queue.forecast.end_counting_window()
            elif seconds is None and not self.coming:
                break
            else:
                next_at = self.coming[0].at if self.coming else float("inf")
                self._advance(min(self.now + (float("inf") if seconds is None else seconds), next_at) - self.now)
        return self

    def _advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.coming and self.coming[0].at <= end:
            arrival = self.coming.pop(0)
            self.now = max(self.now, arrival.at)
            request = request_of(*arrival.lengths)
            self.sent[request] = arrival
            assert self.queue.add(request)
        self.now = end

    def _compute(self, batch: Batch) -> None:
        self.batches.append((self.now, batch))
        for layer in range(self.layers):
            if layer and (small := self.queue.take_interrupting_batch(batch)) is not None:
                self._compute(small)
            self._advance(CPU_COSTS[batch.shape] / self.speed / self.layers)
        for request, number in batch.list_texts():
            self.done_at[request, number] = self.now
            request.unfinished -= 1
            arrival = self.sent[request]
            if not request.unfinished and arrival.again is not None and self.now < self.until:
                self.coming.append(arrival._replace(at=self.now + arrival.again))
                self.coming.sort(key=_time)

    def latencies(self, max_texts: int = 1) -> list[float]:
        """Return the seconds from acceptance to the answer, for each request of at most so many texts."""
        return [
            at - request.accepted_at
            for (request, number), at in self.done_at.items()
            if len(request.lengths) <= max_texts and number == len(request.lengths) - 1
        ]

    def busy_seconds_per_text(self) -> float:
        return sum(CPU_COSTS[batch.shape] for _, batch in self.batches) / len(self.done_at)


def clients_of(count: int, length: int = 10, again: float = 0.001) -> list[Arrival]:
    return [Arrival(number * 0.0013, (length,), again + number * 0.0004) for number in range(count)]


@pytest.mark.parametrize("speed", [1.0, 1.5])
def test_a_single_client_is_never_kept_waiting(speed: float) -> None:
    """Its next request comes before a batch would be done at the measured speed, and is no request to wait for."""
    latencies = Simulation(clients_of(1), until=3.0, speed=speed).run().latencies()
    assert len(latencies) > 300
    agree(max(latencies), SHORTEST / speed)


def test_few_clients_that_send_again_soon_share_their_batches() -> None:
    simulation = Simulation(clients_of(8), until=4.0).run()
    alternating = CPU_COSTS[Shape(1, 64)] / 4  # each half of the clients waits while the other half is computed
    assert simulation.busy_seconds_per_text() < 0.7 * alternating
    assert max(simulation.latencies()) < 2 * CPU_COSTS[Shape(1, 64)] + SHORTEST


def test_a_client_that_leaves_is_soon_not_waited_for() -> None:
    stays, leaves = clients_of(2)
    simulation = Simulation([stays, *[leaves._replace(at=0.02 * number, again=None) for number in range(40)]], 3.0).run()
    late = [at - request.accepted_at for (request, _), at in simulation.done_at.items() if request.accepted_at > 1.5]
    agree(max(late), SHORTEST)


def test_a_device_waits_for_what_is_being_tokenized_no_longer_than_a_short_row_takes() -> None:
    simulation = Simulation([])
    simulation.queue.add(request_of(10))
    assert simulation.queue.compute_wait_seconds() == 0.0
    simulation.queue.count_arriving = lambda: 3
    seconds = simulation.queue.compute_wait_seconds()
    assert 0.0 < seconds <= SHORTEST
    simulation.now += SHORTEST
    assert simulation.queue.compute_wait_seconds() == 0.0


def test_a_device_does_not_wait_where_a_batch_is_full() -> None:
    simulation = Simulation([])
    simulation.queue.count_arriving = lambda: 3
    for _ in range(26):
        simulation.queue.add(request_of(10))
    assert simulation.queue.compute_wait_seconds() == 0.0


def mix(count: int, seed: int) -> tuple[int, ...]:
    random = np.random.default_rng(seed)
    short, long = random.integers(5, 18, count), random.integers(40, 257, count)
    return tuple(np.where(random.random(count) < 0.7, short, long).tolist())


def test_a_query_beside_bulks_waits_for_a_layer_and_not_for_a_batch() -> None:
    random = np.random.default_rng(5)
    queries = [Arrival(at, (10,)) for at in np.cumsum(random.exponential(0.5, 100)).tolist()]
    alone = Simulation(queries).run()
    beside = Simulation([*queries, Arrival(0.0, mix(1000, 3), 0.01)], until=queries[-1].at).run()
    assert np.quantile(beside.latencies(), 0.99) <= 2 * np.quantile(alone.latencies(), 0.99)
    shapes = Counter(batch.shape for _, batch in beside.batches if batch.is_bulk)
    assert max(beside.latencies()) <= CPU_COSTS[max(shapes)] / 6 + 2 * SHORTEST
    assert shapes[Shape(1, 256)] > sum(shapes.values()) / 2, "bulks keep the shape that is good without queries"


def test_queries_and_a_bulk_share_the_device() -> None:
    """32 clients without a pause take all they get; a bulk has at least two fifths of its rate alone."""
    bulk = mix(1000, 4)
    alone = Simulation([Arrival(0.0, bulk)]).run()
    beside = Simulation([Arrival(0.0, bulk), *clients_of(32, again=0.0)], until=3 * alone.now).run()
    of_bulk = [at for (request, _), at in beside.done_at.items() if len(request.lengths) == 1000]
    assert len(of_bulk) == 1000
    assert max(of_bulk) <= 2.5 * alone.now


def texts_before(request: PendingRequest, number: int, requests: Sequence[PendingRequest], is_small: bool) -> int:
    """Return the number of texts of older requests of the same kind, and of those before it in its own request."""
    same = [each for each in requests if (sum(each.lengths) <= 256) == is_small]
    return sum(len(each.lengths) for each in same[: same.index(request)]) + number


SMALL = st.lists(st.integers(1, 40), min_size=1, max_size=4)
BULK = st.lists(st.integers(1, 256), min_size=8, max_size=120).filter(lambda lengths: sum(lengths) > 256)
ARRIVALS = st.lists(st.tuples(st.floats(0.0, 2.0), st.one_of(SMALL, BULK, BULK)), min_size=1, max_size=25)


@settings(deadline=None, max_examples=15)
@given(ARRIVALS, st.integers(0, 40), st.integers(0, 400), st.sampled_from([1, 6]))
def test_nobody_waits_longer_than_the_stated_bound(
    arrivals: list[tuple[float, list[int]]], clients: int, length: int, layers: int
) -> None:
    """Whatever arrives, while clients send short texts again and again; on devices that can and cannot be interrupted."""
    sent = [Arrival(at, tuple(lengths)) for at, lengths in arrivals]
    simulation = Simulation([*sent, *clients_of(clients, 1 + length % 64, 0.0)], until=6.0, layers=layers).run()
    requests = list(simulation.sent)
    for request in requests:
        is_small = sum(request.lengths) <= 256
        for number in range(len(request.lengths)):
            limit = (texts_before(request, number, requests, is_small) + 2) * 4 * LARGEST
            assert simulation.done_at.get((request, number), simulation.now) - request.accepted_at <= limit
