"""Why a step does not continue: the cluster's own words, in one line, and what they mean for the run.

The words are those of a pod's status, of the last warning about what makes the pod or about the pod, and of the `error:`
line with which its log ends.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from gaudi_bert.runners.kubernetes.client import Cluster, ClusterError, Json, StreamDroppedError, title_of
from gaudi_bert.runners.kubernetes.manifests import POD_LABELS, QUEUE_LABEL
from gaudi_bert.runners.kubernetes.pods import STEP_LABEL
from gaudi_bert.runners.launch import rank_pieces
from gaudi_bert.runners.stage_table import STEPS


class State(IntEnum):
    """Meaning of a problem for the run; of several, the first one is reported."""

    # Neither waiting nor trying again helps.
    HOPELESS = 0
    # The cluster tries again, or the other pods work on.
    GOES_ON = 1
    # Stopped on request, or taken away; it saved, and the same is submitted again.
    STOPPED = 2
    # It does not run yet, and may still; given up after `kubernetes.start_seconds`.
    WAITS = 3


@dataclass(frozen=True)
class Problem:
    """A problem in the cluster's words, and the remedy."""

    state: State
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason

    @property
    def without_names(self) -> str:
        """Return the reason without the names of pods, which change with every attempt to make one."""
        return _POD_NAME.sub("pod", self.reason)


# The end of the log of a container of a pod.
ReadLog = Callable[[Json, str], str]

_POD_NAME = re.compile(r'\bpods? (?:"[^"]*"|[a-z0-9][-a-z0-9.]*)')
_BAD_INPUT, _STOPPED = 2, 75
# Enough for what the ranks and mpirun write after one has failed.
_LOG_END_LINES = 1000
# So many pods that do the same are killed for their memory before no further one is tried.
_MOST_MEMORY_KILLS = 3
# What a rank reports that ends because another one has.
_BECAUSE_OF_ANOTHER = re.compile(r"rank \d+.* (aborts|has left|(is|was) lost|did not come)\b")
_STOP = re.compile(r"stopped on request(?: after update \d+(?: of \d+)?)?")
# Options that a person has who runs a stage by hand, and what to do on a cluster instead.
_OPTIONS = re.compile(r"; [^;]*--(?:overwrite|resume)\b.*")
_BY_NAME = "give the pipeline another name, or remove its work folder: `gaudi-bert k8s delete PIPELINE --data`"
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
# Answers of a registry that retrying does not change, and errors of a node that did not reach the registry.
_NO_SUCH_IMAGE = re.compile(
    r"not found|manifest unknown|denied|unauthorized|no such|invalid|InvalidImageName|NeverPull", re.I
)
_NO_REGISTRY = re.compile(r"no such host|dial tcp|server misbehaving|connection refused|timeout|x509", re.I)
# Why pods are not even created.
_REFUSED = re.compile(r"is forbidden|violates PodSecurity|denied the request|exceeded quota|usage per (Container|Pod)")
# Words of the cluster after which no wait helps, and those after which it may, with what to do; all that match are reported.
_HOPELESS = {
    r"violates PodSecurity": "pod security forbids such pods: choose another kubernetes.namespace, or ask for its level",
    r"admission webhook .* denied the request": "correct what the message names",
    r"usage per (Container|Pod) is": "change resources.data or resources.training to what the LimitRange allows",
    r"(?i)configmap \S+ not found": "submit the run again, which creates it",
    r"(?i)secret \S+ not found": "create it, or correct kubernetes.store_secret or images.pull_secret",
}
_PODS_OF_QUOTA = r".*requested: [^:]*\bpods="
_MAY_PASS = {
    rf"exceeded quota{_PODS_OF_QUOTA}": "wait, lower resources.workers or resources.data_workers, or ask for a larger quota",
    rf"exceeded quota(?!{_PODS_OF_QUOTA})": "wait, lower resources.data or resources.training, or ask for a larger quota",
    r"Insufficient habana.ai/gaudi": "wait until cards are free, or lower resources.cards or resources.workers",
    r"Insufficient hugepages-2Mi": "reserve huge pages on the nodes (vm.nr_hugepages), or lower resources.hugepages_2Mi",
    r"Insufficient vpc.amazonaws.com/efa": "use nodes with EFA and its device plugin, or set kubernetes.efa to 0",
    r"Insufficient memory": "lower resources.data.memory or resources.training.memory, or add nodes",
    r"Insufficient cpu": "lower resources.data.cpu or resources.training.cpu, or add nodes",
    r"Insufficient ephemeral-storage": "lower kubernetes.scratch, or free the nodes' disks",
    r"(?i)persistentvolumeclaim|storageclass|provision": (
        "set kubernetes.storage_class to one of `kubectl get storageclass`, or kubernetes.work_claim to a bound claim"
    ),
    r"were unschedulable": "let a cordoned node take pods again: `kubectl uncordon NODE`",
    r"untolerated taint": "set tolerations in kubernetes.data_pods or kubernetes.training_pods, or remove the taint",
    r"didn't match Pod's node": "correct kubernetes.node_selector, or what kubernetes.data_pods and training_pods select",
}
# Who makes the pods where Kubernetes itself does not.
_MAKERS = {
    "MPIJob": "see that the MPI operator runs",
    "TrainJob": "see that the controllers of Kubeflow Trainer and JobSet run",
}


