"""Find out why a step on a cluster fails or does not start, and what this means for the run.

`find_step_problem` examines a step and its pods. `find_suspension_problem` examines a step that waits for its queue. Both
return a `Problem`, which contains the cluster's message in one line, a remedy, and a `ProblemState` that states whether
waiting or retrying can help. The message is taken from the status of a pod, from the newest warning about the pod or about
the object that creates it, or from the last `error:` line of the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from gaudi_bert.common.errors import InputError, StoppedError
from gaudi_bert.runners.kubernetes.client import Cluster, Json, format_object_title
from gaudi_bert.runners.kubernetes.manifests import POD_LABELS, QUEUE_LABEL
from gaudi_bert.runners.kubernetes.pods import ACCELERATOR_RESOURCE, STEP_LABEL
from gaudi_bert.runners.kubernetes.remedies import find_advice
from gaudi_bert.runners.stage_table import STEPS
from gaudi_bert.runners.training_processes import RANK_TAG


class ProblemState(IntEnum):
    """How a problem affects the run. If a step has several problems, the one with the lowest value is reported."""

    # Neither waiting nor retrying helps, so the run fails.
    HOPELESS = 0
    # The run continues, because the cluster replaces the pod or the other pods can do the work.
    CONTINUES = 1
    # The step has not started yet, but it may still start. The run gives up after `kubernetes.start_seconds`.
    WAITING = 2
    # The pods of the step were stopped on request or evicted, so the run submits the step again.
    STOPPED = 3


@dataclass(frozen=True)
class Problem:
    """The reason why a step failed, does not start or has too few pods.

    Attributes:
        state: What the problem means for the run.
        reason: The message of the cluster, in one line.
        remedy: How to fix the problem, or "" if there is no remedy.
        occurrence: The pod, and how often its containers were started. If the same pod fails twice, the two problems differ
            in this text.
    """

    state: ProblemState
    reason: str
    remedy: str = ""
    occurrence: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason

    @property
    def reason_without_pod_names(self) -> str:
        """The reason without the names of pods. Two failed attempts to create a pod then have the same reason, although each
        attempt uses a new name.
        """
        return re.sub(r'\bpods? (?:"[^"]*"|[a-z0-9][-a-z0-9.]*)', "pod", self.reason)


_STATES_BY_EXIT_CODE = {InputError.exit_code: ProblemState.HOPELESS, StoppedError.exit_code: ProblemState.STOPPED}
# A pod may exceed its memory limit by chance, so it is tried again. After this many such failures of the same task, the
# problem counts as hopeless.
_MOST_MEMORY_KILLS = 3
# If a rank ends only because another rank has ended, it prints a message that matches this pattern. The message does not
# explain the first failure.
_CONSEQUENTIAL_ERROR = re.compile(
    r"rank \d+.* (aborts|has left|is lost|lost the connection to another process|did not connect)\b"
)
# The cluster adds this warning to the pods of a node that no longer answers.
_NODE_LOST = "Node is not ready"
# An error message may recommend one of these options to users who run the stage themselves. Users of a cluster do not run it
# themselves, so such a recommendation is replaced by `_CLUSTER_REMEDY`.
_LOCAL_ONLY_REMEDY = re.compile(r"--(overwrite|resume)\b")
_CLUSTER_REMEDY = "give the pipeline another name, or remove its work folder: `gaudi-bert k8s delete PIPELINE --data`"
# If the cluster rejects a pod, the text of the warning matches this pattern. Other warnings about a step do not explain why
# some of its pods are missing.
_REJECTED_POD = re.compile(r"is forbidden|is invalid|violates PodSecurity|denied the request|exceeded quota")
# An operator creates the pods of these kinds of objects. If there are no pods, the operator may not be running.
_OPERATOR_CHECKS = {
    "MPIJob": "check that the MPI operator runs",
    "TrainJob": "check that the controllers of Kubeflow Trainer and JobSet run",
}


def find_step_problem(cluster: Cluster, job: Json, pods: Sequence[Json]) -> Problem | None:
    """Return the most important problem of a step on the cluster, or None if it has no problem.

    A problem concerns one pod, or it states why there are too few pods. After the step has ended, only the pods are
    examined. The problem of a pod that ended because of another pod is returned only if there is no other problem.

    Args:
        cluster: The client for the namespace of the step.
        job: The Job, MPIJob or TrainJob, as it was read from the cluster.
        pods: All pods of the step.
    """
    problems = [
        replace(problem, occurrence=_format_uid_and_restart_count(pod))
        for pod in select_newest_pods(pods)
        if (problem := _find_pod_problem(cluster, pod, pods)) is not None
    ]
    missing = _find_missing_pods_problem(cluster, job, pods) if read_job_outcome(job) is None else None
    problems += [missing] if missing is not None else []
    return min(problems, default=None, key=lambda each: (bool(_CONSEQUENTIAL_ERROR.search(each.reason)), each.state))


def select_newest_pods(pods: Sequence[Json]) -> list[Json]:
    """Return the pods of a step that were not replaced by newer pods."""
    return list({_get_pod_task_id(pod): pod for pod in sorted(pods, key=_creation_time)}.values())


def is_mpijob_worker(pod: Json) -> bool:
    """Return whether a pod is a worker of an MPIJob."""
    return (pod["metadata"].get("labels") or {}).get("training.kubeflow.org/job-role") == "worker"


def _creation_time(kubernetes_object: Json) -> str:
    """Return the creation timestamp of an object. API timestamps can be compared as strings."""
    return kubernetes_object["metadata"].get("creationTimestamp") or ""


def _get_pod_task_id(pod: Json) -> str:
    """Return a key that a pod shares only with the pods that replace it.

    It is the index of the part in a Job, the name of the worker in an MPIJob, or "" for the launcher of an MPIJob.
    """
    annotations = pod["metadata"].get("annotations") or {}
    return (
        _object_name(pod) if is_mpijob_worker(pod) else str(annotations.get("batch.kubernetes.io/job-completion-index", ""))
    )


def _format_uid_and_restart_count(pod: Json) -> str:
    """Return the UID of a pod and the number of its restarts as one text.

    The text changes if the pod is replaced or one of its containers is restarted.
    """
    starts = sum(each.get("restartCount", 0) for each in pod.get("status", {}).get("containerStatuses") or ())
    return f"{pod['metadata'].get('uid') or _object_name(pod)}, start {starts}"


def _object_name(kubernetes_object: Json) -> str:
    """Return the name of an object."""
    return str(kubernetes_object["metadata"]["name"])


def _step_label(kubernetes_object: Json) -> str:
    """Return the name of the step in an object's label, or "STEP" if the object has no such label."""
    return str((kubernetes_object["metadata"].get("labels") or {}).get(STEP_LABEL, "STEP"))


