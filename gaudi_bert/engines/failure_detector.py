"""Finding out which process of a run is lost or does not respond.

When a process is killed, the other processes only get an error with the address of a socket. When a process is suspended or
its node fails, the other processes get no error at all. Therefore every process has a thread that listens on a port and
answers requests. If a sum over all processes fails or takes too long, a process connects to all others. A process that has
ended refuses the connection, and a suspended process does not answer. All other processes answer with a description of what
they are doing.

The first process that finds the reason sends it to all others. Otherwise, a process that checks later would also report
processes as lost that have only ended because of the first failure.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from gaudi_bert.common.launch import MASTER_ADDRESS
from gaudi_bert.engines.protocol import Communicator

Message = dict[str, Any]

_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 5.0
# A process answers one request at a time. If a client connects but sends nothing, the next clients have to wait. After this
# time, the connection is closed.
_REQUEST_SECONDS = 1.0
_MAX_CALLS = 64
_MAX_MESSAGE_BYTES = 4096
_MAX_NAMES = 8
# Connecting a UDP socket to one of these addresses reveals the address that this host uses for outgoing connections. No
# packet is sent, and no other host has these addresses, because they are reserved for documentation.
_UNREACHABLE_ADDRESSES = ("192.0.2.1", "2001:db8::1")
_ENDED, _SILENT = "ended", "silent"
_FAILURES = {
    _ENDED: "lost because the process has ended",
    _SILENT: "not responding because the process is suspended or its node is lost",
}


@dataclass(frozen=True)
class Peer:
    """The rank and the network addresses of one process in a run.

    Attributes:
        rank: The rank of the process.
        host: The host name, which in a cluster is the name of the pod.
        addresses: The addresses to try for a connection to the process.
        port: The port.
    """

    rank: int
    host: str
    addresses: tuple[str, ...]
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass
class FailureDetector:
    """Finds out which other processes of a run are lost or unresponsive. On request, it also tells them what this process is
    doing.

    Attributes:
        token: A random string that all processes of the run share. Requests without it are ignored.
        rank: The rank of this process.
        describe: Returns what this process is doing.
        listener: The listening socket.
        peers: The other processes that were reachable when the run began. Processes that were not reachable then are never
            reported as lost.
        reason: The reason why the run fails. Empty as long as no failure is known.
    """

    token: str
    rank: int
    describe: Callable[[], Message]
    listener: socket.socket
    peers: Sequence[Peer] = ()
    reason: str = field(default="", init=False)

    def start(self) -> None:
        """Start the thread that answers requests from other processes."""
        threading.Thread(target=self._serve_requests, name="failure detector", daemon=True).start()

    def close(self) -> None:
        """Close the listening socket, which also ends the thread."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # otherwise, the waiting thread would keep the port open
        self.listener.close()

    def describe_failed_processes(self, min_busy_seconds: float = math.inf) -> str:
        """Connect to all other processes, and return a description of those that are lost, suspended or busy. Send this
        description to the other processes, so that they report the same failure.

        For every `_MAX_CALLS` peers, the calls take at most `_CONNECT_SECONDS` plus `_ANSWER_SECONDS`. If a description is
        sent, the second calls take at most the same time again.

        Args:
            min_busy_seconds: A process is reported as busy if it has worked on the same activity for at least this time.

        Returns:
            A description of these processes. Empty if all others are fine.
        """
        if not self.peers:
            return ""
        with ThreadPoolExecutor(min(len(self.peers), _MAX_CALLS)) as pool:
            answers = list(pool.map(lambda peer: self.send_message(peer, {}), self.peers))
            self.reason = self.reason or _describe_failures(dict(zip(self.peers, answers, strict=True)), min_busy_seconds)
            if self.reason:
                list(pool.map(lambda peer: self.send_message(peer, {"reason": self.reason}), self.peers))
        return self.reason

    def send_message(self, peer: Peer, message: Message) -> Message | str:
        """Connect to a process, send it a message, and return its answer.

        Args:
            peer: The process.
            message: The message. An empty message requests a description of what the process is doing.

        Returns:
            The answer, which is empty unless the message is empty. `_ENDED` if the process refuses or resets the connection,
            or its answer is not valid JSON, and `_SILENT` if it does not answer.
        """
        try:
            with socket.create_connection((peer.addresses[0], peer.port), _CONNECT_SECONDS) as connection:
                connection.settimeout(_ANSWER_SECONDS)
                connection.sendall(json.dumps({**message, "token": self.token}).encode() + b"\n")
                if message:
                    return {}
                answer: Message = json.loads(connection.makefile("rb").readline(_MAX_MESSAGE_BYTES))
                return answer
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError, ValueError):
            return _ENDED
        except OSError:
            return _SILENT

    def _serve_requests(self) -> None:
        """Answer requests from other processes until the listening socket is closed. If a request reports why the run fails,
        store the reason.
        """
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # the listener was closed
                return
            with connection, suppress(OSError, ValueError, AttributeError):
                connection.settimeout(_REQUEST_SECONDS)
                message = json.loads(connection.makefile("rb").readline(_MAX_MESSAGE_BYTES))
                if message.get("token") != self.token:
                    continue
                self.reason = self.reason or message.get("reason", "")
                connection.sendall(json.dumps(self.describe()).encode() + b"\n")