def step_problem(cluster: Cluster, item: Json, pods: Sequence[Json], read_log: ReadLog) -> Problem | None:
    """Return what is wrong with a step: with its pods, or why it has none, or too few; None where it continues."""
    if not pods:
        return _refusal(cluster, item, pods) or Problem(
            State.WAITS, f"{title_of(item)} has no pods", _MAKERS.get(item["kind"], "see `kubectl describe job`")
        )
    worst = _worst(pods, read_log)
    if worst is not None and worst[0].state in (State.HOPELESS, State.GOES_ON):
        return worst[0]
    refused = _refusal(cluster, item, pods) if _at_work(item, pods) < expected_pods(item) else None
    if refused is not None:
        return refused
    if worst is None:
        return next(filter(None, (_lost_node(cluster, pod) for pod in current_pods(pods))), None)
    problem, pod = worst
    if problem.state is not State.WAITS:
        return problem
    # The last warnings about the pod and its claims, where its own status does not mention them.
    is_silent = " does not start " in problem.reason
    claims = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["spec"].get("volumes") or ()]
    names = [*([_name(pod)] if is_silent else []), *(filter(None, claims) if is_silent or "laim" in problem.reason else ())]
    words = [f"{name}: {warning}" for name in names if (warning := _last_warning(cluster, name))]
    return _in_words(problem.reason, "; ".join(words)) if words else problem


def worst_problem(pods: Sequence[Json], read_log: ReadLog) -> Problem | None:
    """Return the problem to report of several pods', of which those that were replaced do not count."""
    worst = _worst(pods, read_log)
    return None if worst is None else worst[0]


def _worst(pods: Sequence[Json], read_log: ReadLog) -> tuple[Problem, Json] | None:
    """The problem to report, and whose it is: one that another one's end has caused is reported last."""
    problems = [(problem, pod) for pod in current_pods(pods) if (problem := _pod_problem(pod, pods, read_log)) is not None]
    return min(problems, default=None, key=lambda each: (bool(_BECAUSE_OF_ANOTHER.search(each[0].reason)), each[0].state))


def current_pods(pods: Sequence[Json]) -> list[Json]:
    """Return the newest pod of each task: of a part of a Job, of an MPIJob's launcher, of each of its workers."""
    newest: dict[str, Json] = {}
    for pod in sorted(pods, key=_created):
        newest[_task_of(pod)] = pod
    return list(newest.values())


def is_worker(pod: Json) -> bool:
    """Whether a pod is a worker of an MPIJob, which serves the launcher."""
    return (pod["metadata"].get("labels") or {}).get("training.kubeflow.org/job-role") == "worker"


def _created(item: Json) -> str:
    """When an object was created, as the API writes it; the texts sort as the times do."""
    return item["metadata"].get("creationTimestamp") or ""


def _task_of(pod: Json) -> str:
    annotations = pod["metadata"].get("annotations") or {}
    return _name(pod) if is_worker(pod) else str(annotations.get("batch.kubernetes.io/job-completion-index", ""))


