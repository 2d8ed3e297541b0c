"""A watchdog over the processes of a run: who is lost, stopped, asleep or failing is named, and all processes end.

Horovod alone does less. Measured with Horovod 0.28.1 over Gloo, three processes, a stall inspector set to warn after 3 s and
to shut down after 6 s, and a Gloo timeout of 10 s:

    one process ...                      the others end after       and are told
    is killed (SIGKILL)                  3 s                        the address of a socket, no rank
    is stopped (SIGSTOP)                 14 s, the Gloo timeout     that a receive timed out, no rank
    fails and ends                       6 s                        that Horovod was shut down, no rank, no reason
    sleeps in its step                   never (300 s)              nothing: Horovod's own thread in it is awake

So every process has one connection to rank 0. Twice a second it says where its main thread is, and hears whether the run
ends, and why. Processes meet at *meeting points*: sums that all of them take part in. Each counts those that it has reached,
so who waits is ahead of who is waited for. `watch_server.judge` says what ends a run. A verdict is reached within
`stall_seconds` after the last sign of work, at once after a loss or a failure, and reaches every process within two seconds.

A process whose launcher has ended asks itself to stop, which saves a checkpoint, and ends anyway soon after.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError, StoppedError
from gaudi_bert.config import TrainingSettings
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.distributed.watch_server import Verdict, WatchServer

__all__ = ["Watchdog", "connect_to_server", "own_addresses", "watch"]

BEAT_SECONDS = 0.5
CONNECT_SECONDS = 5.0
# Within three beats every process that can hear has heard the verdict and said so.
HEARING_SECONDS = 3 * BEAT_SECONDS
# How long a process that ends waits for the others to hear why.
FAREWELL_SECONDS = 6.0
# How long a process may take to save and end once its launcher has ended.
ORPHAN_SECONDS = 10.0
ADDRESS_BYTES = 1024


def end_process(line: str, exit_code: int) -> None:
    """Print `line` and end this process, whatever its threads are doing.

    A launcher ends all processes once one has ended, so none ends before the others can have heard why.
    """
    print(f"error: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the last word of a process that ends here
    time.sleep(HEARING_SECONDS)
    os._exit(exit_code)


class Watchdog:
    """The thread of one process that speaks to rank 0, and ends the process when the run ends.

    Args:
        connection: to the server in rank 0.
        token: what lets it in.
        rank: of this process.
        stall_seconds: how long rank 0 may be silent.
        server: rank 0's own; None in the others.
        end: what ends the process; another one in tests.
    """

    def __init__(
        self,
        connection: socket.socket,
        token: str,
        rank: int,
        stall_seconds: float,
        server: WatchServer | None = None,
        end: Callable[[str, int], None] = end_process,
    ) -> None:
        connection.settimeout(stall_seconds)
        self._stream, self._rank, self._stall_seconds = connection.makefile("rwb"), rank, stall_seconds
        self._server, self._end = server, end
        self._arrivals, self._signs, self._place, self._slow = 0, 0, "starting", True
        self._launcher = os.getppid()
        self._orphaned: float | None = None
        self._speaking, self._leaving = threading.Lock(), threading.Event()
        self._exchange({"token": token, "rank": rank, "name": f"{socket.gethostname()}, process {os.getpid()}"})
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def arrive(self) -> None:
        """This process has reached a meeting point: from now on it waits for the others."""
        self._arrivals += 1

    def note(self, place: str, slow: bool) -> None:
        """A sign of work, what it is on, and whether that may take longer than usual."""
        self._signs += 1
        self._place, self._slow = place, slow

    def leave(self) -> None:
        """Say that all is done; the run goes on without this process."""
        self._say_last({"bye": True})

    def fail(self, reason: str, exit_code: int) -> None:
        """Say that this process fails, so that all others end with its exit code."""
        self._say_last({"failed": reason, "exit_code": exit_code})

    def await_verdict(self, seconds: float) -> None:
        """Give the verdict time to come, which ends this process."""
        self._thread.join(seconds)

    def _say_last(self, message: dict[str, Any]) -> None:
        self._leaving.set()
        try:
            self._exchange(message)
        except (OSError, ValueError):
            return  # nobody is there to be told
        if self._server is not None:
            self._server.wait(FAREWELL_SECONDS)

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """Say something; the answer, or an OSError or ValueError where none comes."""
        with self._speaking:
            self._stream.write(json.dumps(message).encode() + b"\n")
            self._stream.flush()
            answer: dict[str, Any] = json.loads(self._stream.readline())
            return answer

    def _watch(self) -> None:
        while not self._leaving.wait(BEAT_SECONDS):
            verdict = self._ask() or self._judge_launcher()
            if verdict is not None:
                self._end_with_run(verdict)
                return

    def _ask(self) -> Verdict | None:
        """Say where the main thread is; what rank 0 answers, or that it does not."""
        state = {"arrivals": self._arrivals, "signs": self._signs, "place": self._place, "slow": self._slow}
        try:
            answer = self._exchange(state)
        except TimeoutError:
            return Verdict(f"rank 0 has said nothing for {self._stall_seconds:.0f} s: it is stopped, or cannot be reached")
        except (OSError, ValueError):
            return Verdict("rank 0 is lost: its process has ended or was killed")
        return Verdict(**answer) if answer else None

    def _judge_launcher(self) -> Verdict | None:
        """Ask this process to stop once its launcher has ended, and end it where it does not."""
        if os.getppid() == self._launcher:
            return None
        if self._orphaned is None:
            self._orphaned = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
        if time.monotonic() - self._orphaned < ORPHAN_SECONDS:
            return None
        return Verdict(f"its launcher, process {self._launcher}, has ended")

    def _end_with_run(self, verdict: Verdict) -> None:
        if self._leaving.is_set():
            return
        if self._server is not None:
            self._server.wait(FAREWELL_SECONDS)
        self._end(f"rank {self._rank} ends with the run: {verdict.text}", verdict.exit_code)


@contextmanager
def watch(communicator: Communicator, settings: TrainingSettings) -> Iterator[Watchdog]:
    """All processes watch over each other, and leave together; the context begins and ends at the same time in all of them.

    Raises:
        InputError: the watchdog's port is taken.
        FailedError: another process cannot be reached, or has gone.
    """
    watchdog = _begin(communicator, settings)
    try:
        yield watchdog
        communicator.barrier()
        watchdog.leave()
    except StoppedError:  # in all processes, at the same update
        _outlive_the_launcher()
        communicator.barrier()
        watchdog.leave()
        raise
    except GaudiBertError as error:
        _outlive_the_launcher()
        watchdog.fail(str(error), error.exit_code)
        raise
    except (tf.errors.OpError, RuntimeError) as error:  # a sum that another process did not come to
        watchdog.await_verdict(FAREWELL_SECONDS)
        _outlive_the_launcher()
        text = " ".join(str(error).split())[:300]
        watchdog.fail(text, FailedError.exit_code)
        raise FailedError(f"rank {communicator.rank}: {text}") from error
    except BaseException as error:
        _outlive_the_launcher()
        watchdog.fail(f"{type(error).__name__}: {error}", FailedError.exit_code)
        raise


def _outlive_the_launcher() -> None:
    """Launchers terminate the other processes as soon as one has ended: let this one say its last word, it ends soon."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _begin(communicator: Communicator, settings: TrainingSettings) -> Watchdog:
    """Start the server in rank 0 and connect every process to it; all succeed or all fail."""
    server, offer = _open_server(communicator, settings) if communicator.is_first else (None, "")
    try:
        token, _, place = _share_text(communicator, offer).partition(" ")
        if not token:
            raise InputError(place)
        port, *hosts = place.split(" ")
        problem, watchdog = "another process cannot reach the watchdog in rank 0; see what it says", None
        try:
            connection = connect_to_server(hosts, int(port))
            watchdog = Watchdog(connection, token, communicator.rank, settings.stall_seconds, server)
        except FailedError as error:
            problem = str(error)
        if communicator.any_true(watchdog is None) or watchdog is None:
            raise FailedError(problem)
    except (tf.errors.OpError, RuntimeError) as error:
        raise FailedError(
            f"rank {communicator.rank}: another process ended before the run began; see what it says"
        ) from error
    return watchdog


