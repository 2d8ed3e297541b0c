"""What became of a Job or an MPIJob, why it has no pods, and why its volume is not bound: pure functions of answers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gaudi_bert.runners.kubernetes.problem import Answer, Problem, one_line

__all__ = ["claim_problem", "job_outcome", "last_warning", "no_pods_problem"]

# Why pods are not even made, as the warnings of their Job or MPIJob have it, whether that can pass, and the remedy.
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


def job_outcome(item: Answer) -> str | None:
    """`complete`, `failed: <reason>`, or None while a Job or an MPIJob goes on."""
    for condition in item.get("status", {}).get("conditions") or ():
        if condition.get("status") != "True":
            continue
        if condition["type"] in ("Complete", "Succeeded"):
            return "complete"
        if condition["type"] == "Failed":
            return f"failed: {condition.get('reason', 'unknown')}: {one_line(condition.get('message', ''))}"
    return None


def no_pods_problem(item: Answer, events: Sequence[Answer]) -> Problem:
    """A Job for which no pod has been made yet.

    Args:
        item: the Job or MPIJob.
        events: what the cluster noted about it, oldest first.
    """
    title = f"{item['kind']} {item['metadata']['name']}"
    said = last_warning(events)
    for pattern, hopeless, remedy in _REFUSALS:
        if pattern.search(said):
            return Problem(f"{title} gets no pods: {said}", remedy, hopeless, started=False)
    remedy = "see that the MPI operator runs" if item["kind"] == "MPIJob" else "see `kubectl describe job`"
    return Problem(f"{title} has no pods", remedy, started=False, only_slow=True)


def last_warning(events: Sequence[Answer]) -> str:
    """The newest warning that the cluster noted, or an empty text."""
    said = [one_line(event.get("message", "")) for event in events if event.get("type") == "Warning"]
    return said[-1] if said else ""


def claim_problem(claim: Answer, events: Sequence[Answer]) -> Problem | None:
    """Why a PersistentVolumeClaim is not bound; None where it is."""
    phase = claim.get("status", {}).get("phase")
    if phase == "Bound":
        return None
    said = last_warning(events)
    wanted = claim["spec"].get("storageClassName") or "the default class"
    modes = ", ".join(claim["spec"].get("accessModes") or ())
    reason = f"volume claim {claim['metadata']['name']} is {phase or 'Pending'}, not Bound ({wanted}, {modes})"
    reason += f": {said}" if said else ""
    remedy = "set kubernetes.storage_class to one of `kubectl get storageclass`, or kubernetes.work_claim to a bound claim"
    return Problem(reason, remedy, started=False)
