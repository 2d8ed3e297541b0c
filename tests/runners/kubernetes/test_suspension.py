"""Jobs that wait for a queue: what Kueue's Workloads say, and runs that wait, are admitted, and are suspended again."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest

from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.runners.kubernetes import manage
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.suspension import describe_suspension
from tests.builders.fake_api_server import FakeApiServer, Run, State
from tests.builders.recorded_answers import ACTIVE, active, complete, failed, running, succeeded, unschedulable

Json = dict[str, Any]

NO_ROOM = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor default, 9 more needed"
pytestmark = pytest.mark.usefixtures("short_watches")
SUSPENDED = {"conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended", "message": "Job suspended"}]}

QUEUED_JOB = {"kind": "Job", "metadata": {"name": "demo-plan", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}}


def condition(kind: str, status: str, reason: str, message: str) -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def workload(*conditions: Json, **status: Any) -> Json:
    return {"metadata": {"name": "w"}, "spec": {}, "status": {"conditions": list(conditions), **status}}


PENDING = workload(condition("QuotaReserved", "False", "Pending", NO_ROOM))
PREEMPTED = workload(
    condition("QuotaReserved", "False", "Pending", NO_ROOM),
    condition("Evicted", "True", "Preempted", "Preempted to accommodate a higher priority Workload"),
    condition("Admitted", "False", "NoReservation", "The workload has no reservation"),
)


def waiting(item: Json | None = PENDING) -> State:
    return State(SUSPENDED, [], suspended=True, workload=item)


def queued(*overrides: str) -> PipelineSettings:
    return load_pipeline(None, ["kubernetes.queue=gpus", "kubernetes.start_seconds=1", *overrides])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], ""),
        ([workload()], ""),
        ([PENDING], NO_ROOM),
        ([PREEMPTED], f"Preempted to accommodate a higher priority Workload; {NO_ROOM}"),
        (
            [workload(condition("QuotaReserved", "False", "Inadmissible", "LocalQueue gpus doesn't exist"))],
            "LocalQueue gpus doesn't exist; see `kubectl get localqueues`, and correct kubernetes.queue",
        ),
        (
            [
                workload(
                    condition("QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue c"),
                    admissionChecks=[{"name": "nodes", "state": "Pending", "message": ""}, {"name": "b", "state": "Ready"}],
                )
            ],
            "admission check nodes: Pending",
        ),
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
    assert describe_suspension(item, []) == (
        "Job demo-plan is suspended: Job suspended; a queue of the cluster, or `kubectl edit`, resumes it"
    )
    item["metadata"] = {"name": "demo-plan", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}
    assert describe_suspension(item, []) == "Job demo-plan waits for its queue gpus: Job suspended"
    assert describe_suspension({**item, "status": {}}, []) == "Job demo-plan waits for its queue gpus: not looked at yet"


def test_a_job_that_waits_is_named_with_its_reason_and_outlives_the_time_to_start(
    server: FakeApiServer, said: io.StringIO, run: Run
) -> None:
    """The watch ends after half a second each time, so that it waits for far more than a second."""
    server.watches.extend(["silence"] * 6)
    server.script("demo-plan", waiting(None), *[waiting()] * 6, active(running("p")), complete(succeeded("p")))
    started = time.monotonic()
    assert run(["plan"], "kubernetes.queue=gpus") == {"plan": "done"}
    assert time.monotonic() - started > 2, "twice as long as it may take to start"
    assert "Job demo-plan waits for its queue gpus: Job suspended\n" in said.getvalue()
    assert said.getvalue().count(f"Job demo-plan waits for its queue gpus: {NO_ROOM}\n") == 1
    assert "has no pods" not in said.getvalue()


def test_an_mpijob_waits_as_one_and_training_goes_on_after_it_was_suspended_again(
    server: FakeApiServer, said: io.StringIO, run: Run
) -> None:
    trained = State({"conditions": [{"type": "Succeeded", "status": "True"}]})
    server.script(
        "demo-train",
        waiting(),
        active(running("demo-train-launcher-a", "train")),
        State(SUSPENDED, [failed("demo-train-launcher-a", 75, container="train")], suspended=True, workload=PREEMPTED),
        waiting(PREEMPTED),
        active(unschedulable("demo-train-worker-0", "0/1 nodes are available: 1 Insufficient cpu.")),
        active(running("demo-train-launcher-b", "train")),
        trained,
    )
    assert run(["train"], "kubernetes.queue=gpus", "resources.workers=2") == {"train": "done"}
    assert server.created("MPIJob") == ["demo-train"], "the same MPIJob is followed on"
    assert f"MPIJob demo-train waits for its queue gpus: {NO_ROOM}\n" in said.getvalue()
    assert said.getvalue().count("waits for its queue gpus: Preempted to accommodate a higher priority Workload") == 1
    item = server.objects["MPIJob", "demo-train"]
    assert item["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    for replica in item["spec"]["mpiReplicaSpecs"].values():
        assert "kueue.x-k8s.io/queue-name" not in replica["template"]["metadata"]["labels"]


def test_the_time_to_start_begins_when_it_is_admitted(server: FakeApiServer, run: Run) -> None:
    stuck = active(unschedulable("p", "0/1 nodes are available: 1 Insufficient cpu."))
    server.watches.extend(["silence"] * 2)
    server.script("demo-plan", stuck, waiting(), stuck, waiting(), stuck, complete(succeeded("p")))
    assert run(["plan"], "kubernetes.queue=gpus") == {"plan": "done"}


@pytest.mark.parametrize("hidden", ["forbidden", "no Kueue", "older Kueue"])
def test_workloads_that_cannot_be_read_are_done_without(
    hidden: str, server: FakeApiServer, said: io.StringIO, run: Run
) -> None:
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
    found = manage.status(queued(), cluster)["plan"]
    assert found.state == "suspended"
    assert found.problem == f"Job demo-plan waits for its queue gpus: {NO_ROOM}"
