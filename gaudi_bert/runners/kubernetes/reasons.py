"""Why a pod does not start, or failed, and what to do about it: pure functions of what the API server answered.

The answers are the JSON of the API as plain dictionaries, so that recorded ones can be tested.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Problem",
    "claim_problem",
    "job_outcome",
    "last_warning",
    "no_pods_problem",
    "pod_problem",
    "worst_problem",
]

Answer = Mapping[str, Any]

BAD_INPUT = 2
STOPPED = 75
KILLED = 137

# What is asked for and lacking, as the scheduler writes it, and the remedy.
_SCARCE = {
    "Insufficient habana.ai/gaudi": (
        "wait until cards are free, lower resources.cards or resources.workers, and see `gaudi-bert doctor --cluster`"
    ),
    "Insufficient hugepages-2Mi": "reserve huge pages on the nodes (vm.nr_hugepages), or lower resources.hugepages_2Mi",
    "Insufficient vpc.amazonaws.com/efa": "use nodes with EFA and its device plugin, or set kubernetes.efa to 0",
    "Insufficient memory": "lower resources.data.memory or resources.training.memory, or add nodes",
    "Insufficient cpu": "lower resources.data.cpu or resources.training.cpu, or add nodes",
    "PersistentVolumeClaim": "see whether the claim is bound: kubernetes.storage_class and kubernetes.access_mode must suit",
    "persistentvolumeclaim": "see whether the claim exists and is bound: kubernetes.work_claim, kubernetes.data_claim",
    "untolerated taint": "remove the taint, or add the toleration to what `--render` writes",
    "didn't match Pod's node": "correct kubernetes.node_selector",
}
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
# What a registry says where trying again cannot help.
_NO_SUCH_IMAGE = re.compile(r"not found|manifest unknown|denied|unauthorized|no such|invalid", re.IGNORECASE)
_DESCRIBE = "see `kubectl describe pod`"
_SETUP_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff")


@dataclass(frozen=True)
class Problem:
    """What is wrong with a pod.

    Attributes:
        reason: what happened, one line.
        remedy: what to do, one line.
        hopeless: whether waiting or trying again cannot help.
        started: whether the pod's containers ran at all.
        ordinary: whether every pod is so for a while, so that only its length is a problem.
        taken_away: whether the cluster took the pod away, so that the same work may simply be submitted again.
    """

    reason: str
    remedy: str
    hopeless: bool = False
    started: bool = True
    ordinary: bool = False
    taken_away: bool = False

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


def job_outcome(item: Answer) -> str | None:
    """`complete`, `failed: <reason>`, or None while a Job or an MPIJob goes on."""
    for condition in item.get("status", {}).get("conditions") or ():
        if condition.get("status") != "True":
            continue
        if condition["type"] in ("Complete", "Succeeded"):
            return "complete"
        if condition["type"] == "Failed":
            return f"failed: {condition.get('reason', 'unknown')}: {_one_line(condition.get('message', ''))}"
    return None


def pod_problem(pod: Answer) -> Problem | None:
    """What is wrong with `pod`; None for a pod that waits its turn, runs or has succeeded."""
    status = pod.get("status", {})
    if status.get("phase") == "Succeeded":
        return None
    evicted = _eviction(pod)
    if evicted is not None:
        return evicted
    for container in _container_statuses(status):
        problem = _container_problem(pod, container)
        if problem is not None:
            return problem
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            message = _one_line(condition.get("message", ""))
            remedies = [remedy for sign, remedy in _SCARCE.items() if sign in message]
            remedy = remedies[0] if remedies else _DESCRIBE
            return Problem(f"pod {_name(pod)} is Unschedulable: {message}", remedy, started=False)
    if status.get("phase") == "Failed":
        return Problem(f"pod {_name(pod)} failed: {_one_line(status.get('message', 'no reason given'))}", "run it again")
    return _slow_start(pod)


def no_pods_problem(item: Answer) -> Problem:
    """A Job for which no pod has been made yet."""
    remedy = "see that the MPI operator runs" if item["kind"] == "MPIJob" else "see `kubectl describe job`"
    return Problem(f"{item['kind']} {_name(item)} has no pods", remedy, started=False, ordinary=True)


def last_warning(events: Sequence[Answer]) -> str:
    """The newest warning that the cluster noted, or an empty text."""
    said = [_one_line(event.get("message", "")) for event in events if event.get("type") == "Warning"]
    return said[-1] if said else ""


def _slow_start(pod: Answer) -> Problem | None:
    """A pod that has its node, but none of whose containers runs yet: volumes and images are being brought."""
    status = pod.get("status", {})
    states = [container.get("state") or {} for container in _container_statuses(status)]
    if status.get("phase") != "Pending" or any("running" in state for state in states):
        return None
    reasons = {state["waiting"].get("reason", "") for state in states if "waiting" in state}
    shown = ", ".join(sorted(filter(None, reasons))) or "not scheduled"
    return Problem(f"pod {_name(pod)} does not start ({shown})", _DESCRIBE, started=False, ordinary=True)


def worst_problem(pods: Sequence[Answer]) -> Problem | None:
    """The problem to tell of several pods': a hopeless one first, then one of a pod that ran, the newest first."""
    newest_first = sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or "", reverse=True)
    problems = [problem for problem in map(pod_problem, newest_first) if problem is not None]
    return min(problems, key=lambda problem: (not problem.hopeless, problem.ordinary, not problem.started), default=None)


