"""What ends a process of several when another one is lost, stopped or asleep; and what all of them must have alike.

A process that is killed breaks its connections, and the sum that the others wait in raises an error. One that is stopped
(SIGSTOP), sleeps, or is cut off from the network breaks nothing. So each process has a thread that looks at its own signs of
work: if there was none for `stall_seconds`, the thread ends the process with exit code 1 and one line, which names the
process that is lost or silent (`roll_call.py`). The time-outs of Horovod and of torch.distributed, which are for
connections, are three times as long, as for slow work.

A process whose launcher has ended asks itself to stop, which saves a checkpoint, and ends anyway soon after.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gaudi_bert import __version__
from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError, StoppedError, shorten
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.engines.protocol import Communicator, T
from gaudi_bert.engines.roll_call import RollCall, describe_error, open_roll_call

# Slow work (building a graph, writing a checkpoint) may take so many times as long.
SLOW_WORK_FACTOR = 3
_LOOK_SECONDS = 0.25
# A launcher ends all processes once one has ended: none ends before the others have had time to report why.
_LAST_WORDS_SECONDS = 1.5
# How long a process may take to save and end once its launcher has ended.
ORPHAN_SECONDS = 10.0


class Watchdog:
    """A thread that ends this process, `who`, when that shows no sign of work for too long; as long as the context lasts."""

    def __init__(self, who: str, stall_seconds: float) -> None:
        self._who, self._stall_seconds = who, stall_seconds
        self._activity, self._limit = "the beginning", stall_seconds * SLOW_WORK_FACTOR
        self._moved = time.monotonic()
        self._saved, self._waits = 0, False
        # Calls the other processes, from when all of them know one another.
        self.roll_call: RollCall | None = None
        # Whoever takes it reports why this process ends; the other thread waits for the end.
        self._last_word = threading.Lock()
        self._launcher, self._orphaned = os.getppid(), False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self.roll_call is not None:
            self.roll_call.close()

    def moved(self) -> None:
        """Take a sign of work."""
        self._moved, self._waits = time.monotonic(), False

    def arrived(self) -> None:
        """Take a sign of work: this process's share is done, and it waits for the others."""
        self._moved, self._waits = time.monotonic(), True

    def note(self, activity: str, slow: bool) -> None:
        """Take a sign of work, what it is on, and whether that may take longer than usual."""
        self._activity = activity
        self._limit = self._stall_seconds * (SLOW_WORK_FACTOR if slow else 1)
        self.moved()

    def note_saved(self, update: int) -> None:
        """Take the last update of which a checkpoint is complete."""
        self._saved = update

    def describe(self) -> dict[str, Any]:
        """Return what this process is doing, for those that call it."""
        return {"waits": self._waits, "activity": self._activity, "seconds": time.monotonic() - self._moved}

    def find_reason(self, busy_seconds: float = math.inf) -> str:
        """Return which processes are lost, silent or busy; empty if they cannot be called, or all of them work."""
        return "" if self.roll_call is None else self.roll_call.find_reason(busy_seconds)

    def take_last_word(self) -> None:
        """Keep the thread from ending this process, which reports the reason itself; wait if the thread already does so."""
        self._last_word.acquire()

    def error(self, reason: str) -> FailedError:
        """Return the error of a process that ends because of another one."""
        saved = f"the last saved update is {self._saved}, and " if self._saved else ""
        return FailedError(f"{self._who} aborts: {reason}, in {self._activity}; {saved}the same command goes on")

    def _watch(self) -> None:
        while not self._done.wait(_LOOK_SECONDS):
            waited = time.monotonic() - self._moved
            if waited > self._limit:
                unknown = f"no sign of work for {waited:.0f} s: another process is lost, stopped or asleep, or this one"
                self._end(self.find_reason(self._stall_seconds / 2) or unknown)
            if self.roll_call is not None and self.roll_call.reason:
                self._end(self.roll_call.reason)
            if os.getppid() != self._launcher and not self._orphaned:
                self._orphaned = True
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Timer(ORPHAN_SECONDS, self._end, ["its launcher has ended"]).start()

    def _end(self, reason: str) -> None:
        self._last_word.acquire()
        if self._done.is_set():
            return
        print(f"error: {self.error(reason)}", file=sys.stderr, flush=True)  # noqa: T201 - the last word of this process
        time.sleep(_LAST_WORDS_SECONDS)
        os._exit(FailedError.exit_code)


