"""What is wrong with the pods of a step, and what to do about it: why one does not start, or failed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from gaudi_bert.runners.kubernetes.client import Json
from gaudi_bert.runners.launch import MPIRUN_FOOTER, failed_rank, rank_pieces
from gaudi_bert.runners.stage_table import STAGES

# The end of the log of a container of a pod.
ReadLog = Callable[[Json, str], str]


@dataclass(frozen=True)
class Problem:
    """What is wrong.

    `hopeless`: waiting or trying again cannot help. `started`: the pod's containers ran. `only_slow`: every pod is like
    this for a while, only its length is a problem. `may_pass`: nothing has ended, so it is reported only if it lasts.
    `disrupted`: the cluster took the pod away, or somebody did, so the same work may be submitted again; `saved`: it
    stopped on request before that, which counts for nothing.
    """

    reason: str
    remedy: str
    hopeless: bool = False
    started: bool = True
    only_slow: bool = False
    may_pass: bool = False
    disrupted: bool = False
    saved: bool = False

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"

    @property
    def without_names(self) -> str:
        """The same without the names of pods, which change with every attempt to make one, and with every other pod."""
        return _POD_NAME.sub("pod", _LIKEWISE.sub("", str(self)))


_LIKEWISE = re.compile(r" \(likewise [^)]*\)")
_POD_NAME = re.compile(r'\bpods? (?:"[^"]*"|[a-z0-9][-a-z0-9.]*)')


def one_line(text: str) -> str:
    """`text` without line breaks and double spaces."""
    return " ".join(text.split())


_BAD_INPUT = 2
_STOPPED = 75
_KILLED = 137
# Of training pods, and of the workers of an MPIJob.
_TRAINING_CONTAINERS = ("worker", "node", *(name for name, stage in STAGES.items() if stage.trains))
# What is requested and lacking, as the scheduler writes it, and the remedy.
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
# Answers of a registry that retrying does not change.
_NO_SUCH_IMAGE = re.compile(r"not found|manifest unknown|denied|unauthorized|no such|invalid", re.IGNORECASE)
# ... and errors of a node that did not reach the registry, which may pass.
_NO_REGISTRY = re.compile(r"no such host|dial tcp|server misbehaving|connection refused|timeout|x509", re.IGNORECASE)
_DESCRIBE = "see `kubectl describe pod`"
RUN_AGAIN = "run it again: it resumes where it stopped"
# Of several pods with the same problem, so many are named in addition to the first one.
_MOST_NAMED = 3
# What a rank reports that ends because another one has.
_BECAUSE_OF_ANOTHER = " aborts: "
# ... and training when it stops on request.
_STOP = re.compile(r"stopped on request after update \d+")
# How long after the removal of a worker, at most, its launcher has ended: ranks save, and mpirun notices.
_REPLACEMENT_SECONDS = 60.0
# The message of a node whose pod mounts or reads an object that does not exist.
_NO_SUCH_OBJECT = re.compile(r'(configmap|secret) "([^"]+)" not found', re.IGNORECASE)
_SETUP_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff")


def pod_problem(pod: Json, read_log: ReadLog = lambda pod, container: "") -> Problem | None:
    """What is wrong with `pod`; None for a pod that waits its turn, runs or has succeeded.

    `read_log` gives the end of the log of one of its containers, which tells why a rank failed.
    """
    status = pod.get("status", {})
    if status.get("phase") == "Succeeded":
        return None
    evicted = _eviction(pod)
    if evicted is not None:
        return evicted
    for container in _container_statuses(status):
        problem = _container_problem(pod, container, read_log)
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


def _slow_start(pod: Json) -> Problem | None:
    """A pod that has its node, but none of whose containers runs yet: volumes and images are being brought."""
    status = pod.get("status", {})
    states = [container.get("state") or {} for container in _container_statuses(status)]
    if status.get("phase") != "Pending" or any("running" in state for state in states):
        return None
    reasons = {state["waiting"].get("reason", "") for state in states if "waiting" in state}
    shown = ", ".join(sorted(filter(None, reasons))) or "not scheduled"
    return Problem(f"pod {_name(pod)} does not start ({shown})", _DESCRIBE, started=False, only_slow=True)


def worst_problem(pods: Sequence[Json], read_log: ReadLog = lambda pod, container: "") -> Problem | None:
    """The problem to report of several pods': a hopeless one first, then one of a pod that ran, the newest first.

    What a pod does that has been replaced counts only if nothing is wrong with its successors; of a launcher, not at all.
    """
    newest_first = sorted(pods, key=_created, reverse=True)
    launchers = [pod for pod in newest_first if _role(pod) == "launcher"]
    newest_first = [pod for pod in newest_first if pod not in launchers[1:]]
    lost = _lost_worker(newest_first, read_log)
    if lost is not None:
        return lost
    problems = {_name(pod): problem for pod in newest_first if (problem := pod_problem(pod, read_log)) is not None}
    if not problems:
        return None
    newest = {_task_of(pod): _created(pod) for pod in reversed(newest_first)}
    replaced = {_name(pod) for pod in pods if _created(pod) < newest[_task_of(pod)]}
    name, worst = min(
        problems.items(),
        key=lambda item: (
            item[0] in replaced,
            not item[1].hopeless,
            item[1].only_slow,
            not item[1].started,
            _BECAUSE_OF_ANOTHER in item[1].reason,
        ),
    )
    likewise = [one for one, problem in problems.items() if one != name and problem.without_names == worst.without_names]
    if not likewise or worst.only_slow:
        return worst
    more = f" and {len(likewise) - _MOST_NAMED} more" if len(likewise) > _MOST_NAMED else ""
    return replace(worst, reason=f"{worst.reason} (likewise {', '.join(likewise[:_MOST_NAMED])}{more})")


def _created(pod: Json) -> str:
    """When a pod was created, as the API writes it; the texts sort as the times do."""
    return pod["metadata"].get("creationTimestamp") or ""


def _task_of(pod: Json) -> str:
    """What one pod after another does: a part of an Indexed Job, the launcher or a worker of an MPIJob, or a Job."""
    annotations = pod["metadata"].get("annotations") or {}
    return _name(pod) if is_worker(pod) else str(annotations.get("batch.kubernetes.io/job-completion-index", ""))


def _role(pod: Json) -> str | None:
    return (pod["metadata"].get("labels") or {}).get("training.kubeflow.org/job-role")


def is_worker(pod: Json) -> bool:
    """Whether a pod is a worker of an MPIJob, which serves the launcher."""
    return _role(pod) == "worker"


def _lost_worker(pods: Sequence[Json], read_log: ReadLog) -> Problem | None:
    """A worker of an MPIJob that is being removed, or was while the launcher ran: it is why the launcher ended, if it has.

    A removed worker is replaced at once, by a pod of the same name.
    """
    launcher = next((pod for pod in pods if not is_worker(pod)), None)
    ended = _ended(launcher) if launcher else {}
    if ended.get("exitCode") in (0, _BAD_INPUT):
        return None
    since = _seconds(ended.get("finishedAt")) - _REPLACEMENT_SECONDS
    for pod in filter(is_worker, pods):
        removed = _eviction(pod) or (_deleted(pod) if "deletionTimestamp" in pod["metadata"] else None)
        if removed is None and ended and since <= _seconds(_created(pod)) and _created(pod) > str(ended.get("startedAt")):
            removed = _deleted(pod)
        if removed is not None:
            stop = _last_stop(launcher, read_log) if launcher and ended else None
            remedy = stop or ("training resumes from its newest checkpoint" if ended else "its ranks save first")
            return replace(removed, reason=f"worker {removed.reason}", remedy=remedy, saved=stop is not None)
    return None


def _last_stop(pod: Json, read_log: ReadLog) -> str | None:
    """What the ranks of a launcher reported when they stopped on request; None if they did not stop."""
    ended, (container, *_) = _ended(pod), pod["spec"]["containers"]
    stops = _STOP.findall(ended.get("message") or "") or _STOP.findall(read_log(pod, container["name"]))
    return f"{stops[-1]}, saved" if stops else None


def _ended(pod: Json) -> Json:
    """How the first container of a pod ended; nothing while it runs or waits."""
    states = [status.get("state") or {} for status in pod.get("status", {}).get("containerStatuses") or ()]
    return (states[0].get("terminated") if states else None) or {}


def _seconds(moment: Any) -> float:
    return datetime.fromisoformat(str(moment).replace("Z", "+00:00")).timestamp() if moment else 0.0


def last_warning(events: Sequence[Json]) -> str:
    """The newest warning that the cluster noted, or an empty text."""
    warnings = [one_line(event.get("message", "")) for event in events if event.get("type") == "Warning"]
    return warnings[-1] if warnings else ""


def missing_object(where: str, message: str) -> Problem | None:
    """Why a pod that does not start never will: it mounts a ConfigMap or a Secret that is not there."""
    match = _NO_SUCH_OBJECT.search(message)
    if match is None:
        return None
    kind = "ConfigMap" if match[1].lower() == "configmap" else "Secret"
    remedy = "submit the run again, which creates it: `gaudi-bert run --on kubernetes`, or `kubectl apply -k`"
    if kind == "Secret":
        remedy = "create it, or correct kubernetes.store_secret and images.pull_secret"
    return Problem(f"{where} cannot start: {kind} {match[2]} does not exist", remedy, hopeless=True, started=False)


def _container_problem(pod: Json, status: Json, read_log: ReadLog) -> Problem | None:
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
        reason = f"{where}: {waiting['reason']}: image {status['image']}: {message}"
        return Problem(reason, remedy, hopeless, started=False)
    if waiting.get("reason") in _SETUP_REASONS and not (status.get("lastState") or {}).get("terminated"):
        message = one_line(waiting.get("message", ""))
        return missing_object(where, message) or Problem(
            f"{where}: {waiting['reason']}: {message}", _DESCRIBE, started=False
        )
    if not ended and waiting.get("reason") == "CrashLoopBackOff":
        ended = status["lastState"]["terminated"]
    if not ended or ended.get("exitCode") == 0:
        return None
    return _exit_problem(where, pod, status, ended, read_log)


def _exit_problem(where: str, pod: Json, status: Json, ended: Json, read_log: ReadLog) -> Problem:
    code = ended.get("exitCode")
    reason = _reason(ended.get("message") or "", lambda: read_log(pod, status["name"]))
    because = f": {reason}" if reason else ""
    if ended.get("reason") == "OOMKilled":
        limit = _memory_limit(pod, status["name"])
        part = "training" if status["name"] in _TRAINING_CONTAINERS else "data"
        remedy = f"raise resources.{part}.memory_limit (or memory, on cards)"
        return Problem(f"{where}: OOMKilled: it needed more memory than its limit of {limit}", remedy)
    if code == _BAD_INPUT:
        return Problem(
            f"{where}: exit code {code}{because}", "correct the pipeline file or the data, then run it again", True
        )
    if code == _STOPPED:
        stop = _last_stop(pod, read_log) or "stopped on request, saved"
        return Problem(f"{where}: {stop}", RUN_AGAIN, disrupted=True, saved=True)
    if code == _KILLED:
        return Problem(f"{where}: killed (exit code {code}){because}", "run it again: finished parts are not done again")
    return Problem(f"{where}: exit code {code}{because}", "see `gaudi-bert k8s logs`, then run it again")


def _eviction(pod: Json) -> Problem | None:
    status = pod.get("status", {})
    if status.get("reason") in ("Evicted", "Preempting", "NodeLost", "NodeShutdown", "Terminated"):
        message = one_line(status.get("message", ""))
        return Problem(f"pod {_name(pod)} was taken away ({status['reason']}): {message}", RUN_AGAIN, disrupted=True)
    for condition in status.get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition.get("status") == "True":
            message = one_line(condition.get("message", ""))
            reason = f"pod {_name(pod)} was taken away ({condition.get('reason')}): {message}"
            return Problem(reason, RUN_AGAIN, disrupted=True, saved=condition.get("reason") != "TerminationByKubelet")
    # What becomes of a worker matters only to its launcher: when that is done, all workers are removed.
    return _deleted(pod) if "deletionTimestamp" in pod["metadata"] and not is_worker(pod) else None


def _deleted(pod: Json) -> Problem:
    return Problem(f"pod {_name(pod)} was deleted", RUN_AGAIN, disrupted=True, saved=True)


def lost_node(pod: Json, read_events: Callable[[str], Sequence[Json]]) -> Problem | None:
    """The node of a pod that seems to run, if the cluster has lost contact with it; events are read by a pod's name."""
    conditions = {each["type"]: each.get("status") for each in pod.get("status", {}).get("conditions") or ()}
    if pod.get("status", {}).get("phase") != "Running" or conditions.get("Ready") != "False":
        return None
    if not any(event.get("reason") == "NodeNotReady" for event in read_events(_name(pod))):
        return None
    node = pod["spec"].get("nodeName", "unknown")
    remedy = f"wait until it is back, or remove it: `kubectl describe node {node}`"
    return Problem(f"node {node} is NotReady, and pod {_name(pod)} is on it", remedy, may_pass=True)


def _container_statuses(status: Json) -> Iterator[Json]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _memory_limit(pod: Json, name: str) -> str:
    spec = pod.get("spec", {})
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        if container["name"] == name:
            return str((container.get("resources") or {}).get("limits", {}).get("memory", "unknown"))
    return "unknown"


def _reason(message: str, read_log: Callable[[], str]) -> str:
    """Why a container ended, from its termination message, which is the end of its log.

    What mpirun writes last hides the error of the rank that failed. So that is looked for above it: in the log, or in what
    the message has of it where the log cannot be read.
    """
    if MPIRUN_FOOTER.search(message):
        reason = failed_rank(read_log()) or failed_rank(message)
        if reason is not None:
            return reason
        message = MPIRUN_FOOTER.sub("", message)
    lines = ["".join(text for _, text in rank_pieces(line)).strip() for line in message.splitlines()]
    return " | ".join([line for line in lines if line.strip("-")][-3:])


def _name(item: Json) -> str:
    return str(item["metadata"]["name"])
