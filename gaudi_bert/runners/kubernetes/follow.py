"""Follows one submitted step to its end: logs, progress, and the reason where it fails or does not start.

The object is read, checked, and then watched until it changes; a watch that is dropped or has expired only means that the
object is read again a little earlier. So nothing that happens between two watches is lost.

What is suspended waits for its queue, for as long as that takes; when it is admitted, its time to start begins again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter, human_seconds
from gaudi_bert.runners.kubernetes.client import Cluster, Json, title_of
from gaudi_bert.runners.kubernetes.logs import LogFollower, StepProgress
from gaudi_bert.runners.kubernetes.reasons import (
    Problem,
    State,
    describe_suspension,
    is_suspended,
    job_outcome,
    pods_of,
    step_problem,
)

_WATCH_SECONDS = 5
_SHORTEST_ROUND_SECONDS = 0.2
_LOG_END_SECONDS = 10
# A wait that passes sooner is not reported: most volumes are bound, and most pods placed, soon after a Job is created.
_PASSING_SECONDS = 15.0


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
                waits.begin_again()
                progress.show_waiting(describe_suspension(cluster, current))
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
                    _give_up(cluster, current, problem, waits.waited)
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
                self._reporter.say(f"{problem.reason}; retrying")
        return False


def _give_up(cluster: Cluster, item: Json, problem: Problem, waited: float) -> None:
    """Remove what only holds resources, and say why."""
    cluster.delete(item["kind"], item["metadata"]["name"])
    after = f" after {human_seconds(waited)}" if waited >= 1 else ""
    removed = f"{problem.reason}{after} ({title_of(item)} was removed)"
    raise _ERRORS.get(problem.state, FailedError)(f"{removed}; {problem.remedy}" if problem.remedy else removed)
