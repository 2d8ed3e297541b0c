"""What is wrong with a step on a cluster, or what it waits for, and what to do about it.

Of Jobs, MPIJobs and TrainJobs: what became of one, why it has no pods or too few. Of their volume claims: why one is not
bound. Of what a queue holds back: why.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

from gaudi_bert.runners.kubernetes.client import Cluster, ClusterError, ForbiddenError, Json, StreamDroppedError, title_of
from gaudi_bert.runners.kubernetes.manifests import POD_LABELS, QUEUE_LABEL
from gaudi_bert.runners.kubernetes.pod_problems import (
    Problem,
    ReadLog,
    is_worker,
    last_warning,
    lost_node,
    missing_object,
    one_line,
    pod_problem,
    worst_problem,
)
from gaudi_bert.runners.kubernetes.pods import pod_specs

# Enough for what the ranks and mpirun write after one has failed.
_LOG_END_LINES = 1000
# Of Kueue: the label that names the owner of a Workload, and the kinds, the newest version of the API first.
_OWNER_LABEL = "kueue.x-k8s.io/job-uid"
_WORKLOADS = ("Workload", "OlderWorkload")


def pods_of(cluster: Cluster, item: Json) -> list[Json]:
    """The pods of a step."""
    return cluster.find("Pod", f"{POD_LABELS[item['kind']]}={item['metadata']['name']}")


def workloads_of(cluster: Cluster, item: Json) -> list[Json]:
    """The Workloads of `item`, what its queue keeps about it; none without Kueue, or where this account may not see them."""
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


def problem_of(cluster: Cluster, item: Json, pods: Sequence[Json], read_log: ReadLog) -> Problem | None:
    """What is wrong with the pods of a running Job or MPIJob, or why it has none, or too few."""
    if not pods:
        return _no_pods_problem(item, _events_of_maker(cluster, item))
    problem = worst_problem(pods, read_log)
    if problem is None or problem.disrupted:
        problem = next(filter(None, (lost_node(pod, cluster.events) for pod in pods)), problem)
    if problem is not None and not problem.only_slow and not problem.disrupted:
        return problem
    if lacks_pods(item, pods):
        refused = _refusal(item, pods, _events_of_maker(cluster, item))
        if refused is not None:
            return refused
    return problem if problem is None or problem.disrupted else _why_slow(cluster, pods) or problem


def _why_slow(cluster: Cluster, pods: Sequence[Json]) -> Problem | None:
    """What is missing to pods that do not start; those with the same containers need the same."""
    slow = {pod["spec"]["containers"][0]["name"]: pod["metadata"]["name"] for pod in pods if pod_problem(pod) is not None}
    missing = (missing_object(f"pod {name}", last_warning(cluster.events(name))) for name in slow.values())
    return next(filter(None, missing), None)


def _events_of_maker(cluster: Cluster, item: Json) -> list[Json]:
    """What the cluster noted about who makes the pods of `item`: itself, and an MPIJob's Job that launches."""
    name, created = item["metadata"]["name"], item["metadata"].get("creationTimestamp") or ""
    launcher = cluster.events(f"{name}-launcher") if item["kind"] == "MPIJob" else []
    events = [*launcher, *cluster.events(name)]
    # Events outlive the object that they are about, and an earlier one may have had the same name.
    return [event for event in events if (event.get("lastTimestamp") or created) >= created]


def claim_problem(cluster: Cluster, item: Json) -> Problem | None:
    """What keeps a volume of `item` from being bound."""
    volumes = [volume for spec in pod_specs(item) for volume in spec.get("volumes") or ()]
    names = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume}
    claims = [claim for name in sorted(names) if (claim := cluster.read("PersistentVolumeClaim", name)) is not None]
    problems = (_claim_problem(claim, cluster.events(claim["metadata"]["name"])) for claim in claims)
    return next(filter(None, problems), None)


# --- Jobs, MPIJobs and volume claims

