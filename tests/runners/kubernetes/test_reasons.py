"""Why a step does not go on: what the API answered, as a line with its meaning and its remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes import manage
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.reasons import Problem, ProblemState, find_step_problem, find_suspension_problem
from tests.builders.fake_api_server import FakeApiServer
from tests.builders.recorded_answers import (
    MPIRUN_FOOTER_ONLY,
    MPIRUN_OUTPUT,
    evicted,
    failed,
    image_missing,
    pod,
    preempted,
    running,
    succeeded,
    unschedulable,
)

Json = dict[str, Any]
Only = Callable[..., Problem | None]
JOB = {"kind": "Job", "metadata": {"name": "demo-plan"}, "spec": {}}


@pytest.fixture
def only(cluster: Cluster) -> Only:
    """What is wrong with a Job that has these pods."""
    return lambda *pods: find_step_problem(cluster, JOB, pods)


WAITING_FOR_INPUTS = pod("p", "Pending", waiting={"reason": "PodInitializing"})
WAITING_FOR_INPUTS["status"]["initContainerStatuses"] = [{"name": "wait", "image": "x", "state": {"running": {}}}]


def test_a_pod_that_runs_has_succeeded_or_waits_for_its_inputs_has_no_problem(only: Only) -> None:
    assert [only(state) for state in (running("p"), succeeded("p"), WAITING_FOR_INPUTS)] == [None] * 3


@pytest.mark.parametrize(
    ("message", "remedies"),
    [
        ("1 Insufficient memory, 1 Insufficient cpu.", ["resources.training.memory", "resources.training.cpu"]),
        ("pod has unbound immediate PersistentVolumeClaims.", ["kubernetes.storage_class"]),
        ("1 node(s) were unschedulable.", ["kubectl uncordon"]),
        ("1 node(s) didn't match Pod's node affinity/selector.", ["kubernetes.node_selector"]),
        ("something new.", ["kubectl describe pod"]),
    ],
)
def test_an_unschedulable_pod_says_all_that_is_lacking_and_nothing_else(
    message: str, remedies: list[str], only: Only
) -> None:
    problem = only(unschedulable("p", f"0/3 nodes are available: {message}"))
    assert (problem.state, problem.reason) == (
        ProblemState.WAITING,
        f"pod p: Unschedulable: 0/3 nodes are available: {message}",
    )
    assert all(remedy in problem.remedy for remedy in remedies)
    assert problem.remedy.count(";") == len(remedies) - 1


@pytest.mark.parametrize(
    ("reason", "message", "state"),
    [
        ("ErrImagePull", "pull access denied", ProblemState.HOPELESS),
        ("ImagePullBackOff", 'Back-off pulling image "x"', ProblemState.WAITING),
        ("ImagePullBackOff", "Back-off pulling image: NotFound: not found", ProblemState.HOPELESS),
        ("ErrImagePull", "dial tcp: lookup registry.example on 10.0.0.10:53: no such host", ProblemState.WAITING),
        ("ErrImagePull", "x509: certificate signed by unknown authority: invalid", ProblemState.WAITING),
        ("ErrImageNeverPull", "image is not present with pull policy of Never", ProblemState.HOPELESS),
    ],
)
def test_an_image_that_cannot_come_ends_the_wait(reason: str, message: str, state: ProblemState, only: Only) -> None:
    problem = only(image_missing("p", message, reason))
    assert (problem.state, problem.reason) == (state, f"pod p: {reason}: {message}")
    assert "images.registry" in problem.remedy


NO_CONFIGURATION = {"reason": "CreateContainerConfigError", "message": 'configmap "demo-pipeline-12" not found'}
NO_ROOT = {"reason": "CreateContainerConfigError", "message": "container has runAsNonRoot and image will run as root"}
CRASHED = pod("p", "Running", waiting={"reason": "CrashLoopBackOff"})
CRASHED["status"]["containerStatuses"][0]["lastState"] = {"terminated": {"exitCode": 1, "message": "sshd: no hostkeys"}}
LINES = "first\nsecond\nerror: no space left; free some\nthird"
STOP = "error: /work/demo/run: stopped on request after update 614 of 800; run it again to resume"
FEWER = "error: run: this run has training.updates = 800; pass --resume to extend it, or pass --overwrite to start again"
LOG = "see its log: `gaudi-bert k8s logs PIPELINE --step STEP`"


@pytest.mark.parametrize(
    ("ended", "state", "reason", "remedy"),
    [
        (failed("p", 1, LINES), ProblemState.CONTINUES, "error: no space left", "free some"),
        (failed("p", 2, LINES), ProblemState.HOPELESS, "error: no space left", "free some"),
        (failed("p", 2, FEWER), ProblemState.HOPELESS, FEWER.partition(";")[0], "give the pipeline another name"),
        (failed("p", 75, STOP), ProblemState.STOPPED, STOP.partition(";")[0], ""),
        (
            failed("p", 137, reason="OOMKilled"),
            ProblemState.CONTINUES,
            "a container exceeded its memory limit (OOMKilled, memory limit: 2Gi)",
            "raise resources.data.mem",
        ),
        (CRASHED, ProblemState.CONTINUES, "a container ended with exit code 1", LOG),
        (evicted("p"), ProblemState.CONTINUES, "Evicted: The node was low on resource: memory.", ""),
        (preempted("p"), ProblemState.STOPPED, "PreemptionByScheduler: default-scheduler: preempting", ""),
        (
            pod("p", "Pending", waiting=NO_ROOT),
            ProblemState.WAITING,
            "CreateContainerConfigError: container has",
            "see `kubectl",
        ),
        (
            pod("p", "Pending", waiting=NO_CONFIGURATION),
            ProblemState.HOPELESS,
            'configmap "demo-pipeline-12" not',
            "run the same",
        ),
    ],
)
def test_how_a_pod_ended_is_told(ended: Json, state: ProblemState, reason: str, remedy: str, only: Only) -> None:
    problem = only(ended)
    assert problem.state is state
    assert reason in problem.reason
    assert problem.remedy.startswith(remedy) if remedy else not problem.remedy


@pytest.mark.parametrize("known", ["message", "log"])
def test_the_error_of_the_rank_that_failed_is_the_reason(known: str, server: FakeApiServer, only: Only) -> None:
    """The last words of a launcher's log are mpirun's; the message that a pod leaves holds only the end of its log."""
    server.logs["launcher"] = [f"2026-01-01T00:00:00Z {line}" for line in MPIRUN_OUTPUT.splitlines()]
    launcher = failed("launcher", 2, MPIRUN_OUTPUT if known == "message" else "", container="train")
    assert str(only(launcher)) == "pod launcher: error: settings.yaml: depth is 3 there, 4 here; give another --out"
    hidden = failed("hidden", 1, MPIRUN_FOOTER_ONLY, container="train")
    assert str(only(hidden)).startswith("pod hidden: error: rank 1 has left")


@pytest.mark.parametrize(
    ("step", "cards", "setting"),
    [
        ("write-finish", {}, "resources.data.memory_limit"),
        ("train-worker", {}, "resources.training.memory_limit"),
        ("evaluate", {"habana.ai/gaudi": "1"}, "resources.training.memory"),
        ("launcher", {}, "resources.launcher.memory_limit"),
        ("wait", {}, "resources.waiting.memory_limit"),
    ],
)
def test_memory_that_is_too_small_names_the_setting_that_raises_it(
    step: str, cards: dict[str, str], setting: str, only: Only
) -> None:
    killed = failed("p", 137, reason="OOMKilled", **({"container": "wait"} if step == "wait" else {}))
    killed["metadata"]["labels"] = {"app.kubernetes.io/component": step}
    if step == "launcher":
        killed["metadata"]["labels"]["training.kubeflow.org/job-role"] = step
    killed["spec"]["containers"][0]["resources"]["limits"] = {"memory": "7Gi", **cards}
    problem = str(only(killed))
    assert problem == f"pod p: a container exceeded its memory limit (OOMKilled, memory limit: 7Gi); raise {setting}"


def test_a_node_that_is_lost_is_named_before_its_pods_are_taken_away(server: FakeApiServer, only: Only) -> None:
    unready = pod("p", "Running", conditions=[{"type": "Ready", "status": "False"}])
    unready["spec"]["nodeName"] = "node-7"
    assert only(unready) is None, "its probe may fail for a moment"
    server.warn("p", "Node is not ready")
    assert str(only(unready)) == "pod p: node is not ready: node-7; see `kubectl get nodes`"


def part(index: int, state: Json, created: str = "2026-01-01T00:00:00Z") -> Json:
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    return {**state, "metadata": {**state["metadata"], "annotations": annotations, "creationTimestamp": created}}


def state_of(problem: Problem | None) -> ProblemState | None:
    return problem and problem.state


def test_memory_that_is_too_small_three_times_is_hopeless(only: Only) -> None:
    """Of one part each: three parts that are killed once each are tried again."""
    killed = [failed(f"p-{number}", 137, reason="OOMKilled") for number in range(3)]
    moments = [f"2026-01-01T00:0{number}:00Z" for number in range(3)]
    apart = [part(number, each) for number, each in enumerate(killed)]
    again = [part(0, each, moment) for each, moment in zip(killed, moments, strict=True)]
    assert state_of(only(*apart)) is ProblemState.CONTINUES
    assert state_of(only(*again[:2])) is ProblemState.CONTINUES
    assert state_of(only(*again)) is ProblemState.HOPELESS
    restarted = failed("worker-0", 137, reason="OOMKilled", container="worker")
    restarted["status"]["containerStatuses"][0]["restartCount"] = 3
    assert state_of(only(restarted)) is ProblemState.HOPELESS


def test_a_pod_that_was_replaced_does_not_count(only: Only) -> None:
    later = part(0, unschedulable("p-2", "1 Insufficient cpu."), "2026-01-01T00:00:10Z")
    first = part(0, failed("p-1", 1, "error: disk full"))
    assert str(only(first, later)).startswith("pod p-2: Unschedulable")
    assert only(first, part(0, running("p-2"), "2026-01-01T00:00:10Z")) is None
    assert "disk full" in str(only(first, part(1, unschedulable("p-2", "no")))), "another part is no successor"


@pytest.mark.parametrize(
    "consequence",
    [
        "rank 0 of 2 aborts during update 168: rank 1 (demo-train-1) is lost",
        "rank 0 of 2, started by torchrun: lost the connection to another process at demo-train-0:1 (closed)",
        "rank 0 of 2: rank 1 did not connect within 600 s",
    ],
)
def test_the_problem_that_is_told_is_the_one_that_matters(consequence: str, only: Only) -> None:
    lost = failed("a", 1, f"error: {consequence}")
    stopped, full, waits = failed("b", 75), failed("c", 1, "error: disk full"), unschedulable("e", "no")
    for pods in ([lost, full, stopped, waits], [waits, stopped, lost, full]):
        told = [part(number, each) for number, each in enumerate(pods)]
        assert "disk full" in str(only(*told))
        assert "bad" in str(only(*told, part(9, failed("d", 2, "error: bad"))))
    assert state_of(only(part(0, lost), part(1, stopped))) is ProblemState.STOPPED
    assert state_of(only(part(0, stopped), part(1, waits))) is ProblemState.WAITING, "its successor may have no room either"


# --- what the cluster noted

MPIJOB = {"kind": "MPIJob", "metadata": {"name": "demo-train", "creationTimestamp": "2026-01-01T00:00:00Z"}}
MPIJOB["spec"] = {"mpiReplicaSpecs": {"Worker": {"replicas": 2}}}
SHARED = {**JOB, "spec": {"completions": 2, "parallelism": 2}}
PODS = 'pods "x-1" is forbidden: exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4'


@pytest.mark.parametrize(
    ("said", "state", "remedy"),
    [
        ('pods "w-0" is forbidden: violates PodSecurity "restricted:latest"', ProblemState.HOPELESS, "kubernetes.namespace"),
        ('pods "x" is forbidden: exceeded quota: team, requested: cpu=95', ProblemState.WAITING, "lower resources.data, "),
        (PODS, ProblemState.WAITING, "lower resources.workers"),
        (
            'admission webhook "policy.example" denied the request: no owner label',
            ProblemState.HOPELESS,
            "correct the setting",
        ),
        (
            "pods is forbidden: maximum memory usage per Container is 1Gi, but limit is 4Gi",
            ProblemState.HOPELESS,
            "LimitRange",
        ),
        ("pods is forbidden: failed quota: q: must specify limits.cpu for: wait", ProblemState.HOPELESS, "set cpu_limit"),
        (
            "cpu max limit to request ratio per Container is 2, but provided ratio is 4.0",
            ProblemState.HOPELESS,
            "lower cpu_limit and",
        ),
        (
            'Pod "p" is invalid: requests: "200m": must be less than or equal to cpu limit of 100m',
            ProblemState.HOPELESS,
            "LimitRange",
        ),
        ("something new", ProblemState.WAITING, "kubectl describe"),
    ],
)
def test_pods_that_are_refused_have_the_clusters_last_warning(
    said: str, state: ProblemState, remedy: str, server: FakeApiServer, cluster: Cluster
) -> None:
    server.warn("demo-train", "an older one", "2026-01-01T00:00:01Z")
    server.warn("demo-train", said, "2026-01-01T00:00:02Z")
    problem = find_step_problem(cluster, MPIJOB, [])
    assert problem.reason == f"MPIJob demo-train has no pods: {said}"
    assert (problem.state, remedy in problem.remedy) == (state, True)


def test_what_was_said_of_an_earlier_object_of_that_name_does_not_count(server: FakeApiServer, cluster: Cluster) -> None:
    server.warn("demo-train", "exceeded quota: team", "2025-01-01T00:00:00Z")
    problem = find_step_problem(cluster, MPIJOB, [])
    assert str(problem) == "MPIJob demo-train has no pods; check that the MPI operator runs"


def test_a_quota_with_room_for_some_holds_up_only_those_that_wait_for_one_another(
    server: FakeApiServer, cluster: Cluster
) -> None:
    for item, labels in ((SHARED, {}), (MPIJOB, {"training.kubeflow.org/job-role": "worker"})):
        server.warn(item["metadata"]["name"], PODS, "2026-01-02T00:00:00Z")
        one = running("x-0")
        one["metadata"]["labels"] = labels
        problem = find_step_problem(cluster, item, [one])
        assert f"{item['metadata']['name']} has only 1 of 2 pods: " in problem.reason
        assert problem.state is (ProblemState.CONTINUES if item is SHARED else ProblemState.WAITING)


def test_a_pod_that_does_not_start_has_the_warnings_about_it_and_its_claim(server: FakeApiServer, cluster: Cluster) -> None:
    creating = pod("p", "Pending", waiting={"reason": "ContainerCreating"})
    creating["spec"]["volumes"] = [{"name": "work", "persistentVolumeClaim": {"claimName": "demo-work"}}]
    assert "pod p: the pod does not start (ContainerCreating)" in str(find_step_problem(cluster, JOB, [creating]))
    server.warn("p", "MountVolume.SetUp failed")
    server.warn("demo-work", 'storageclass.storage.k8s.io "fast" not found')
    words = (
        'p: MountVolume.SetUp failed; demo-work: storageclass.storage.k8s.io "fast" not found; set kubernetes.storage_class'
    )
    assert words in str(find_step_problem(cluster, JOB, [creating]))


# --- what waits for a queue

NO_ROOM = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor default, 9 more needed"


def condition(kind: str, status: str, reason: str, message: str) -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def workload(*conditions: Json, **status: Any) -> Json:
    return {"metadata": {"name": "w"}, "spec": {}, "status": {"conditions": list(conditions), **status}}


def pending(message: str) -> Json:
    return workload(condition("QuotaReserved", "False", "Pending", message))


PENDING = pending(NO_ROOM)
SET = "couldn't assign flavors to pod set main"
UNCOVERED = "resource ephemeral-storage unavailable in ClusterQueue"
TOO_LARGE = (
    "insufficient quota for cpu in flavor b, previously considered podsets requests (0) + current podset request (96) > "
    "maximum capacity (4)"
)
PREEMPTED = workload(
    condition("QuotaReserved", "False", "Pending", NO_ROOM),
    condition("Evicted", "True", "Preempted", "Preempted to accommodate a higher priority Workload"),
    condition("Admitted", "False", "NoReservation", "The workload has no reservation"),
)
RESERVED = condition("QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue c")
CHECKS = [{"name": "nodes", "state": "Pending", "message": ""}, {"name": "b", "state": "Ready"}]


@pytest.mark.parametrize(
    ("found", "said", "remedy"),
    [
        (None, "Job suspended", ""),
        (workload(), "the queue has not examined it yet", ""),
        (PENDING, NO_ROOM, ""),
        (PREEMPTED, f"Preempted to accommodate a higher priority Workload; {NO_ROOM}", ""),
        (workload(RESERVED, admissionChecks=CHECKS), "admission check nodes: Pending", ""),
        (pending(f"{SET}: {UNCOVERED}"), f"{SET}: {UNCOVERED}", "set kubernetes.request_scratch to false"),
        (pending("LocalQueue gpus doesn't exist"), "LocalQueue gpus doesn't exist", "kubectl get localqueues"),
        (pending(f"{SET}: {TOO_LARGE}"), f"{SET}: {TOO_LARGE}", "lower resources.data"),
        (pending(f"{NO_ROOM}, {TOO_LARGE}"), f"{NO_ROOM}, {TOO_LARGE}", ""),
    ],
    ids=["none", "not looked at", "no room", "preempted", "check", "uncovered", "no queue", "too large", "another flavor"],
)
def test_a_queued_step_says_what_its_workload_says_and_whether_waiting_helps(
    found: Json | None, said: str, remedy: str, server: FakeApiServer, cluster: Cluster
) -> None:
    if found is not None:
        labels = {"kueue.x-k8s.io/job-uid": "u"}
        server.put("Workload", {**found, "metadata": {"name": "new", "labels": labels}})
        earlier = {"name": "old", "labels": labels, "creationTimestamp": "2025-01-01T00:00:00Z"}
        server.put("Workload", {**workload(condition("QuotaReserved", "False", "Pending", "old")), "metadata": earlier})
    conditions = [condition("Suspended", "True", "JobSuspended", "Job suspended")]
    metadata = {"name": "demo-plan", "uid": "u", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}
    item = {"kind": "Job", "metadata": metadata, "status": {"conditions": conditions}}
    problem = find_suspension_problem(cluster, item)
    assert problem.reason == f"Job demo-plan waits for its queue gpus: {said}"
    assert (problem.state is ProblemState.HOPELESS, remedy in problem.remedy) == (bool(remedy), True)


def test_status_says_what_a_step_waits_for(server: FakeApiServer, cluster: Cluster) -> None:
    server.put_own("Job", "demo-plan", spec={"suspend": True}, status={})
    server.advance = lambda kind, name: server.objects[kind, name]  # type: ignore[method-assign]
    found = manage.read_step_statuses(load_pipeline(None), cluster)["plan"]
    assert found["state"] == "suspended"
    assert found["problem"].startswith("Job demo-plan is suspended")
