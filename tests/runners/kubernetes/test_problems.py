"""Reasons and remedies from what the API answered."""

from __future__ import annotations

from typing import Any

import pytest

from gaudi_bert.runners.kubernetes.problems import (
    claim_problem,
    job_outcome,
    missing_object,
    no_pods_problem,
    pod_problem,
    worst_problem,
)
from tests.builders.recorded_answers import (
    IMAGE,
    evicted,
    failed,
    image_missing,
    pod,
    preempted,
    running,
    succeeded,
    unschedulable,
)


@pytest.mark.parametrize("state", [running("p"), succeeded("p")])
def test_a_pod_that_runs_or_succeeded_has_no_problem(state: dict[str, Any]) -> None:
    assert pod_problem(state) is None


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (pod("p", "Pending"), "not scheduled"),
        (pod("p", "Pending", waiting={"reason": "PodInitializing"}), "PodInitializing"),
    ],
)
def test_a_pod_that_is_about_to_start_is_only_a_problem_in_the_long_run(state: dict[str, Any], said: str) -> None:
    problem = pod_problem(state)
    assert problem is not None
    assert problem.only_slow
    assert not problem.started
    assert said in problem.reason


def test_a_pod_that_waits_for_its_inputs_is_no_problem() -> None:
    waits = pod("p", "Pending", waiting={"reason": "PodInitializing"})
    waits["status"]["initContainerStatuses"] = [{"name": "wait", "image": "x", "state": {"running": {}}}]
    assert pod_problem(waits) is None


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("3 Insufficient habana.ai/gaudi.", "resources.cards"),
        ("1 Insufficient hugepages-2Mi.", "resources.hugepages_2Mi"),
        ("1 Insufficient vpc.amazonaws.com/efa.", "kubernetes.efa"),
        ("1 Insufficient memory.", "resources.training.memory"),
        ("1 Insufficient cpu.", "resources.training.cpu"),
        ("pod has unbound immediate PersistentVolumeClaims.", "kubernetes.storage_class"),
        ('persistentvolumeclaim "corpus" not found.', "kubernetes.data_claim"),
        ("1 node(s) had untolerated taint {gaudi: }.", "kubernetes.training_pods.tolerations"),
        ("1 Insufficient ephemeral-storage.", "kubernetes.scratch"),
        ("1 node(s) didn't match Pod's node affinity/selector.", "kubernetes.node_selector"),
        ("something new.", "kubectl describe pod"),
    ],
)
def test_an_unschedulable_pod_says_what_is_lacking(message: str, remedy: str) -> None:
    problem = pod_problem(unschedulable("p", f"0/3 nodes are available: {message}"))
    assert problem is not None
    assert message in problem.reason
    assert remedy in problem.remedy
    assert not problem.started
    assert not problem.hopeless


@pytest.mark.parametrize(
    ("reason", "message", "hopeless"),
    [
        ("ErrImagePull", "pull access denied", True),
        ("ErrImagePull", "dial tcp: i/o timeout", False),
        ("ImagePullBackOff", 'Back-off pulling image "x"', False),
        ("ImagePullBackOff", "Back-off pulling image: NotFound: not found", True),
        ("ErrImagePull", "dial tcp: lookup registry.example on 10.0.0.10:53: no such host", False),
        ("ErrImagePull", "tls: failed to verify certificate: x509: certificate signed by unknown authority: invalid", False),
        ("InvalidImageName", "couldn't parse image", True),
        ("ErrImageNeverPull", "image is not present with pull policy of Never", True),
    ],
)
def test_an_image_that_cannot_come_ends_the_wait(reason: str, message: str, hopeless: bool) -> None:
    problem = pod_problem(image_missing("p", message, reason))
    assert problem is not None
    assert problem.hopeless is hopeless
    assert IMAGE in problem.reason
    assert "images.registry" in problem.remedy


@pytest.mark.parametrize(
    ("code", "said", "hopeless"),
    [(1, "exit code 1", False), (2, "exit code 2", True), (75, "stopped on request", False), (137, "killed", False)],
)
def test_an_exit_code_is_told(code: int, said: str, hopeless: bool) -> None:
    problem = pod_problem(failed("p", code, "first\nsecond\nthird\nerror: last"))
    assert problem is not None
    assert said in problem.reason
    assert problem.hopeless is hopeless
    if code in (1, 2, 137):
        assert problem.reason.endswith("second | third | error: last")


def test_a_pod_that_failed_without_a_container_says_what_is_known() -> None:
    lost = {**running("p"), "status": {"phase": "Failed", "message": "the node has\n no such runtime"}}
    problem = pod_problem(lost)
    assert problem is not None
    assert problem.reason == "pod p failed: the node has no such runtime"


def test_all_pods_with_the_same_problem_are_named() -> None:
    killed = [failed(f"p-{number}", 137) for number in range(6)]
    problem = worst_problem([*killed, failed("other", 1), running("q")])
    assert problem is not None
    assert problem.reason == "pod p-0, container plan: killed (exit code 137) (likewise p-1, p-2, p-3 and 2 more)"
    one = worst_problem([failed("p-0", 137), failed("other", 1)])
    assert one is not None
    assert "likewise" not in one.reason


