"""Ending a process when another process of the run is lost or hangs, and comparing the settings of all processes.

When a process is killed, its connections break, and the sum for which the other processes wait raises an error. When a
process is suspended (SIGSTOP), hangs or is cut off from the network, there is no error. Therefore a thread in each process
checks whether the process itself makes progress. If there is no progress for `stall_seconds`, the thread prints one line
that names the process that is lost or does not respond (`failure_detector.py`), and ends its own process with exit code 1.
Slow work may take three times as long. The connection time-outs of Horovod and torch.distributed are also three times as
long, so that they do not expire first.

If the launcher of a process has ended, the process saves a checkpoint and stops. If it still runs after `ORPHAN_SECONDS`,
the thread ends it.
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
from gaudi_bert.engines.failure_detector import FailureDetector, start_failure_detector, summarize_gloo_error
from gaudi_bert.engines.protocol import Communicator, T

# The watchdog ends a process that makes no progress for `stall_seconds`. During slow work, such as building a graph or
# writing a checkpoint, it waits this many times as long.
SLOW_WORK_FACTOR = 3
_POLL_SECONDS = 0.25
# A launcher ends all processes as soon as one of them has ended. Therefore a failing process waits for this time before it
# ends, so that the other processes can also report the reason.
_EXIT_DELAY_SECONDS = 1.5
# If its launcher has ended, a process saves a checkpoint and stops. If it still runs after this time, the watchdog ends it.
ORPHAN_SECONDS = 10.0


class Watchdog:
    """A context manager that ends this process if it makes no progress for too long. A separate thread checks the progress.

    Args:
        process_name: The name of this process, for error messages.
        stall_seconds: The maximum time without progress.

    Attributes:
        failure_detector: Calls the other processes. None until the processes have exchanged their addresses.
    """

    def __init__(self, process_name: str, stall_seconds: float) -> None:
        self._process_name, self._stall_seconds = process_name, stall_seconds
        self._activity, self._limit = "the start", stall_seconds * SLOW_WORK_FACTOR
        self._progressed_at = time.monotonic()
        self._saved, self._waits = 0, False
        self.failure_detector: FailureDetector | None = None
        # Only one thread may report why this process ends, so the thread that reports the reason acquires this lock. Any
        # other thread that tries to report is blocked until the process ends.
        self._error_report = threading.Lock()
        self._launcher, self._orphaned = os.getppid(), False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch_progress, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self.failure_detector is not None:
            self.failure_detector.close()

    def record_progress(self) -> None:
        """Record that this process has made progress."""
        self._progressed_at, self._waits = time.monotonic(), False

    def record_waiting_for_others(self) -> None:
        """Record that this process has finished its part of an update and waits for the other processes."""
        self._progressed_at, self._waits = time.monotonic(), True

    def record_activity(self, activity: str, slow: bool) -> None:
        """Record that this process begins an activity.

        Args:
            activity: A description for error messages.
            slow: Whether the activity may take longer than usual.
        """
        self._activity = activity
        self._limit = self._stall_seconds * (SLOW_WORK_FACTOR if slow else 1)
        self.record_progress()

    def record_saved_update(self, update: int) -> None:
        """Record the number of the last update whose checkpoint is complete."""
        self._saved = update

    def describe_activity(self) -> dict[str, Any]:
        """Return what this process is doing. The failure detector sends this description to other processes on request."""
        return {"waits": self._waits, "activity": self._activity, "seconds": time.monotonic() - self._progressed_at}

    def describe_failed_processes(self, min_busy_seconds: float = math.inf) -> str:
        """Return a description of the other processes that are lost, suspended or busy.

        The result of `FailureDetector.describe_failed_processes` is returned. It is empty if all other processes make
        progress, or if the processes have not exchanged their addresses yet.
        """
        return "" if self.failure_detector is None else self.failure_detector.describe_failed_processes(min_busy_seconds)

    def disarm(self) -> None:
        """Prevent the watchdog thread from ending this process, so that the caller can report an error itself.

        If the thread is already ending the process, this call does not return.
        """
        self._error_report.acquire()

    def make_abort_error(self, reason: str) -> FailedError:
        """Return the error that ends this process after another process failed."""
        saved = f"the last saved update is {self._saved}; " if self._saved else ""
        return FailedError(
            f"{self._process_name} aborts during {self._activity}: {reason}; {saved}run the same command again to resume"
        )

    def _watch_progress(self) -> None:
        """End this process if it makes no progress, if another process reports a failure, or if the launcher has ended.

        If the launcher has ended, this process first receives SIGTERM, so that it can save a checkpoint.
        """
        while not self._done.wait(_POLL_SECONDS):
            waited = time.monotonic() - self._progressed_at
            if waited > self._limit:
                unknown = (
                    f"no progress for {waited:.0f} s, because this process or another one is lost, stopped or suspended"
                )
                self._report_and_exit(self.describe_failed_processes(self._stall_seconds / 2) or unknown)
            if self.failure_detector is not None and self.failure_detector.reason:
                self._report_and_exit(self.failure_detector.reason)
            if os.getppid() != self._launcher and not self._orphaned:
                self._orphaned = True
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Timer(ORPHAN_SECONDS, self._report_and_exit, ["its launcher has exited"]).start()

    def _report_and_exit(self, reason: str) -> None:
        """Print an error message with the reason, and end this process with exit code 1. Do nothing if the `with` block has
        already ended.
        """
        self._error_report.acquire()
        if self._done.is_set():
            return
        print(f"error: {self.make_abort_error(reason)}", file=sys.stderr, flush=True)  # noqa: T201 - nothing else can report it before the process exits
        time.sleep(_EXIT_DELAY_SECONDS)
        os._exit(FailedError.exit_code)


@dataclass(frozen=True)
class ConnectedProcess(Communicator):
    """The communicator of one process in a run with several processes. Each engine has a subclass that exchanges arrays.

    Attributes:
        watchdog: Watches this process. Until `watch_processes_during_block` is entered, it does nothing.
        facts: Values that must be equal in all processes. They are compared before the training begins.
    """

    watchdog: Watchdog = field(default_factory=lambda: Watchdog("a process", math.inf), repr=False, compare=False)
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def run_on_first_process(self, function: Callable[[], T]) -> T:
        """Call `function` in the process with rank 0 only, and return its result in every process."""
        return self._run_on_rank_and_broadcast(0, function)

    def _run_on_rank_and_broadcast(self, rank: int, function: Callable[[], T]) -> T:
        """Call `function` only in the process with the given rank, and return its result in every process."""
        content = np.frombuffer(pickle.dumps(function()) if self.rank == rank else b"", np.uint8)
        size = int(self.sum_array(np.array([len(content)]))[0])
        shared = self.sum_array(content if self.rank == rank else np.zeros(size))
        value: T = pickle.loads(shared.astype(np.uint8).tobytes())
        return value

    def check_processes_have_same_settings(self) -> None:
        """Check that the settings, versions, model and data of every process equal those of rank 0.

        Raises:
            InputError: A value differs. All processes raise the same error, about the first process that differs.
        """
        host = socket.gethostname()
        first_host, first = self.run_on_first_process(lambda: (host, dict(self.facts)))
        names = [name for name, value in first.items() if self.facts.get(name) != value]
        differs = np.zeros(self.size)
        differs[self.rank] = bool(names)
        differs = self.sum_array(differs)

        def describe_difference() -> str:
            """Return the name of the first setting or other common value that differs between this process and rank 0, and
            its values in both.
            """
            own, right = (shorten(str(each.get(names[0]))) for each in (self.facts, first))
            return f"{names[0]} is {own} in rank {self.rank} ({host}), but {right} in rank 0 ({first_host})"

        if differs.any():
            found = self._run_on_rank_and_broadcast(int(differs.argmax()), describe_difference)
            raise InputError(f"{found}; start all ranks with the same version, settings, model and data")

    def record_activity(self, activity: str, *, slow: bool = False) -> None:
        """Report to the watchdog what this process is doing."""
        self.watchdog.record_activity(activity, slow)

    def record_saved_update(self, update: int) -> None:
        """Report to the watchdog the number of the last update whose checkpoint is complete."""
        self.watchdog.record_saved_update(update)

    def record_waiting_for_others(self) -> None:
        """Report to the watchdog that this process is about to wait for the others."""
        self.watchdog.record_waiting_for_others()

    @contextmanager
    def watch_processes_during_block(self, settings: LoopSettings) -> Iterator[Communicator]:
        """Inside a `with` block, end this process with an error message if it or another process of the run makes no
        progress, or if another process is lost. All processes enter and leave the block at the same time.

        Yields:
            The communicator to use inside the block.

        Raises:
            InputError: The settings, the versions or the data of the processes differ.
            FailedError: Another process was lost or hangs.
        """
        with Watchdog(str(self), settings.stall_seconds) as watchdog:
            own = replace(self, watchdog=watchdog)
            try:
                own.check_processes_have_same_settings()
                watchdog.failure_detector = start_failure_detector(own, watchdog.describe_activity)
                yield own
                own.barrier()
            except StoppedError:  # raised by all processes after the same update
                _ignore_sigterm()
                with suppress(*self.errors):
                    own.barrier()
                raise
            except (GaudiBertError, KeyboardInterrupt):
                _ignore_sigterm()
                raise
            except self.errors as error:  # another process did not take part in a sum
                watchdog.disarm()
                _ignore_sigterm()
                raise watchdog.make_abort_error(
                    watchdog.describe_failed_processes() or summarize_gloo_error(error)
                ) from error


def _ignore_sigterm() -> None:
    """Ignore SIGTERM, so that this process can still report why it ends.

    Launchers terminate all other processes as soon as one process has ended.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def collect_values_that_must_agree(settings: LoopSettings, further_facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that all processes of a run must have in common, by name, such as the version and the settings.

    Args:
        settings: The settings of the training loop. The device and the number of threads may differ.
        further_facts: Further values that must be equal.
    """
    values = settings.model_dump(mode="json", exclude={"device", "threads"})
    own_facts = {f"{settings.section_name}.{name}": value for name, value in values.items()}
    return {"gaudi-bert": __version__, **own_facts, **further_facts}
