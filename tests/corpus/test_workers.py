from __future__ import annotations

import os

import pytest

from gaudi_bert.common.errors import FailedError
from gaudi_bert.corpus.workers import default_workers, ordered_map


def square(number: int) -> int:
    return number * number


def die(number: int) -> int:
    os._exit(number)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_and_few_are_in_flight(workers: int) -> None:
    taken: list[int] = []

    def items() -> object:
        for number in range(20):
            taken.append(number)
            yield number

    results = ordered_map(square, items(), workers)  # type: ignore[arg-type]
    assert next(results) == 0
    assert len(taken) <= workers + 1
    assert list(results) == [number * number for number in range(1, 20)]


def test_a_dead_worker_is_reported() -> None:
    with pytest.raises(FailedError, match="a worker process died"):
        list(ordered_map(die, [9], 2))


def test_there_is_a_processor() -> None:
    assert default_workers() >= 1
