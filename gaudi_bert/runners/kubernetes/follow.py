"""Wait for a submitted step to end, and show its log, its progress, and why it fails or does not start.

`follow_step` reads the step's object, checks it and its pods, and waits until the object changes. The object is read again
after each wait, so no change is lost. A suspended step may wait for its queue without a time limit, unless the queue reports
that it can never admit the step. When the step is admitted, the time limit for starting begins again.

A thread reads the log of a pod. If a step has several pods, only the log of the first pod is shown. If the connection
breaks, the log is read again from a few seconds before the last line. Lines that were already shown are recognized by their
timestamps and skipped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter, format_seconds
from gaudi_bert.runners.kubernetes.client import (
    Cluster,
    ClusterError,
    Json,
    NotFoundError,
    StreamDroppedError,
    format_object_title,
)
from gaudi_bert.runners.kubernetes.reasons import (
    Problem,
    ProblemState,
    find_step_problem,
    find_suspension_problem,
    is_distributed_training,
    is_mpijob_worker,
    is_suspended,
    list_job_pods,
    read_job_outcome,
)
from gaudi_bert.runners.training_processes import RANK_TAG

_WATCH_SECONDS = 5
_SHORTEST_ROUND_SECONDS = 0.2
_LOG_END_SECONDS = 10
# Most pods are scheduled soon after their Job is created, so a pod is reported only if it waits longer than this.
_PASSING_SECONDS = 15.0
_SAY_EVERY_SECONDS = 60.0
_OVERLAP_SECONDS = 5
_INDEX = "batch.kubernetes.io/job-completion-index"


class PodsStoppedError(FailedError):
    """Raised if the pods of a step were stopped on request or evicted. The step can be submitted again."""


_ERRORS = {ProblemState.HOPELESS: InputError, ProblemState.STOPPED: PodsStoppedError}


def follow_step(
    cluster: Cluster, job: Json, reporter: Reporter, start_timeout_seconds: float, *, show_logs: bool = True
) -> None:
    """Wait until a step that was submitted to the cluster is complete, and show its progress.

    Args:
        cluster: The client for the namespace of the step.
        job: The Job, MPIJob or TrainJob of the step.
        reporter: Shows progress and the lines of the log.
        start_timeout_seconds: How long the pods may wait for a node, a volume or an image before the step is deleted.
        show_logs: Whether to show the log.

    Raises:
        PodsStoppedError: The pods were stopped. The step can be submitted again.
        InputError: The step cannot succeed, because its input is wrong or because the cluster can never start its pods. A
            step that cannot start is deleted.
        FailedError: The step failed, was deleted by somebody, or did not start in time.
    """
    progress = _StepProgress(job, reporter)
    logs = _LogFollower(cluster, reporter, progress)
    start_timer = _StartTimer(start_timeout_seconds, reporter)
    try:
        while True:
            round_started = time.monotonic()
            current = cluster.read_object(job["kind"], job["metadata"]["name"])
            if current is None:
                raise FailedError(f"{format_object_title(job)} was deleted while it ran; run the same command again")
            current = {"kind": job["kind"], **current}  # the server's answer may lack the kind
            pods, outcome = list_job_pods(cluster, current), read_job_outcome(current)
            if show_logs:
                logs.start_or_resume_reading(pods)
            if outcome == "complete":
                logs.wait_until_read(_LOG_END_SECONDS)
                return
            if outcome is None and is_suspended(current):
                suspension = find_suspension_problem(cluster, current)
                progress.show_waiting_reason(str(suspension))
                if start_timer.should_stop_waiting_for_queue(suspension):
                    _delete_step_and_raise(cluster, current, suspension, start_timer)
            else:
                problem = find_step_problem(cluster, current, pods)
                if outcome is not None:
                    logs.wait_until_read(_LOG_END_SECONDS)
                    if problem is None or problem.state is ProblemState.WAITING:
                        raise FailedError(
                            f"{format_object_title(current)} {outcome}; see the logs with `gaudi-bert k8s logs`"
                        )
                    raise _ERRORS.get(problem.state, FailedError)(str(problem))
                if problem is None:
                    start_timer.reset()
                elif start_timer.should_stop_waiting_for_pods(problem):
                    _delete_step_and_raise(cluster, current, problem, start_timer)
                progress.show_progress(current, pods)
            cluster.wait_for_change(current, _WATCH_SECONDS)
            if time.monotonic() - round_started < _SHORTEST_ROUND_SECONDS:
                time.sleep(_SHORTEST_ROUND_SECONDS)
    finally:
        logs.wait_until_read(0)


def _delete_step_and_raise(cluster: Cluster, job: Json, problem: Problem, start_timer: _StartTimer) -> NoReturn:
    """Delete the Job of a step that does not start, and raise an error that states the problem.

    If the Job were not deleted, it could start later without anybody noticing.
    """
    cluster.delete_object(job["kind"], job["metadata"]["name"])
    after = f" after {format_seconds(start_timer.waited_seconds)}" if start_timer.waited_seconds >= 1 else ""
    problem = replace(problem, reason=f"{problem.reason}{after} ({format_object_title(job)} was deleted)")
    raise _ERRORS.get(problem.state, FailedError)(str(problem))


class _StartTimer:
    """Measures how long the pods of a step have been waiting to start, and reports each problem of the step once.

    Args:
        start_timeout_seconds: How long the pods may wait.
        reporter: Shows the problems.
        clock: Replaces `time.monotonic`, for tests.
    """

    def __init__(
        self, start_timeout_seconds: float, reporter: Reporter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._start_seconds, self._reporter, self._clock = start_timeout_seconds, reporter, clock
        self._waiting_since: float | None = None
        self._reported: set[str] = set()

    @property
    def waited_seconds(self) -> float:
        """The number of seconds that the pods have been waiting, or 0 if they are not waiting."""
        return 0.0 if self._waiting_since is None else self._clock() - self._waiting_since

    def reset(self) -> None:
        """Set the waiting time to 0. Call this method when the pods have started or the queue has admitted the step."""
        self._waiting_since = None

    def should_stop_waiting_for_queue(self, problem: Problem) -> bool:
        """Return whether to give up on a suspended step, because the cluster's job queue will never let it start.

        This is True only if the queue has reported a hopeless problem for 15 seconds, because a queue that is being created
        may report such a problem for a moment.

        Args:
            problem: What the suspended step is waiting for, as returned by `find_suspension_problem`.
        """
        if problem.state is not ProblemState.HOPELESS:
            self.reset()
        elif self._waiting_since is None:
            self._waiting_since = self._clock()
        return problem.state is ProblemState.HOPELESS and self.waited_seconds >= _PASSING_SECONDS

    def should_stop_waiting_for_pods(self, problem: Problem) -> bool:
        """Return whether to give up on a step whose pods have this problem. If not, report the problem once.

        A problem that may pass by itself is reported after it has lasted for 15 seconds.
        """
        if problem.state is not ProblemState.WAITING:
            self.reset()
        elif self._waiting_since is None:
            self._waiting_since = self._clock()
        if problem.state is ProblemState.HOPELESS or (
            problem.state is ProblemState.WAITING and self.waited_seconds >= self._start_seconds
        ):
            return True
        lasts = problem.state is not ProblemState.WAITING or self.waited_seconds >= _PASSING_SECONDS
        # Report each problem only once. A pod that cannot be created gets a new name with every attempt, so compare problems
        # without pod names. Lost pods are an exception: each of them is reported.
        key = problem.reason_without_pod_names + (problem.occurrence if problem.state is ProblemState.CONTINUES else "")
        if lasts and key not in self._reported:
            self._reported.add(key)
            if problem.state is ProblemState.WAITING:
                self._reporter.say(f"{problem} (the run gives up after {format_seconds(self._start_seconds)})")
            else:
                self._reporter.say(f"{problem.reason}; the cluster retries")
        return False


# --- logs and progress


class _StepProgress:
    """Shows the log lines of a step, and its progress if no log line was shown for a minute.

    Args:
        job: The Job, MPIJob or TrainJob of the step.
        reporter: Shows the lines.
        clock: Replaces `time.monotonic`, for tests.
    """

    def __init__(self, job: Json, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = job["metadata"]["name"]
        # In most stages, each pod does a separate part of the work. Pods that train together are an exception: they all make
        # the same progress, which the log of the first pod shows. So count them as one part.
        self._parts = 1 if is_distributed_training(job) else int(job.get("spec", {}).get("completions") or 1)
        self._reporter, self._clock = reporter, clock
        self._began = self._last_shown = clock()
        self._waits_for: str | None = None
        self._waiting_since = 0.0

    def show_log_line(self, line: str) -> None:
        """Show a line from the log of a pod."""
        if self._parts == 1:
            self._last_shown = self._clock()
        self._reporter.say(line)

    def show_progress(self, job: Json, pods: Sequence[Json]) -> None:
        """Show the progress of the step if pods are running. In a log, show it only if nothing was shown for a minute."""
        self._waits_for = None
        running = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
        if not running or not self._is_progress_line_due():
            return
        text = f"running for {format_seconds(self._clock() - self._began)}"
        if self._parts > 1:
            done = job.get("status", {}).get("succeeded") or 0
            text = f"{done} of {self._parts} parts are done, {running} are running, {text}"
        self._reporter.show(f"{self._name}: {text}")

    def show_waiting_reason(self, reason: str) -> None:
        """Show why the step is waiting. Show a new reason at once, and repeat it later with the waiting time."""
        if reason != self._waits_for:
            if self._waits_for is None:
                self._waiting_since = self._clock()
            self._waits_for, self._last_shown = reason, self._clock()
            self._reporter.say(reason)
        elif self._is_progress_line_due():
            self._reporter.show(f"{reason} ({format_seconds(self._clock() - self._waiting_since)} so far)")

    def _is_progress_line_due(self) -> bool:
        """Return whether to show a progress line now. On a terminal, a line is always due, and in a log once a minute."""
        now = self._clock()
        if not self._reporter.live and now - self._last_shown < _SAY_EVERY_SECONDS:
            return False
        self._last_shown = now
        return True


def select_container_for_logs(pod: Json) -> str | None:
    """Return the name of the container whose log is shown to users, or None if the pod is a worker of an MPIJob.

    Such a worker only runs sshd, whose log does not help users.
    """
    return None if is_mpijob_worker(pod) else pod["spec"]["containers"][0]["name"]


@dataclass
class _LogState:
    """Records how far the log of a pod has been read.

    Attributes:
        thread: The thread that reads the log, or None if reading has not begun.
        last_timestamp: The timestamp of the last line that was shown, or "" if none was shown.
        started: When the pod was first seen, in seconds of `time.monotonic`.
        reached_end: Whether the log was read to its end.
    """

    thread: threading.Thread | None = None
    last_timestamp: str = ""
    started: float = field(default_factory=time.monotonic)
    reached_end: bool = False


class _LogFollower:
    """Reads the log of a step's first pod in a thread, and shows its lines."""

    def __init__(self, cluster: Cluster, reporter: Reporter, progress: _StepProgress) -> None:
        self._cluster, self._reporter, self._progress = cluster, reporter, progress
        self._logs_by_pod: dict[str, _LogState] = {}
        self._has_complained = False

    def start_or_resume_reading(self, pods: Sequence[Json]) -> None:
        """Start a thread that reads the log of the first pod, if its container has started and no thread is reading the log.

        Call this method again and again. If the connection broke, the next call resumes reading.
        """
        for pod in pods:
            metadata, container = pod["metadata"], select_container_for_logs(pod)
            if container is None or (metadata.get("annotations") or {}).get(_INDEX, "0") != "0":
                continue
            statuses = pod.get("status", {}).get("containerStatuses") or ()
            states = {status["name"]: next(iter(status.get("state") or {}), "waiting") for status in statuses}
            state, log = states.get(container, "waiting"), self._logs_by_pod.setdefault(metadata["name"], _LogState())
            is_read = log.thread is not None and log.thread.is_alive()
            if state != "waiting" and not is_read and not (log.reached_end and state == "terminated"):
                self._start_reader_thread(log, metadata["name"], container)

    def wait_until_read(self, timeout_seconds: float) -> None:
        """Wait until all log lines are shown, but no longer than `timeout_seconds`."""
        until = time.monotonic() + timeout_seconds
        for log in self._logs_by_pod.values():
            if log.thread is not None:
                log.thread.join(max(0.0, until - time.monotonic()))

    def _start_reader_thread(self, log: _LogState, pod: str, container: str) -> None:
        """Start a thread that shows the log lines of a container that were not shown before."""
        shown_until = log.last_timestamp
        since = int(time.monotonic() - log.started) + _OVERLAP_SECONDS if shown_until else None

        def show() -> None:
            """Show new log lines until the log ends or the connection breaks."""
            try:
                for line in self._cluster.read_log_lines(pod, container, since):
                    moment, _, text = line.partition(" ")
                    if moment > shown_until:
                        log.last_timestamp = moment
                        self._progress.show_log_line(RANK_TAG.sub("", text))
                log.reached_end = True
            except StreamDroppedError:
                pass  # the next update resumes reading
            except ClusterError as error:
                # If the pod is gone, the status of the step explains why, so do not report the missing log as well.
                if not isinstance(error, NotFoundError) and not self._has_complained:
                    self._has_complained = True
                    self._reporter.say(f"{error}; the run continues without this log")

        log.reached_end = False
        log.thread = threading.Thread(target=show, daemon=True)
        log.thread.start()
