"""Work in threads: results in the order of the items, the first error, and no more results in memory than a window."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.threads import each_in_threads, map_in_threads, worker_count


def no_buffer() -> np.ndarray:
    return np.zeros(0, np.uint8)


class Taken(Sequence):
    """The numbers below `count`, and how many of them were asked for."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index):
        raise AssertionError("items are taken one after the other")

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.taken += 1
            yield number


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    assert map_in_threads(lambda number, _: number**2, range(333), workers, no_buffer) == [n**2 for n in range(333)]


def test_results_that_wait_behind_a_slow_item_are_few() -> None:
    items, slow = Taken(10_000), threading.Event()

    def work(number: int, _: np.ndarray) -> int:
        if number == 100:
            slow.set()  # item 0 is done only when others, which come after it, are
        return number if number or slow.wait(60) else -1

    results = each_in_threads(work, items, 2, no_buffer)
    assert next(results) == 0
    assert 100 < items.taken < 200
    assert list(results) == list(range(1, 10_000))


def test_the_first_error_in_the_order_of_the_items_is_raised() -> None:
    def work(number: int, _: np.ndarray) -> int:
        if number >= 50:
            raise InputError(f"item {number}")
        return number

    with pytest.raises(InputError, match="item 50"):
        map_in_threads(work, range(500), 3, no_buffer)


def test_as_many_threads_as_items_or_cores_and_never_none() -> None:
    assert [worker_count(workers, items) for workers, items in ((4, 2), (1, 9), (3, 0))] == [2, 1, 1]
    with pytest.raises(InputError, match="workers = 0"):
        worker_count(0, 5)
