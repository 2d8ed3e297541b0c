"""Follows one submitted step to its end: logs, progress, and the reason where it fails or does not start.

The object is read, checked, and then watched until it changes, so nothing that happens between two watches is lost. What
is suspended waits for its queue, for as long as that takes, unless the queue says that it can never admit it. When it is
admitted, its time to start begins again.

A thread follows the log of a pod; of pods that share a step, the first one reports. When the connection drops, the log is
read again from a little before the last line that came, and what was shown already is recognised by its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter, format_seconds
from gaudi_bert.runners.kubernetes.client import (
    Cluster,
    ClusterError,
    Json,
    NotFoundError,
    StreamDroppedError,
    title_of,
)
from gaudi_bert.runners.kubernetes.reasons import (
    Problem,
    State,
    is_suspended,
    is_worker,
    job_outcome,
    pods_of,
    step_problem,
    suspension_problem,
    trains_together,
)
from gaudi_bert.runners.launch import RANK_TAG

_WATCH_SECONDS = 5
_SHORTEST_ROUND_SECONDS = 0.2
_LOG_END_SECONDS = 10
# A wait that passes sooner is not reported: most volumes are bound, and most pods placed, soon after a Job is created.
_PASSING_SECONDS = 15.0
_SAY_EVERY_SECONDS = 60.0
_OVERLAP_SECONDS = 5
_INDEX = "batch.kubernetes.io/job-completion-index"


class PodsStoppedError(FailedError):
    """The pods were stopped on request, or taken away after they saved: the same may be submitted again."""


_ERRORS = {State.HOPELESS: InputError, State.STOPPED: PodsStoppedError}


def follow(cluster: Cluster, item: Json, reporter: Reporter, start_seconds: float, *, shows_logs: bool = True) -> None:
    """Return when `item` is complete.

    Its pods may wait `start_seconds` for a node, a volume or an image.

    Raises:
        PodsStoppedError: it can be submitted again.
        InputError: neither waiting nor trying again helps; `item` was removed.
        FailedError: it failed, or did not start in time.
    """
    progress = _StepProgress(item, reporter)
    logs = _LogFollower(cluster, reporter, progress)
    waits = _Waits(start_seconds, reporter)
    try:
        while True:
            round_started = time.monotonic()
            current = cluster.read(item["kind"], item["metadata"]["name"])
            if current is None:
                raise FailedError(f"{title_of(item)} was removed while it ran; run it again")
            current = {"kind": item["kind"], **current}  # Answers about one object do not always name its kind.
            pods, outcome = pods_of(cluster, current), job_outcome(current)
            if shows_logs:
                logs.update(pods)
            if outcome == "complete":
                logs.finish(_LOG_END_SECONDS)
                return
            if outcome is None and is_suspended(current):
                suspension = suspension_problem(cluster, current)
                progress.show_waiting(str(suspension))
                if waits.never_begin(suspension):
                    _give_up(cluster, current, suspension, waits)
            else:
                problem = step_problem(cluster, current, pods)
                if outcome is not None:
                    logs.finish(_LOG_END_SECONDS)
                    if problem is None or problem.state is State.WAITS:
                        raise FailedError(f"{title_of(current)} {outcome}; see `gaudi-bert k8s logs`")
                    raise _ERRORS.get(problem.state, FailedError)(str(problem))
                if problem is None:
                    waits.begin_again()
                elif waits.are_over(problem):
                    _give_up(cluster, current, problem, waits)
                progress.show(current, pods)
            cluster.wait_for_change(current, _WATCH_SECONDS)
            if time.monotonic() - round_started < _SHORTEST_ROUND_SECONDS:
                time.sleep(_SHORTEST_ROUND_SECONDS)
    finally:
        logs.finish(0)


def _give_up(cluster: Cluster, item: Json, problem: Problem, waits: _Waits) -> NoReturn:
    """Remove a step that does not start, so that it does not start later, and raise the error that says why."""
    cluster.delete(item["kind"], item["metadata"]["name"])
    after = f" after {format_seconds(waits.waited)}" if waits.waited >= 1 else ""
    removed = f"{problem.reason}{after} ({title_of(item)} was removed)"
    message = f"{removed}; {problem.remedy}" if problem.remedy else removed
    raise _ERRORS.get(problem.state, FailedError)(message)


class _Waits:
    """Waits for pods that do not start, so long and no longer; reports each new problem once."""

    def __init__(self, start_seconds: float, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._start_seconds, self._reporter, self._clock = start_seconds, reporter, clock
        self._waiting_since: float | None = None
        self._reported: set[str] = set()

    @property
    def waited(self) -> float:
        """Seconds since pods began to wait."""
        return 0.0 if self._waiting_since is None else self._clock() - self._waiting_since

    def begin_again(self) -> None:
        """Whatever pods wait for next, its time begins again."""
        self._waiting_since = None

    def never_begin(self, problem: Problem) -> bool:
        """Return whether a queue can never admit a suspended step, and has said so for some seconds.

        A queue that is just being made may say so for a moment.
        """
        if problem.state is not State.HOPELESS:
            self.begin_again()
        elif self._waiting_since is None:
            self._waiting_since = self._clock()
        return problem.state is State.HOPELESS and self.waited >= _PASSING_SECONDS

    def are_over(self, problem: Problem) -> bool:
        """Whether to give up because of `problem`; where not, it is reported, unless that was done already."""
        if problem.state is not State.WAITS:
            self.begin_again()
        elif self._waiting_since is None:
            self._waiting_since = self._clock()
        if problem.state is State.HOPELESS or (problem.state is State.WAITS and self.waited >= self._start_seconds):
            return True
        lasts = problem.state is not State.WAITS or self.waited >= _PASSING_SECONDS
        # Each pod that is lost is reported. Pods that wait are not, because every attempt to make one has another name.
        key = problem.without_names + (problem.occurrence if problem.state is State.GOES_ON else "")
        if lasts and key not in self._reported:
            self._reported.add(key)
            if problem.state is State.WAITS:
                self._reporter.say(f"{problem} (giving up after {format_seconds(self._start_seconds)})")
            else:
                self._reporter.say(f"{problem.reason}; retrying")
        return False


# --- what the pods write, and how far the step is


class _StepProgress:
    """Shows the progress of a step, in one line a minute where nothing else is shown."""

    def __init__(self, item: Json, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = item["metadata"]["name"]
        # Pods that train together report how far all of them are.
        self._parts = 1 if trains_together(item) else int(item.get("spec", {}).get("completions") or 1)
        self._reporter, self._clock = reporter, clock
        self._began = self._last_shown = clock()
        self._waits_for: str | None = None
        self._waiting_since = 0.0

    def take(self, line: str) -> None:
        """Show a line of a pod."""
        if self._parts == 1:
            self._last_shown = self._clock()
        self._reporter.say(line)

    def show(self, item: Json, pods: Sequence[Json]) -> None:
        """Show how far the step is, where a minute has gone by (on a terminal: at once)."""
        self._waits_for = None
        at_work = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
        if not at_work or not self._is_due():
            return
        text = f"running for {format_seconds(self._clock() - self._began)}"
        if self._parts > 1:
            text = f"{item.get('status', {}).get('succeeded') or 0} of {self._parts} parts done, {at_work} at work, {text}"
        self._reporter.show(f"{self._name}: {text}")

    def show_waiting(self, reason: str) -> None:
        """Say what the step waits for: at once where that is new, and then every minute with the time that it took."""
        if reason != self._waits_for:
            if self._waits_for is None:
                self._waiting_since = self._clock()
            self._waits_for, self._last_shown = reason, self._clock()
            self._reporter.say(reason)
        elif self._is_due():
            self._reporter.show(f"{reason} ({format_seconds(self._clock() - self._waiting_since)} so far)")

    def _is_due(self) -> bool:
        """Whether a line may be shown now; the minute then starts again."""
        now = self._clock()
        if not self._reporter.live and now - self._last_shown < _SAY_EVERY_SECONDS:
            return False
        self._last_shown = now
        return True


def followed_container(pod: Json) -> str | None:
    """Return the container whose log is of interest; None for a pod that only serves others (a worker of an MPIJob)."""
    return None if is_worker(pod) else pod["spec"]["containers"][0]["name"]


@dataclass
class _Followed:
    thread: threading.Thread | None = None
    last_moment: str = ""
    started: float = field(default_factory=time.monotonic)
    reached_end: bool = False


class _LogFollower:
    """Reads the log of the pod of a step, or of the first of several, for `progress`."""

    def __init__(self, cluster: Cluster, reporter: Reporter, progress: _StepProgress) -> None:
        self._cluster, self._reporter, self._progress = cluster, reporter, progress
        self._followed: dict[str, _Followed] = {}
        self._has_complained = False

    def update(self, pods: Sequence[Json]) -> None:
        """Read the logs of those pods whose container has started, and resume those that were dropped."""
        for pod in pods:
            metadata, container = pod["metadata"], followed_container(pod)
            if container is None or (metadata.get("annotations") or {}).get(_INDEX, "0") != "0":
                continue
            statuses = pod.get("status", {}).get("containerStatuses") or ()
            states = {status["name"]: next(iter(status.get("state") or {}), "waiting") for status in statuses}
            state, log = states.get(container, "waiting"), self._followed.setdefault(metadata["name"], _Followed())
            is_read = log.thread is not None and log.thread.is_alive()
            if state != "waiting" and not is_read and not (log.reached_end and state == "terminated"):
                self._read(log, metadata["name"], container)

    def finish(self, seconds: float) -> None:
        """Let the logs that are still coming in end, for so long at the most."""
        until = time.monotonic() + seconds
        for log in self._followed.values():
            if log.thread is not None:
                log.thread.join(max(0.0, until - time.monotonic()))

    def _read(self, log: _Followed, pod: str, container: str) -> None:
        shown_until = log.last_moment
        since = int(time.monotonic() - log.started) + _OVERLAP_SECONDS if shown_until else None

        def show() -> None:
            try:
                for line in self._cluster.log_lines(pod, container, since):
                    moment, _, text = line.partition(" ")
                    if moment > shown_until:
                        log.last_moment = moment
                        self._progress.take(RANK_TAG.sub("", text))
                log.reached_end = True
            except StreamDroppedError:
                pass  # The next update takes the log up again.
            except ClusterError as error:
                # The status of a pod that is gone explains its end.
                if not isinstance(error, NotFoundError) and not self._has_complained:
                    self._has_complained = True
                    self._reporter.say(f"{error}; the run continues without this log")

        log.reached_end = False
        log.thread = threading.Thread(target=show, daemon=True)
        log.thread.start()
