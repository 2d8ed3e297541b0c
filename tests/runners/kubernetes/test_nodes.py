"""Pods that train together as an Indexed Job or a TrainJob: what a run says and does when they are lost, stopped or late."""

from __future__ import annotations

import io
from typing import Any

import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes import follow, manage
from gaudi_bert.runners.kubernetes.client import Cluster
from tests.builders.fake_api_server import FakeApiServer, Run, State
from tests.builders.recorded_answers import ACTIVE, COMPLETE, FAILED, failed, preempted, running, unschedulable

Json = dict[str, Any]

KINDS = {"Job": "job", "TrainJob": "trainjob"}
STOPPED = "error: /work/demo/train: stopped on request after update 174 of 800; run it again to resume"
LOST = "error: rank 0 aborts: rank 1 (demo-train-1, process 1) is lost in update 168: its process has ended or was killed"
NEVER_MET = "error: rank 0 of 2: rank 1 did not come, after 600 s; see their errors; the same command tries again"
DIFFER = (
    "error: rank 1 (demo-train-1) has gaudi-bert = 0.5.0, rank 0 (demo-train-0) has 0.6.0; start all ranks with the same"
)
SUSPENDED = {"conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended", "message": "Job suspended"}]}


def node(index: int, state: Json, attempt: str = "a", created: str = "2026-01-01T00:00:00Z", **metadata: str) -> Json:
    """The pod of an index, as its Job makes it."""
    return {
        **state,
        "metadata": {
            "name": f"demo-train-{index}-{attempt}",
            "labels": {"app.kubernetes.io/component": "train"},
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            "creationTimestamp": created,
            **metadata,
        },
    }


def both(attempt: str = "a", created: str = "2026-01-01T00:00:00Z") -> list[Json]:
    return [node(index, running("", "train"), attempt, created) for index in range(2)]


def ended(index: int, code: int, message: str = "", reason: str = "Error") -> Json:
    return node(index, failed("", code, message, reason, container="train"))


AGAIN = State(ACTIVE, both("b", "2026-01-01T00:00:20Z"))
TRAINED = State(COMPLETE)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """What trains on two nodes."""
    return str(request.param)


def options(kind: str) -> list[str]:
    if kind == "MPIJob":
        return ["resources.workers=2"]
    return ["resources.workers=2", "training.engine=pytorch", f"kubernetes.training={KINDS[kind]}"]