def start_failure_detector(communicator: Communicator, describe_activity: Callable[[], Message]) -> FailureDetector:
    """Start the failure detector of this process, and exchange addresses with all other processes. All processes must call
    this function at the same time.

    Args:
        communicator: The processes of the run.
        describe_activity: Returns what this process is doing: whether it `waits` for others, its `activity`, and the
            `seconds` since it last made progress.
    """
    is_one_host = communicator.local_size == communicator.size
    listener = _open_listener(loopback_only=is_one_host)
    detector = FailureDetector(
        communicator.run_on_first_process(lambda: secrets.token_hex(16)), communicator.rank, describe_activity, listener
    )
    detector.start()
    addresses = ["127.0.0.1"] if is_one_host else _find_host_addresses()
    own_entry = json.dumps([socket.gethostname(), addresses, listener.getsockname()[1]]).encode()
    entries = np.zeros((communicator.size, 512))
    entries[communicator.rank, : len(own_entry)] = np.frombuffer(own_entry, np.uint8)[:512]
    entries = communicator.sum_array(entries)
    peers = []
    for rank, entry in enumerate(entries):
        host, known, port = json.loads(entry.astype(np.uint8).tobytes().rstrip(b"\0"))
        peers.append(Peer(rank, host, tuple(known), port))
    # In some networks, hosts cannot connect to each other, and the processes on other hosts would be reported as lost.
    # Therefore each process first tries to connect to a process on the next host. Later, only processes that answered this
    # attempt are checked.
    called = peers[(communicator.rank + (1 if is_one_host else communicator.local_size)) % communicator.size]
    choices = [Peer(called.rank, called.host, (address,), called.port) for address in called.addresses]
    answered = [isinstance(detector.send_message(choice, {}), dict) for choice in choices]
    reached = np.zeros(communicator.size)
    reached[called.rank] = answered.index(True) + 1 if any(answered) else 0
    reached = communicator.sum_array(reached)
    detector.peers = [
        Peer(peer.rank, peer.host, (peer.addresses[int(number) - 1],), peer.port)
        for peer, number in zip(peers, reached, strict=True)
        if number and peer.rank != communicator.rank
    ]
    return detector


def _open_listener(*, loopback_only: bool) -> socket.socket:
    """Return a socket that listens on a free port, on all interfaces or only on the loopback interface.

    On all interfaces, the socket also accepts IPv6 connections if this machine supports them.
    """
    if not loopback_only and socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("127.0.0.1" if loopback_only else "", 0), backlog=1024)


def _find_host_addresses() -> list[str]:
    """Return the addresses that other hosts may use to reach this host. The address on the route to rank 0 comes first."""
    found = []
    for target in (os.environ.get(MASTER_ADDRESS), *_UNREACHABLE_ADDRESSES):
        with suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                found.append(probe.getsockname()[0])
    others = [address for address in dict.fromkeys(found) if address != "::1" and not address.startswith("127.")]
    return others or found


def _describe_failures(answers: Mapping[Peer, Message | str], min_busy_seconds: float) -> str:
    """Return a message that names the processes that have ended or do not answer.

    If all processes answered, describe the process that has been busy for the longest time, if it has been busy for at least
    `min_busy_seconds`. If there is no such process, return an empty string.
    """
    failures = []
    for kind, meaning in _FAILURES.items():
        failed = [str(peer) for peer, answer in answers.items() if answer == kind]
        if failed:
            more = f" and {len(failed) - _MAX_NAMES} more" if len(failed) > _MAX_NAMES else ""
            failures.append(f"{', '.join(failed[:_MAX_NAMES])}{more} {'is' if len(failed) == 1 else 'are'} {meaning}")
    at_work = [(each, answer) for each, answer in answers.items() if isinstance(answer, dict) and not answer["waits"]]
    busy = [(answer["seconds"], each, answer) for each, answer in at_work if answer["seconds"] >= min_busy_seconds]
    if not failures and busy:
        seconds, peer, answer = max(busy, key=itemgetter(0))
        failures = [f"{peer} has been busy with {answer['activity']} for {seconds:.0f} s"]
    return " and ".join(failures)


# --- Error messages of Gloo, the CPU backend of torch.distributed, about broken connections

_BROKEN = re.compile(r"closed by peer|reset by peer|read error|write error|broken pipe|timed out|timeout", re.IGNORECASE)
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")


def summarize_gloo_error(error: Exception) -> str:
    """Return a one-line summary of an error that Gloo raised while summing values over all processes.

    The summary is only shown if the failure detector finds no reason for the error.
    """
    text = " ".join(str(error).split())
    if not _BROKEN.search(text):
        return text[:300]
    address = _ADDRESS.search(text)
    return f"the connection to {address[1] if address else 'another process'} broke or timed out"
