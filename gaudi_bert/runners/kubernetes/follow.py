"""Follows one submitted Job or MPIJob to its end: logs, progress, and the reason where it fails or does not start.

The object is read, checked, and then watched until it changes; a watch that is dropped or has expired only means that the
object is read again a little earlier. So nothing that happens between two watches is lost.

What is suspended waits for its queue, for as long as that takes: it has no pods that could be stuck, and when it is admitted
its time to start begins again. So it goes with what is suspended while it runs, whose pods are taken away meanwhile.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence

from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import Reporter, human_seconds
from gaudi_bert.runners.kubernetes.client import Cluster, ClusterError, ForbiddenError, Json, StreamDroppedError
from gaudi_bert.runners.kubernetes.logs import LogFollower, StepProgress
from gaudi_bert.runners.kubernetes.manifests import POD_LABELS, QUEUE_LABEL
from gaudi_bert.runners.kubernetes.pods import pod_specs
from gaudi_bert.runners.kubernetes.problems import (
    RUN_AGAIN,
    Problem,
    ReadLog,
    claim_problem,
    few_pods_problem,
    is_worker,
    job_outcome,
    lacks_pods,
    last_warning,
    lost_node,
    missing_object,
    no_pods_problem,
    one_line,
    pod_problem,
    worst_problem,
)

_WATCH_SECONDS = 5
_SHORTEST_ROUND_SECONDS = 0.2
_LOG_END_SECONDS = 10
# What passes sooner is not reported: most volumes are bound, and most pods placed, a moment after a Job is created.
_PASSING_SECONDS = 15.0
# How long a Job may take to replace pods that were stopped on request; its backoff begins with 10 s, and doubles.
_RESTART_SECONDS = 15.0
# Enough for what the ranks and mpirun write after one has failed.
_LOG_END_LINES = 1000
# Of Kueue: the label that names the owner of a Workload, and the kinds, the newest version of the API first.
_OWNER_LABEL = "kueue.x-k8s.io/job-uid"
_WORKLOADS = ("Workload", "OlderWorkload")


class PodsDisruptedError(FailedError):
    """The cluster took the pods away; the same Job may be submitted again, which counts for nothing if they have `saved`."""

    def __init__(self, message: str, *, saved: bool) -> None:
        super().__init__(message)
        self.saved = saved


def pods_of(cluster: Cluster, item: Json) -> list[Json]:
    """The pods of a step."""
    return cluster.find("Pod", f"{POD_LABELS[item['kind']]}={item['metadata']['name']}")


def workloads_of(cluster: Cluster, item: Json) -> list[Json]:
    """The Workloads of `item`; none without Kueue, or where this account may not see them."""
    try:
        for kind in _WORKLOADS:
            workloads = cluster.find(kind, f"{_OWNER_LABEL}={item['metadata'].get('uid', '')}")
            if workloads:
                return workloads
    except ForbiddenError:
        pass
    return []


def log_reader(cluster: Cluster) -> ReadLog:
    """How the end of a container's log is read, for the error of a rank that failed; empty where it cannot be read."""

    @functools.cache
    def log_end(name: str, container: str) -> str:
        try:
            lines = list(cluster.log_lines(name, container, follow=False, last=_LOG_END_LINES))
        except (ClusterError, StreamDroppedError):
            return ""
        return "\n".join(line.partition(" ")[2] for line in lines)

    return lambda pod, container: log_end(pod["metadata"]["name"], container)


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
    progress = StepProgress(item, reporter)
    logs = LogFollower(cluster, reporter, progress)
    read_log = log_reader(cluster)
    limit, stops = _StartLimit(start_seconds, reporter), _Stops()
    try:
        while True:
            round_started = time.monotonic()
            current = cluster.read(item["kind"], item["metadata"]["name"])
            if current is None:
                raise FailedError(f"{item['kind']} {item['metadata']['name']} was removed while it ran; run it again")
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


def problem_of(cluster: Cluster, item: Json, pods: Sequence[Json], read_log: ReadLog) -> Problem | None:
    """What is wrong with the pods of a running Job or MPIJob, or why it has none, or too few."""
    if not pods:
        return no_pods_problem(item, _events_of_maker(cluster, item))
    problem = worst_problem(pods, read_log)
    if problem is None or problem.disrupted:
        problem = next(filter(None, (lost_node(pod, cluster.events) for pod in pods)), problem)
    if problem is not None and not problem.only_slow and not problem.disrupted:
        return problem
    if lacks_pods(item, pods):
        refused = few_pods_problem(item, pods, _events_of_maker(cluster, item))
        if refused is not None:
            return refused
    return problem if problem is None or problem.disrupted else _why_slow(cluster, pods) or problem


def _why_slow(cluster: Cluster, pods: Sequence[Json]) -> Problem | None:
    """What is missing to pods that do not start; those with the same containers need the same."""
    slow = {pod["spec"]["containers"][0]["name"]: pod for pod in pods if pod_problem(pod) is not None}
    missing = (missing_object(pod, cluster.events(pod["metadata"]["name"])) for pod in slow.values())
    return next(filter(None, missing), None)