def _share_text(communicator: Communicator, text: str) -> str:
    """What rank 0 gave as `text`, at most `ADDRESS_BYTES` of UTF-8."""
    padded = text.encode().ljust(ADDRESS_BYTES, b"\0") if communicator.is_first else bytes(ADDRESS_BYTES)
    summed = communicator.sum_array(np.frombuffer(padded, np.uint8))
    return summed.astype(np.uint8).tobytes().rstrip(b"\0").decode()


def _open_server(communicator: Communicator, settings: TrainingSettings) -> tuple[WatchServer | None, str]:
    """The server, and where it is as one text: token, port, hosts; or without a token, why there is none."""
    is_one_host = communicator.local_size == communicator.size
    token = secrets.token_hex(16)
    address = ("127.0.0.1" if is_one_host else "", settings.watch_port)
    try:
        server = WatchServer(address, communicator.size, token, settings.stall_seconds)
    except OSError as error:
        return None, (
            f" training.watch_port = {settings.watch_port}: rank 0 cannot listen there ({error.strerror}); "
            "choose another port, or 0 for any that is free"
        )
    hosts = ["127.0.0.1"] if is_one_host else own_addresses()
    return server, " ".join([token, str(server.server_address[1]), *hosts])


def connect_to_server(hosts: Sequence[str], port: int) -> socket.socket:
    """A connection to the first of `hosts` that answers.

    Raises:
        FailedError: none does.
    """
    for host in hosts:
        try:
            return socket.create_connection((host, port), CONNECT_SECONDS)
        except OSError:
            continue
    raise FailedError(
        f"rank 0 does not answer at port {port} of {' or '.join(hosts)}; "
        "open that port between the workers, or set training.watch_port to one that is open"
    )


def own_addresses() -> list[str]:
    """By which other hosts may reach this one: the address of its default route, and its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: nothing is sent, only a route is looked up
            routed = [probe.getsockname()[0]]
        except OSError:
            routed = []
    return [*routed, socket.gethostname()]