def _name(item: Json) -> str:
    return str(item["metadata"]["name"])


def one_line(text: str) -> str:
    """Return `text` without line breaks and double spaces."""
    return " ".join(text.split())


# --- one pod


def _pod_problem(pod: Json, pods: Sequence[Json], read_log: ReadLog) -> Problem | None:
    """The problem of a pod, one of all `pods` of its step; None for one that runs, is done or waits for its inputs."""
    status, where = pod.get("status", {}), f"pod {_name(pod)}"
    if status.get("phase") == "Succeeded":
        return None
    for condition in status.get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition.get("status") == "True":
            message = f"{where} was taken away ({condition.get('reason')}): {one_line(condition.get('message', ''))}"
            by_kubelet = condition.get("reason") == "TerminationByKubelet"
            return Problem(State.GOES_ON if by_kubelet else State.STOPPED, message)
    # What becomes of a worker matters only to its launcher: when that is done, all workers are removed.
    if "deletionTimestamp" in pod["metadata"] and not is_worker(pod):
        return Problem(State.STOPPED, f"{where} was deleted")
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    for container in containers:
        state = container.get("state") or {}
        ended = state.get("terminated") or {}
        if "waiting" in state and not ended:
            ended = (container.get("lastState") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            return _exit_problem(where, pod, pods, container, ended, read_log)
        waiting = state.get("waiting") or {}
        if waiting.get("message"):
            return _start_problem(f"{where}: {waiting['reason']}", waiting["reason"], one_line(waiting["message"]))
    if status.get("phase") == "Failed":
        words = one_line(f"{status.get('reason', '')}: {status.get('message', 'no reason given')}").removeprefix(": ")
        return Problem(State.GOES_ON, f"{where} failed: {words}")
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return _in_words(f"{where} is Unschedulable", one_line(condition.get("message", "")))
    if status.get("phase") != "Pending" or any("running" in (container.get("state") or {}) for container in containers):
        return None
    reasons = {((container.get("state") or {}).get("waiting") or {}).get("reason", "") for container in containers}
    shown = ", ".join(sorted(filter(None, reasons))) or "not scheduled"
    return Problem(State.WAITS, f"{where} does not start ({shown})", "see `kubectl describe pod`")


def _start_problem(where: str, reason: str, message: str) -> Problem:
    """Why a container does not start: its image does not come, or something that it needs is not there."""
    if reason not in _IMAGE_REASONS:
        return _in_words(where, message)
    if _NO_REGISTRY.search(message):
        remedy = "the node did not reach the registry: check images.registry and the node's network and DNS"
        return Problem(State.WAITS, f"{where}: {message}", remedy)
    remedy = "build and push it (`make images`), or set images.registry, images.tag and images.pull_secret"
    hopeless = _NO_SUCH_IMAGE.search(f"{reason} {message}") is not None
    return Problem(State.HOPELESS if hopeless else State.WAITS, f"{where}: {message}", remedy)


def _in_words(where: str, words: str) -> Problem:
    """A problem in the cluster's words, with every remedy that suits them."""
    hopeless, may_pass = (
        [remedy for pattern, remedy in table.items() if re.search(pattern, words)] for table in (_HOPELESS, _MAY_PASS)
    )
    remedy = "; ".join(hopeless or may_pass) or "see `kubectl describe pod`"
    return Problem(State.HOPELESS if hopeless else State.WAITS, f"{where}: {words}", remedy)


def _exit_problem(where: str, pod: Json, pods: Sequence[Json], container: Json, ended: Json, read_log: ReadLog) -> Problem:
    """Why a container ended: its `error:` line stands alone, since it names the remedy; else its exit code."""
    code, name = ended["exitCode"], container["name"]
    if ended.get("reason") == "OOMKilled":
        ends = [
            (status.get("state") or {}).get("terminated") or {}
            for each in pods
            if _task_of(each) == _task_of(pod)
            for status in each.get("status", {}).get("containerStatuses") or ()
        ]
        again = sum(end.get("reason") == "OOMKilled" for end in ends)
        state = State.HOPELESS if max(again, container.get("restartCount", 0)) >= _MOST_MEMORY_KILLS else State.GOES_ON
        specs = [each for each in pod["spec"]["containers"] if each["name"] == name]
        limit = next((each["resources"]["limits"].get("memory") for each in specs if "resources" in each), "unknown")
        part = "training" if is_worker(pod) or STEPS.get(_step_of(pod), STEPS["plan"]).trains else "data"
        remedy = f"raise resources.{part}.memory_limit (or memory, on cards)"
        return Problem(state, f"{where}: OOMKilled: it needed more memory than its limit of {limit}", remedy)
    error = _error_line(ended.get("message") or "") or _error_line(read_log(pod, name))
    if code == _STOPPED or (error is not None and _STOP.search(error)):
        stop = _STOP.search(error or "")
        return Problem(State.STOPPED, f"{where}: {stop[0] if stop else 'stopped on request'}")
    state = State.HOPELESS if code == _BAD_INPUT else State.GOES_ON
    if error is not None:
        without_options = _OPTIONS.sub("", error)
        return Problem(state, f"{where}: {without_options}", "" if without_options == error else _BY_NAME)
    return Problem(state, f"{where}: exit code {code}", f"its log: `gaudi-bert k8s logs PIPELINE --step {_step_of(pod)}`")


def _step_of(item: Json) -> str:
    return str((item["metadata"].get("labels") or {}).get(STEP_LABEL, "STEP"))


def _error_line(text: str) -> str | None:
    """The `error:` line of a log, without the tags of mpirun; of several ranks, that of the one that failed by itself."""
    pieces = [piece.strip() for line in text.splitlines() for _, piece in rank_pieces(line)]
    errors = [piece for piece in pieces if piece.startswith("error: ")]
    return min(reversed(errors), default=None, key=lambda error: bool(_BECAUSE_OF_ANOTHER.search(error)))


def log_reader(cluster: Cluster) -> ReadLog:
    """Return how the end of a container's log is read; empty where it cannot be read."""

    @functools.cache
    def log_end(name: str, container: str) -> str:
        try:
            lines = list(cluster.log_lines(name, container, follow=False, last=_LOG_END_LINES))
        except (ClusterError, StreamDroppedError):
            return ""
        return "\n".join(line.partition(" ")[2] for line in lines)

    return lambda pod, container: log_end(_name(pod), container)


# --- what the cluster noted about a step, its pods and its claims


def _last_warning(cluster: Cluster, name: str, since: str = "") -> str:
    """The newest warning about the object called `name`; events outlive it, and an earlier one may have had its name."""
    warnings = [
        one_line(event.get("message", ""))
        for event in cluster.events(name)
        if event.get("type") == "Warning" and (event.get("lastTimestamp") or since) >= since
    ]
    return warnings[-1] if warnings else ""


def _refusal(cluster: Cluster, item: Json, pods: Sequence[Json]) -> Problem | None:
    """Why the cluster makes no pods, or fewer than `item` wants; None where it refuses none.

    The pods that a Job has do its work one after another; those that train together wait for the others.
    """
    names = [_name(item), *([f"{_name(item)}-launcher"] if item["kind"] == "MPIJob" else [])]
    words = [warning for name in names if (warning := _last_warning(cluster, name, _created(item)))]
    if not words or (pods and not _REFUSED.search(words[-1])):
        return None
    gets = f"{_at_work(item, pods)} of {expected_pods(item)} pods" if pods else "no pods"
    problem = _in_words(f"{title_of(item)} gets {gets}", words[-1])
    if pods and problem.state is State.WAITS and not needs_all_pods(item):
        return Problem(State.GOES_ON, problem.reason, problem.remedy)
    return problem


def _lost_node(cluster: Cluster, pod: Json) -> Problem | None:
    """The node of a pod that seems to run, if the cluster has lost contact with it."""
    conditions = {each["type"]: each.get("status") for each in pod.get("status", {}).get("conditions") or ()}
    if pod.get("status", {}).get("phase") != "Running" or conditions.get("Ready") != "False":
        return None
    if not any(event.get("reason") == "NodeNotReady" for event in cluster.events(_name(pod))):
        return None
    node = pod["spec"].get("nodeName", "unknown")
    remedy = f"wait until it is back, or remove it: `kubectl describe node {node}`"
    return Problem(State.GOES_ON, f"node {node} is NotReady, and pod {_name(pod)} is on it", remedy)


# --- Jobs, MPIJobs and TrainJobs


def pods_of(cluster: Cluster, item: Json) -> list[Json]:
    """Return the pods of a step."""
    return cluster.find("Pod", f"{POD_LABELS[item['kind']]}={_name(item)}")


def job_outcome(item: Json) -> str | None:
    """Return `complete`, `failed: <reason>`, or None while a step runs."""
    for condition in item.get("status", {}).get("conditions") or ():
        if condition.get("status") != "True":
            continue
        if condition["type"] in ("Complete", "Succeeded"):
            return "complete"
        if condition["type"] == "Failed":
            return f"failed: {condition.get('reason', 'unknown')}: {one_line(condition.get('message', ''))}"
    return None


def needs_all_pods(item: Json) -> bool:
    """Whether the pods of a step train together, so that none continues without the others."""
    return item.get("kind", "Job") != "Job" or _step_of(item) == "train"


def expected_pods(item: Json) -> int:
    """Return how many pods a step should have at a time; of an MPIJob, how many workers."""
    spec = item.get("spec", {})
    if item["kind"] == "TrainJob":
        return int(spec.get("trainer", {}).get("numNodes") or 1)
    if item["kind"] == "MPIJob":
        return int(spec.get("mpiReplicaSpecs", {}).get("Worker", {}).get("replicas") or 0)
    remaining = int(spec.get("completions") or 1) - int(item.get("status", {}).get("succeeded") or 0)
    return min(int(spec.get("parallelism") or 1), remaining)


def _at_work(item: Json, pods: Sequence[Json]) -> int:
    """Number of pods that run or wait; of an MPIJob, of workers."""
    counted = filter(is_worker, pods) if item["kind"] == "MPIJob" else pods
    return sum(pod.get("status", {}).get("phase") in ("Pending", "Running") for pod in counted)


# --- what waits for a queue: suspended until it is admitted, and again when others come first
#
# Kueue suspends whatever carries the label of one of its queues, by itself, and creates a Workload for it, whose
# conditions say what it waits for. Where Workloads may not be read, the Job's own condition is all that is known.

_OWNER_LABEL = "kueue.x-k8s.io/job-uid"
# The newest version of the API first.
_WORKLOADS = ("Workload", "OlderWorkload")


def is_suspended(item: Json) -> bool:
    """Whether a step is held back, so that it has no pods, or loses those that it has."""
    spec = item.get("spec", {})
    return bool((spec.get("runPolicy") or {}).get("suspend") if item["kind"] == "MPIJob" else spec.get("suspend"))


def describe_suspension(cluster: Cluster, item: Json) -> str:
    """Return what a suspended step waits for, in one line."""
    workloads: list[Json] = []
    for kind in _WORKLOADS:
        label = f"{_OWNER_LABEL}={item['metadata'].get('uid', '')}"
        workloads = workloads or cluster.find(kind, label, if_allowed=True)
    own = (item.get("status") or {}).get("conditions") or ()
    reasons = [_message_of(each) for each in own if each["type"] == "Suspended" and each.get("status") == "True"]
    reasons = list(_queue_reasons(max(workloads, key=_created))) if workloads else reasons
    queue = (item["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    waits = f"waits for its queue {queue}" if queue else "is suspended, until somebody resumes it"
    return f"{title_of(item)} {waits}: {'; '.join(dict.fromkeys(reasons)) or 'not looked at yet'}"


def _queue_reasons(workload: Json) -> Iterator[str]:
    status = workload.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    for kind, status_that_waits in (("Evicted", "True"), ("QuotaReserved", "False")):
        if conditions.get(kind, {}).get("status") == status_that_waits:
            yield _message_of(conditions[kind])
    for check in status.get("admissionChecks") or ():
        if check.get("state") != "Ready":
            yield f"admission check {check['name']}: {one_line(check.get('message') or '') or check.get('state', 'Pending')}"


def _message_of(condition: Json) -> str:
    return one_line(condition.get("message") or "") or str(condition.get("reason", condition["type"]))
