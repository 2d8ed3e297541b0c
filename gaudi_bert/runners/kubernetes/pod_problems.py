"""Why a pod does not start, or failed, and what to do about it: pure functions of what the API server answered."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gaudi_bert.runners.kubernetes.problem import Answer, Problem, one_line
from gaudi_bert.runners.stage_table import STAGES

__all__ = ["pod_problem", "worst_problem"]

BAD_INPUT = 2
STOPPED = 75
KILLED = 137
# Of training pods, and of the workers of an MPIJob.
TRAINING_CONTAINERS = ("worker", *(name for name, stage in STAGES.items() if stage.trains))

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
    "untolerated taint": "set kubernetes.data_pods.tolerations or kubernetes.training_pods.tolerations, or remove the taint",
    "didn't match Pod's node": "correct kubernetes.node_selector, or what kubernetes.data_pods and training_pods select",
    "Insufficient ephemeral-storage": "lower kubernetes.scratch, or free the nodes' disks",
}
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
# What a registry says where trying again cannot help.
_NO_SUCH_IMAGE = re.compile(r"not found|manifest unknown|denied|unauthorized|no such|invalid", re.IGNORECASE)
# ... and what a node says that did not reach the registry, which may pass.
_NO_REGISTRY = re.compile(r"no such host|dial tcp|server misbehaving|connection refused|timeout|x509", re.IGNORECASE)
_DESCRIBE = "see `kubectl describe pod`"
_SETUP_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff")


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
            message = one_line(condition.get("message", ""))
            remedies = [remedy for sign, remedy in _SCARCE.items() if sign in message]
            return Problem(f"pod {_name(pod)} is Unschedulable: {message}", "; ".join(remedies) or _DESCRIBE, started=False)
    if status.get("phase") == "Failed":
        return Problem(f"pod {_name(pod)} failed: {one_line(status.get('message', 'no reason given'))}", "run it again")
    return _slow_start(pod)


def _slow_start(pod: Answer) -> Problem | None:
    """A pod that has its node, but none of whose containers runs yet: volumes and images are being brought."""
    status = pod.get("status", {})
    states = [container.get("state") or {} for container in _container_statuses(status)]
    if status.get("phase") != "Pending" or any("running" in state for state in states):
        return None
    reasons = {state["waiting"].get("reason", "") for state in states if "waiting" in state}
    shown = ", ".join(sorted(filter(None, reasons))) or "not scheduled"
    return Problem(f"pod {_name(pod)} does not start ({shown})", _DESCRIBE, started=False, only_slow=True)


def worst_problem(pods: Sequence[Answer]) -> Problem | None:
    """The problem to tell of several pods': a hopeless one first, then one of a pod that ran, the newest first."""
    newest_first = sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or "", reverse=True)
    problems = [problem for problem in map(pod_problem, newest_first) if problem is not None]
    return min(problems, key=lambda problem: (not problem.hopeless, problem.only_slow, not problem.started), default=None)


def _container_problem(pod: Answer, status: Answer) -> Problem | None:
    state = status.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
    where = f"pod {_name(pod)}, container {status['name']}"
    if waiting.get("reason") in _IMAGE_REASONS:
        message = one_line(waiting.get("message", ""))
        remedy = "build and push it (`make images`), or set images.registry, images.tag and images.pull_secret"
        if _NO_REGISTRY.search(message):
            remedy = "the node did not reach the registry: check images.registry and the node's network and DNS"
        named_wrongly = waiting["reason"] in ("InvalidImageName", "ErrImageNeverPull")
        hopeless = named_wrongly or bool(_NO_SUCH_IMAGE.search(message) and not _NO_REGISTRY.search(message))
        said = f"{where}: {waiting['reason']}: image {status['image']}: {message}"
        return Problem(said, remedy, hopeless, started=False)
    if waiting.get("reason") in _SETUP_REASONS and not (status.get("lastState") or {}).get("terminated"):
        message = one_line(waiting.get("message", ""))
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
        part = "training" if status["name"] in TRAINING_CONTAINERS else "data"
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
        message = one_line(status.get("message", ""))
        return Problem(f"pod {_name(pod)} was taken away ({status['reason']}): {message}", remedy, disrupted=True)
    for condition in status.get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition.get("status") == "True":
            message = one_line(condition.get("message", ""))
            reason = f"pod {_name(pod)} was taken away ({condition.get('reason')}): {message}"
            return Problem(reason, remedy, disrupted=True)
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