def _format_status(status: Mapping[str, str]) -> str:
    """Format the status or a condition of an object as one line of the form `reason: message`."""
    return " ".join(": ".join(filter(None, (status.get("reason"), status.get("message")))).split())


def _problem_from_message(subject: str, message: str) -> Problem:
    """Return a `Problem` for a message from the cluster, and include the remedies for this message.

    Args:
        subject: The object that the message is about.
        message: The message of the cluster.
    """
    advice = find_advice(message)
    state = ProblemState.HOPELESS if advice.is_hopeless else ProblemState.WAITING
    return Problem(state, f"{subject}: {message}", advice.remedy or "see `kubectl describe pod`")


# --- one pod


def _find_pod_problem(cluster: Cluster, pod: Json, step_pods: Sequence[Json]) -> Problem | None:
    """Return the problem of a pod, or None if the pod is running, has succeeded or is waiting for its inputs.

    Args:
        cluster: The client for the namespace of the pod.
        pod: The pod.
        step_pods: All pods of the step, including replaced ones.
    """
    status, where = pod.get("status", {}), f"pod {_object_name(pod)}"
    phase, conditions = status.get("phase"), {each["type"]: each for each in status.get("conditions") or ()}
    if phase == "Succeeded":
        return None
    taken = conditions.get("DisruptionTarget", {})
    if taken.get("status") == "True":
        meaning = ProblemState.CONTINUES if taken.get("reason") == "TerminationByKubelet" else ProblemState.STOPPED
        return Problem(meaning, f"{where} was evicted or preempted: {_format_status(taken)}")
    # The operator deletes the workers of an MPIJob when the launcher is done, so a deleted worker is not a problem.
    if "deletionTimestamp" in pod["metadata"] and not is_mpijob_worker(pod):
        return Problem(ProblemState.STOPPED, f"{where} was deleted")
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    states = [container.get("state") or {} for container in containers]
    for container, state in zip(containers, states, strict=True):
        before = container.get("lastState") or {} if "waiting" in state else {}
        ended = state.get("terminated") or before.get("terminated") or {}
        if ended.get("exitCode"):
            return _find_exit_problem(cluster, pod, step_pods, container, ended)
    if phase == "Failed":
        return Problem(ProblemState.CONTINUES, f"{where} failed: {_format_status(status) or 'the cluster gives no reason'}")
    is_unready = phase == "Running" and conditions.get("Ready", {}).get("status") == "False"
    # The cluster evicts the pods of a lost node only after several minutes, so look for a warning to report the loss
    # earlier.
    if is_unready and cluster.read_last_warning(_object_name(pod)) == _NODE_LOST:
        return Problem(
            ProblemState.CONTINUES,
            f"{where}: {_NODE_LOST.lower()}: {pod['spec'].get('nodeName')}",
            "see `kubectl get nodes`",
        )
    if phase != "Pending" or any("running" in state for state in states):
        return None
    return _find_start_problem(
        cluster, pod, [state.get("waiting") or {} for state in states], conditions.get("PodScheduled", {})
    )


