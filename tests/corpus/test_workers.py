from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from gaudi_bert.corpus.workers import ordered_map

def note(number):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(0.2)

if __name__ == "__main__":
    for _ in ordered_map(note, range(10_000), 2):
        pass
"""
    (tmp_path / "pids").mkdir()
    (tmp_path / "main.py").write_text(code)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "main.py"), str(tmp_path / "pids")])
    wait_until(lambda: len(list((tmp_path / "pids").iterdir())) == 2)
    workers = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(is_running(worker) for worker in workers))


def is_running(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come about in a minute")


def test_there_is_a_processor() -> None:
    assert default_workers() >= 1
