"""What waits: turns of requests, bounds, and what a batch takes."""

from __future__ import annotations

import threading

import numpy as np

from gaudi_bert.rows.types import Sequences
from gaudi_bert.serving.ladder import ladder
from gaudi_bert.serving.queue import Queue, Work, gathered

COSTS = {shape: 0.001 + 0.0001 * shape.slots for shape in ladder(64, 1)}


def work_of(*lengths: int, first_id: int = 0) -> Work:
    tokens = sum(lengths)
    sequences = Sequences(
        row=np.arange(len(lengths)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        input_ids=np.arange(first_id, first_id + tokens, dtype=np.int32),
        segment_ids=np.zeros(tokens, np.int8),
    )
    return Work(sequences, np.zeros((len(lengths), 1), np.float32), lambda work, error: None)


def queue_of(*works: Work, most_texts: int = 100, most_tokens: int = 10_000) -> Queue:
    queue = Queue(most_texts)
    queue.costs, queue.most_tokens = COSTS, most_tokens
    for work in works:
        assert queue.add(work)
    return queue


def taken(queue: Queue) -> list[tuple[Work, int]]:
    batch = queue.take()
    assert batch is not None
    return [each for row in batch.rows for each in row]


def test_requests_take_turns() -> None:
    bulk, pair = work_of(*[20] * 9), work_of(20, 20)
    queue = queue_of(bulk, pair)
    assert taken(queue) == [(bulk, 0), (pair, 0), (bulk, 1)]
    assert taken(queue) == [(bulk, 2), (pair, 1), (bulk, 3)]
    assert (queue.texts, queue.tokens) == (5, 100)


def test_a_query_beside_a_bulk_does_not_wait_for_the_fastest_shape() -> None:
    bulk, query, pair = work_of(*[10] * 200), work_of(9), work_of(9, 9)
    queue = queue_of(bulk, pair, most_texts=300)
    queue.costs = {shape: 0.001 * (1 + index) for index, shape in enumerate(ladder(256, 2))}
    assert len(taken(queue)) > 40
    assert queue.add(query)
    first, texts = next(iter(bulk.waiting)), taken(queue)
    assert texts[:2] == [(bulk, first), (query, 0)]
    assert len(texts) < 30
    assert len(taken(queue)) < 30, "another query may come soon"


def test_the_oldest_text_is_in_the_next_batch_however_long() -> None:
    queries = [work_of(7) for _ in range(40)]
    old = work_of(64)
    queue = queue_of(old, *queries)
    assert (old, 0) in taken(queue)


def test_what_exceeds_a_bound_is_not_accepted() -> None:
    queue = queue_of(work_of(5, 5), most_texts=3, most_tokens=30)
    assert not queue.add(work_of(1, 1))
    assert not queue.add(work_of(21))
    assert not queue.is_full
    assert queue.add(work_of(20))
    assert queue.is_full


def test_a_work_that_goes_takes_its_texts_along() -> None:
    gone, other = work_of(*[30] * 5), work_of(11)
    queue = queue_of(gone, other)
    assert queue.remove(gone)
    assert not queue.remove(gone)
    assert (queue.texts, queue.tokens) == (1, 11)
    assert taken(queue) == [(other, 0)]
    assert (queue.texts, queue.tokens) == (0, 0)


def test_the_sequences_of_a_batch_come_in_the_order_of_its_rows() -> None:
    one, other = work_of(3, 4, first_id=0), work_of(2, first_id=50)
    batch = queue_of(one, other).take()
    assert batch is not None
    sequences = gathered(batch)
    assert sequences.lengths.tolist() == [3, 2, 4]
    assert sequences.input_ids.tolist() == [0, 1, 2, 50, 51, 3, 4, 5, 6]


def test_a_queue_that_is_closed_gives_nothing_to_a_thread_that_waits() -> None:
    queue, found = queue_of(), []
    thread = threading.Thread(target=lambda: found.append(queue.take()))
    thread.start()
    queue.close()
    thread.join()
    assert found == [None]
