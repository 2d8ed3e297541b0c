"""What a run reports while it follows a Job: pods that are stopped on request, and Jobs that wait for a queue."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes import manage
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.follow import _StartLimit
from gaudi_bert.runners.kubernetes.pod_problems import worst_problem
from gaudi_bert.runners.kubernetes.problems import describe_suspension
from tests.builders.fake_api_server import FakeApiServer, Run, State
from tests.builders.recorded_answers import (
    ACTIVE,
    active,
    complete,
    failed,
    gave_up,
    pod,
    preempted,
    running,
    succeeded,
    unschedulable,
)

Json = dict[str, Any]

UNBOUND = unschedulable("p", "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.")
FULL = unschedulable("q", "0/1 nodes are available: 1 Insufficient cpu.")
TRAINED = State({"conditions": [{"type": "Succeeded", "status": "True"}]})
STOPPED = "[1,0]<stderr>:error: /work/demo/run: stopped on request after update 614 of 800; run it again to resume\n"
LOST = f"{STOPPED}ORTE has lost communication with a remote daemon: connection to the node demo-train-worker-1 is lost\n"


class Told:
    """What is reported of pods at moments of a clock that the test turns."""

    def __init__(self, reporter: Reporter, said: io.StringIO) -> None:
        self.now, self._said = 0.0, said
        self._limit = _StartLimit(600, reporter, clock=lambda: self.now)

    def at(self, now: float, *pods: Json) -> list[str]:
        """The new lines, after these pods were seen at `now`."""
        self.now = now
        before, problem = len(self._said.getvalue()), worst_problem(pods)
        if problem is None:
            self._limit.begin_again()
        else:
            assert not self._limit.is_over(problem)
        return self._said.getvalue()[before:].splitlines()


@pytest.fixture
def told(reporter: Reporter, said: io.StringIO) -> Told:
    return Told(reporter, said)


@pytest.mark.parametrize("condition", [UNBOUND, FULL], ids=["unbound", "full"])
def test_only_a_condition_that_lasts_15_seconds_is_reported_and_once(condition: Json, told: Told) -> None:
    assert told.at(0, condition) + told.at(14, condition) + told.at(14.9, running("p")) == []
    assert told.at(100, condition) + told.at(114.9, condition) == []
    (line,) = told.at(115, condition)
    assert line.startswith(f"pod {condition['metadata']['name']} is Unschedulable: 0/1 nodes are available")
    assert line.endswith("(giving up after 10 min 00 s)")
    assert told.at(116, condition) + told.at(200, condition) == []


def test_what_has_ended_is_reported_at_once_and_not_again_for_a_later_pod(told: Told) -> None:
    first = failed("p-1", 1, "disk full")
    later = {**FULL, "metadata": {"name": "p-2", "creationTimestamp": "2026-01-01T00:00:10Z"}}
    (line,) = told.at(0, first)
    assert re.fullmatch("pod p-1, container plan: exit code 1: disk full; see `gaudi-bert k8s logs`.*; retrying", line)
    assert told.at(10, later, first) == []
    assert told.at(25, later, first) == [f"{worst_problem([later])} (giving up after 10 min 00 s)"]
    assert told.at(30, {**later, "status": running("p-2")["status"]}, first) == []


def test_the_time_that_a_pod_may_wait_begins_when_none_has_started(told: Told) -> None:
    later = {**FULL, "metadata": {"name": "p-2", "creationTimestamp": "2026-01-01T00:00:10Z"}}
    told.at(0, failed("p-1", 1, "disk full"))
    assert told.at(700, later) == []
    assert len(told.at(1299, later)) == 1


def test_more_pods_with_the_same_reason_are_no_news(told: Told) -> None:
    killed = [failed(f"p-{number}", 137) for number in range(6)]
    assert len(told.at(0, *killed[:1])) == 1
    assert [told.at(number, *killed[:number]) for number in range(2, 7)] == [[]] * 5


def test_a_pod_that_was_replaced_does_not_hide_that_its_successor_cannot_start() -> None:
    later = {**FULL, "metadata": {"name": "p-2", "creationTimestamp": "2026-01-01T00:00:10Z"}}
    problem = worst_problem([failed("p-1", 1, "disk full"), later])
    assert str(problem).startswith("pod p-2 is Unschedulable")
    parts = [{**each, "metadata": {**each["metadata"], "annotations": {}}} for each in (failed("p-1", 1, "x"), later)]
    for number, part in enumerate(parts):
        part["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] = str(number)
    assert "exit code 1" in str(worst_problem(parts)), "another part is no successor"


# Pods of an MPIJob: a worker that is removed is the reason why its launcher ends, whatever mpirun writes.


def member(name: str, role: str, state: Json, created: str = "2026-01-01T00:00:00Z", **metadata: str) -> Json:
    labels = {"training.kubeflow.org/job-role": role}
    return {**state, "metadata": {"name": name, "labels": labels, "creationTimestamp": created, **metadata}}


def launcher(name: str = "launcher-a", created: str = "2026-01-01T00:00:00Z", **ended: Any) -> Json:
    moments = {"startedAt": "2026-01-01T00:00:05Z", "finishedAt": "2026-01-01T01:00:00Z", "reason": "Error"}
    phase = "Failed" if ended.get("exitCode") else "Succeeded"
    state = pod(name, phase, "train", ended={**moments, **ended}) if ended else running(name, "train")
    return member(name, "launcher", state, created)


def workers(*second: str, **metadata: str) -> list[Json]:
    return [
        member("demo-train-worker-0", "worker", running("", "worker")),
        member("demo-train-worker-1", "worker", running("", "worker"), *second, **metadata),
    ]


REPLACED = workers("2026-01-01T01:00:02Z")
DELETED = "worker pod demo-train-worker-1 was deleted; "


@pytest.mark.parametrize(
    ("pods", "said"),
    [
        ([launcher(exitCode=205, message=LOST), *REPLACED], f"{DELETED}stopped on request after update 614, saved"),
        ([launcher(exitCode=205), *REPLACED], f"{DELETED}training resumes from its newest checkpoint"),
        ([launcher(), *workers(deletionTimestamp="2026-01-01T01:00:00Z")], f"{DELETED}its ranks save first"),
        ([launcher(exitCode=1, message="error: disk full"), *workers()], "container train: exit code 1: error: disk full"),
        ([launcher(exitCode=2, message="error: bad"), *REPLACED], "container train: exit code 2: error: bad"),
        ([launcher(exitCode=1, message="error: full"), *workers("2026-01-01T00:30:00Z")], "exit code 1: error: full"),
        ([launcher(exitCode=205, message=LOST), launcher("launcher-b", "2026-01-01T01:00:20Z"), *REPLACED], "None"),
        ([launcher(exitCode=0), *workers(deletionTimestamp="2026-01-01T01:00:00Z")], "None"),
    ],
    ids=["saved", "forced", "saving", "not deleted", "bad input", "deleted long before", "retried", "complete"],
)
def test_a_worker_that_was_deleted_is_the_reason(pods: list[Json], said: str) -> None:
    assert said in str(worst_problem(pods))


# Stops on request count for nothing, and are not left to the backoff of a Job.

DRAINED = failed("p", 75, "error: /work/demo/run: stopped on request after update 614 of 800; run it again to resume")


@pytest.mark.parametrize(
    "stopped",
    [[active(DRAINED)], [active(preempted("p"))], [active()], [gave_up(DRAINED)] * 2, [gave_up(preempted("p"))] * 2],
    ids=["drained", "preempted", "deleted", "drained too often", "preempted too often"],
)
def test_a_step_that_is_stopped_is_started_again_however_often(
    stopped: list[State], server: FakeApiServer, said: io.StringIO, run: Run
) -> None:
    """Before the Job's own backoff is over, and after its retries are used up."""
    server.script("demo-plan", *[active(running("p")), *stopped] * 6, active(running("q")), complete(succeeded("q")))
    assert run(["plan"]) == {"plan": "done"}
    assert server.created("Job") == ["demo-plan"] * 7
    assert said.getvalue().count(": submitting it again") == 6


