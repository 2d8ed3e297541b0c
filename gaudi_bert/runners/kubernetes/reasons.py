"""Why a step does not continue: the cluster's own words, in one line, and what they mean for the run.

The words are those of a pod's status, of the last warning about the pod or about what makes it, and of the `error:` line
with which its log ends.
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
from gaudi_bert.runners.launch import RANK_TAG
from gaudi_bert.runners.stage_table import STEPS


class State(IntEnum):
    """Meaning of a problem for the run; of several, the first one is reported."""

    # Neither waiting nor trying again helps.
    HOPELESS = 0
    # The cluster tries again, or the other pods work on.
    GOES_ON = 1
    # It does not run yet, and may still; given up after `kubernetes.start_seconds`.
    WAITS = 2
    # Stopped on request, or taken away; it saved, and the same is submitted again.
    STOPPED = 3


@dataclass(frozen=True)
class Problem:
    """A problem in the cluster's words, and the remedy."""

    state: State
    reason: str
    remedy: str = ""
    # Which pod it is about, and how often that pod's containers were started: a second loss is another problem.
    occurrence: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason

    @property
    def without_names(self) -> str:
        """Return the reason without the names of pods, which change with every attempt to make one."""
        return re.sub(r'\bpods? (?:"[^"]*"|[a-z0-9][-a-z0-9.]*)', "pod", self.reason)


_BY_EXIT_CODE = {InputError.exit_code: State.HOPELESS, StoppedError.exit_code: State.STOPPED}
# So many pods that do the same are killed for their memory before no further one is tried.
_MOST_MEMORY_KILLS = 3
# What a rank reports that ends because another one has.
_BECAUSE_OF_ANOTHER = re.compile(r"rank \d+.* (aborts|has left|(is|was) lost|did not come)\b")
# What the cluster notes of the pods of a node that it does not hear of.
_NODE_LOST = "Node is not ready"
# A remedy for who runs a stage by hand is none on a cluster.
_BY_HAND = re.compile(r"--(overwrite|resume)\b")
_ON_A_CLUSTER = "give the pipeline another name, or remove its work folder: `gaudi-bert k8s delete PIPELINE --data`"
# Why some pods are not even created, though others are.
_REFUSED = re.compile(r"is forbidden|is invalid|violates PodSecurity|denied the request|exceeded quota")
# Who makes the pods where Kubernetes itself does not.
_MAKERS = {
    "MPIJob": "see that the MPI operator runs",
    "TrainJob": "see that the controllers of Kubeflow Trainer and JobSet run",
}


def step_problem(cluster: Cluster, item: Json, pods: Sequence[Json]) -> Problem | None:
    """Return what is wrong with a step: with one of its pods, or why there are too few; None where it continues.

    Of a step that has ended, its pods alone say why. What ended because of another pod is reported last.
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
    """Return the newest pod of each task: of a part of a Job, of an MPIJob's launcher, of each of its workers."""
    return list({_task_of(pod): pod for pod in sorted(pods, key=_created)}.values())


def is_worker(pod: Json) -> bool:
    """Whether a pod is a worker of an MPIJob, which serves the launcher."""
    return (pod["metadata"].get("labels") or {}).get("training.kubeflow.org/job-role") == "worker"


def _created(item: Json) -> str:
    """When an object was created, as the API writes it; the texts sort as the times do."""
    return item["metadata"].get("creationTimestamp") or ""


def _task_of(pod: Json) -> str:
    annotations = pod["metadata"].get("annotations") or {}
    return _name(pod) if is_worker(pod) else str(annotations.get("batch.kubernetes.io/job-completion-index", ""))


def _occurrence(pod: Json) -> str:
    starts = sum(each.get("restartCount", 0) for each in pod.get("status", {}).get("containerStatuses") or ())
    return f"{pod['metadata'].get('uid') or _name(pod)}, start {starts}"


def _name(item: Json) -> str:
    return str(item["metadata"]["name"])


def _step_of(item: Json) -> str:
    return str((item["metadata"].get("labels") or {}).get(STEP_LABEL, "STEP"))


def _words_of(status: Mapping[str, str]) -> str:
    """The words of a status or a condition, in one line: its reason, and its message."""
    return " ".join(": ".join(filter(None, (status.get("reason"), status.get("message")))).split())


def _in_words(where: str, words: str) -> Problem:
    """A problem in the cluster's words, with every remedy that suits them."""
    advice = find_advice(words)
    state = State.HOPELESS if advice.is_hopeless else State.WAITS
    return Problem(state, f"{where}: {words}", advice.remedy or "see `kubectl describe pod`")


