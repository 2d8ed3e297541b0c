"""Pods and Jobs as a real API server describes them, in the states that matter."""

from __future__ import annotations

from typing import Any

from gaudi_bert import __version__
from tests.builders.fake_api_server import State

Json = dict[str, Any]

IMAGE = f"gaudi-bert-data:{__version__}"
STORAGE_CLASS = {"metadata": {"name": "nfs", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}}


def pod(
    name: str, phase: str, container: str = "plan", *, waiting: Json | None = None, ended: Json | None = None, **status: Any
) -> Json:
    state = {"waiting": waiting} if waiting else {"terminated": ended} if ended else {"running": {}}
    started = phase != "Pending" or waiting
    statuses = [{"name": container, "image": IMAGE, "state": state}] if started else []
    return {
        "metadata": {"name": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [{"name": container, "image": IMAGE, "resources": {"limits": {"memory": "2Gi"}}}]},
        "status": {"phase": phase, "containerStatuses": statuses, **status},
    }


def running(name: str, container: str = "plan") -> Json:
    return pod(name, "Running", container)


def succeeded(name: str, container: str = "plan") -> Json:
    return pod(name, "Succeeded", container, ended={"exitCode": 0, "reason": "Completed"})


def failed(name: str, code: int, message: str = "", reason: str = "Error", container: str = "plan") -> Json:
    return pod(name, "Failed", container, ended={"exitCode": code, "reason": reason, "message": message})


def unschedulable(name: str, message: str) -> Json:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod(name, "Pending", conditions=[condition])


def image_missing(name: str, message: str, reason: str = "ErrImagePull") -> Json:
    return pod(name, "Pending", waiting={"reason": reason, "message": message})


def evicted(name: str) -> Json:
    return pod(name, "Failed", containerStatuses=[], reason="Evicted", message="The node was low on resource: memory.")


def preempted(name: str) -> Json:
    why = "default-scheduler: preempting to accommodate a higher priority pod"
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": why}
    return pod(name, "Failed", ended={"exitCode": 143, "reason": "Error"}, conditions=[condition])


# What Open MPI 4.1.4 wrote with --tag-output when rank 1 of two ended in an error, and rank 0 noticed.
MPIRUN_OUTPUT = """\
[1,0]<stderr>:train: rank 0 begins[1,1]<stderr>:train: rank 1 begins
[1,0]<stderr>:
[1,1]<stderr>:error: settings.yaml: depth is 3 there, 4 here; give another --out[1,1]<stderr>:
--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
[1,0]<stderr>:error: rank 1 has left; the same command goes on from the last checkpoint
--------------------------------------------------------------------------
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[12153,1],1]
  Exit code:    2
--------------------------------------------------------------------------
"""
MPIRUN_FOOTER_ONLY = MPIRUN_OUTPUT[MPIRUN_OUTPUT.index("[1,0]<stderr>:error: rank 1") :]


ACTIVE = {"active": 1}
COMPLETE = {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]}
LIMIT_REACHED = "Job has reached the specified backoff limit"
FAILED_CONDITION = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": LIMIT_REACHED}
FAILED = {"failed": 4, "conditions": [FAILED_CONDITION]}


def active(*pods: Json) -> State:
    return State(ACTIVE, list(pods))


def complete(*pods: Json) -> State:
    return State(COMPLETE, list(pods))


def gave_up(*pods: Json) -> State:
    return State(FAILED, list(pods))