def test_a_launcher_that_waits_for_its_workers_is_not_submitted_again(server: FakeApiServer, run: Run) -> None:
    """After a suspension it is made when sshd listens on all of them, which may take long."""
    pending = [member(f"demo-train-worker-{number}", "worker", pod("", "Pending")) for number in range(2)]
    some = [workers()[0]]
    ran = State({}, [launcher(), *workers()])
    server.script("demo-train", ran, *[State({}, pods) for pods in (pending, some, pending)], ran, TRAINED)
    assert run(["train"], "resources.workers=2") == {"train": "done"}
    assert server.created("MPIJob") == ["demo-train"]
    server.script("demo-train", ran, *[State({}, workers())] * 2, ran, TRAINED)
    del server.objects["MPIJob", "demo-train"]
    assert run(["train"], "resources.workers=2") == {"train": "done"}
    assert server.created("MPIJob") == ["demo-train"] * 3


def test_a_drained_pod_whose_successor_a_quota_refuses_is_not_submitted_again(server: FakeApiServer, run: Run) -> None:
    server.warn("demo-plan", 'Error creating: pods "demo-plan-2" is forbidden: exceeded quota: team', "2099-01-01T00:00:00Z")
    server.script("demo-plan", active(running("p")), *[active(DRAINED)] * 3, active(running("q")), complete(succeeded("q")))
    assert run(["plan"]) == {"plan": "done"}
    assert server.created("Job") == ["demo-plan"]


