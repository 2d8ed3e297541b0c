"""A pipeline on a cluster, against an API server over real HTTP: what is checked, submitted and submitted again."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.runners.kubernetes.client import Cluster, ClusterError
from gaudi_bert.runners.kubernetes.run import _DIGEST_ANNOTATION
from tests.builders.command_line import run_command
from tests.builders.fake_api_server import HELM_LABELS, FakeApiServer, Fault, Run, State
from tests.builders.recorded_answers import (
    ACTIVE,
    STORAGE_CLASS,
    active,
    complete,
    failed,
    gave_up,
    preempted,
    running,
    succeeded,
)

PLAN = ["plan"]
NODES = ["resources.workers=2", "training.engine=pytorch", "kubernetes.access_mode=ReadWriteMany"]
TRAINJOB = [*NODES, "kubernetes.training=trainjob"]


def test_all_steps_are_submitted_in_order_and_their_objects_made(server: FakeApiServer, run: Run) -> None:
    result = run(["prepare", "histogram", "plan", "write", "verify"])
    steps = ["prepare", "histogram", "plan", "write", "write-finish", "verify", "verify-finish"]
    assert result == dict.fromkeys(steps, "done")
    assert server.created("Job") == [f"demo-{step}" for step in steps]
    assert ("PersistentVolumeClaim", "demo-work") in server.objects
    assert ("ServiceAccount", "demo-stages") in server.objects
    assert "pipeline.yaml" in server.objects["ConfigMap", "demo-pipeline"]["data"]


@pytest.mark.parametrize(
    ("policy", "minor", "retries"),
    [
        ("auto", "28", {"backoffLimit": 18}),
        ("auto", "29+", {"backoffLimitPerIndex": 3}),
        ("false", "31", {"backoffLimit": 18}),
    ],
)
def test_each_of_six_data_pods_has_retries_of_its_own(
    policy: str, minor: str, retries: dict[str, int], server: FakeApiServer, run: Run
) -> None:
    server.version = {"major": "1", "minor": minor}
    run(["histogram"], "resources.data_workers=6", f"kubernetes.failure_policy={policy}")
    spec = server.objects["Job", "demo-histogram"]["spec"]
    assert {key: value for key, value in spec.items() if key.startswith("backoffLimit")} == retries
    assert ("podFailurePolicy" in spec) == ("backoffLimitPerIndex" in spec)


def test_a_second_run_skips_what_is_complete_unless_it_has_other_settings(server: FakeApiServer, run: Run) -> None:
    run(PLAN)
    assert run(PLAN) == {"plan": "skipped"}
    assert server.created("Job") == ["demo-plan"]
    assert run(PLAN, "packing.depth=4") == {"plan": "done"}
    assert server.created("Job") == ["demo-plan", "demo-plan"]
    assert "depth: 4" in server.objects["ConfigMap", "demo-pipeline"]["data"]["pipeline.yaml"]


def test_a_job_of_the_same_run_that_is_still_active_is_followed(server: FakeApiServer, run: Run) -> None:
    run(PLAN)
    server.objects["Job", "demo-plan"]["status"] = ACTIVE
    server.script("demo-plan", active(), active(), active(running("p")), complete())
    assert run(PLAN) == {"plan": "done"}
    assert server.created("Job") == ["demo-plan"]


def test_another_run_in_the_same_work_folder_is_left_alone(server: FakeApiServer, run: Run) -> None:
    server.put_own("Job", "demo-write", status=ACTIVE)["metadata"]["annotations"] = {_DIGEST_ANNOTATION: "x"}
    with pytest.raises(InputError, match="Job demo-write of another run"):
        run(PLAN)
    assert server.created("Job") == []


def test_a_changed_runtime_is_replaced_by_its_version_and_trains_again(server: FakeApiServer, run: Run) -> None:
    """Objects that no controller of Kubernetes itself knows cannot be replaced otherwise."""
    for memory in ("1Gi", "2Gi"):
        assert run(["train"], *TRAINJOB, f"resources.training.memory={memory}") == {"train": "done"}
    job = server.objects["TrainingRuntime", "demo-train"]["spec"]["template"]["spec"]["replicatedJobs"][0]
    assert job["template"]["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"] == "2Gi"
    assert server.created("TrainJob") == ["demo-train"] * 2


# --- what is refused before anything is made


@pytest.mark.parametrize(
    ("stage", "overrides", "named"),
    [
        ("train", ["resources.workers=2", "kubernetes.access_mode=ReadWriteMany"], "does not serve objects of kind MPIJob"),
        ("train", TRAINJOB, "does not serve objects of kind Train.*; install Kubeflow Trainer 2"),
        ("plan", ["kubernetes.namespace=nowhere"], "namespace nowhere does not exist"),
        (
            "plan",
            ["kubernetes.data_claim=corpus"],
            "kubernetes.data_claim: claim corpus does not exist in namespace gaudi-bert",
        ),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(
    stage: str, overrides: list[str], named: str, server: FakeApiServer, run: Run
) -> None:
    server.kinds_unknown = {"MPIJob", "TrainJob", "TrainingRuntime"}
    with pytest.raises(InputError, match=named):
        run([stage], *overrides)
    assert server.objects == {}


def test_a_run_that_the_server_refuses_leaves_nothing(server: FakeApiServer, run: Run) -> None:
    """The Job is the last object that is checked, and the first one that is refused."""
    server.faults = [Fault("POST", "/jobs?dryRun=All", 422, message="spec.template: required")]
    with pytest.raises(ClusterError, match="cannot create Job demo-plan: 422"):
        run(PLAN)
    assert server.objects == {}


@pytest.mark.parametrize(
    ("kind", "name", "stage", "overrides"),
    [
        ("ConfigMap", "demo-pipeline", "plan", []),
        ("Service", "demo-train", "train", NODES),
        ("TrainingRuntime", "demo-train", "train", TRAINJOB),
        ("Job", "demo-plan", "plan", []),
    ],
)
def test_what_is_not_the_pipelines_own_is_neither_used_nor_changed(
    kind: str, name: str, stage: str, overrides: list[str], server: FakeApiServer, run: Run
) -> None:
    metadata = {"name": name, "labels": HELM_LABELS}
    theirs = server.put(kind, {"metadata": metadata, "spec": {}, "status": {"phase": "Bound", **complete().status}})
    with pytest.raises(InputError, match=f"{kind} {name} in namespace gaudi-bert does not belong to this pipeline"):
        run([stage], *overrides)
    assert server.objects == {(kind, name): theirs}


@pytest.mark.parametrize("hidden", [{("list", "mpijobs"), ("list", "trainjobs")}, {("list", "trainjobs")}])
def test_an_account_without_rights_on_what_is_not_used_can_run(
    hidden: set[tuple[str, str]], server: FakeApiServer, run: Run
) -> None:
    server.forbidden = hidden
    assert run(["train"], *NODES) == {"train": "done"}


# --- how a step ends

BAD_DEPTH = failed("p", 2, "error: packing.depth: 0 is too small")


@pytest.mark.parametrize(
    ("states", "error", "said_why"),
    [
        ([gave_up(failed("p", 1, "a\nerror: disk full"))], FailedError, "pod p: error: disk full"),
        ([gave_up()], FailedError, "Job demo-plan failed: BackoffLimitExceeded"),
        ([active(running("p")), active(BAD_DEPTH)], InputError, "pod p: error: packing.depth: 0 is too small"),
    ],
    ids=["exit", "no pod left", "bad input"],
)
def test_a_failure_has_its_reason(
    states: list[State], error: type[Exception], said_why: str, server: FakeApiServer, run: Run
) -> None:
    server.script("demo-plan", *states)
    with pytest.raises(error, match=said_why):
        run(["plan", "write"])
    assert server.created("Job") == ["demo-plan"], "nothing is submitted after a failure"


STOP = "error: /work/demo/run: stopped on request after update 614 of 800; run it again to resume"
DRAINED = failed("p", 75, STOP)


@pytest.mark.parametrize(
    "stopped",
    [[gave_up(DRAINED)] * 2, [gave_up(preempted("p"))] * 2],
    ids=["drained too often", "preempted too often"],
)
def test_a_step_that_is_stopped_is_started_again_however_often(
    stopped: list[State], server: FakeApiServer, said: io.StringIO, run: Run
) -> None:
    """After the retries of its Job are used up."""
    server.script("demo-plan", *[active(running("p")), *stopped] * 6, active(running("q")), complete(succeeded("q")))
    assert run(PLAN) == {"plan": "done"}
    assert server.created("Job") == ["demo-plan"] * 7
    assert said.getvalue().count("; submitting the step again") == 6
    assert "same command again" not in said.getvalue()


def test_an_interrupt_leaves_the_job(
    server: FakeApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    server.script("demo-plan", active(running("p")))
    monkeypatch.setattr(cluster, "wait_for_change", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(PLAN)
    assert ("Job", "demo-plan") in server.objects


def test_a_job_that_somebody_removes_ends_the_run(server: FakeApiServer, run: Run) -> None:
    def vanish(kind: str, name: str) -> Any:
        del server.objects[kind, name]
        return {"metadata": {"name": name}, "status": ACTIVE}

    server.advance = vanish  # type: ignore[method-assign]
    with pytest.raises(FailedError, match="Job demo-plan was deleted while it ran"):
        run(PLAN)


# --- the claim of the work folder: what several workers cannot share is refused early, what got no volume is made anew

TWO = "resources.workers=2"
ONCE = {"accessModes": ["ReadWriteOnce"]}


@pytest.mark.parametrize("options", [["--dry-run", "--on", "kubernetes"], ["--render", "manifests"]], ids=" ".join)
def test_several_workers_on_one_nodes_volume_are_refused(options: list[str], repository: Path, tmp_path: Path) -> None:
    done = run_command("run", repository / "pipelines" / "demo.yaml", *options, "--set", TWO, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(
        "error: kubernetes.access_mode: only one node can mount a ReadWriteOnce volume, but the 2 workers"
    )
    assert list(tmp_path.iterdir()) == []


def put_cluster(server: FakeApiServer, nodes: int, provisioner: str = "ebs.csi.aws.com") -> None:
    for number in range(nodes):
        server.put("Node", {"metadata": {"name": f"node-{number}"}})
    server.put("StorageClass", {**STORAGE_CLASS, "provisioner": provisioner})


@pytest.mark.parametrize("exists", [False, True])
def test_a_volume_that_workers_cannot_share_is_refused(exists: bool, server: FakeApiServer, run: Run) -> None:
    """Which class and how many nodes there are is known here, so a cluster of one node needs no other volume."""
    put_cluster(server, 2)
    if exists:
        server.put_own("PersistentVolumeClaim", "demo-work", spec=ONCE)
    with pytest.raises(InputError, match="claim demo-work: only one node can mount a ReadWriteOnce volume, but the 2"):
        run(["prepare", "train"], TWO)
    assert server.created("Job") + server.created("PersistentVolumeClaim") == []


@pytest.mark.parametrize(
    ("nodes", "provisioner", "hidden"),
    [
        (1, "rancher.io/local-path", set()),
        (2, "cluster.local/nfs-subdir-external-provisioner", set()),
        (2, "ebs.csi.aws.com", {("list", "nodes")}),
    ],
    ids=["one node", "network file system", "nodes are hidden"],
)
def test_a_volume_that_workers_may_share_is_submitted(
    nodes: int, provisioner: str, hidden: Any, server: FakeApiServer, run: Run
) -> None:
    put_cluster(server, nodes, provisioner)
    server.forbidden = hidden
    assert run(["train"], TWO) == {"train": "done"}


@pytest.mark.parametrize(
    ("overrides", "phase", "made"),
    [
        (["kubernetes.storage_class=right"], "Pending", 1),
        ([], "Pending", 1),
        (["kubernetes.storage_class=wrong"], "Pending", 0),
        (["kubernetes.storage_class=wrong", "kubernetes.access_mode=ReadWriteMany"], "Pending", 1),
        (["kubernetes.storage_class=right"], "Bound", 0),
    ],
    ids=["other class", "default class", "same class", "other mode", "holds data"],
)
def test_a_claim_that_got_no_volume_is_made_anew_with_the_right_class(
    overrides: list[str], phase: str, made: int, server: FakeApiServer, run: Run
) -> None:
    server.put("StorageClass", STORAGE_CLASS)
    server.put_own("PersistentVolumeClaim", "demo-work", spec={**ONCE, "storageClassName": "wrong"}, status={"phase": phase})
    assert run(["plan"], *overrides) == {"plan": "done"}
    assert len(server.created("PersistentVolumeClaim")) == made


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("mine", ["kubernetes.work_claim=mine"]), ("mine", ["kubernetes.data_claim=mine"]), ("demo-work", [])],
)
def test_a_claim_of_the_users_is_used_as_it_is(name: str, overrides: list[str], server: FakeApiServer, run: Run) -> None:
    """Also one that has got no volume yet."""
    spec = {**ONCE, "storageClassName": "theirs"}
    theirs = server.put("PersistentVolumeClaim", {"metadata": {"name": name}, "spec": spec, "status": {"phase": "Pending"}})
    assert run(["plan"], "kubernetes.storage_class=ours", *overrides) == {"plan": "done"}
    assert server.objects["PersistentVolumeClaim", name] == theirs


@pytest.mark.parametrize("broken", ["lost", "being removed"])
def test_a_claim_that_no_pod_can_mount_is_refused(broken: str, server: FakeApiServer, run: Run) -> None:
    claim = server.put_own("PersistentVolumeClaim", "demo-work", spec=ONCE, status={"phase": "Lost"})
    if broken == "being removed":
        claim["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(InputError, match="volume claim demo-work"):
        run(["plan"])
    assert server.created("Job") == []
