"""Reasons and remedies from what the API answered; and a volume that several workers cannot share, refused early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gaudi_bert.runners.kubernetes.pod_problems import Problem, missing_object, pod_problem, worst_problem
from gaudi_bert.runners.kubernetes.problems import _claim_problem, _no_pods_problem, job_outcome

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.claims import check_access_mode, shares_volumes
from tests.builders.command_line import run_command
from tests.builders.fake_api_server import FakeApiServer, Run
from tests.builders.recorded_answers import (
    IMAGE,
    STORAGE_CLASS,
    evicted,
    failed,
    image_missing,
    node,
    pod,
    preempted,
    running,
    succeeded,
    unschedulable,
)

WAITING_FOR_INPUTS = pod("p", "Pending", waiting={"reason": "PodInitializing"})
WAITING_FOR_INPUTS["status"]["initContainerStatuses"] = [{"name": "wait", "image": "x", "state": {"running": {}}}]


@pytest.mark.parametrize("state", [running("p"), succeeded("p"), WAITING_FOR_INPUTS])
def test_a_pod_that_runs_has_succeeded_or_waits_for_its_inputs_has_no_problem(state: dict[str, Any]) -> None:
    assert pod_problem(state) is None


def only(problem: Problem | None) -> Problem:
    assert problem is not None
    return problem


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (pod("p", "Pending"), "not scheduled"),
        (pod("p", "Pending", waiting={"reason": "PodInitializing"}), "PodInitializing"),
    ],
)
def test_a_pod_that_is_about_to_start_is_only_a_problem_in_the_long_run(state: dict[str, Any], said: str) -> None:
    problem = only(pod_problem(state))
    assert (problem.only_slow, problem.started) == (True, False)
    assert said in problem.reason


@pytest.mark.parametrize(
    ("message", "remedies"),
    [
        ("3 Insufficient habana.ai/gaudi.", ["resources.cards"]),
        ("1 Insufficient hugepages-2Mi.", ["resources.hugepages_2Mi"]),
        ("1 Insufficient vpc.amazonaws.com/efa.", ["kubernetes.efa"]),
        ("1 Insufficient cpu, 1 Insufficient memory.", ["resources.training.cpu", "resources.training.memory"]),
        ("pod has unbound immediate PersistentVolumeClaims.", ["kubernetes.storage_class"]),
        ('persistentvolumeclaim "corpus" not found.', ["kubernetes.data_claim"]),
        ("1 node(s) had untolerated taint {gaudi: }.", ["kubernetes.training_pods.tolerations"]),
        ("1 Insufficient ephemeral-storage.", ["kubernetes.scratch"]),
        ("1 node(s) didn't match Pod's node affinity/selector.", ["kubernetes.node_selector"]),
        ("something new.", ["kubectl describe pod"]),
    ],
)
def test_an_unschedulable_pod_says_all_that_is_lacking_and_nothing_else(message: str, remedies: list[str]) -> None:
    problem = only(pod_problem(unschedulable("p", f"0/3 nodes are available: {message}")))
    assert message in problem.reason
    assert all(remedy in problem.remedy for remedy in remedies)
    assert problem.remedy.count(";") == len(remedies) - 1
    assert (problem.started, problem.hopeless) == (False, False)


UNREACHED = "did not reach the registry: check images.registry and the node's network and DNS"


@pytest.mark.parametrize(
    ("reason", "message", "hopeless", "remedy"),
    [
        ("ErrImagePull", "pull access denied", True, "images.registry"),
        ("ErrImagePull", "dial tcp: i/o timeout", False, UNREACHED),
        ("ImagePullBackOff", 'Back-off pulling image "x"', False, "images.registry"),
        ("ImagePullBackOff", "Back-off pulling image: NotFound: not found", True, "images.registry"),
        ("ErrImagePull", "dial tcp: lookup registry.example on 10.0.0.10:53: no such host", False, UNREACHED),
        ("ErrImagePull", "x509: certificate signed by unknown authority: invalid", False, UNREACHED),
        ("InvalidImageName", "couldn't parse image", True, "images.registry"),
        ("ErrImageNeverPull", "image is not present with pull policy of Never", True, "images.registry"),
    ],
)
def test_an_image_that_cannot_come_ends_the_wait(reason: str, message: str, hopeless: bool, remedy: str) -> None:
    problem = only(pod_problem(image_missing("p", message, reason)))
    assert problem.hopeless is hopeless
    assert IMAGE in problem.reason
    assert remedy in problem.remedy


CRASHED = pod("p", "Running", waiting={"reason": "CrashLoopBackOff"})
CRASHED["status"]["containerStatuses"][0]["lastState"] = {"terminated": {"exitCode": 1, "message": "sshd: no hostkeys"}}
NO_ROOT = {"reason": "CreateContainerConfigError", "message": "container has runAsNonRoot and image will run as root"}
NO_RUNTIME = {"phase": "Failed", "message": "the node has\n no such runtime"}
LINES = "first\nsecond\nthird\nerror: last"
OOM = "OOMKilled: it needed more memory than its limit of 2Gi; raise resources.data.memory_limit"


@pytest.mark.parametrize(
    ("state", "said", "hopeless"),
    [
        (failed("p", 1, LINES), "exit code 1: second | third | error: last;", False),
        (failed("p", 2, LINES), "exit code 2: second | third | error: last;", True),
        (failed("p", 75, LINES), "stopped on request", False),
        (failed("p", 137, LINES), "killed (exit code 137): second | third | error: last;", False),
        (failed("p", 137, reason="OOMKilled"), OOM, False),
        ({**running("p"), "status": NO_RUNTIME}, "pod p failed: the node has no such runtime;", False),
        (CRASHED, "exit code 1: sshd: no hostkeys", False),
        (evicted("p"), "taken away", False),
        (preempted("p"), "taken away", False),
        (pod("p", "Pending", waiting=NO_ROOT), "CreateContainerConfigError: container has runAsNonRoot", False),
    ],
)
def test_how_a_pod_ended_is_told(state: dict[str, Any], said: str, hopeless: bool) -> None:
    problem = only(pod_problem(state))
    assert said in str(problem)
    assert problem.hopeless is hopeless


def test_all_pods_with_the_same_problem_are_named() -> None:
    killed = [failed(f"p-{number}", 137) for number in range(6)]
    problem = only(worst_problem([*killed, failed("other", 1), running("q")]))
    assert problem.reason == "pod p-0, container plan: killed (exit code 137) (likewise p-1, p-2, p-3 and 2 more)"
    assert "likewise" not in only(worst_problem([failed("p-0", 137), failed("other", 1)])).reason


@pytest.mark.parametrize(
    ("message", "reason", "remedy"),
    [
        ('configmap "demo-pipeline-12" not found', "ConfigMap demo-pipeline-12 does not exist", "submit the run again"),
        ('MountVolume.SetUp failed for volume "k" : secret "key" not found', "Secret key does not exist", "store_secret"),
    ],
)
def test_what_a_pod_mounts_and_is_not_there_is_a_reason_at_once(message: str, reason: str, remedy: str) -> None:
    refused = pod("p", "Pending", waiting={"reason": "CreateContainerConfigError", "message": message})
    for problem in (missing_object("pod p", message), pod_problem(refused)):
        assert only(problem).hopeless
        assert reason in only(problem).reason
        assert remedy in only(problem).remedy
    assert missing_object("pod p", "Unable to attach or mount volumes: timed out") is None


def test_the_hopeless_problem_is_told_first() -> None:
    pods = [failed("a", 1), unschedulable("b", "no"), failed("c", 2, "bad input"), running("d")]
    assert "pod c" in only(worst_problem(pods)).reason
    assert worst_problem([running("a"), succeeded("b")]) is None


# What became of a Job, why it has no pods, and why a claim is not bound.

MPIJOB = {"kind": "MPIJob", "metadata": {"name": "demo-train"}}


@pytest.mark.parametrize(
    ("conditions", "outcome"),
    [
        ([], None),
        ([{"type": "Complete", "status": "False"}], None),
        ([{"type": "Complete", "status": "True"}], "complete"),
        ([{"type": "Created", "status": "True"}, {"type": "Succeeded", "status": "True"}], "complete"),
        ([{"type": "Failed", "status": "True", "reason": "Deadline", "message": "late"}], "failed: Deadline: late"),
    ],
)
def test_the_outcome_of_a_job_is_in_its_conditions(conditions: list[dict[str, Any]], outcome: str | None) -> None:
    assert job_outcome({"status": {"conditions": conditions}}) == outcome


def test_a_bound_claim_is_no_problem() -> None:
    claim = {"metadata": {"name": "work"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    assert _claim_problem(claim, []) is None
    problem = only(_claim_problem({**claim, "status": {"phase": "Pending"}}, []))
    assert "work is Pending, not Bound (the default class, ReadWriteMany)" in problem.reason


@pytest.mark.parametrize(
    ("said", "hopeless", "remedy"),
    [
        ('pods "worker-0" is forbidden: violates PodSecurity "restricted:latest"', True, "pod security forbids such pods"),
        ('Error creating: pods "x" is forbidden: exceeded quota: team, requested: cpu=95', False, "wait until the quota"),
        ('admission webhook "policy.example" denied the request: no owner label', True, "the cluster's own rules"),
        ("pods is forbidden: maximum memory usage per Container is 1Gi, but limit is 4Gi", True, "LimitRange"),
    ],
)
def test_pods_that_are_refused_have_the_remedy_for_their_refusal(said: str, hopeless: bool, remedy: str) -> None:
    events = [{"type": "Warning", "message": "an older one"}, {"type": "Warning", "message": said}]
    problem = _no_pods_problem(MPIJOB, events)
    assert said in problem.reason
    assert remedy in problem.remedy
    assert problem.hopeless is hopeless
    assert not problem.only_slow


def test_a_job_without_pods_and_warnings_is_only_slow() -> None:
    problem = _no_pods_problem(MPIJOB, [{"type": "Normal", "message": "Created"}])
    assert problem.only_slow
    assert problem.remedy == "see that the MPI operator runs"


# --- several workers need a volume that several nodes mount: refused before the data are packed, wherever that is known


TWO = "resources.workers=2"
REFUSAL = (
    "error: kubernetes.access_mode: ReadWriteOnce, but the 2 workers may run on several nodes; "
    "set kubernetes.access_mode to ReadWriteMany and kubernetes.storage_class to "
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
def test_several_workers_on_one_nodes_volume_are_refused(options: list[str], repository: Path, tmp_path: Path) -> None:
    done = run_command("run", repository / "pipelines" / "demo.yaml", *options, "--set", TWO, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(REFUSAL)
    assert list(tmp_path.iterdir()) == []


def put_cluster(server: FakeApiServer, nodes: int, provisioner: str = "ebs.csi.aws.com") -> None:
    for number in range(nodes):
        server.put("Node", node(f"node-{number}", cpu="4", memory="16Gi"))
    server.put("StorageClass", {**STORAGE_CLASS, "provisioner": provisioner})


@pytest.mark.parametrize("exists", [False, True])
def test_a_volume_that_workers_cannot_share_is_refused(exists: bool, server: FakeApiServer, run: Run) -> None:
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
def test_a_volume_that_workers_may_share_is_submitted(
    nodes: int, provisioner: str, hidden: Any, server: FakeApiServer, run: Run
) -> None:
    put_cluster(server, nodes, provisioner)
    server.forbidden = hidden
    assert run(["train"], TWO) == {"train": "done"}


def test_classes_that_attach_nothing_to_a_node_are_known() -> None:
    known = ("nfs.csi.k8s.io", "cluster.local/nfs-subdir-external-provisioner", "efs.csi.aws.com")
    assert all(shares_volumes({"provisioner": name}) for name in known)
    unknown = ("pd.csi.storage.gke.io", "rancher.io/local-path", "kubernetes.io/no-provisioner", "efs.csi.aws.com.example")
    assert not any(shares_volumes({"provisioner": name}) for name in unknown)
    assert not shares_volumes(None)
