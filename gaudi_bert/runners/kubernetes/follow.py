"""Follows one submitted step to its end: logs, progress, and the reason where it fails or does not start.

The object is read, checked, and then watched until it changes; a watch that is dropped or has expired only means that the
object is read again a little earlier. So nothing that happens between two watches is lost.

What is suspended waits for its queue, for as long as that takes; when it is admitted, its time to start begins again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter, human_seconds
from gaudi_bert.runners.kubernetes.client import Cluster, Json, title_of
from gaudi_bert.runners.kubernetes.logs import LogFollower, StepProgress
from gaudi_bert.runners.kubernetes.manifests import QUEUE_LABEL
from gaudi_bert.runners.kubernetes.reasons import (
    Problem,
    State,
    current_pods,
    describe_suspension,
    is_suspended,
    job_outcome,
    log_reader,
    pods_of,
    step_problem,
)

_WATCH_SECONDS = 5
_SHORTEST_ROUND_SECONDS = 0.2
_LOG_END_SECONDS = 10
# A wait that passes sooner is not reported: most volumes are bound, and most pods placed, soon after a Job is created.
_PASSING_SECONDS = 15.0
# How long a Job may take to replace pods that were stopped on request; its backoff begins with 10 s, and doubles.
_RESTART_SECONDS = 15.0
# What a message tells a person to do who reads it on their own machine; a cluster does it by itself.
_BY_HAND = re.compile(r"(; |, and )(run it again|the same command)[^;]*")


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
    progress = StepProgress(item, reporter)
    logs = LogFollower(cluster, reporter, progress)
    read_log = log_reader(cluster)
    waits, stops = _Waits(start_seconds, reporter), _Stops()
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
            if outcome is None and is_suspended(current):
                waits.begin_again()
                progress.show_waiting(describe_suspension(cluster, current))
            else:
                problem = step_problem(cluster, current, pods, read_log) if outcome != "complete" else None
                if outcome is not None:
                    logs.finish(_LOG_END_SECONDS)
                    if outcome == "complete":
                        return
                    if problem is None or problem.state is State.WAITS:
                        raise FailedError(f"{title_of(current)} {outcome}; see `gaudi-bert k8s logs`")
                    raise _ERRORS.get(problem.state, FailedError)(str(problem))
                if problem is None:
                    waits.begin_again()
                elif waits.are_over(problem):
                    _give_up(cluster, current, problem, waits.waited)
                if stops.last_too_long(current, pods, problem):
                    cluster.delete(current["kind"], current["metadata"]["name"])
                    raise PodsStoppedError(f"{current['metadata']['name']} was stopped on request")
                progress.show(current, pods)
            cluster.wait_for_change(current, _WATCH_SECONDS)
            if time.monotonic() - round_started < _SHORTEST_ROUND_SECONDS:
                time.sleep(_SHORTEST_ROUND_SECONDS)
    finally:
        logs.finish(0)


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

    def are_over(self, problem: Problem) -> bool:
        """Whether to give up because of `problem`; where not, it is reported, unless that was done already."""
        if problem.state is not State.WAITS:
            self.begin_again()
        elif self._waiting_since is None:
            self._waiting_since = self._clock()
        if problem.state is State.HOPELESS or (problem.state is State.WAITS and self.waited >= self._start_seconds):
            return True
        lasts = problem.state is not State.WAITS or self.waited >= _PASSING_SECONDS
        if lasts and problem.without_names not in self._reported:
            self._reported.add(problem.without_names)
            if problem.state is State.WAITS:
                self._reporter.say(f"{problem} (giving up after {human_seconds(self._start_seconds)})")
            else:
                self._reporter.say(f"{_BY_HAND.sub('', problem.reason)}; retrying")
        return False


class _Stops:
    """Whether pods that were stopped on request wait for the backoff that their Job has after failures."""

    def __init__(self) -> None:
        self._has_worked = False
        self._since: float | None = None

    def last_too_long(self, item: Json, pods: Sequence[Json], problem: Problem | None) -> bool:
        """Whether nothing has replaced them for longer than after a first failure, though nothing stands in the way.

        A queue would have to admit a new Job first, and the launcher of an MPIJob waits for its workers.
        """
        at_work = any(pod.get("status", {}).get("phase") in ("Pending", "Running") for pod in current_pods(pods))
        self._has_worked |= at_work
        stopped = problem is not None and problem.state is State.STOPPED and self._has_worked and not at_work
        if not stopped or item["kind"] == "MPIJob" or QUEUE_LABEL in (item["metadata"].get("labels") or {}):
            self._since = None
            return False
        self._since = time.monotonic() if self._since is None else self._since
        return time.monotonic() - self._since >= _RESTART_SECONDS


def _give_up(cluster: Cluster, item: Json, problem: Problem, waited: float) -> None:
    """Remove what only holds resources, and say why."""
    cluster.delete(item["kind"], item["metadata"]["name"])
    after = f" after {human_seconds(waited)}" if waited >= 1 else ""
    removed = f"{problem.reason}{after} ({title_of(item)} was removed)"
    raise _ERRORS.get(problem.state, FailedError)(f"{removed}; {problem.remedy}" if problem.remedy else removed)
