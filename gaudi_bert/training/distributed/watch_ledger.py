"""What the watchdog knows of every process, and when it ends a run: a pure function of what was heard and the time.

Processes meet at *meeting points*: sums that all of them take part in. Each counts the meeting points that it has reached,
so who waits is ahead of who is waited for, wherever a process sleeps. In the order in which they are looked at:

1. A process that says it failed, or whose connection broke, ends the run at once.
2. A process that says nothing at all for `stall_seconds` is stopped, or its host is out of reach.
3. A process that has reached fewer meeting points than another and has shown no sign of work for `stall_seconds` is stuck.
4. If all are at the same meeting point and none has moved for `stall_seconds`, the connection between them is stuck.

A process that says that its work is *slow* (it builds a graph, or writes a checkpoint) has three times as long for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Member", "Verdict", "judge"]

PATIENCE = 3


@dataclass
class Member:
    """One process as the watchdog knows it.

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

    def beat(self, now: float, arrivals: int, signs: int, place: str, slow: bool) -> None:
        """Take down what it says of itself."""
        if (arrivals, signs) != (self.arrivals, self.signs):
            self.moved = now
        self.heard, self.arrivals, self.signs, self.place, self.slow = now, arrivals, signs, place, slow

    def has_stopped(self, now: float, stall_seconds: float) -> bool:
        """Whether it has not moved for as long as its work allows."""
        return now - self.moved > stall_seconds * (PATIENCE if self.slow else 1)


@dataclass(frozen=True)
class Verdict:
    """Why the run ends, as one line that names the rank, and the exit code of all processes."""

    text: str
    exit_code: int


def judge(members: Sequence[Member], now: float, stall_seconds: float) -> Verdict | None:
    """The reason to end the run, or None.

    Args:
        members: all processes, by rank.
        now: seconds of the same clock as in `members`.
        stall_seconds: how long a process may be silent or stand still.
    """
    for member in members:
        if member.state == "failed":
            return Verdict(f"{_title(member)} failed: {member.reason}", member.exit_code)
    for member in members:
        if member.state == "lost":
            return Verdict(f"{_title(member)} is lost in {member.place}: its process has ended or was killed", 1)
    here = [member for member in members if member.state == "here"]
    for member in here:
        if now - member.heard > stall_seconds:
            return Verdict(
                f"{_title(member)} has said nothing for {now - member.heard:.0f} s in {member.place}: "
                "its process is stopped, or its host cannot be reached",
                1,
            )
    return _stuck(here, now, stall_seconds)


def _stuck(here: Sequence[Member], now: float, stall_seconds: float) -> Verdict | None:
    if not here:
        return None
    fewest = min(member.arrivals for member in here)
    behind = [member for member in here if member.arrivals == fewest]
    stuck = [member for member in behind if member.has_stopped(now, stall_seconds)]
    names = ", ".join(f"{_title(member)} in {member.place}" for member in stuck)
    seconds = min((now - member.moved for member in stuck), default=0.0)
    if stuck and len(behind) < len(here):
        return Verdict(f"{names}: no sign of work for {seconds:.0f} s, and the other processes wait for it", 1)
    if len(stuck) == len(here):
        return Verdict(f"no process has moved for {seconds:.0f} s: {names}; check the network between them", 1)
    return None


def _title(member: Member) -> str:
    return f"rank {member.rank} ({member.name})"
