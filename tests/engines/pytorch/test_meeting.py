"""How the ranks of a launch meet: in threads of this process where nobody dies, in a process where somebody does."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError
from gaudi_bert.common.launch import LauncherInfo, find_free_port
from gaudi_bert.engines.pytorch import distributed
from gaudi_bert.engines.pytorch.distributed import rendezvous
from gaudi_bert.engines.watchdog import Watchdog


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Where the ranks of this test meet."""
    number = find_free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    return number


def end_of(rank: int, size: int, seconds: float = 30) -> GaudiBertError | None:
    """The error that the meeting ends with in one rank; None if it has met the others."""
    try:
        rendezvous(LauncherInfo("torchrun", rank, size), seconds, Watchdog("a test", 60.0))
    except GaudiBertError as error:
        return error
    return None


def test_ranks_meet(port: int) -> None:
    with ThreadPoolExecutor(3) as pool:
        stores = list(
            pool.map(lambda rank: rendezvous(LauncherInfo("torchrun", rank, 3), 30, Watchdog("a test", 60.0)), range(3))
        )
    assert all(store.check([f"here/{rank}" for rank in range(3)]) for store in stores)


@pytest.mark.parametrize(
    ("host", "rank", "named"),
    [
        ("127.0.0.1", 0, "ranks 1, 2, 3 did not connect"),
        ("127.0.0.1", 1, "127.0.0.1:{port}"),
        ("no-such-host.invalid", 1, "no-such-host.invalid:{port}"),
    ],
    ids=["first alone", "nobody listens", "no such name"],
)
def test_who_does_not_come_is_waited_for_a_limited_time(
    host: str, rank: int, named: str, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setattr(distributed, "_QUIET_SECONDS", 0.5)
    error = end_of(rank, 4, seconds=1)
    assert isinstance(error, FailedError), "worth another try"
    assert str(error).startswith(f"rank {rank} of 4: ")
    assert named.format(port=port) in str(error)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rank {rank} of 4 is waiting for at most 1 s: rank")


def test_a_port_in_use_is_a_wrong_setting(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        error = end_of(0, 2)
    assert isinstance(error, InputError)
    assert str(port) in str(error)


# A rank in a process of its own. SIGTERM interrupts, as in a command.
RANK = """
import signal, sys
from gaudi_bert.common.launch import LauncherInfo
from gaudi_bert.engines.pytorch.distributed import rendezvous
from gaudi_bert.engines.watchdog import Watchdog
signal.signal(signal.SIGTERM, signal.default_int_handler)
print("ready", flush=True)
with Watchdog("rank " + sys.argv[1], float(sys.argv[2])) as watchdog:
    rendezvous(LauncherInfo("torchrun", int(sys.argv[1]), 3), 60, watchdog)
"""


def rank_process(rank: int, stall_seconds: float = 60) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RANK, str(rank), str(stall_seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_rank_0_that_is_stopped_on_request_while_they_meet_ends_the_others(port: int) -> None:
    """It waits for rank 2, which never comes, for longer than a process may be without a sign of work."""
    with rank_process(0, stall_seconds=1.5) as first, ThreadPoolExecutor(1) as pool:
        assert first.stdout is not None
        first.stdout.readline()
        other = pool.submit(end_of, 1, 3)
        assert not wait([other], 4).done
        first.send_signal(signal.SIGTERM)
        error = other.result(60)
    assert isinstance(error, FailedError)
    assert str(error).startswith("rank 1 of 3: lost the connection to another process")
