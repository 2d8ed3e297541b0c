"""Find out why a step on a cluster fails or does not start, and what this means for the run.

`step_problem` examines a step and its pods, and `suspension_problem` a step that waits for its queue. A `Problem` contains
the cluster's own message in one line, a remedy, and a `State` that says whether waiting or retrying can help. The message is
taken from the status of a pod, from the last warning about the pod or about the object that creates it, or from the `error:`
line at the end of the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from gaudi_bert.common.errors import InputError, StoppedError
from gaudi_bert.runners.kubernetes.client import Cluster, Json, title_of
from gaudi_bert.runners.kubernetes.manifests import POD_LABELS, QUEUE_LABEL
from gaudi_bert.runners.kubernetes.pods import CARD_RESOURCE, STEP_LABEL
from gaudi_bert.runners.kubernetes.remedies import find_advice
from gaudi_bert.runners.stage_table import STEPS
from gaudi_bert.runners.training_processes import RANK_TAG


class State(IntEnum):
    """What a problem means for the run. If a step has several problems, the one with the lowest value is reported."""

    # Neither waiting nor retrying helps.
    HOPELESS = 0
    # The cluster retries, or the other pods continue.
    GOES_ON = 1
    # The step has not started yet, but it may still start. The run gives up after `kubernetes.start_seconds`.
    WAITS = 2
    # The step was stopped on request or evicted after it had saved, and the run submits it again.
    STOPPED = 3


@dataclass(frozen=True)
class Problem:
    """A problem of a step.

    Attributes:
        state: What the problem means for the run.
        reason: The cluster's message, in one line.
        remedy: How to fix the problem, or "" if there is no remedy.
        occurrence: The pod, and how often its containers were started. It distinguishes two losses of the same pod.
    """

    state: State
    reason: str
    remedy: str = ""
    occurrence: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason

    @property
    def without_names(self) -> str:
        """The reason without the names of pods, because every new attempt to create a pod has another name."""
        return re.sub(r'\bpods? (?:"[^"]*"|[a-z0-9][-a-z0-9.]*)', "pod", self.reason)


_BY_EXIT_CODE = {InputError.exit_code: State.HOPELESS, StoppedError.exit_code: State.STOPPED}
# After this many pods for the same task were killed because of their memory limit, no further pod is tried.
_MOST_MEMORY_KILLS = 3
# Messages of a rank that ends only because another rank has ended.
_BECAUSE_OF_ANOTHER = re.compile(r"rank \d+.* (aborts|has left|(is|was) lost|did not connect)\b")
# The cluster's warning about pods on a node that does not answer.
_NODE_LOST = "Node is not ready"
# Remedies that name these options help only users who run a stage themselves. On a cluster they are replaced.
_BY_HAND = re.compile(r"--(overwrite|resume)\b")
_ON_A_CLUSTER = "give the pipeline another name, or remove its work folder: `gaudi-bert k8s delete PIPELINE --data`"
# Messages about pods that were rejected and not created, while other pods of the same step may exist.
_REFUSED = re.compile(r"is forbidden|is invalid|violates PodSecurity|denied the request|exceeded quota")
# What to check if no pods are created, for the kinds whose pods are created by an operator.
_MAKERS = {
    "MPIJob": "see that the MPI operator runs",
    "TrainJob": "see that the controllers of Kubeflow Trainer and JobSet run",
}


def step_problem(cluster: Cluster, item: Json, pods: Sequence[Json]) -> Problem | None:
    """Return the most important problem of a step, or None if it has none.

    A problem concerns one pod, or it says why there are too few pods. After the step has ended, only the pods are examined.
    A pod that ended because of another pod is reported only if there is no other problem.

    Args:
        cluster: The namespace of the step.
        item: The Job, MPIJob or TrainJob, as it was read from the cluster.
        pods: All pods of the step.
    """
    problems = [
        replace(each, occurrence=_occurrence(pod))
        for pod in current_pods(pods)
        if (each := _pod_problem(cluster, pod, pods)) is not None
    ]
    if job_outcome(item) is None:
        problems += _missing_pods(cluster, item, pods)
    return min(problems, default=None, key=lambda each: (bool(_BECAUSE_OF_ANOTHER.search(each.reason)), each.state))


def current_pods(pods: Sequence[Json]) -> list[Json]:
    """Return the newest pod of each task, without the pods that it replaced.

    A task is one part of a Job, the launcher of an MPIJob, or one of its workers.
    """
    return list({_task_of(pod): pod for pod in sorted(pods, key=_created)}.values())


def is_worker(pod: Json) -> bool:
    """Return whether a pod is a worker of an MPIJob."""
    return (pod["metadata"].get("labels") or {}).get("training.kubeflow.org/job-role") == "worker"


def _created(item: Json) -> str:
    """Return the creation time of an object in the format of the API, which sorts alphabetically."""
    return item["metadata"].get("creationTimestamp") or ""


def _task_of(pod: Json) -> str:
    """Return a key that is equal for all pods that were created for the same task."""
    annotations = pod["metadata"].get("annotations") or {}
    return _name(pod) if is_worker(pod) else str(annotations.get("batch.kubernetes.io/job-completion-index", ""))


def _occurrence(pod: Json) -> str:
    """Return a text that identifies the pod and how often its containers were restarted."""
    starts = sum(each.get("restartCount", 0) for each in pod.get("status", {}).get("containerStatuses") or ())
    return f"{pod['metadata'].get('uid') or _name(pod)}, start {starts}"


def _name(item: Json) -> str:
    """Return the name of an object."""
    return str(item["metadata"]["name"])


def _step_of(item: Json) -> str:
    """Return the step that an object belongs to, from its label."""
    return str((item["metadata"].get("labels") or {}).get(STEP_LABEL, "STEP"))


def _words_of(status: Mapping[str, str]) -> str:
    """Return the reason and the message of a status or a condition as `reason: message`, in one line."""
    return " ".join(": ".join(filter(None, (status.get("reason"), status.get("message")))).split())


def _in_words(where: str, words: str) -> Problem:
    """Build a `Problem` from a message of the cluster, with all remedies that suit the message.

    Args:
        where: The object that the message is about.
        words: The message of the cluster.
    """
    advice = find_advice(words)
    state = State.HOPELESS if advice.is_hopeless else State.WAITS
    return Problem(state, f"{where}: {words}", advice.remedy or "see `kubectl describe pod`")


# --- one pod


def _pod_problem(cluster: Cluster, pod: Json, pods: Sequence[Json]) -> Problem | None:
    """Return the problem of a pod, or None if the pod runs, has succeeded or waits for its inputs.

    Args:
        cluster: The namespace of the pod.
        pod: The pod.
        pods: All pods of the step, including replaced ones.
    """
    status, where = pod.get("status", {}), f"pod {_name(pod)}"
    phase, conditions = status.get("phase"), {each["type"]: each for each in status.get("conditions") or ()}
    if phase == "Succeeded":
        return None
    taken = conditions.get("DisruptionTarget", {})
    if taken.get("status") == "True":
        meaning = State.GOES_ON if taken.get("reason") == "TerminationByKubelet" else State.STOPPED
        return Problem(meaning, f"{where} was taken away: {_words_of(taken)}")
    # The operator deletes the workers of an MPIJob when the launcher is done, so a deleted worker is not a problem.
    if "deletionTimestamp" in pod["metadata"] and not is_worker(pod):
        return Problem(State.STOPPED, f"{where} was deleted")
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    states = [container.get("state") or {} for container in containers]
    for container, state in zip(containers, states, strict=True):
        before = container.get("lastState") or {} if "waiting" in state else {}
        ended = state.get("terminated") or before.get("terminated") or {}
        if ended.get("exitCode"):
            return _exit_problem(cluster, pod, pods, container, ended)
    if phase == "Failed":
        return Problem(State.GOES_ON, f"{where} failed: {_words_of(status) or 'no reason given'}")
    is_unready = phase == "Running" and conditions.get("Ready", {}).get("status") == "False"
    # The cluster evicts the pods of a lost node only after minutes, so report the lost node earlier.
    if is_unready and cluster.last_warning(_name(pod)) == _NODE_LOST:
        return Problem(
            State.GOES_ON, f"{where}: {_NODE_LOST.lower()}: {pod['spec'].get('nodeName')}", "see `kubectl get nodes`"
        )
    if phase != "Pending" or any("running" in state for state in states):
        return None
    return _start_problem(cluster, pod, [state.get("waiting") or {} for state in states], conditions.get("PodScheduled", {}))


def _start_problem(cluster: Cluster, pod: Json, waiting: Sequence[Json], scheduled: Json) -> Problem:
    """Return the problem of a pod that does not start.

    The message is taken from the status of the pod. If the status has no message, or if its message is about a volume claim,
    the last warnings about the pod or its claims are added.

    Args:
        cluster: The namespace of the pod.
        pod: The pod.
        waiting: The `waiting` state of each container.
        scheduled: The condition `PodScheduled` of the pod.
    """
    words = [_words_of(each) for each in waiting if each.get("message")]
    words += [_words_of(scheduled)] if scheduled.get("reason") == "Unschedulable" else []
    names = [] if words else [_name(pod)]
    if not words or "laim" in words[0]:
        claims = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["spec"].get("volumes") or ()]
        names += filter(None, claims)
    words += [f"{name}: {warning}" for name in names if (warning := cluster.last_warning(name))]
    shown = ", ".join(sorted(filter(None, (each.get("reason") for each in waiting)))) or "not scheduled"
    return _in_words(f"pod {_name(pod)}", "; ".join(words) or f"does not start ({shown})")


def _exit_problem(cluster: Cluster, pod: Json, pods: Sequence[Json], container: Json, ended: Json) -> Problem:
    """Return the problem of a container that ended with an exit code other than 0.

    The message is the `error:` line at the end of the log. If there is none, the message states the exit code. A container
    that was killed because of its memory limit may be tried again twice.

    Args:
        cluster: The namespace of the pod.
        pod: The pod of the container.
        pods: All pods of the step, including replaced ones.
        container: The status of the container.
        ended: The `terminated` state of the container.
    """
    code, where = ended["exitCode"], f"pod {_name(pod)}"
    if ended.get("reason") == "OOMKilled":
        of_the_task = [each.get("status", {}) for each in pods if _task_of(each) == _task_of(pod)]
        states = [each.get("state") or {} for status in of_the_task for each in status.get("containerStatuses") or ()]
        again = sum((state.get("terminated") or {}).get("reason") == "OOMKilled" for state in states)
        is_hopeless = max(again, container.get("restartCount", 0)) >= _MOST_MEMORY_KILLS
        limit, setting = _memory_limit(pod, container["name"])
        reason, remedy = f"{where}: OOMKilled (memory limit: {limit})", f"raise {setting}"
        return Problem(State.HOPELESS if is_hopeless else State.GOES_ON, reason, remedy)
    state = _BY_EXIT_CODE.get(code, State.GOES_ON)
    error = _error_line(ended.get("message") or "") or _error_line(cluster.log_end(_name(pod), container["name"]))
    reason, _, remedy = (
        error or f"exit code {code}; its log: `gaudi-bert k8s logs PIPELINE --step {_step_of(pod)}`"
    ).partition("; ")
    if state is State.STOPPED:
        remedy = ""  # nothing to do for the user, because the run submits the step again
    elif _BY_HAND.search(remedy):
        remedy = _ON_A_CLUSTER
    return Problem(state, f"{where}: {reason}", remedy)


def _memory_limit(pod: Json, container: str) -> tuple[str, str]:
    """Return the memory limit of a container, and the name of the setting that sets this limit."""
    containers: list[Json] = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
    limits = {each["name"]: each.get("resources", {}).get("limits", {}) for each in containers}.get(container, {})
    stage = STEPS.get(_step_of(pod).removesuffix("-worker"))
    setting = "resources.training" if stage is not None and stage.trains else "resources.data"
    if (pod["metadata"].get("labels") or {}).get("training.kubeflow.org/job-role") == "launcher":
        setting = "resources.launcher"
    if container == "wait":
        setting = "resources.waiting"
    return limits.get("memory", "none"), f"{setting}.{'memory' if CARD_RESOURCE in limits else 'memory_limit'}"


def _error_line(text: str) -> str | None:
    """Return the last `error:` line of a log without the tags of mpirun, or None if there is none.

    An error of a rank that failed by itself is preferred to errors of ranks that ended because of another rank.
    """
    pieces = [piece.strip() for line in text.splitlines() for piece in RANK_TAG.split(line)]
    errors = [piece for piece in pieces if piece.startswith("error: ")]
    return min(reversed(errors), default=None, key=lambda error: bool(_BECAUSE_OF_ANOTHER.search(error)))


# --- Jobs, MPIJobs and TrainJobs


def pods_of(cluster: Cluster, item: Json) -> list[Json]:
    """Return all pods of a Job, an MPIJob or a TrainJob, including replaced ones."""
    return cluster.find("Pod", f"{POD_LABELS[item['kind']]}={_name(item)}")


def job_outcome(item: Json) -> str | None:
    """Return "complete", or "failed: <reason>", or None if the step has not ended."""
    for condition in item.get("status", {}).get("conditions") or ():
        if condition.get("status") == "True" and condition["type"] in ("Complete", "Succeeded"):
            return "complete"
        if condition.get("status") == "True" and condition["type"] == "Failed":
            return f"failed: {_words_of(condition)}"
    return None


def trains_together(item: Json) -> bool:
    """Return whether the pods of a step train together, so that no pod can continue without the others."""
    return item.get("kind", "Job") != "Job" or _step_of(item) == "train"


def _missing_pods(cluster: Cluster, item: Json, pods: Sequence[Json]) -> Iterator[Problem]:
    """Yield the problem of a step that has fewer pods than it should have. Yield nothing if it has enough.

    The message is the last warning about the step, or about the launcher of an MPIJob. For an MPIJob, only the workers are
    counted. The existing pods of a shared stage can do all of its work, so missing pods do not stop it. Pods that train
    together must wait for the missing ones.
    """
    spec, kind = item.get("spec", {}), item["kind"]
    remaining = int(spec.get("completions") or 1) - int(item.get("status", {}).get("succeeded") or 0)
    expected = min(int(spec.get("parallelism") or 1), remaining)
    if kind == "TrainJob":
        expected = int(spec.get("trainer", {}).get("numNodes") or 1)
    elif kind == "MPIJob":
        expected = int(spec.get("mpiReplicaSpecs", {}).get("Worker", {}).get("replicas") or 0)
    counted = [pod for pod in pods if kind != "MPIJob" or is_worker(pod)]
    at_work = sum(pod.get("status", {}).get("phase") in ("Pending", "Running") for pod in counted)
    if pods and at_work >= expected:
        return
    makers = [_name(item), *([f"{_name(item)}-launcher"] if kind == "MPIJob" else [])]
    words = next(filter(None, (cluster.last_warning(name, _created(item)) for name in reversed(makers))), "")
    if not words and not pods:
        yield Problem(State.WAITS, f"{title_of(item)} has no pods", _MAKERS.get(kind, "see `kubectl describe job`"))
    elif words and (not pods or _REFUSED.search(words)):
        problem = _in_words(f"{title_of(item)} gets {f'{at_work} of {expected}' if pods else 'no'} pods", words)
        works_on = bool(pods) and problem.state is State.WAITS and not trains_together(item)
        yield Problem(State.GOES_ON, problem.reason, problem.remedy) if works_on else problem


# --- suspended steps, which wait for a queue
#
# Kueue suspends every object that has the label of one of its queues, and creates a Workload for it. It suspends the object
# again if others have priority. The conditions of the Workload say what the object waits for. If the account may not read
# Workloads, only the condition of the object itself is known.

_HELD_BACK = {"Evicted": "True", "QuotaReserved": "False", "Suspended": "True"}


def is_suspended(item: Json) -> bool:
    """Return whether a step is suspended. A suspended step has no pods, or its pods are being removed."""
    spec = item.get("spec", {})
    return bool((spec.get("runPolicy") or {}).get("suspend") if item["kind"] == "MPIJob" else spec.get("suspend"))


def suspension_problem(cluster: Cluster, item: Json) -> Problem:
    """Return the problem that says what a suspended step waits for.

    Its state is `HOPELESS` if the queue can never admit the step in its present form, and otherwise `WAITS`.
    """
    label = f"kueue.x-k8s.io/job-uid={item['metadata'].get('uid', '')}"
    holders = (cluster.find(kind, label, if_allowed=True) for kind in ("Workload", "OlderWorkload"))
    holder = max(next(filter(None, holders), ()), default=item, key=_created)
    status = holder.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    held = [conditions[kind] for kind, value in _HELD_BACK.items() if conditions.get(kind, {}).get("status") == value]
    reasons = [each.get("message") or _words_of(each) for each in held]
    checks = [check for check in status.get("admissionChecks") or () if check.get("state") != "Ready"]
    reasons += [f"admission check {each['name']}: {each.get('message') or each.get('state', 'Pending')}" for each in checks]
    queue = (item["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    waits = f"waits for its queue {queue}" if queue else "is suspended, until somebody resumes it"
    words = " ".join(f"{title_of(item)} {waits}: {'; '.join(dict.fromkeys(reasons)) or 'not looked at yet'}".split())
    advice = find_advice(words)
    return Problem(State.HOPELESS if advice.is_hopeless else State.WAITS, words, advice.remedy)