def _raise_unless_complete(item: Json, outcome: str, problem: Problem | None) -> None:
    if outcome == "complete":
        return
    if problem is None or problem.only_slow:
        raise FailedError(f"{item['kind']} {item['metadata']['name']} {outcome}; see `gaudi-bert k8s logs`")
    raise PodsDisruptedError(str(problem), saved=problem.saved) if problem.disrupted else FailedError(str(problem))


def _give_up(cluster: Cluster, item: Json, pods: Sequence[Json], problem: Problem, waited: float) -> None:
    """Remove what only holds resources, and say why."""
    reason, remedy = problem.reason, problem.remedy
    claims = [] if problem.started else _claim_problems(cluster, item)
    if claims and (problem.only_slow or "laim" in reason):
        reason, remedy = claims[0].reason, claims[0].remedy
    elif problem.only_slow:
        names = [item["metadata"]["name"], *(pod["metadata"]["name"] for pod in pods)]
        warnings = [warning for name in names if (warning := last_warning(cluster.events(name)))]
        reason += f": {warnings[-1]}" if warnings else ""
    cluster.delete(item["kind"], item["metadata"]["name"])
    after = f" after {human_seconds(waited)}" if waited >= 1 else ""
    raise FailedError(f"{reason}{after} ({item['kind']} {item['metadata']['name']} was removed); {remedy}")


def _events_of_maker(cluster: Cluster, item: Json) -> list[Json]:
    """What the cluster noted about who makes the pods of `item`: itself, and an MPIJob's Job that launches."""
    name, created = item["metadata"]["name"], item["metadata"].get("creationTimestamp") or ""
    launcher = cluster.events(f"{name}-launcher") if item["kind"] == "MPIJob" else []
    events = [*launcher, *cluster.events(name)]
    # Events outlive the object that they are about, and an earlier one may have had the same name.
    return [event for event in events if (event.get("lastTimestamp") or created) >= created]


def _claim_problems(cluster: Cluster, item: Json) -> list[Problem]:
    """What keeps the volumes of `item` from being bound."""
    volumes = [volume for spec in pod_specs(item) for volume in spec.get("volumes") or ()]
    names = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume}
    problems = []
    for name in sorted(names):
        claim = cluster.read("PersistentVolumeClaim", name)
        problem = claim_problem(claim, cluster.events(name)) if claim is not None else None
        if problem is not None:
            problems.append(problem)
    return problems


# --- what waits for a queue: suspended until it is admitted, and again when others come first
#
# Kueue suspends whatever carries the label of one of its queues, by itself, and creates a Workload for it, whose
# conditions say what it waits for (kueue.sigs.k8s.io, "Troubleshooting Jobs"). An MPIJob has one Workload with launcher and
# workers, so that it is admitted as one; its pods carry no label of their own. Where Workloads may not be read, the Job's
# own condition is all that is known.


def is_suspended(item: Json) -> bool:
    """Whether a Job or an MPIJob is held back, so that it has no pods, or loses those that it has."""
    spec = item.get("spec", {})
    return bool((spec.get("runPolicy") or {}).get("suspend") if item["kind"] == "MPIJob" else spec.get("suspend"))


def describe_suspension(item: Json, workloads: Sequence[Json]) -> str:
    """What a suspended Job or MPIJob waits for, in one line; `workloads` is what its queue keeps about it."""
    title = f"{item['kind']} {item['metadata']['name']}"
    queue = (item["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    own = (item.get("status") or {}).get("conditions") or ()
    own_reasons = [_message_of(each) for each in own if each["type"] == "Suspended" and each.get("status") == "True"]
    reason = _queue_reason(workloads) or "; ".join(own_reasons)
    if queue is None:
        because = f": {reason}" if reason else ""
        return f"{title} is suspended{because}; a queue of the cluster, or `kubectl edit`, resumes it"
    return f"{title} waits for its queue {queue}: {reason or 'not looked at yet'}"


def _queue_reason(workloads: Sequence[Json]) -> str:
    """Why the newest of `workloads` is not admitted; empty where the reason is unknown."""
    if not workloads:
        return ""
    newest = max(workloads, key=lambda workload: str(workload["metadata"].get("creationTimestamp") or ""))
    return "; ".join(dict.fromkeys(_reasons(newest)))


def _reasons(workload: Json) -> Iterator[str]:
    status = workload.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    if workload.get("spec", {}).get("active") is False:
        yield "it was deactivated, and waits until its Workload is active again"
    if _is(conditions, "Evicted", "True"):
        yield _message_of(conditions["Evicted"])
    if _is(conditions, "QuotaReserved", "True"):
        for check in status.get("admissionChecks") or ():
            if check.get("state") != "Ready":
                message = one_line(check.get("message") or "") or check.get("state", "Pending")
                yield f"admission check {check['name']}: {message}"
        return
    for kind in ("QuotaReserved", "Admitted"):
        if _is(conditions, kind, "False"):
            yield _message_of(conditions[kind])
            if conditions[kind].get("reason") == "Inadmissible":
                yield "see `kubectl get localqueues`, and correct kubernetes.queue"
            return


def _is(conditions: Json, kind: str, status: str) -> bool:
    return kind in conditions and conditions[kind].get("status") == status


def _message_of(condition: Json) -> str:
    return one_line(condition.get("message") or "") or str(condition.get("reason", condition["type"]))
