"""Jobs and MPIJobs that wait for a queue: suspended until they are admitted, and again when others come first.

Kueue suspends whatever carries the label of one of its queues, without being asked, and makes a Workload for it, whose
conditions say what it waits for (kueue.sigs.k8s.io, "Troubleshooting Jobs"). An MPIJob has one Workload with launcher and
workers, so that it is admitted as one; its pods carry no label of their own. Where Workloads may not be read, the Job's own
condition is all that is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.connection import ClusterError
from gaudi_bert.runners.kubernetes.problem import Answer, one_line

__all__ = ["QUEUE_LABEL", "describe_suspension", "is_suspended", "queue_reason", "workloads_of"]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_OWNER_LABEL = "kueue.x-k8s.io/job-uid"
# The newest version of the API first; a cluster may serve either.
_KINDS = ("Workload", "OlderWorkload")


def is_suspended(item: Answer) -> bool:
    """Whether a Job or an MPIJob is held back, so that it has no pods, or loses those that it has."""
    spec = item.get("spec", {})
    return bool((spec.get("runPolicy") or {}).get("suspend") if item["kind"] == "MPIJob" else spec.get("suspend"))


def workloads_of(cluster: Cluster, item: Answer) -> list[Answer]:
    """What Kueue keeps about `item`; nothing where there is no Kueue, or where this account may not see it."""
    try:
        for kind in _KINDS:
            found = cluster.find(kind, f"{_OWNER_LABEL}={item['metadata'].get('uid', '')}")
            if found:
                return list(found)
    except ClusterError as error:
        if error.status != 403:
            raise
    return []


def describe_suspension(item: Answer, workloads: Sequence[Answer]) -> str:
    """What a suspended `item` waits for, in one line.

    Args:
        item: the Job or MPIJob.
        workloads: what its queue keeps about it.
    """
    title = f"{item['kind']} {item['metadata']['name']}"
    queue = (item["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    reason = queue_reason(workloads) or "; ".join(_own_reasons(item))
    if queue is None:
        said = f": {reason}" if reason else ""
        return f"{title} is suspended{said}; it goes on when a queue of the cluster, or `kubectl edit`, resumes it"
    return f"{title} waits for its queue {queue}: {reason or 'not looked at yet'}"


def queue_reason(workloads: Sequence[Answer]) -> str:
    """Why the newest of `workloads` is not admitted; empty where nothing is said."""
    if not workloads:
        return ""
    newest = max(workloads, key=lambda workload: str(workload["metadata"].get("creationTimestamp") or ""))
    return "; ".join(dict.fromkeys(_reasons(newest)))


def _reasons(workload: Answer) -> Iterator[str]:
    status = workload.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    if workload.get("spec", {}).get("active") is False:
        yield "it was deactivated, and waits until its Workload is made active again"
    if _is(conditions, "Evicted", "True"):
        yield _said(conditions["Evicted"])
    if _is(conditions, "QuotaReserved", "True"):
        for check in status.get("admissionChecks") or ():
            if check.get("state") != "Ready":
                said = one_line(check.get("message") or "") or check.get("state", "Pending")
                yield f"admission check {check['name']}: {said}"
        return
    for kind in ("QuotaReserved", "Admitted"):
        if _is(conditions, kind, "False"):
            yield _said(conditions[kind])
            if conditions[kind].get("reason") == "Inadmissible":
                yield "see `kubectl get localqueues`, and correct kubernetes.queue"
            return


def _own_reasons(item: Answer) -> Iterator[str]:
    for condition in (item.get("status") or {}).get("conditions") or ():
        if condition["type"] == "Suspended" and condition.get("status") == "True":
            yield _said(condition)


def _is(conditions: Answer, kind: str, status: str) -> bool:
    return kind in conditions and conditions[kind].get("status") == status


def _said(condition: Answer) -> str:
    return one_line(condition.get("message") or "") or str(condition.get("reason", condition["type"]))