def _find_start_problem(cluster: Cluster, pod: Json, waiting_states: Sequence[Json], scheduled_condition: Json) -> Problem:
    """Return a `Problem` that explains why a pod does not start.

    The message is taken from the status of the pod. If the status has no message, the newest warnings about the pod and its
    volume claims are used. If the message is about a claim, the warnings about the claims are added.

    Args:
        cluster: The client for the namespace of the pod.
        pod: The pod.
        waiting_states: The `waiting` state of each container.
        scheduled_condition: The condition `PodScheduled` of the pod.
    """
    messages = [_format_status(each) for each in waiting_states if each.get("message")]
    messages += [_format_status(scheduled_condition)] if scheduled_condition.get("reason") == "Unschedulable" else []
    names = [] if messages else [_object_name(pod)]
    if not messages or "laim" in messages[0]:
        claims = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["spec"].get("volumes") or ()]
        names += filter(None, claims)
    messages += [f"{name}: {warning}" for name in names if (warning := cluster.read_last_warning(name))]
    shown = ", ".join(sorted(filter(None, (each.get("reason") for each in waiting_states)))) or "not scheduled"
    return _problem_from_message(f"pod {_object_name(pod)}", "; ".join(messages) or f"the pod does not start ({shown})")


def _find_exit_problem(
    cluster: Cluster, pod: Json, step_pods: Sequence[Json], container_status: Json, terminated_state: Json
) -> Problem:
    """Return the problem of a container that ended with a nonzero exit code.

    The message is the last `error:` line of the log. If there is none, the message states the exit code. A container that
    exceeded its memory limit may be tried again twice.

    Args:
        cluster: The client for the namespace of the pod.
        pod: The pod of the container.
        step_pods: All pods of the step, including replaced ones.
        container_status: The status of the container.
        terminated_state: The `terminated` state of the container.
    """
    code, where = terminated_state["exitCode"], f"pod {_object_name(pod)}"
    if terminated_state.get("reason") == "OOMKilled":
        of_the_task = [each.get("status", {}) for each in step_pods if _get_pod_task_id(each) == _get_pod_task_id(pod)]
        states = [each.get("state") or {} for status in of_the_task for each in status.get("containerStatuses") or ()]
        again = sum((state.get("terminated") or {}).get("reason") == "OOMKilled" for state in states)
        is_hopeless = max(again, container_status.get("restartCount", 0)) >= _MOST_MEMORY_KILLS
        limit, setting = _find_memory_limit(pod, container_status["name"])
        return Problem(
            ProblemState.HOPELESS if is_hopeless else ProblemState.CONTINUES,
            f"{where}: a container exceeded its memory limit (OOMKilled, memory limit: {limit})",
            f"raise {setting}",
        )
    state = _STATES_BY_EXIT_CODE.get(code, ProblemState.CONTINUES)
    error = _find_error_line(terminated_state.get("message") or "") or _find_error_line(
        cluster.read_log_end(_object_name(pod), container_status["name"])
    )
    reason, _, remedy = (
        error
        or f"a container ended with exit code {code}; see its log: `gaudi-bert k8s logs PIPELINE --step {_step_label(pod)}`"
    ).partition("; ")
    if state is ProblemState.STOPPED:
        remedy = ""  # nothing to do for the user, because the run submits the step again
    elif _LOCAL_ONLY_REMEDY.search(remedy):
        remedy = _CLUSTER_REMEDY
    return Problem(state, f"{where}: {reason}", remedy)


