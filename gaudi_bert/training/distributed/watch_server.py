"""The watchdog's side in rank 0: what it knows of every process, when that ends the run, and who has heard of it."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Member", "Verdict", "WatchServer", "judge"]

# Work that is said to be slow (building a graph, writing a checkpoint) has so many times as long.
SLOW_WORK_FACTOR = 3
# A process that has not spoken for so long (it does so twice a second) is not waited for when the run ends.
SILENT_SECONDS = 3.0
SENDING_SECONDS = 0.2


@dataclass
class Member:
    """One process as rank 0 knows it.

    Attributes:
        rank: its number.
        name: its host and process id, for people.
        heard: when its last message came, in seconds of a monotonic clock.
        moved: when it last reached a meeting point or showed a sign of work.
        arrivals: meeting points reached.
        signs: signs of work shown.
        place: what it is doing, for people.
        slow: whether that may take longer than usual.
        state: `left` once it is done, `failed` with `reason` and `exit_code`, `lost` once its connection broke.
        told: whether it has heard the verdict.
    """

    rank: int
    name: str
    heard: float
    moved: float
    arrivals: int = 0
    signs: int = 0
    place: str = "starting"
    slow: bool = True
    state: Literal["here", "left", "failed", "lost"] = "here"
    reason: str = ""
    exit_code: int = 1
    told: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"


@dataclass(frozen=True)
class Verdict:
    """Why the run ends, as one line that names the rank, and the exit code of all processes."""

    text: str
    exit_code: int = 1


def judge(members: Sequence[Member], now: float, stall_seconds: float) -> Verdict | None:
    """The reason to end the run, or None.

    Looked at in this order: a process that failed; one whose connection broke; one that has said nothing for
    `stall_seconds`; one that has reached fewer meeting points than another and shown no sign of work for so long; all of
    them at the same point for so long.

    Args:
        members: all processes, by rank.
        now: seconds of the same clock as in `members`.
        stall_seconds: how long a process may be silent or stand still.
    """
    for member in members:
        if member.state == "failed":
            return Verdict(f"{member} failed: {member.reason}", member.exit_code)
    for member in members:
        if member.state == "lost":
            return Verdict(f"{member} is lost in {member.place}: its process has ended or was killed")
    here = [member for member in members if member.state == "here"]
    for member in here:
        if now - member.heard > stall_seconds:
            silence = f"{member} has said nothing for {now - member.heard:.0f} s in {member.place}"
            return Verdict(f"{silence}: its process is stopped, or its host cannot be reached")
    fewest = min((member.arrivals for member in here), default=0)
    behind = [member for member in here if member.arrivals == fewest]
    stuck = [m for m in behind if now - m.moved > stall_seconds * (SLOW_WORK_FACTOR if m.slow else 1)]
    names = ", ".join(f"{member} in {member.place}" for member in stuck)
    seconds = min((now - member.moved for member in stuck), default=0.0)
    if stuck and len(behind) < len(here):
        return Verdict(f"{names}: no sign of work for {seconds:.0f} s, and the other processes wait for it")
    if stuck and len(stuck) == len(here):
        return Verdict(f"no process has moved for {seconds:.0f} s: {names}; check the network between them")
    return None


class WatchServer(socketserver.ThreadingTCPServer):
    """Hears every process, rank 0 itself too, and answers each message with the verdict, if there is one.

    Messages and answers are JSON, one per line: `{"token", "rank", "name"}` first, then `{"arrivals", "signs", "place",
    "slow"}` again and again, and at last `{"bye"}` or `{"failed", "exit_code"}`.

    Args:
        address: host and port to listen at; port 0 for any.
        size: how many processes there are.
        token: what they must know to be heard.
        stall_seconds: see `judge`.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], size: int, token: str, stall_seconds: float) -> None:
        super().__init__(address, _Connection)
        self.token = token
        self._size, self._stall_seconds = size, stall_seconds
        self._members: dict[int, Member] = {}
        self._verdict: Verdict | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self.serve_forever, args=(0.1,), name="watch-server", daemon=True).start()

    def enter(self, rank: int, name: str) -> Member:
        """A process has said its first word."""
        now = time.monotonic()
        with self._changed:
            self._members[rank] = Member(rank, name, now, now)
            return self._members[rank]

    def hear(self, member: Member, message: dict[str, Any]) -> dict[str, Any]:
        """Take down what a process says; the answer to it."""
        with self._changed:
            member.heard = time.monotonic()
            if "bye" in message:
                member.state = "left"
            elif "failed" in message:
                member.state, member.reason, member.exit_code = "failed", message["failed"], message["exit_code"]
            elif self._verdict is None:
                if (message["arrivals"], message["signs"]) != (member.arrivals, member.signs):
                    member.moved = member.heard
                member.arrivals, member.signs = message["arrivals"], message["signs"]
                member.place, member.slow = message["place"], message["slow"]
                members = [self._members[rank] for rank in sorted(self._members)]
                self._verdict = judge(members, member.heard, self._stall_seconds)
            member.told = self._verdict is not None
            self._changed.notify_all()
            return {} if self._verdict is None else vars(self._verdict)

    def lose(self, member: Member) -> None:
        """The connection of a process has ended."""
        with self._changed:
            if member.state == "here" and not member.told:
                member.state = "lost"
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until every process but rank 0 has left, failed, heard the verdict or fallen silent; at most `seconds`."""
        with self._changed:
            self._changed.wait_for(self._is_done, seconds)
        time.sleep(SENDING_SECONDS)  # what was answered last is still on its way out

    def _is_done(self) -> bool:
        others = [member for rank, member in self._members.items() if rank]
        silent = time.monotonic() - SILENT_SECONDS
        awaited = [each for each in others if each.state == "here" and not each.told and each.heard > silent]
        return len(others) == self._size - 1 and not awaited


class _Connection(socketserver.StreamRequestHandler):
    server: WatchServer

    def handle(self) -> None:
        """Hear one process from its first word to its last."""
        member = None
        try:
            hello = json.loads(self.rfile.readline())
            if hello["token"] != self.server.token:
                return
            member = self.server.enter(int(hello["rank"]), str(hello["name"]))
            self.wfile.write(b"{}\n")
            for line in self.rfile:
                self.wfile.write(json.dumps(self.server.hear(member, json.loads(line))).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError):
            return  # not one of ours, or cut off in the middle of a word
        finally:
            if member is not None:
                self.server.lose(member)