# Nodes that the cluster has lost contact with.


def test_status_names_a_node_that_is_not_ready(server: FakeApiServer, cluster: Cluster) -> None:
    """From the pod and its events: an account of one namespace may look at no node."""
    silent = pod("p-1", "Running", conditions=[{"type": "Ready", "status": "False"}])
    silent["spec"]["nodeName"] = "worker-7"
    server.put("Job", {"metadata": {"name": "demo-plan"}, "status": {"active": 1}})
    server.script("demo-plan", active(silent))
    settings = load_pipeline(None)
    assert manage.status(settings, cluster)["plan"].problem is None, "it may still be starting"
    event = {"type": "Warning", "reason": "NodeNotReady", "message": "Node is not ready"}
    server.put("Event", {"metadata": {"name": "p-1.1"}, **event, "involvedObject": {"name": "p-1"}})
    found = manage.status(settings, cluster)["plan"]
    assert str(found.problem).startswith("node worker-7 is NotReady, and pod p-1 is on it; wait until it is back, or remove")


# --- jobs that wait for a queue: what Kueue's Workloads say, and runs that wait, are admitted, and are suspended again

NO_ROOM = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor default, 9 more needed"
SUSPENDED = {"conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended", "message": "Job suspended"}]}

QUEUED_JOB = {"kind": "Job", "metadata": {"name": "demo-plan", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}}


def condition(kind: str, status: str, reason: str, message: str) -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def workload(*conditions: Json, **status: Any) -> Json:
    return {"metadata": {"name": "w"}, "spec": {}, "status": {"conditions": list(conditions), **status}}


PENDING = workload(condition("QuotaReserved", "False", "Pending", NO_ROOM))
NO_QUEUE = workload(condition("QuotaReserved", "False", "Inadmissible", "LocalQueue gpus doesn't exist"))
RESERVED = condition("QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue c")
CHECKS = [{"name": "nodes", "state": "Pending", "message": ""}, {"name": "b", "state": "Ready"}]
PREEMPTED = workload(
    condition("QuotaReserved", "False", "Pending", NO_ROOM),
    condition("Evicted", "True", "Preempted", "Preempted to accommodate a higher priority Workload"),
    condition("Admitted", "False", "NoReservation", "The workload has no reservation"),
)


def waiting(item: Json | None = PENDING) -> State:
    return State(SUSPENDED, [], suspended=True, workload=item)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], ""),
        ([workload()], ""),
        ([PENDING], NO_ROOM),
        ([PREEMPTED], f"Preempted to accommodate a higher priority Workload; {NO_ROOM}"),
        ([NO_QUEUE], "LocalQueue gpus doesn't exist; see `kubectl get localqueues`, and correct kubernetes.queue"),
        ([workload(RESERVED, admissionChecks=CHECKS)], "admission check nodes: Pending"),
        ([workload(condition("Admitted", "False", "Pending", "workload didn't\nfit"))], "workload didn't fit"),
        ([{**PENDING, "spec": {"active": False}}], f"it was deactivated, and waits .* active again; {NO_ROOM}"),
    ],
    ids=["none", "not looked at", "no room", "preempted", "no queue", "check", "as it was", "deactivated"],
)
def test_the_reason_is_what_the_workload_says(found: list[Json], said: str) -> None:
    prefix = "Job demo-plan waits for its queue gpus: "
    assert re.fullmatch(prefix + (said or "not looked at yet").replace("(", r"\("), describe_suspension(QUEUED_JOB, found))