# --- one pod


def _pod_problem(cluster: Cluster, pod: Json, pods: Sequence[Json]) -> Problem | None:
    """The problem of a pod, one of all `pods` of its step; None for one that runs, is done or waits for its inputs."""
    status, where = pod.get("status", {}), f"pod {_name(pod)}"
    phase, conditions = status.get("phase"), {each["type"]: each for each in status.get("conditions") or ()}
    if phase == "Succeeded":
        return None
    taken = conditions.get("DisruptionTarget", {})
    if taken.get("status") == "True":
        meaning = State.GOES_ON if taken.get("reason") == "TerminationByKubelet" else State.STOPPED
        return Problem(meaning, f"{where} was taken away: {_words_of(taken)}")
    # What becomes of a worker matters only to its launcher: when that is done, all workers are removed.
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
    if is_unready and cluster.last_warning(_name(pod)) == _NODE_LOST:  # long before the cluster takes the pod away
        return Problem(
            State.GOES_ON, f"{where}: {_NODE_LOST.lower()}: {pod['spec'].get('nodeName')}", "see `kubectl get nodes`"
        )
    if phase != "Pending" or any("running" in state for state in states):
        return None
    return _start_problem(cluster, pod, [state.get("waiting") or {} for state in states], conditions.get("PodScheduled", {}))


def _start_problem(cluster: Cluster, pod: Json, waiting: Sequence[Json], scheduled: Json) -> Problem:
    """Why a pod does not start: the reason in its status; without one, or where it names a claim, the last warnings."""
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
    """Why a container ended: the `error:` line with which its log ends, or else its exit code."""
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
        remedy = ""  # the run submits it again
    elif _BY_HAND.search(remedy):
        remedy = _ON_A_CLUSTER
    return Problem(state, f"{where}: {reason}", remedy)


def _memory_limit(pod: Json, container: str) -> tuple[str, str]:
    """Return the memory that a container may use, and the setting that raises it."""
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
    """The `error:` line of a log, without the tags of mpirun; of several ranks, that of the one that failed by itself."""
    pieces = [piece.strip() for line in text.splitlines() for piece in RANK_TAG.split(line)]
    errors = [piece for piece in pieces if piece.startswith("error: ")]
    return min(reversed(errors), default=None, key=lambda error: bool(_BECAUSE_OF_ANOTHER.search(error)))


# --- Jobs, MPIJobs and TrainJobs


def pods_of(cluster: Cluster, item: Json) -> list[Json]:
    """Return the pods of a step."""
    return cluster.find("Pod", f"{POD_LABELS[item['kind']]}={_name(item)}")


def job_outcome(item: Json) -> str | None:
    """Return `complete`, `failed: <reason>`, or None while a step runs."""
    for condition in item.get("status", {}).get("conditions") or ():
        if condition.get("status") == "True" and condition["type"] in ("Complete", "Succeeded"):
            return "complete"
        if condition.get("status") == "True" and condition["type"] == "Failed":
            return f"failed: {_words_of(condition)}"
    return None


def trains_together(item: Json) -> bool:
    """Whether the pods of a step train together, so that none continues without the others."""
    return item.get("kind", "Job") != "Job" or _step_of(item) == "train"


def _missing_pods(cluster: Cluster, item: Json, pods: Sequence[Json]) -> Iterator[Problem]:
    """Why the cluster makes no pods, or fewer than `item` wants (of an MPIJob, workers): its last warning about the maker.

    The pods that a Job has do its work one after another; those that train together wait for the others.
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


# --- what waits for a queue: suspended until it is admitted, and again when others come first
#
# Kueue suspends whatever carries the label of one of its queues, by itself, and creates a Workload for it, whose
# conditions say what it waits for. Where Workloads may not be read, the Job's own condition is all that is known.

_HELD_BACK = {"Evicted": "True", "QuotaReserved": "False", "Suspended": "True"}


def is_suspended(item: Json) -> bool:
    """Whether a step is held back, so that it has no pods, or loses those that it has."""
    spec = item.get("spec", {})
    return bool((spec.get("runPolicy") or {}).get("suspend") if item["kind"] == "MPIJob" else spec.get("suspend"))


def suspension_problem(cluster: Cluster, item: Json) -> Problem:
    """Return what a suspended step waits for; its state is hopeless if the queue can never admit the step as it is."""
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
