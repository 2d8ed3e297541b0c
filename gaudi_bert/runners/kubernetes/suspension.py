"""Jobs and MPIJobs that wait for a queue: suspended until they are admitted, and again when others come first.

Kueue suspends whatever carries the label of one of its queues, by itself, and creates a Workload for it, whose
conditions say what it waits for (kueue.sigs.k8s.io, "Troubleshooting Jobs"). An MPIJob has one Workload with launcher and
workers, so that it is admitted as one; its pods carry no label of their own. Where Workloads may not be read, the Job's
own condition is all that is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gaudi_bert.runners.kubernetes.client import Json
from gaudi_bert.runners.kubernetes.manifests import QUEUE_LABEL
from gaudi_bert.runners.kubernetes.problems import one_line


def is_suspended(item: Json) -> bool:
    """Whether a Job or an MPIJob is held back, so that it has no pods, or loses those that it has."""
    spec = item.get("spec", {})
    return bool((spec.get("runPolicy") or {}).get("suspend") if item["kind"] == "MPIJob" else spec.get("suspend"))


def describe_suspension(item: Json, workloads: Sequence[Json]) -> str:
    """What a suspended Job or MPIJob waits for, in one line; `workloads` is what its queue keeps about it."""
    title = f"{item['kind']} {item['metadata']['name']}"
    queue = (item["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    reason = _queue_reason(workloads) or "; ".join(_own_reasons(item))
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


def _own_reasons(item: Json) -> Iterator[str]:
    for condition in (item.get("status") or {}).get("conditions") or ():
        if condition["type"] == "Suspended" and condition.get("status") == "True":
            yield _message_of(condition)


def _is(conditions: Json, kind: str, status: str) -> bool:
    return kind in conditions and conditions[kind].get("status") == status


def _message_of(condition: Json) -> str:
    return one_line(condition.get("message") or "") or str(condition.get("reason", condition["type"]))