@dataclass(frozen=True)
class ConnectedProcess(Communicator):
    """One of several processes; nothing is watched until they train. An engine adds how arrays travel.

    `facts` have to be the same in all: they are compared before the processes train.
    """

    watchdog: Watchdog = field(default_factory=lambda: Watchdog("a process", math.inf), repr=False, compare=False)
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what `make` returns in the first process, which alone calls it."""
        return self._from_rank(0, make)

    def _from_rank(self, rank: int, make: Callable[[], T]) -> T:
        content = np.frombuffer(pickle.dumps(make()) if self.rank == rank else b"", np.uint8)
        size = int(self.sum_array(np.array([len(content)]))[0])
        shared = self.sum_array(content if self.rank == rank else np.zeros(size))
        value: T = pickle.loads(shared.astype(np.uint8).tobytes())
        return value

    def compare(self) -> None:
        """Refuse `facts` that are not those of rank 0; all processes raise the same error, about the first that differs."""
        host = socket.gethostname()
        first_host, first = self.from_first(lambda: (host, dict(self.facts)))
        names = [name for name, value in first.items() if self.facts.get(name) != value]
        differs = np.zeros(self.size)
        differs[self.rank] = bool(names)
        differs = self.sum_array(differs)

        def difference() -> str:
            own, right = (shorten(str(each.get(names[0]))) for each in (self.facts, first))
            return f"rank {self.rank} ({host}) has {names[0]} = {own}, rank 0 ({first_host}) has {right}"

        if differs.any():
            reported = self._from_rank(int(differs.argmax()), difference)
            raise InputError(f"{reported}; start all ranks with the same version, settings, model and data")

    def note(self, activity: str, *, slow: bool = False) -> None:
        """Tell the watchdog what this process is doing."""
        self.watchdog.note(activity, slow)

    def note_saved(self, update: int) -> None:
        """Tell the watchdog which update a checkpoint holds."""
        self.watchdog.note_saved(update)

    def arrive(self) -> None:
        """Tell the watchdog that this process is about to wait for the others."""
        self.watchdog.arrived()

    @contextmanager
    def watched(self, settings: LoopSettings) -> Iterator[Communicator]:
        """Watch this process while the context lasts, which begins and ends at the same time in all processes."""
        with Watchdog(str(self), settings.stall_seconds) as watchdog:
            own = replace(self, watchdog=watchdog)
            try:
                own.compare()
                watchdog.roll_call = open_roll_call(own, watchdog.describe)
                yield own
                own.barrier()
            except StoppedError:  # in all processes, at the same update
                _outlive_the_launcher()
                with suppress(*self.errors):
                    own.barrier()
                raise
            except (GaudiBertError, KeyboardInterrupt):
                _outlive_the_launcher()
                raise
            except self.errors as error:  # a sum that another process did not come to
                watchdog.take_last_word()
                _outlive_the_launcher()
                raise watchdog.error(watchdog.find_reason() or describe_error(error)) from error


def _outlive_the_launcher() -> None:
    """Launchers terminate the other processes as soon as one has ended: let this one say why it ends, which it does soon."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def shared_facts(settings: LoopSettings, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what has to be the same in all processes of a run, by its name."""
    own = settings.model_dump(mode="json", exclude={"device", "threads"})
    keys = {f"{settings.section_name}.{name}": value for name, value in own.items()}
    return {"gaudi-bert": __version__, **keys, **facts}