class _MemoryLimit(NamedTuple):
    """The memory limit of a container, or "none", and the name of the setting that determines it."""

    limit: str
    setting: str


def _find_memory_limit(pod: Json, container_name: str) -> _MemoryLimit:
    """Return the memory limit of a container, and the name of the setting that determines the limit."""
    containers: list[Json] = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
    limits = {each["name"]: each.get("resources", {}).get("limits", {}) for each in containers}.get(container_name, {})
    stage = STEPS.get(_step_label(pod).removesuffix("-worker"))
    setting = "resources.training" if stage is not None and stage.runs_model else "resources.data"
    if (pod["metadata"].get("labels") or {}).get("training.kubeflow.org/job-role") == "launcher":
        setting = "resources.launcher"
    if container_name == "wait":
        setting = "resources.waiting"
    key = "memory" if ACCELERATOR_RESOURCE in limits else "memory_limit"
    return _MemoryLimit(limits.get("memory", "none"), f"{setting}.{key}")


def _find_error_line(log: str) -> str | None:
    """Return the last `error:` line of a log without mpirun's tags, or None if there is no such line.

    Lines of ranks that ended only because another rank had ended are returned only if there are no other `error:` lines.
    """
    pieces = [piece.strip() for line in log.splitlines() for piece in RANK_TAG.split(line)]
    errors = [piece for piece in pieces if piece.startswith("error: ")]
    return min(reversed(errors), default=None, key=lambda error: bool(_CONSEQUENTIAL_ERROR.search(error)))


# --- Jobs, MPIJobs and TrainJobs


def list_job_pods(cluster: Cluster, job: Json) -> list[Json]:
    """Return all pods of a Job, an MPIJob or a TrainJob, including pods that were replaced."""
    return cluster.list_objects("Pod", f"{POD_LABELS[job['kind']]}={_object_name(job)}")


def read_job_outcome(job: Json) -> str | None:
    """Return "complete" or "failed: <reason>" if the Job of a step has ended, otherwise None."""
    for condition in job.get("status", {}).get("conditions") or ():
        if condition.get("status") == "True" and condition["type"] in ("Complete", "Succeeded"):
            return "complete"
        if condition.get("status") == "True" and condition["type"] == "Failed":
            return f"failed: {_format_status(condition)}"
    return None


def is_distributed_training(job: Json) -> bool:
    """Return whether the pods of a step train one model together. Such pods cannot continue without each other."""
    return job.get("kind", "Job") != "Job" or _step_label(job) == "train"


