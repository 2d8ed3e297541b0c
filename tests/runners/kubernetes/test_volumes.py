"""Several workers need a volume that several nodes mount: refused before the data are packed, wherever that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.volumes import check_access_mode, shares_volumes
from tests.builders.command_line import run_command
from tests.builders.fake_api_server import FakeApiServer, Run
from tests.builders.recorded_answers import STORAGE_CLASS, node

TWO = "resources.workers=2"
REFUSAL = (
    "kubernetes.access_mode: ReadWriteOnce, but the 2 workers may run on several nodes; set kubernetes.access_mode to "
    "ReadWriteMany and kubernetes.storage_class to a class that offers it, or kubernetes.work_claim to a claim that all "
    "workers can mount"
)


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
def test_several_workers_on_one_nodes_volume_are_refused_before_anything_is_written(
    options: list[str], repository: Path, tmp_path: Path
) -> None:
    done = run_command("run", repository / "pipelines" / "demo.yaml", *options, "--set", TWO, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {REFUSAL}\n")
    assert list(tmp_path.iterdir()) == []


def put_cluster(server: FakeApiServer, nodes: int, provisioner: str = "ebs.csi.aws.com") -> None:
    for number in range(nodes):
        server.put("Node", node(f"node-{number}", cpu="4", memory="16Gi"))
    server.put("StorageClass", {**STORAGE_CLASS, "provisioner": provisioner})


@pytest.mark.parametrize("exists", [False, True])
def test_a_run_asks_the_cluster_whether_its_workers_can_share_the_volume(
    exists: bool, server: FakeApiServer, run: Run
) -> None:
    """Which class and how many nodes there are is known here, so a cluster of one node needs no other volume."""
    put_cluster(server, 2)
    if exists:
        server.put("PersistentVolumeClaim", {"metadata": {"name": "demo-work"}, "spec": {"accessModes": ["ReadWriteOnce"]}})
    said = r"volume claim demo-work: ReadWriteOnce, but the 2 workers .* set kubernetes.access_mode to ReadWriteMany"
    with pytest.raises(InputError, match=said) as raised:
        run(["prepare", "train"], TWO)
    assert ("remove this claim with its data" in str(raised.value)) is exists
    assert server.created("Job") + server.created("PersistentVolumeClaim") == []


@pytest.mark.parametrize(
    ("nodes", "provisioner", "hidden"),
    [(1, "rancher.io/local-path", set()), (2, "nfs.csi.k8s.io", set()), (2, "ebs.csi.aws.com", {("list", "nodes")})],
    ids=["one node", "network file system", "nodes are hidden"],
)
def test_a_run_whose_workers_can_share_the_volume_as_far_as_is_known_is_submitted(
    nodes: int, provisioner: str, hidden: Any, server: FakeApiServer, run: Run
) -> None:
    put_cluster(server, nodes, provisioner)
    server.forbidden = hidden
    assert run(["train"], TWO) == {"train": "done"}


def test_classes_that_attach_nothing_to_a_node_are_known() -> None:
    known = ("nfs.csi.k8s.io", "cluster.local/nfs-subdir-external-provisioner", "efs.csi.aws.com")
    assert all(shares_volumes({"provisioner": name}) for name in known)
    unknown = (
        "pd.csi.storage.gke.io",
        "rancher.io/local-path",
        "kubernetes.io/no-provisioner",
        "my-efs.csi.aws.com.example",
    )
    assert not any(shares_volumes({"provisioner": name}) for name in unknown)
    assert not shares_volumes(None)