def test_two_pods_train_and_the_first_one_reports(kind: str, server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    server.logs = {"demo-train-0-a": ["2026-01-01T00:00:01Z update 1"], "demo-train-1-a": ["2026-01-01T00:00:01Z silence"]}
    server.script("demo-train", State(ACTIVE, both()), State(ACTIVE, both()), State(COMPLETE, both()))
    assert run(["train"], *options(kind)) == {"train": "done"}
    assert server.created(kind) == ["demo-train"]
    assert "update 1" in said.getvalue()
    assert "silence" not in said.getvalue()
    assert (("Service", "demo-train") in server.objects) == (kind == "Job")
    assert (("TrainingRuntime", "demo-train") in server.objects) == (kind == "TrainJob")
    assert run(["train"], *options(kind)) == {"train": "skipped"}


DELETED = [ended(0, 75, STOPPED), node(1, running("", "train"), deletionTimestamp="2026-01-01T00:00:05Z")]
EVICTED = [ended(0, 75, STOPPED), node(1, preempted(""))]
SAVED = [ended(0, 75, STOPPED), ended(1, 75, STOPPED)]


@pytest.mark.parametrize("taken", [DELETED, EVICTED, SAVED], ids=["deleted", "preempted", "saved"])
def test_pods_that_are_taken_away_save_and_their_successors_go_on(
    taken: list[Json], kind: str, server: FakeApiServer, said: io.StringIO, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_RESTART_SECONDS", 60.0)
    server.script("demo-train", State(ACTIVE, both()), State(ACTIVE, taken), AGAIN, TRAINED)
    assert run(["train"], *options(kind)) == {"train": "done"}
    assert server.created(kind) == ["demo-train"], "the Job itself makes them anew"
    assert (
        "was deleted" in said.getvalue() or "taken away" in said.getvalue() or "after update 174, saved" in said.getvalue()
    )


def test_pods_that_wait_for_the_backoff_of_their_job_are_submitted_again(kind: str, server: FakeApiServer, run: Run) -> None:
    again = [State(ACTIVE, both()), *[State(ACTIVE, SAVED)] * 3]
    server.script("demo-train", *again, AGAIN, TRAINED)
    assert run(["train"], *options(kind)) == {"train": "done"}
    assert server.created(kind) == ["demo-train"] * 2


@pytest.mark.parametrize("kind", [*KINDS, "MPIJob"])
def test_a_suspension_is_waited_for(kind: str, server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    held = State(SUSPENDED, SAVED, suspended=True)
    server.script("demo-train", State(ACTIVE, both()), held, held, AGAIN, TRAINED)
    assert run(["train"], *options(kind), "kubernetes.queue=gpus") == {"train": "done"}
    assert server.created(kind) == ["demo-train"]
    assert f"{kind} demo-train waits for its queue gpus" in said.getvalue()
    assert server.objects[kind, "demo-train"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"


@pytest.mark.parametrize(
    ("pods", "reason"),
    [
        (
            [ended(0, 1, LOST), ended(1, 137, reason="OOMKilled")],
            "pod demo-train-1-a, container train: OOMKilled: it needed",
        ),
        (
            [ended(0, 1, LOST), ended(1, 1, "error: disk full")],
            "demo-train-1-a, container train: exit code 1: error: disk full",
        ),
        ([ended(0, 1, NEVER_MET)], "demo-train-0-a, container train: exit code 1: error: rank 0 of 2: rank 1 did not come"),
        ([ended(0, 2, DIFFER), ended(1, 2, DIFFER)], "exit code 2: error: rank 1 .demo-train-1. has gaudi-bert = 0.5.0"),
    ],
    ids=["out of memory", "failed", "never met", "other version"],
)
def test_a_run_that_cannot_go_on_ends_with_the_reason_of_the_pod_that_failed(
    pods: list[Json], reason: str, kind: str, server: FakeApiServer, cluster: Cluster, run: Run
) -> None:
    """Not with that of the pod that ended because of it."""
    server.script("demo-train", State(ACTIVE, both()), State(FAILED, pods))
    with pytest.raises(FailedError, match=reason):
        run(["train"], *options(kind))
    status = manage.status(load_pipeline(None, options(kind)), cluster)["train"]
    assert status.state.startswith("failed: BackoffLimitExceeded")
    assert reason[:20] in str(status.problem)


def test_a_pod_that_finds_no_node_is_waited_for_no_longer_than_any(kind: str, server: FakeApiServer, run: Run) -> None:
    full = node(1, unschedulable("", "0/1 nodes are available: 1 Insufficient cpu."))
    server.script("demo-train", State(ACTIVE, [node(0, running("", "train")), full]))
    with pytest.raises(FailedError, match=r"pod demo-train-1-a is Unschedulable: .*was removed\); lower resources"):
        run(["train"], *options(kind))


def test_a_quota_that_refuses_one_of_the_pods_ends_the_run(kind: str, server: FakeApiServer, run: Run) -> None:
    """The other one would wait for it in vain."""
    server.warn(
        "demo-train", 'Error creating: pods "demo-train-1-x" is forbidden: exceeded quota: team', "2099-01-01T00:00:00Z"
    )
    server.script("demo-train", *[State(ACTIVE, both()[:1])] * 500, TRAINED)
    said = rf"{kind} demo-train gets 1 of 2 pods: .*quota.*was removed\); wait until the quota"
    with pytest.raises(FailedError, match=said):
        run(["train"], *options(kind))


def test_all_that_was_made_is_removed(kind: str, server: FakeApiServer, cluster: Cluster, run: Run) -> None:
    run(["train"], *options(kind))
    removed = manage.delete(load_pipeline(None, options(kind)), cluster, data=True)
    made = {("Job", "Service"), ("TrainJob", "TrainingRuntime")}
    assert {f"{each} demo-train" for pair in made if kind in pair for each in pair} <= set(removed)
    assert [key for key in server.objects if key[0] in ("Job", "TrainJob", "Service", "TrainingRuntime")] == []


def test_a_service_of_somebody_else_is_left_alone(server: FakeApiServer, run: Run) -> None:
    theirs = {"metadata": {"name": "demo-train"}, "spec": {"selector": {"app": "theirs"}}}
    server.put("Service", theirs)
    with pytest.raises(
        InputError, match="Service demo-train exists in namespace gaudi-bert, and is not of this pipeline; rem"
    ):
        run(["train"], *options("Job"))
    assert server.created("Job") == []


def test_a_changed_runtime_is_replaced_by_its_version_and_trains_again(server: FakeApiServer, run: Run) -> None:
    """Objects that no controller of Kubernetes itself knows cannot be replaced otherwise."""
    for memory, states in (("1Gi", []), ("2Gi", [TRAINED])):
        server.script("demo-train", *states, State(ACTIVE, both()), TRAINED)
        assert run(["train"], *options("TrainJob"), f"resources.training.memory={memory}") == {"train": "done"}
    job = server.objects["TrainingRuntime", "demo-train"]["spec"]["template"]["spec"]["replicatedJobs"][0]
    requests = job["template"]["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert requests["memory"] == "2Gi"
    assert server.created("TrainJob") == ["demo-train"] * 2
