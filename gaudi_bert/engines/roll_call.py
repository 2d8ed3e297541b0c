"""Which process of a run is lost or silent, by name.

When a process is killed, the others are told only the address of a socket. When it is stopped or its node is lost, they are
told nothing. So every process listens on a port of its own, where a thread answers. If a sum fails or does not come, a
process calls all the others: one that has ended refuses the connection, one that is stopped does not answer, and the
others answer with what they are doing. Whoever finds the reason first tells it to all, because a process that asks later
would also miss those that have ended meanwhile.
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
# How long a stranger that connects and says nothing may keep others waiting.
_REQUEST_SECONDS = 1.0
_MOST_CALLS = 64
_MOST_BYTES = 4096
_MOST_NAMES = 8
# No packet is sent there: the routes to these documentation networks tell this host's own address.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_ENDED, _SILENT = "ended", "silent"


@dataclass(frozen=True)
class Member:
    """A process of the run: its host, which is its pod's name in a cluster, and where it listens."""

    rank: int
    host: str
    addresses: tuple[str, ...]
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass
class RollCall:
    """The port of one process, and the members that it can call.

    `members` are those that were reached when the run began; what could not be reached then is never said to be lost.
    """

    token: str
    rank: int
    describe: Callable[[], Message]
    listener: socket.socket
    members: Sequence[Member] = ()
    reason: str = field(default="", init=False)

    def begin(self) -> None:
        """Start the thread that answers."""
        threading.Thread(target=self._answer_calls, name="roll call", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # or the thread that waits for a call would keep the port open
        self.listener.close()

    def find_reason(self, busy_seconds: float = math.inf) -> str:
        """Return which processes are lost, silent or busy, and tell the others; empty if nobody is found.

        It takes `_CONNECT_SECONDS` and `_ANSWER_SECONDS` at most, for every `_MOST_CALLS` members.

        Args:
            busy_seconds: A process that has been at work for so long keeps the others waiting.
        """
        if not self.members:
            return ""
        with ThreadPoolExecutor(min(len(self.members), _MOST_CALLS)) as pool:
            answers = list(pool.map(lambda member: self.call(member, {}), self.members))
            self.reason = self.reason or _describe_answers(dict(zip(self.members, answers, strict=True)), busy_seconds)
            if self.reason:
                list(pool.map(lambda member: self.call(member, {"reason": self.reason}), self.members))
        return self.reason

    def call(self, member: Member, message: Message) -> Message | str:
        """Send a message to a member, and return its answer, `_ENDED` or `_SILENT`."""
        try:
            with socket.create_connection((member.addresses[0], member.port), _CONNECT_SECONDS) as connection:
                connection.settimeout(_ANSWER_SECONDS)
                connection.sendall(json.dumps({**message, "token": self.token}).encode() + b"\n")
                if message:
                    return {}
                answer: Message = json.loads(connection.makefile("rb").readline(_MOST_BYTES))
                return answer
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError, ValueError):
            return _ENDED
        except OSError:
            return _SILENT

    def _answer_calls(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # closed
                return
            with connection, suppress(OSError, ValueError, AttributeError):
                connection.settimeout(_REQUEST_SECONDS)
                message = json.loads(connection.makefile("rb").readline(_MOST_BYTES))
                if message.get("token") != self.token:
                    continue
                self.reason = self.reason or message.get("reason", "")
                connection.sendall(json.dumps(self.describe()).encode() + b"\n")


def open_roll_call(communicator: Communicator, describe: Callable[[], Message]) -> RollCall:
    """Let all processes of a run know one another, at the same time in all of them.

    Args:
        communicator: A process of several.
        describe: Returns what this process is doing: `waits`, `activity` and `seconds` since its last sign of work.
    """
    is_one_host = communicator.local_size == communicator.size
    listener = _listen(only_here=is_one_host)
    roll_call = RollCall(communicator.from_first(lambda: secrets.token_hex(16)), communicator.rank, describe, listener)
    roll_call.begin()
    addresses = ["127.0.0.1"] if is_one_host else _own_addresses()
    own = json.dumps([socket.gethostname(), addresses, listener.getsockname()[1]]).encode()
    entries = np.zeros((communicator.size, 512))
    entries[communicator.rank, : len(own)] = np.frombuffer(own, np.uint8)[:512]
    entries = communicator.sum_array(entries)
    members = []
    for rank, entry in enumerate(entries):
        host, known, port = json.loads(entry.astype(np.uint8).tobytes().rstrip(b"\0"))
        members.append(Member(rank, host, tuple(known), port))
    # Each process calls one on the next host. Where a network lets nobody through, nobody is blamed later.
    called = members[(communicator.rank + (1 if is_one_host else communicator.local_size)) % communicator.size]
    choices = [Member(called.rank, called.host, (address,), called.port) for address in called.addresses]
    answered = [isinstance(roll_call.call(choice, {}), dict) for choice in choices]
    reached = np.zeros(communicator.size)
    reached[called.rank] = answered.index(True) + 1 if any(answered) else 0
    reached = communicator.sum_array(reached)
    roll_call.members = [
        Member(member.rank, member.host, (member.addresses[int(number) - 1],), member.port)
        for member, number in zip(members, reached, strict=True)
        if number and member.rank != communicator.rank
    ]
    return roll_call


def _listen(*, only_here: bool) -> socket.socket:
    """Listen on a free port, for this machine alone or for all networks, of IPv6 too where this machine has it."""
    if not only_here and socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("127.0.0.1" if only_here else "", 0), backlog=1024)


