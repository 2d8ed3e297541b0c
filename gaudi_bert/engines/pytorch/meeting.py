"""How the processes of a launch meet before they compute: rank 0 listens, the others find it, and all run the same.

torch's own meeting waits where no signal is heard, an hour for a process that never comes, and names none. So processes
look for one another here, for `meeting_seconds` at most: names may not resolve yet, and pods start at different times. Each
says who it is and what it runs; rank 0 compares that with its own, and lets all begin or none. A process that is lost
meanwhile is worth another try (exit code 1), one that runs something else is not (2), and one that is stopped on request
stops the others likewise (75).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from torch import distributed as torch_distributed

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError, StoppedError
from gaudi_bert.common.launch import MASTER_ADDRESS, MASTER_PORT, Launch
from gaudi_bert.common.progress import Reporter
from gaudi_bert.engines.watchdog import difference_of

_POLL_SECONDS = 0.2
# What passes sooner is not reported.
_QUIET_SECONDS = 5.0
# How long a process that listens may take to accept.
_CONNECT_SECONDS = 10.0
# How long a process may take to answer that was there a moment ago.
_ANSWER_SECONDS = 20.0
# Long enough for all to have read the verdict of a process that ends.
_FAREWELL_SECONDS = 5 * _POLL_SECONDS
T = TypeVar("T")
_ERRORS = {error.exit_code: error for error in (FailedError, InputError, StoppedError)}


@dataclass(frozen=True)
class _MeetingPoint:
    """Where processes meet, how long they wait there, and who this one is."""

    launch: Launch
    host: str
    port: int
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.launch.rank} of {self.launch.size}"

    def wait(self, reason: Callable[[], str | None], hopeless: str) -> None:
        """Return when there is no `reason` to wait any more: it is reported once, and ends the run after `seconds`."""
        began, is_said = time.monotonic(), False
        while (because := reason()) is not None:
            waited = time.monotonic() - began
            if waited >= self.seconds:
                raise FailedError(f"{self}: {because}, after {self.seconds:g} s; {hopeless}")
            if waited >= _QUIET_SECONDS and not is_said:
                is_said = True
                Reporter().say(f"{self} waits, at most {self.seconds:g} s: {because}")
            time.sleep(_POLL_SECONDS)


def meet(launch: Launch, seconds: float, facts: Mapping[str, Any]) -> Any:
    """The store by which all processes of the launch continue, once all are there and have the same `facts`.

    Raises:
        FailedError: a process does not come within `seconds`, or is lost.
        InputError: rank 0 cannot listen, or `facts` differ.
        StoppedError: one of them is stopped on request.
    """
    point = _MeetingPoint(launch, os.environ[MASTER_ADDRESS], int(os.environ[MASTER_PORT]), seconds)
    with _lost_as_failure(point):
        store = _open_store(point)
        try:
            _introduce(store, point, facts)
            _agree(store, point)
        except KeyboardInterrupt:
            _tell(store, StoppedError(f"{point} was stopped on request before training had started; run it again"))
            raise
        except GaudiBertError as error:
            _tell(store, error)
            raise
    return store


@contextmanager
def _lost_as_failure(point: _MeetingPoint) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise FailedError(
            f"{point}: another process was lost while they met at {point.host}, port {point.port} ({reason}); "
            "the same command tries again"
        ) from error


def _open_store(point: _MeetingPoint) -> Any:
    """The store of rank 0, or of torchrun, which has its own."""
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = point.launch.rank == 0 and not of_torchrun
    if listens:
        _check_port(point)
    else:
        hopeless = (
            f"see that rank 0 runs, and that {MASTER_ADDRESS} and {MASTER_PORT} are right; the same command tries again"
        )
        point.wait(lambda: _silence(point), hopeless)
    # Rank 0 need not resolve its own name. Where it does, its address is better: torch asks for the name of the address that
    # it connects to, and in a network without a name server nobody answers for that of the loopback.
    host = "127.0.0.1" if listens and not _resolves(point.host) else point.host
    timeout = timedelta(seconds=_CONNECT_SECONDS)
    size = point.launch.size
    store = _answered(
        lambda: torch_distributed.TCPStore(host, point.port, size, listens, timeout=timeout, wait_for_workers=False)
    )
    store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return torch_distributed.PrefixStore(f"gaudi-bert/{attempt}", store)


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _answered(ask: Callable[[], T]) -> T:
    """What rank 0 answers. In a thread: torch waits without end, and hears no signal, if rank 0 is silent but not gone."""
    answers: SimpleQueue[T | Exception] = SimpleQueue()

    def answer() -> None:
        try:
            answers.put(ask())
        except (RuntimeError, ValueError, OSError) as error:
            answers.put(error)

    Thread(target=answer, name="meeting", daemon=True).start()
    try:
        value = answers.get(timeout=_ANSWER_SECONDS)
    except Empty:
        raise TimeoutError(f"nothing was heard for {_ANSWER_SECONDS:g} s: does another program listen there?") from None
    if isinstance(value, Exception):
        raise value
    return value


def _check_port(point: _MeetingPoint) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", point.port))
        except OSError as error:
            raise InputError(
                f"{point}: cannot listen at {MASTER_PORT} = {point.port} ({error.strerror}); "
                "set another one, the same in all processes, or end what listens there"
            ) from error


def _silence(point: _MeetingPoint) -> str | None:
    """Why rank 0 does not answer; None if something does."""
    try:
        socket.create_connection((point.host, point.port), _CONNECT_SECONDS).close()
    except OSError as error:
        return f"rank 0 does not answer at {point.host}, port {point.port} ({error.strerror or error})"
    return None


def _introduce(store: Any, point: _MeetingPoint, facts: Mapping[str, Any]) -> None:
    """Say who this process is; rank 0 waits for all and decides."""
    _set(store, f"hello/{point.launch.rank}", {"host": socket.gethostname(), "facts": dict(facts)})
    if point.launch.rank == 0:
        point.wait(lambda: _absent(store, point, "hello"), "see their errors; the same command tries again")
        difference = next(filter(None, (_difference(store, rank) for rank in range(1, point.launch.size))), None)
        if difference is not None:
            raise InputError(difference)
        _set(store, "verdict", {"text": "", "exit_code": 0})


def _agree(store: Any, point: _MeetingPoint) -> None:
    """Wait for what is decided, and then until every process has heard it."""
    hopeless = "see the error of rank 0; the same command tries again"
    point.wait(lambda: None if _is_decided(store) else "not all ranks have come", hopeless)
    _answered(lambda: store.set(f"ready/{point.launch.rank}", ""))
    point = _MeetingPoint(point.launch, point.host, point.port, _ANSWER_SECONDS)
    point.wait(lambda: _absent(store, point, "ready"), "it was lost; the same command tries again")


def _absent(store: Any, point: _MeetingPoint, what: str) -> str | None:
    """Which processes have not come."""
    _is_decided(store)
    absent = _answered(lambda: [str(each) for each in range(point.launch.size) if not store.check([f"{what}/{each}"])])
    shown = f"{', '.join(absent[:8])}{', ...' if len(absent) > 8 else ''}"
    return f"rank{'s' if len(absent) > 1 else ''} {shown} did not come" if absent else None


def _difference(store: Any, rank: int) -> str | None:
    """What a process runs that rank 0 does not."""
    first, other = (json.loads(store.get(f"hello/{each}")) for each in (0, rank))
    return difference_of(other["facts"], first["facts"], f"rank {rank} ({other['host']})", f"rank 0 ({first['host']})")


def _tell(store: Any, error: GaudiBertError) -> None:
    """Tell all processes why the run ends, and give them time to read it before this one does."""
    with suppress(RuntimeError, OSError):  # nobody listens any more
        _set(store, "verdict", {"text": str(error), "exit_code": error.exit_code})
        time.sleep(_FAREWELL_SECONDS)


def _is_decided(store: Any) -> bool:
    """Whether all may begin; the error of a process that ends the run."""
    if not _answered(lambda: store.check(["verdict"])):
        return False
    verdict = json.loads(_answered(lambda: store.get("verdict")))
    if verdict["exit_code"]:
        raise _ERRORS[verdict["exit_code"]](verdict["text"])
    return True


def _set(store: Any, key: str, value: Mapping[str, Any]) -> None:
    _answered(lambda: store.set(key, json.dumps(value)))