def _find_missing_pods_problem(cluster: Cluster, job: Json, pods: Sequence[Json]) -> Problem | None:
    """Return the problem of a step that has too few pods, or None if it has enough or the cluster gives no reason.

    The message is the newest warning about the step, or about the launcher of an MPIJob. For an MPIJob, only the workers are
    counted. If several pods share a stage, the existing pods can do all of its work, so the run continues. Pods that train
    together must wait for the missing pods.
    """
    spec, kind = job.get("spec", {}), job["kind"]
    remaining = int(spec.get("completions") or 1) - int(job.get("status", {}).get("succeeded") or 0)
    expected = min(int(spec.get("parallelism") or 1), remaining)
    if kind == "TrainJob":
        expected = int(spec.get("trainer", {}).get("numNodes") or 1)
    elif kind == "MPIJob":
        expected = int(spec.get("mpiReplicaSpecs", {}).get("Worker", {}).get("replicas") or 0)
    counted = [pod for pod in pods if kind != "MPIJob" or is_mpijob_worker(pod)]
    active = sum(pod.get("status", {}).get("phase") in ("Pending", "Running") for pod in counted)
    if pods and active >= expected:
        return None
    title, creators = format_object_title(job), [_object_name(job)]
    creators += [f"{_object_name(job)}-launcher"] if kind == "MPIJob" else []
    warnings = (cluster.read_last_warning(name, _creation_time(job)) for name in reversed(creators))
    warning = next(filter(None, warnings), "")
    if not warning and not pods:
        return Problem(
            ProblemState.WAITING, f"{title} has no pods", _OPERATOR_CHECKS.get(kind, "see `kubectl describe job`")
        )
    if not warning or (pods and not _REJECTED_POD.search(warning)):
        return None
    problem = _problem_from_message(f"{title} has {f'only {active} of {expected}' if pods else 'no'} pods", warning)
    if pods and problem.state is ProblemState.WAITING and not is_distributed_training(job):
        return replace(problem, state=ProblemState.CONTINUES)
    return problem


# --- suspended steps, which wait for a queue
#
# Kueue suspends every object that has the label of one of its queues, and creates a Workload for the object. It suspends the
# object again if other objects have priority. The conditions of the Workload state what the object waits for. If the account
# may not read Workloads, only the condition of the object itself is available.

_WAITING_CONDITIONS = {"Evicted": "True", "QuotaReserved": "False", "Suspended": "True"}


def is_suspended(job: Json) -> bool:
    """Return whether the Job of a step is suspended, so that it has no pods or its pods are being removed."""
    spec = job.get("spec", {})
    return bool((spec.get("runPolicy") or {}).get("suspend") if job["kind"] == "MPIJob" else spec.get("suspend"))


def find_suspension_problem(cluster: Cluster, job: Json) -> Problem:
    """Return a `Problem` that states what a suspended step is waiting for.

    Its state is `HOPELESS` if the queue can never admit the step, and otherwise `WAITING`.
    """
    label = f"kueue.x-k8s.io/job-uid={job['metadata'].get('uid', '')}"
    holders = (cluster.list_objects(kind, label, empty_if_forbidden=True) for kind in ("Workload", "OlderWorkload"))
    holder = max(next(filter(None, holders), ()), default=job, key=_creation_time)
    status = holder.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    held = [
        conditions[kind] for kind, value in _WAITING_CONDITIONS.items() if conditions.get(kind, {}).get("status") == value
    ]
    reasons = [each.get("message") or _format_status(each) for each in held]
    checks = [check for check in status.get("admissionChecks") or () if check.get("state") != "Ready"]
    reasons += [f"admission check {each['name']}: {each.get('message') or each.get('state', 'Pending')}" for each in checks]
    queue = (job["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    waits = f"waits for its queue {queue}" if queue else "is suspended until it is resumed"
    details = "; ".join(dict.fromkeys(reasons)) or "the queue has not examined it yet"
    message = " ".join(f"{format_object_title(job)} {waits}: {details}".split())
    advice = find_advice(message)
    return Problem(ProblemState.HOPELESS if advice.is_hopeless else ProblemState.WAITING, message, advice.remedy)