def claim_problem(claim: Answer, events: Sequence[Answer]) -> Problem | None:
    """Why a PersistentVolumeClaim is not bound; None where it is."""
    phase = claim.get("status", {}).get("phase")
    if phase == "Bound":
        return None
    said = last_warning(events)
    wanted = claim["spec"].get("storageClassName") or "the default class"
    modes = ", ".join(claim["spec"].get("accessModes") or ())
    reason = f"volume claim {_name(claim)} is {phase or 'Pending'}, not Bound ({wanted}, {modes})"
    reason += f": {said}" if said else ""
    remedy = "set kubernetes.storage_class to one of `kubectl get storageclass`, or kubernetes.work_claim to a bound claim"
    return Problem(reason, remedy, started=False)


def _container_problem(pod: Answer, status: Answer) -> Problem | None:
    state = status.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
    where = f"pod {_name(pod)}, container {status['name']}"
    if waiting.get("reason") in _IMAGE_REASONS:
        message = _one_line(waiting.get("message", ""))
        remedy = "build and push it (`make images`), or set images.registry, images.tag and images.pull_secret"
        hopeless = waiting["reason"] in ("InvalidImageName", "ErrImageNeverPull") or bool(_NO_SUCH_IMAGE.search(message))
        said = f"{where}: {waiting['reason']}: image {status['image']}: {message}"
        return Problem(said, remedy, hopeless, started=False)
    if waiting.get("reason") in _SETUP_REASONS and not (status.get("lastState") or {}).get("terminated"):
        message = _one_line(waiting.get("message", ""))
        return Problem(f"{where}: {waiting['reason']}: {message}", _DESCRIBE, started=False)
    if not ended and waiting.get("reason") == "CrashLoopBackOff":
        ended = status["lastState"]["terminated"]
    if not ended or ended.get("exitCode") == 0:
        return None
    return _exit_problem(where, pod, status, ended)


def _exit_problem(where: str, pod: Answer, status: Answer, ended: Answer) -> Problem:
    code = ended.get("exitCode")
    lines = _last_lines(ended.get("message") or "")
    said = f": {lines}" if lines else ""
    if ended.get("reason") == "OOMKilled":
        limit = _memory_limit(pod, status["name"])
        part = "training" if status["name"] in ("train", "worker", "evaluate") else "data"
        remedy = f"raise resources.{part}.memory_limit (or memory, on cards)"
        return Problem(f"{where}: OOMKilled: it needed more memory than its limit of {limit}", remedy)
    if code == BAD_INPUT:
        return Problem(f"{where}: exit code {code}{said}", "correct the pipeline file or the data, then run it again", True)
    if code == STOPPED:
        return Problem(f"{where}: stopped on request (exit code {code})", "run it again: it goes on where it stopped")
    if code == KILLED:
        return Problem(f"{where}: killed (exit code {code}){said}", "run it again: finished parts are not done again")
    return Problem(f"{where}: exit code {code}{said}", "see `gaudi-bert k8s logs`, then run it again")


def _eviction(pod: Answer) -> Problem | None:
    """A pod that the cluster took away."""
    status = pod.get("status", {})
    remedy = "run it again: it goes on where it stopped"
    if status.get("reason") in ("Evicted", "Preempting", "NodeLost", "NodeShutdown", "Terminated"):
        message = _one_line(status.get("message", ""))
        return Problem(f"pod {_name(pod)} was taken away ({status['reason']}): {message}", remedy, taken_away=True)
    for condition in status.get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition.get("status") == "True":
            message = _one_line(condition.get("message", ""))
            reason = f"pod {_name(pod)} was taken away ({condition.get('reason')}): {message}"
            return Problem(reason, remedy, taken_away=True)
    return None


def _container_statuses(status: Answer) -> Iterator[Answer]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _memory_limit(pod: Answer, name: str) -> str:
    spec = pod.get("spec", {})
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        if container["name"] == name:
            return (container.get("resources") or {}).get("limits", {}).get("memory", "unknown")
    return "unknown"


def _last_lines(text: str, count: int = 3) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-count:])


def _name(item: Answer) -> str:
    return item["metadata"]["name"]


def _one_line(text: str) -> str:
    return " ".join(text.split())
