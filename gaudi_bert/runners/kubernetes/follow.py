"""Follows one submitted Job or MPIJob to its end: logs, progress, and the reason where it fails or does not start.

The object is read, checked, and then watched until it changes; a watch that is dropped or has expired only means that the
object is read again a little earlier. So nothing that happens between two watches is lost.

What is suspended waits for its queue, for as long as that takes: it has no pods that could be stuck, and when it is admitted
its time to start begins again. So it goes with what is suspended while it runs, whose pods are taken away meanwhile.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import Reporter, human_seconds
from gaudi_bert.runners.kubernetes.client import Cluster, ClusterError, Json, NotFoundError, StreamDroppedError, title_of
from gaudi_bert.runners.kubernetes.manifests import QUEUE_LABEL
from gaudi_bert.runners.kubernetes.pod_problems import RUN_AGAIN, Problem, is_worker, last_warning, worst_problem
from gaudi_bert.runners.kubernetes.problems import (
    claim_problem,
    describe_suspension,
    is_suspended,
    job_outcome,
    lacks_pods,
    log_reader,
    needs_all_pods,
    pods_of,
    problem_of,
    workloads_of,
)
from gaudi_bert.runners.launch import MPIRUN_FOOTER, rank_pieces

_WATCH_SECONDS = 5
_SHORTEST_ROUND_SECONDS = 0.2
_LOG_END_SECONDS = 10
# What passes sooner is not reported: most volumes are bound, and most pods placed, a moment after a Job is created.
_PASSING_SECONDS = 15.0
# How long a Job may take to replace pods that were stopped on request; its backoff begins with 10 s, and doubles.
_RESTART_SECONDS = 15.0


class PodsDisruptedError(FailedError):
    """The cluster took the pods away; the same Job may be submitted again, which counts for nothing if they have `saved`."""

    def __init__(self, message: str, *, saved: bool) -> None:
        super().__init__(message)
        self.saved = saved


def follow(
    cluster: Cluster,
    item: Json,
    reporter: Reporter,
    start_seconds: float,
    *,
    shows_logs: bool = True,
) -> None:
    """Return when `item` is complete; it may fail with a `PodsDisruptedError`, after which it can be submitted again.

    Its pods may wait `start_seconds` for a node, a volume or an image.
    """
    progress = _StepProgress(item, reporter)
    logs = _LogFollower(cluster, reporter, progress)
    read_log = log_reader(cluster)
    limit, stops = _StartLimit(start_seconds, reporter), _Stops()
    try:
        while True:
            round_started = time.monotonic()
            current = cluster.read(item["kind"], item["metadata"]["name"])
            if current is None:
                raise FailedError(f"{title_of(item)} was removed while it ran; run it again")
            current = {"kind": item["kind"], **current}  # Answers about one object do not always name its kind.
            pods = pods_of(cluster, current)
            if shows_logs:
                logs.update(pods)
            outcome = job_outcome(current)
            suspended = outcome is None and is_suspended(current)
            problem = None if suspended else problem_of(cluster, current, pods, read_log)
            if outcome is not None:
                logs.finish(_LOG_END_SECONDS)
                _raise_unless_complete(current, outcome, problem)
                return
            if suspended:
                limit.begin_again()
                progress.show_waiting(describe_suspension(current, workloads_of(cluster, current)))
            else:
                if problem is None:
                    limit.begin_again()
                elif limit.is_over(problem):
                    _give_up(cluster, current, pods, problem, limit.waited)
                if stops.last_too_long(current, pods, problem):
                    cluster.delete(current["kind"], current["metadata"]["name"])
                    raise PodsDisruptedError(f"{current['metadata']['name']} was stopped on request", saved=True)
                progress.show(current, pods)
            cluster.wait_for_change(current, _WATCH_SECONDS)
            if time.monotonic() - round_started < _SHORTEST_ROUND_SECONDS:
                time.sleep(_SHORTEST_ROUND_SECONDS)
    finally:
        logs.finish(0)


class _StartLimit:
    """How long pods that cannot start are waited for; each new problem is reported once."""

    def __init__(self, start_seconds: float, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._start_seconds, self._reporter, self._clock = start_seconds, reporter, clock
        self._waiting_since: float | None = None
        self._reported: set[str] = set()
        self._noticed: dict[str, float] = {}

    @property
    def waited(self) -> float:
        """Seconds since pods began to wait."""
        return 0.0 if self._waiting_since is None else self._clock() - self._waiting_since

    def begin_again(self) -> None:
        """Whatever pods wait for next, its time begins again."""
        self._waiting_since = None
        self._noticed.clear()

    def is_over(self, problem: Problem) -> bool:
        """Whether to give up because of `problem`."""
        if problem.started:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = self._clock()
        if problem.hopeless or (not problem.started and self.waited >= self._start_seconds):
            return True
        if not problem.only_slow and problem.without_names not in self._reported:
            self._report(problem)
        return False

    def _report(self, problem: Problem) -> None:
        """Report what has ended, and what lasts."""
        since = self._noticed.setdefault(problem.without_names, self._clock())
        may_pass = problem.may_pass or not problem.started
        if may_pass and self._clock() - since < _PASSING_SECONDS:
            return
        self._reported.add(problem.without_names)
        if not problem.started:
            self._reporter.say(f"{problem} (giving up after {human_seconds(self._start_seconds)})")
        elif may_pass:
            self._reporter.say(str(problem))
        else:
            self._reporter.say(f"{problem.reason if problem.remedy == RUN_AGAIN else problem}; retrying")


class _Stops:
    """Whether pods that were stopped on request, or deleted, wait for the backoff that their Job has after failures."""

    def __init__(self) -> None:
        self._at_work: set[str] = set()
        self._since: float | None = None

    def last_too_long(self, item: Json, pods: Sequence[Json], problem: Problem | None) -> bool:
        """Whether nothing has replaced them for longer than after a first failure, though nothing stands in the way.

        A queue would have to admit a new Job first, so what has one keeps it.
        """
        ours = {pod["metadata"]["name"]: pod for pod in pods if not is_worker(pod)}
        at_work = {name for name, pod in ours.items() if pod.get("status", {}).get("phase") in ("Pending", "Running")}
        if at_work:
            self._at_work, self._since = at_work, None
        is_free = problem is None or problem.only_slow or problem.saved
        if at_work or not self._at_work or not is_free or QUEUE_LABEL in (item["metadata"].get("labels") or {}):
            return False
        workers = [pod for pod in pods if is_worker(pod)]
        waits = item["kind"] == "MPIJob" and (
            lacks_pods(item, pods) or any(pod["status"].get("phase") != "Running" for pod in workers)
        )
        ends = [worst_problem([ours[name], *workers]) for name in self._at_work if name in ours]
        if waits or not all(end is not None and end.saved for end in ends):
            return False
        self._since = time.monotonic() if self._since is None else self._since
        return time.monotonic() - self._since >= _RESTART_SECONDS


def _raise_unless_complete(item: Json, outcome: str, problem: Problem | None) -> None:
    if outcome == "complete":
        return
    if problem is None or problem.only_slow:
        raise FailedError(f"{title_of(item)} {outcome}; see `gaudi-bert k8s logs`")
    raise PodsDisruptedError(str(problem), saved=problem.saved) if problem.disrupted else FailedError(str(problem))


def _give_up(cluster: Cluster, item: Json, pods: Sequence[Json], problem: Problem, waited: float) -> None:
    """Remove what only holds resources, and say why."""
    reason, remedy = problem.reason, problem.remedy
    claim = None if problem.started else claim_problem(cluster, item)
    if claim is not None and (problem.only_slow or "laim" in reason):
        reason, remedy = claim.reason, claim.remedy
    elif problem.only_slow:
        names = [item["metadata"]["name"], *(pod["metadata"]["name"] for pod in pods)]
        warnings = [warning for name in names if (warning := last_warning(cluster.events(name)))]
        reason += f": {warnings[-1]}" if warnings else ""
    cluster.delete(item["kind"], item["metadata"]["name"])
    after = f" after {human_seconds(waited)}" if waited >= 1 else ""
    raise FailedError(f"{reason}{after} ({title_of(item)} was removed); {remedy}")


# --- what the pods of a step write: the log of one that is alone line by line, of those that share a step the last line
#
# A thread follows each log. When the connection drops, the log is read again from a little before the last line that came,
# and what was shown already is recognised by its time.

_EVERY_SECONDS = 60.0
# More logs at once than a person can read help nobody.
_MOST_LOGS = 8
_OVERLAP_SECONDS = 5


class _StepProgress:
    """How far a step is, in one line a minute where nothing else is shown."""

    def __init__(self, item: Json, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = item["metadata"]["name"]
        # Pods that train together report once, in the first one's log.
        self._parts = 1 if needs_all_pods(item) else int(item.get("spec", {}).get("completions") or 1)
        self._reporter, self._clock = reporter, clock
        self._began = self._last_shown = clock()
        self._last_lines: dict[str, str] = {}
        self._waits_for: str | None = None
        self._waiting_since = 0.0

    @property
    def is_shared(self) -> bool:
        """Whether several pods share the step."""
        return self._parts > 1

    def take(self, pod: str, prefix: str, lines: Sequence[str]) -> None:
        """Show lines of a pod that is alone; of others keep the last one."""
        for line in lines:
            if self.is_shared:
                self._last_lines[pod] = line
            else:
                self._last_shown = self._clock()
                self._reporter.say(prefix + line)

    def show(self, item: Json, pods: Sequence[Json]) -> None:
        """Show how far the step is, where a minute has gone by (on a terminal: at once)."""
        self._waits_for = None
        at_work = [pod["metadata"]["name"] for pod in pods if pod.get("status", {}).get("phase") == "Running"]
        if not at_work or not self._is_due():
            return
        text = f"running for {human_seconds(self._clock() - self._began)}"
        if self.is_shared:
            done = int(item.get("status", {}).get("succeeded") or 0)
            last_lines = [f"{pod}: {self._last_lines[pod]}" for pod in at_work if pod in self._last_lines]
            text = "; ".join([f"{done} of {self._parts} parts done, {len(at_work)} at work", *(last_lines or [text])])
        self._reporter.show(f"{self._name}: {text}")

    def show_waiting(self, reason: str) -> None:
        """Say what the step waits for: at once where that is new, and then every minute with the time that it took."""
        if reason != self._waits_for:
            if self._waits_for is None:
                self._waiting_since = self._clock()
            self._waits_for, self._last_shown = reason, self._clock()
            self._reporter.say(reason)
        elif self._is_due():
            self._reporter.show(f"{reason} ({human_seconds(self._clock() - self._waiting_since)} so far)")

    def _is_due(self) -> bool:
        """Whether a line may be shown now; the minute then starts again."""
        now = self._clock()
        if not self._reporter.live and now - self._last_shown < _EVERY_SECONDS:
            return False
        self._last_shown = now
        return True


def followed_container(pod: Json) -> str | None:
    """The container whose log is of interest; None for a pod that only serves others (a worker of an MPIJob)."""
    return None if is_worker(pod) else pod["spec"]["containers"][0]["name"]


def _is_later_node(pod: Json) -> bool:
    """Whether a pod trains together with a first one, which reports for all."""
    metadata = pod["metadata"]
    index = (metadata.get("annotations") or {}).get("batch.kubernetes.io/job-completion-index", "0")
    return index != "0" and (metadata.get("labels") or {}).get("app.kubernetes.io/component") == "train"


class _Advice:
    """Holds back what mpirun writes between two lines of dashes, until it is known whether that is the cause of an end.

    It is, where no rank writes after it; mpirun's word that a rank has failed is not, since the reason names that rank.
    """

    _EDGE = re.compile(r"-{60,}")

    def __init__(self) -> None:
        self._held: list[str] = []
        self._is_open = False

    def shown(self, line: str) -> list[str]:
        """What of `line`, and of what was held back, is to be shown now."""
        is_edge = self._EDGE.fullmatch(line) is not None
        if is_edge or self._is_open:
            self._is_open ^= is_edge
            self._held.append(line)
            return []
        if any(rank is not None for rank, _ in rank_pieces(line)):
            self._held = []
        return [line]

    def rest(self) -> list[str]:
        """What is still held back when the log has ended."""
        held, self._held, self._is_open = self._held, [], False
        return MPIRUN_FOOTER.sub("", "".join(f"{line}\n" for line in held)).splitlines()


@dataclass
class _Followed:
    advice: _Advice = field(default_factory=_Advice)
    thread: threading.Thread | None = None
    last_moment: str = ""
    started: float = field(default_factory=time.monotonic)
    reached_end: bool = False

    @property
    def is_read(self) -> bool:
        """Whether somebody reads it at present."""
        return self.thread is not None and self.thread.is_alive()


class _LogFollower:
    """Reads the logs of a step's pods for `progress`."""

    def __init__(self, cluster: Cluster, reporter: Reporter, progress: _StepProgress) -> None:
        self._cluster = cluster
        self._reporter = reporter
        self._progress = progress
        self._followed: dict[str, _Followed] = {}
        self._reported: set[int | None] = set()

    def update(self, pods: Sequence[Json]) -> None:
        """Read the logs of those pods whose container has started, and resume those that were dropped."""
        for pod in pods:
            name, container = pod["metadata"]["name"], followed_container(pod)
            statuses = pod.get("status", {}).get("containerStatuses") or ()
            states = [status.get("state") or {} for status in statuses if status["name"] == container]
            state = next(iter(states[0]), "waiting") if states else "waiting"
            reading = sum(log.is_read for log in self._followed.values())
            log = self._followed.get(name)
            ended = log is not None and (log.is_read or (log.reached_end and state == "terminated"))
            if container is None or _is_later_node(pod) or state == "waiting" or ended or reading >= _MOST_LOGS:
                continue
            prefix = f"[{name}] " if len(pods) > 1 else ""
            self._read(log or self._followed.setdefault(name, _Followed()), name, container, prefix)

    def finish(self, seconds: float) -> None:
        """Let the logs that are still coming in end, for so long at the most."""
        until = time.monotonic() + seconds
        for log in self._followed.values():
            if log.thread is not None:
                log.thread.join(max(0.0, until - time.monotonic()))

    def _read(self, log: _Followed, pod: str, container: str, prefix: str) -> None:
        shown_until = log.last_moment
        since = int(time.monotonic() - log.started) + _OVERLAP_SECONDS if shown_until else None

        def show() -> None:
            try:
                for line in self._cluster.log_lines(pod, container, since):
                    moment, _, text = line.partition(" ")
                    if moment > shown_until:
                        log.last_moment = moment
                        self._progress.take(pod, prefix, log.advice.shown(text))
                self._progress.take(pod, prefix, log.advice.rest())
                log.reached_end = True
            except StreamDroppedError:
                pass  # The next update takes the log up again.
            except ClusterError as error:
                self._report(error)

        log.reached_end = False
        log.thread = threading.Thread(target=show, daemon=True)
        log.thread.start()

    def _report(self, error: ClusterError) -> None:
        """Report that logs cannot be read, once for each reason; the status of a pod that is gone explains its end."""
        if not isinstance(error, NotFoundError) and error.status not in self._reported:
            self._reported.add(error.status)
            self._reporter.say(f"{error}; the run continues without this log")
