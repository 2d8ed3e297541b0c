"""How the ranks of a launch meet: in threads of this process where nobody dies, in a process where somebody does."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError
from gaudi_bert.common.launch import Launch, free_port
from gaudi_bert.engines.pytorch import distributed
from gaudi_bert.engines.pytorch.distributed import meet

FACTS = {"gaudi-bert": "1.0", "training.updates": 7}


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Where the ranks of this test meet."""
    number = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    return number


def end_of(rank: int, size: int, facts: dict[str, Any], seconds: float = 30) -> GaudiBertError | None:
    """The error that the meeting ends with in one rank; None if it has met the others."""
    try:
        store = meet(Launch("torchrun", rank, size), seconds, facts)
    except GaudiBertError as error:
        return error
    store.set(f"done/{rank}", "")
    while rank == 0 and not all(store.check([f"done/{each}"]) for each in range(size)):
        time.sleep(0.05)  # the store ends with rank 0
    return None


def ends(*facts: dict[str, Any]) -> list[GaudiBertError | None]:
    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(lambda rank: end_of(rank, len(facts), facts[rank]), range(len(facts))))


def test_ranks_that_run_the_same_meet(port: int) -> None:
    assert ends(FACTS, FACTS, FACTS) == [None] * 3


@pytest.mark.parametrize(("rank", "name", "value"), [(1, "gaudi-bert", "2.0"), (2, "training.updates", 8)])
def test_a_rank_that_runs_something_else_is_named_in_all(rank: int, name: str, value: object, port: int) -> None:
    errors = ends(*({**FACTS, name: value} if each == rank else FACTS for each in range(3)))
    host = socket.gethostname()
    told = f"rank {rank} ({host}) has {name} = {value}, rank 0 ({host}) has {FACTS[name]}; start all ranks"
    for error in errors:
        assert isinstance(error, InputError)
        assert str(error).startswith(told)


@pytest.mark.parametrize(
    ("host", "rank", "said"),
    [
        (
            "127.0.0.1",
            0,
            "rank 0 of 4: ranks 1, 2, 3 did not come, after 1 s; see their errors; the same command tries again",
        ),
        (
            "127.0.0.1",
            1,
            "rank 1 of 4: rank 0 does not answer at 127.0.0.1, port {port} (Connection refused), after 1 s; see",
        ),
        ("no-such-host.invalid", 1, "rank 0 does not answer at no-such-host.invalid, port {port} ("),
    ],
    ids=["first alone", "nobody listens", "no such name"],
)
def test_who_does_not_come_is_waited_for_a_limited_time(
    host: str, rank: int, said: str, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setattr(distributed, "_QUIET_SECONDS", 0.5)
    error = end_of(rank, 4, FACTS, seconds=1)
    assert isinstance(error, FailedError), "worth another try"
    assert said.format(port=port) in str(error)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rank {rank} of 4 waits, at most 1 s: rank")


def test_a_port_in_use_is_a_wrong_setting(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        error = end_of(0, 2, FACTS)
    assert isinstance(error, InputError)
    assert str(error).startswith(f"rank 0 of 2: cannot listen at MASTER_PORT = {port} (Address already in use); set another")


def test_what_listens_and_never_answers_is_given_up(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of somebody else, or a rank 0 that is stopped or lost its network: torch would wait without end."""
    monkeypatch.setattr(distributed, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(distributed, "_CONNECT_SECONDS", 1.0)
    with socket.socket() as silent:
        silent.bind(("", port))
        silent.listen()
        error = end_of(1, 2, FACTS)
    for thread in threading.enumerate():
        if thread.name == "meeting":  # torch aborts an interpreter that ends while it connects
            thread.join(60)
    assert isinstance(error, FailedError)
    assert "was lost while they met at 127.0.0.1" in str(error)
    assert "nothing was heard for 1 s" in str(error)


# A rank in a process of its own, as a command has it: SIGTERM interrupts.
RANK = """
import signal, sys
from gaudi_bert.common.launch import Launch
from gaudi_bert.engines.pytorch.distributed import meet
signal.signal(signal.SIGTERM, signal.default_int_handler)
print("ready", flush=True)
meet(Launch("torchrun", 0, 3), 60, {})
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 1), (signal.SIGTERM, 75)], ids=["killed", "stopped"])
def test_a_rank_that_is_lost_or_stopped_while_they_meet_ends_the_others(
    number: signal.Signals, code: int, port: int
) -> None:
    """Rank 0 waits for rank 2, which never comes."""
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        first.stdout.readline()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(end_of, 1, 3, {})
            time.sleep(1.0)
            first.send_signal(number)
            error = other.result(30)
    assert isinstance(error, GaudiBertError)
    assert error.exit_code == code
    assert ("was lost while they met" if code == 1 else "rank 0 of 3 was stopped on request") in str(error)
