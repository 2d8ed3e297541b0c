"""What ends a process that waits for another one, in real processes; and what all of them must have alike."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.watchdog import ConnectedProcess

ROOT = Path(__file__).resolve().parents[2]
WATCHED = """
import os, signal, sys, time
from gaudi_bert.engines import watchdog
with watchdog.Watchdog("rank 1 of 3", 1.0) as dog:
    {body}
print("left", flush=True)
time.sleep(1.5)
"""


def watched(body: str) -> subprocess.CompletedProcess[str]:
    code = WATCHED.format(body=body.replace("\n", "\n    "))
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_process_that_waits_in_vain_ends_by_one_line_with_the_last_saved_update() -> None:
    done = watched(
        "dog.record_saved_update(3)\ndog.record_activity('update 4', slow=False)\nfor _ in range(600): time.sleep(0.05)"
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: rank 1 of 3 aborts during update 4: no progress for 1 s")
    assert line.endswith("; the last saved update is 3; run the same command again to resume")


def test_a_process_that_sleeps_where_no_python_runs_ends_too() -> None:
    done = watched("dog.record_activity('a step', slow=False)\nimport ctypes\nctypes.CDLL(None).sleep(60)")
    assert done.returncode == 1
    assert "during a step: " in done.stderr


@pytest.mark.parametrize(
    "body",
    [
        "for _ in range(8): time.sleep(0.25); dog.record_progress()",
        "dog.record_activity('a graph', slow=True)\ntime.sleep(1.5)",
        "pass",
    ],
    ids=["moves", "slow work", "left"],
)
def test_a_process_that_works_or_has_left_is_not_touched(body: str) -> None:
    done = watched(body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


@pytest.mark.parametrize(("kind", "last_words"), [("stops", "asked to stop"), ("hangs", "has exited")])
def test_a_process_ends_with_its_launcher(kind: str, last_words: str) -> None:
    """The launcher is killed; the pipe closes when the process that it started has ended too."""
    command = [sys.executable, "-m", "tests.builders.launched", kind]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        assert launcher.stdout is not None
        lines = iter(launcher.stdout)
        assert any(line == "ready\n" for line in lines)
        os.kill(launcher.pid, signal.SIGKILL)
        said = list(lines)
    assert "asked to stop\n" in said
    assert last_words in said[-1]


@pytest.mark.parametrize(("size", "others"), [(2, ()), (2, (1,)), (3, (2,)), (5, (4, 1, 3)), (7, (1, 2, 3, 4, 5, 6))])
def test_all_end_alike_and_name_the_first_rank_that_runs_something_else(size: int, others: tuple[int, ...]) -> None:
    shares: dict[int, np.ndarray] = {}
    meeting = threading.Barrier(size)

    class OneThread(ConnectedProcess):
        def sum_array(self, values: np.ndarray) -> np.ndarray:
            shares[self.rank] = np.asarray(values, np.float64)
            meeting.wait(20)
            total = sum(shares.values())
            meeting.wait(20)
            return total

    def end_of(rank: int) -> str:
        facts = {"gaudi-bert": "1.0", "training.updates": 7 + 100 * rank * (rank in others)}
        try:
            OneThread(rank, size, facts=facts).check_processes_have_same_settings()
        except InputError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(size) as pool:
        (end,) = set(pool.map(end_of, range(size)))
    host, first = socket.gethostname(), min(others, default=0)
    said = f"training.updates is {7 + 100 * first} in rank {first} ({host}), but 7 in rank 0 ({host})"
    assert end.startswith(said) if others else end == ""