# Why pods are not even created, from the warnings of their Job or MPIJob; whether that is hopeless; and the remedy.
_REFUSALS = (
    (
        re.compile(r"violates PodSecurity"),
        True,
        "this namespace's pod security forbids such pods: see `gaudi-bert doctor --cluster` for the level that they need, "
        "or choose another kubernetes.namespace",
    ),
    (
        re.compile(r"exceeded quota"),
        False,
        "wait until the quota has room, lower resources.data or resources.training, or ask for a larger quota",
    ),
    (
        re.compile(r"admission webhook .* denied the request"),
        True,
        "the cluster's own rules refuse such pods: correct what the message names",
    ),
    (
        re.compile(r"(maximum|minimum) \S+ usage per (Container|Pod) is"),
        True,
        "the namespace's LimitRange refuses such pods: change resources.data or resources.training to what it allows",
    ),
)
# Who makes the pods where Kubernetes itself does not.
_MAKERS = {
    "MPIJob": "see that the MPI operator runs",
    "TrainJob": "see that the controllers of Kubeflow Trainer and JobSet run",
}


def job_outcome(item: Json) -> str | None:
    """`complete`, `failed: <reason>`, or None while a Job or an MPIJob runs."""
    for condition in item.get("status", {}).get("conditions") or ():
        if condition.get("status") != "True":
            continue
        if condition["type"] in ("Complete", "Succeeded"):
            return "complete"
        if condition["type"] == "Failed":
            return f"failed: {condition.get('reason', 'unknown')}: {one_line(condition.get('message', ''))}"
    return None


def _no_pods_problem(item: Json, events: Sequence[Json]) -> Problem:
    """A Job or MPIJob that has no pods yet; `events` is what the cluster noted about it, oldest first."""
    remedy = _MAKERS.get(item["kind"], "see `kubectl describe job`")
    slow = Problem(f"{title_of(item)} has no pods", remedy, started=False, only_slow=True)
    return _refusal(item, (), events) or slow


def lacks_pods(item: Json, pods: Sequence[Json]) -> bool:
    """Whether a Job or MPIJob has fewer pods than it should have now."""
    return _at_work(item, pods) < expected_pods(item)


def needs_all_pods(item: Json) -> bool:
    """Whether the pods of a step train together, so that none continues without the others."""
    labels = item["metadata"].get("labels") or {}
    return item.get("kind", "Job") != "Job" or labels.get("app.kubernetes.io/component") == "train"


def expected_pods(item: Json) -> int:
    """How many pods a step should have at a time; of an MPIJob, how many workers."""
    spec = item.get("spec", {})
    if item["kind"] == "TrainJob":
        return int(spec.get("trainer", {}).get("numNodes") or 1)
    if item["kind"] == "MPIJob":
        return int(spec.get("mpiReplicaSpecs", {}).get("Worker", {}).get("replicas") or 0)
    remaining = int(spec.get("completions") or 1) - int(item.get("status", {}).get("succeeded") or 0)
    return min(int(spec.get("parallelism") or 1), remaining)


def _at_work(item: Json, pods: Sequence[Json]) -> int:
    """How many pods run or wait; of an MPIJob, how many workers."""
    counted = filter(is_worker, pods) if item["kind"] == "MPIJob" else pods
    return sum(pod.get("status", {}).get("phase") in ("Pending", "Running") for pod in counted)


def _refusal(item: Json, pods: Sequence[Json], events: Sequence[Json]) -> Problem | None:
    """Why the cluster makes no pods, or fewer than `item` wants; None where it refuses none.

    The pods that a Job has do its work one after another; those that train together wait for the others.
    """
    refusal = last_warning(events)
    for pattern, hopeless, remedy in _REFUSALS:
        if pattern.search(refusal):
            gets = f"{_at_work(item, pods)} of {expected_pods(item)} pods" if pods else "no pods"
            goes_on = bool(pods) and not needs_all_pods(item) and not hopeless
            return Problem(
                f"{title_of(item)} gets {gets}: {refusal}", remedy, hopeless, started=goes_on, may_pass=bool(pods)
            )
    return None


def _claim_problem(claim: Json, events: Sequence[Json]) -> Problem | None:
    """Why a PersistentVolumeClaim is not bound; None where it is."""
    phase = claim.get("status", {}).get("phase")
    if phase == "Bound":
        return None
    warning = last_warning(events)
    storage_class = claim["spec"].get("storageClassName") or "the default class"
    modes = ", ".join(claim["spec"].get("accessModes") or ())
    reason = f"volume claim {claim['metadata']['name']} is {phase or 'Pending'}, not Bound ({storage_class}, {modes})"
    reason += f": {warning}" if warning else ""
    remedy = "set kubernetes.storage_class to one of `kubectl get storageclass`, or kubernetes.work_claim to a bound claim"
    return Problem(reason, remedy, started=False)


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
    title = title_of(item)
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