def _own_addresses() -> list[str]:
    """Return the addresses by which other hosts may reach this one, those on the way to rank 0 first."""
    found = []
    for target in (os.environ.get(MASTER_ADDRESS), *_ELSEWHERE):
        with suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                found.append(probe.getsockname()[0])
    others = [address for address in dict.fromkeys(found) if address != "::1" and not address.startswith("127.")]
    return others or found


def _describe_answers(answers: Mapping[Member, Message | str], busy_seconds: float) -> str:
    """Return who is lost and who is silent; if all answer, who has been busy for longest, and at least `busy_seconds`."""
    ended, silent = ([member for member, answer in answers.items() if answer == kind] for kind in (_ENDED, _SILENT))
    found = [
        *([f"{_names(ended)} {_are(ended)} lost: the process has ended"] if ended else []),
        *([f"{_names(silent)} {_are(silent)} silent: stopped, asleep, or its node is lost"] if silent else []),
    ]
    at_work = [(each, answer) for each, answer in answers.items() if isinstance(answer, dict) and not answer["waits"]]
    busy = [(answer["seconds"], each, answer) for each, answer in at_work if answer["seconds"] >= busy_seconds]
    if not found and busy:
        seconds, member, answer = max(busy, key=itemgetter(0))
        found = [f"{member} has been busy with {answer['activity']} for {seconds:.0f} s"]
    return " and ".join(found)


def _names(members: Sequence[Member]) -> str:
    return ", ".join(map(str, members[:_MOST_NAMES])) + (
        f" and {len(members) - _MOST_NAMES} more" * (len(members) > _MOST_NAMES)
    )


def _are(members: Sequence[Member]) -> str:
    return "is" if len(members) == 1 else "are"


# --- what torch.distributed's Gloo says of a connection that broke

_BROKEN = re.compile(r"closed by peer|reset by peer|read error|write error|broken pipe|timed out|timeout", re.IGNORECASE)
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")


def describe_error(error: Exception) -> str:
    """Return what an error of a sum means, in one line, for runs in which nobody could be called."""
    text = " ".join(str(error).split())
    if not _BROKEN.search(text):
        return text[:300]
    address = _ADDRESS.search(text)
    return f"the connection to {address[1] if address else 'another process'} broke, or nothing came over it"
