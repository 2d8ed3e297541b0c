"""The claim of the work folder: what several workers cannot share is refused early, what got no volume is made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.claims import check_access_mode
from tests.builders.command_line import run_command
from tests.builders.fake_api_server import FakeApiServer, Run
from tests.builders.recorded_answers import STORAGE_CLASS

TWO = "resources.workers=2"
ONCE = {"accessModes": ["ReadWriteOnce"]}


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [TWO, "kubernetes.access_mode=ReadWriteMany"],
        [TWO, "kubernetes.work_claim=shared"],
        [TWO, "kubernetes.store=s3://bucket/work"],
        ["kubernetes.training=mpijob"],
    ],
    ids=["one worker", "ReadWriteMany", "own claim", "bucket", "MPIJob of one"],
)
def test_a_volume_that_all_workers_may_mount_is_accepted(overrides: list[str]) -> None:
    check_access_mode(load_pipeline(None, overrides))


@pytest.mark.parametrize("options", [["--dry-run", "--on", "kubernetes"], ["--render", "manifests"]], ids=" ".join)
def test_several_workers_on_one_nodes_volume_are_refused(options: list[str], repository: Path, tmp_path: Path) -> None:
    done = run_command("run", repository / "pipelines" / "demo.yaml", *options, "--set", TWO, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: kubernetes.access_mode: ReadWriteOnce, but the 2 workers")
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
    with pytest.raises(InputError, match="volume claim demo-work: ReadWriteOnce, but the 2 workers"):
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