@pytest.mark.parametrize(
    ("message", "reason", "remedy"),
    [
        ('configmap "demo-pipeline-12" not found', "there is no ConfigMap demo-pipeline-12", "submit the run again"),
        ('MountVolume.SetUp failed for volume "k" : secret "key" not found', "there is no Secret key", "store_secret"),
    ],
)
def test_what_a_pod_mounts_and_is_not_there_is_a_reason_at_once(message: str, reason: str, remedy: str) -> None:
    waits = pod("p", "Pending", waiting={"reason": "ContainerCreating"})
    refused = pod("p", "Pending", waiting={"reason": "CreateContainerConfigError", "message": message})
    for problem in (missing_object(waits, [{"type": "Warning", "message": message}]), pod_problem(refused)):
        assert problem is not None
        assert problem.hopeless
        assert reason in problem.reason
        assert remedy in problem.remedy
    assert missing_object(waits, [{"type": "Warning", "message": "Unable to attach or mount volumes: timed out"}]) is None


def test_a_container_that_crashes_again_and_again_shows_its_last_exit() -> None:
    crashed = pod("p", "Running", waiting={"reason": "CrashLoopBackOff"})
    crashed["status"]["containerStatuses"][0]["lastState"] = {"terminated": {"exitCode": 1, "message": "sshd: no hostkeys"}}
    problem = pod_problem(crashed)
    assert problem is not None
    assert "exit code 1: sshd: no hostkeys" in problem.reason


@pytest.mark.parametrize("taken", [evicted("p"), preempted("p")])
def test_a_pod_that_was_taken_away_can_be_run_again(taken: dict[str, Any]) -> None:
    problem = pod_problem(taken)
    assert problem is not None
    assert "taken away" in problem.reason
    assert not problem.hopeless


def test_a_container_that_cannot_be_set_up_is_told() -> None:
    waiting = {"reason": "CreateContainerConfigError", "message": "container has runAsNonRoot and image will run as root"}
    problem = pod_problem(pod("p", "Pending", waiting=waiting))
    assert problem is not None
    assert "CreateContainerConfigError: container has runAsNonRoot" in problem.reason


def test_the_hopeless_problem_is_told_first() -> None:
    pods = [failed("a", 1), unschedulable("b", "no"), failed("c", 2, "bad input"), running("d")]
    problem = worst_problem(pods)
    assert problem is not None
    assert "pod c" in problem.reason
    assert worst_problem([running("a"), succeeded("b")]) is None


def test_a_registry_that_a_node_did_not_reach_has_another_remedy_than_a_missing_image() -> None:
    unreached = pod_problem(image_missing("p", "dial tcp: lookup registry.example on 10.0.0.10:53: no such host"))
    assert unreached is not None
    assert "did not reach the registry: check images.registry and the node's network and DNS" in unreached.remedy


def test_several_shortages_have_several_remedies() -> None:
    message = "0/2 nodes are available: 1 Insufficient cpu, 1 Insufficient memory, 2 Insufficient habana.ai/gaudi."
    problem = pod_problem(unschedulable("p", message))
    assert problem is not None
    for key in ("resources.cards", "resources.training.memory", "resources.training.cpu"):
        assert key in problem.remedy
    assert "hugepages" not in problem.remedy


# What became of a Job, why it has no pods, and why a claim is not bound.

MPIJOB = {"kind": "MPIJob", "metadata": {"name": "demo-train"}}


@pytest.mark.parametrize(
    ("conditions", "outcome"),
    [
        ([], None),
        ([{"type": "Complete", "status": "False"}], None),
        ([{"type": "Complete", "status": "True"}], "complete"),
        ([{"type": "Created", "status": "True"}, {"type": "Succeeded", "status": "True"}], "complete"),
        (
            [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "late"}],
            "failed: DeadlineExceeded: late",
        ),
    ],
)
def test_the_outcome_of_a_job_is_in_its_conditions(conditions: list[dict[str, Any]], outcome: str | None) -> None:
    assert job_outcome({"status": {"conditions": conditions}}) == outcome


def test_a_bound_claim_is_no_problem() -> None:
    claim = {"metadata": {"name": "work"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    assert claim_problem(claim, []) is None
    problem = claim_problem({**claim, "status": {"phase": "Pending"}}, [])
    assert problem is not None
    assert "work is Pending, not Bound (the default class, ReadWriteMany)" in problem.reason


@pytest.mark.parametrize(
    ("said", "hopeless", "remedy"),
    [
        (
            'pods "demo-train-worker-0" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true',
            True,
            "pod security forbids such pods",
        ),
        ('Error creating: pods "x" is forbidden: exceeded quota: team, requested: cpu=95', False, "wait until the quota"),
        ('admission webhook "policy.example" denied the request: no owner label', True, "the cluster's own rules"),
        ("pods is forbidden: maximum memory usage per Container is 1Gi, but limit is 4Gi", True, "LimitRange"),
    ],
)
def test_pods_that_are_refused_have_the_remedy_for_their_refusal(said: str, hopeless: bool, remedy: str) -> None:
    events = [{"type": "Warning", "message": "an older one"}, {"type": "Warning", "message": said}]
    problem = no_pods_problem(MPIJOB, events)
    assert said in problem.reason
    assert remedy in problem.remedy
    assert problem.hopeless is hopeless
    assert not problem.only_slow


def test_a_job_without_pods_and_warnings_is_only_slow() -> None:
    problem = no_pods_problem(MPIJOB, [{"type": "Normal", "message": "Created"}])
    assert problem.only_slow
    assert problem.remedy == "see that the MPI operator runs"
