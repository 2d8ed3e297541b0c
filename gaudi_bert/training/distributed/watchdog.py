"""A watchdog over the processes of a run: who is lost, sleeps or fails is named, and all processes end.

A process that waits in a collective operation waits for ever when another one does not come, and cannot be interrupted. So
every process has a thread that tells rank 0 twice a second how far its main thread is (`watch_server.py`,
`watch_ledger.py`), and that ends the process, with the rank to blame on standard error, when rank 0 says so or is heard no
more. It needs one TCP connection from each process to rank 0 and nothing else, so it works the same under Gloo, MPI and on a
cluster.

A verdict is reached within `stall_seconds` after the last sign of work, at once after a loss or a failure, and reaches every
process within two seconds more.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gaudi_bert.common.errors import FailedError

__all__ = ["Watchdog", "connect_to_server", "own_addresses"]

BEAT_SECONDS = 0.5
CONNECT_SECONDS = 5.0
FAREWELL_SECONDS = 6.0


def end_process(line: str, exit_code: int) -> None:
    """Print `line` and end this process, whatever its threads are doing."""
    print(f"error: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the last word of a process that ends here
    os._exit(exit_code)


class Watchdog:
    """The thread of one process.

    Args:
        connection: to the server in rank 0.
        token: what lets it in.
        rank: of this process.
        stall_seconds: how long rank 0 may be silent.
        end: what ends the process; another one in tests.
    """

    def __init__(
        self,
        connection: socket.socket,
        token: str,
        rank: int,
        stall_seconds: float,
        end: Callable[[str, int], None] = end_process,
    ) -> None:
        self._connection, self._rank, self._stall_seconds, self._end = connection, rank, stall_seconds, end
        self._arrivals, self._signs, self._place, self._slow = 0, 0, "starting", True
        self._sending, self._leaving = threading.Lock(), False
        self._received = b""
        self._send({"token": token, "rank": rank, "name": f"{socket.gethostname()}, process {os.getpid()}"})
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
        self._leaving = True
        try:
            self._send(message)
        except OSError:
            return  # nobody is there to be told
        # Closing before the answer came could take the message back.
        self._thread.join(FAREWELL_SECONDS)
        self._connection.close()

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _watch(self) -> None:
        heard = time.monotonic()
        try:
            while True:
                if not self._leaving:
                    self._send(self._state())
                next_beat = time.monotonic() + BEAT_SECONDS
                while (left := next_beat - time.monotonic()) > 0:
                    for message in self._receive(left):
                        heard = time.monotonic()
                        if self._is_last(message):
                            return
                if time.monotonic() - heard > self._stall_seconds:
                    seconds = f"{self._stall_seconds:.0f} s"
                    self._end_without_server(f"rank 0 has said nothing for {seconds}: it is stopped, or cannot be reached")
                    return
        except OSError:
            self._end_without_server("rank 0 is lost: its process has ended or was killed")

    def _state(self) -> dict[str, Any]:
        return {"arrivals": self._arrivals, "signs": self._signs, "place": self._place, "slow": self._slow}

    def _is_last(self, message: dict[str, Any]) -> bool:
        """Whether nothing follows; a verdict ends the process here, unless it is leaving anyway."""
        if "verdict" in message and not self._leaving:
            self._end(f"rank {self._rank} ends with the run: {message['verdict']}", message["exit_code"])
        return "verdict" in message or "bye" in message

    def _end_without_server(self, reason: str) -> None:
        if not self._leaving:
            self._end(f"rank {self._rank} ends with the run: {reason}", 1)

    def _receive(self, seconds: float) -> list[dict[str, Any]]:
        """What came, as soon as anything does; raises OSError when the connection is closed."""
        readable, _, _ = select.select([self._connection], [], [], seconds)
        if not readable:
            return []
        data = self._connection.recv(65_536)
        if not data:
            raise ConnectionResetError
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]


def connect_to_server(hosts: Sequence[str], port: int) -> socket.socket:
    """A connection to the first of `hosts` that answers.

    Raises:
        FailedError: none does.
    """
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), CONNECT_SECONDS)
        except OSError:
            continue
        connection.settimeout(None)
        return connection
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