def test_the_newest_workload_counts() -> None:
    old, new = workload(condition("QuotaReserved", "False", "Pending", "old")), {**PENDING}
    old["metadata"] = {"name": "a", "creationTimestamp": "2026-01-01T00:00:00Z"}
    new["metadata"] = {"name": "b", "creationTimestamp": "2026-01-01T00:00:01Z"}
    for workloads in ([new, old], [old, new]):
        assert describe_suspension(QUEUED_JOB, workloads).endswith(f": {NO_ROOM}")


def test_without_a_workload_the_job_speaks_for_itself() -> None:
    item = {"kind": "Job", "metadata": {"name": "demo-plan"}, "spec": {"suspend": True}, "status": SUSPENDED}
    suspended = "Job demo-plan is suspended: Job suspended; a queue of the cluster, or `kubectl edit`, resumes it"
    assert describe_suspension(item, []) == suspended
    item["metadata"] = {"name": "demo-plan", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}
    assert describe_suspension(item, []) == "Job demo-plan waits for its queue gpus: Job suspended"
    assert describe_suspension({**item, "status": {}}, []) == "Job demo-plan waits for its queue gpus: not looked at yet"


def test_a_job_that_waits_may_outlive_the_time_to_start(server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    """The watch ends after half a second each time, so that it waits for far more than a second."""
    server.watches.extend(["silence"] * 6)
    server.script("demo-plan", waiting(None), *[waiting()] * 6, active(running("p")), complete(succeeded("p")))
    started = time.monotonic()
    assert run(["plan"], "kubernetes.queue=gpus") == {"plan": "done"}
    assert time.monotonic() - started > 2, "twice as long as it may take to start"
    assert "Job demo-plan waits for its queue gpus: Job suspended\n" in said.getvalue()
    assert said.getvalue().count(f"Job demo-plan waits for its queue gpus: {NO_ROOM}\n") == 1
    assert "has no pods" not in said.getvalue()


def test_the_time_to_start_begins_when_it_is_admitted(server: FakeApiServer, run: Run) -> None:
    stuck = active(unschedulable("p", "0/1 nodes are available: 1 Insufficient cpu."))
    server.watches.extend(["silence"] * 2)
    server.script("demo-plan", stuck, waiting(), stuck, waiting(), stuck, complete(succeeded("p")))
    assert run(["plan"], "kubernetes.queue=gpus") == {"plan": "done"}


@pytest.mark.parametrize("hidden", ["forbidden", "no Kueue", "older Kueue"])
def test_a_run_does_without_hidden_workloads(hidden: str, server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    if hidden == "forbidden":
        server.forbidden = {("list", "workloads")}
    unknown = {"no Kueue": {"v1beta1", "v1beta2"}, "older Kueue": {"v1beta2"}}
    server.versions_unknown = {f"kueue.x-k8s.io/{version}" for version in unknown.get(hidden, ())}
    server.script("demo-plan", waiting(), waiting(), active(running("p")), complete(succeeded("p")))
    assert run(["plan"], "kubernetes.queue=gpus") == {"plan": "done"}
    assert (NO_ROOM in said.getvalue()) == (hidden == "older Kueue")
    assert "Job demo-plan waits for its queue gpus" in said.getvalue()


def test_status_says_what_a_step_waits_for(server: FakeApiServer, cluster: Cluster) -> None:
    server.put("Job", {"metadata": {"name": "demo-plan", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}, "status": ACTIVE})
    server.script("demo-plan", waiting())
    found = manage.status(load_pipeline(None, ["kubernetes.queue=gpus"]), cluster)["plan"]
    assert found.state == "suspended"
    assert found.problem == f"Job demo-plan waits for its queue gpus: {NO_ROOM}"
