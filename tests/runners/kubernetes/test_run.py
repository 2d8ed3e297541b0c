"""The Kubernetes runner against an API server over real HTTP."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.runners.kubernetes import manage
from gaudi_bert.runners.kubernetes.client import Cluster, ClusterError, Connection
from gaudi_bert.runners.kubernetes.run import _DIGEST, run_on_kubernetes
from tests.builders.fake_api_server import FakeApiServer, Fault, Run, State
from tests.builders.recorded_answers import (
    ACTIVE,
    FAILED,
    MPIRUN_FOOTER_ONLY,
    MPIRUN_OUTPUT,
    active,
    complete,
    evicted,
    failed,
    gave_up,
    pod,
    running,
    succeeded,
    unschedulable,
)

pytestmark = pytest.mark.usefixtures("short_watches")
PLAN = ["plan"]


def settings(*overrides: str) -> PipelineSettings:
    return load_pipeline(None, ["kubernetes.start_seconds=1", *overrides])


def test_all_steps_are_submitted_in_order_and_their_objects_made(server: FakeApiServer, run: Run) -> None:
    result = run(["prepare", "histogram", "plan", "write", "verify"])
    steps = ["prepare", "histogram", "plan", "write", "write-finish", "verify", "verify-finish"]
    assert result == dict.fromkeys(steps, "done")
    assert server.created("Job") == [f"demo-{step}" for step in steps]
    assert ("PersistentVolumeClaim", "demo-work") in server.objects
    assert ("ServiceAccount", "demo-stages") in server.objects
    assert "pipeline.yaml" in server.objects["ConfigMap", "demo-pipeline"]["data"]


def test_logs_are_streamed_once_also_after_a_drop(server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    server.logs["plan-x"] = [f"2026-01-01T00:00:0{number}Z line {number}" for number in range(6)]
    server.log_drops["plan-x"] = 3
    server.script("demo-plan", active(), *[active(running("plan-x"))] * 3, *[complete(succeeded("plan-x"))] * 2)
    # Let the first log end before the Job is looked at again, as in life.
    server.watches.extend(["silence"] * 3)
    run(PLAN)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("line")]
    assert lines == [f"line {number}" for number in range(6)]


@pytest.mark.parametrize(
    ("policy", "minor", "retries"),
    [
        ("auto", "28", {"backoffLimit": 18}),
        ("auto", "29+", {"backoffLimitPerIndex": 3}),
        ("false", "31", {"backoffLimit": 18}),
        ("true", "28", {"backoffLimitPerIndex": 3}),
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
    server.script("demo-plan", active(), active(running("p")), complete())
    assert run(PLAN) == {"plan": "done"}
    assert server.created("Job") == ["demo-plan"]


def test_another_run_in_the_same_work_folder_is_left_alone(server: FakeApiServer, run: Run) -> None:
    labels = {"app.kubernetes.io/instance": "demo"}
    server.put(
        "Job", {"metadata": {"name": "demo-write", "labels": labels, "annotations": {_DIGEST: "x"}}, "status": ACTIVE}
    )
    with pytest.raises(InputError, match=r"Job demo-write of another run works in the same work folder; .*k8s delete"):
        run(PLAN)
    assert server.created("Job") == []


NO_CARDS = unschedulable("p", "0/3 nodes are available: 3 Insufficient habana.ai/gaudi.")
BAD_DEPTH = failed("p", 2, "error: packing.depth: 0 is too small")


@pytest.mark.parametrize(
    ("states", "said_why"),
    [
        ([gave_up(failed("p", 1, "a\nerror: disk full"))], r"pod p, container plan: exit code 1: a \| error: disk full"),
        ([gave_up()], "BackoffLimitExceeded: Job has reached the specified backoff limit"),
        ([active(NO_CARDS)], r"Unschedulable: 0/3 nodes .* 3 Insufficient .* after .*was removed\); wait until cards"),
        ([active(running("p")), active(BAD_DEPTH)], "exit code 2: error: packing.depth: 0 .*correct the pipeline file"),
    ],
    ids=["exit", "no pod left", "cards", "bad input"],
)
def test_a_failure_has_its_reason_and_remedy(states: list[State], said_why: str, server: FakeApiServer, run: Run) -> None:
    server.script("demo-plan", *states)
    with pytest.raises(FailedError, match=said_why):
        run(["plan", "write"])
    assert server.created("Job") == ["demo-plan"], "nothing is submitted after a failure"


def test_a_step_that_is_always_taken_away_ends_the_run(server: FakeApiServer, run: Run) -> None:
    server.script("demo-plan", gave_up(evicted("p")))
    with pytest.raises(FailedError, match=r"pod p was taken away \(Evicted\): The node was low on .*; run it again"):
        run(PLAN)
    assert server.created("Job") == ["demo-plan"] * 4


@pytest.mark.parametrize("about", ["demo-plan", "p"])
def test_a_pod_that_never_comes_up_is_not_waited_for_for_ever(about: str, server: FakeApiServer, run: Run) -> None:
    claim = {"metadata": {"name": "demo-work", "uid": "1"}, "spec": {}, "status": {"phase": "Bound"}}
    server.objects["PersistentVolumeClaim", "demo-work"] = claim
    creating = pod("p", "Pending", waiting={"reason": "ContainerCreating"})
    server.script("demo-plan", active(*([creating] if about == "p" else [])))
    message = "MountVolume.SetUp failed" if about == "p" else "exceeded quota: team"
    server.warn(about, message)
    with pytest.raises(FailedError, match=f"{message} after .*Job demo-plan was removed"):
        run(PLAN)


def test_an_interrupt_leaves_the_job(
    server: FakeApiServer, cluster: Cluster, said: io.StringIO, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    server.script("demo-plan", active(running("p")))
    monkeypatch.setattr(cluster, "wait_for_change", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(PLAN)
    assert ("Job", "demo-plan") in server.objects
    assert "what was submitted keeps running" in said.getvalue()


def test_a_pod_that_is_evicted_and_replaced_does_not_end_the_run(server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    server.script("demo-plan", active(evicted("p-1")), active(evicted("p-1"), running("p-2")), complete(succeeded("p-2")))
    assert run(PLAN) == {"plan": "done"}
    assert "taken away (Evicted)" in said.getvalue()


def test_a_claim_that_is_not_bound_is_named_with_what_the_cluster_says(server: FakeApiServer, run: Run) -> None:
    message = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    server.script("demo-plan", active(unschedulable("p", message)))
    server.warn("demo-work", 'storageclass.storage.k8s.io "fast" not found')
    with pytest.raises(FailedError, match=r"claim demo-work is Pending, not Bound \(fast, .* not found.*storage_class"):
        run(PLAN, "kubernetes.storage_class=fast")


@pytest.mark.parametrize("behaviour", ["drop", "gone", "silence"])
def test_a_watch_that_breaks_is_resumed(behaviour: str, server: FakeApiServer, run: Run) -> None:
    server.watches.extend([behaviour] * 2)
    server.script("demo-plan", *[active(running("p"))] * 4, complete(succeeded("p")))
    assert run(PLAN) == {"plan": "done"}


@pytest.mark.parametrize(
    ("code", "method", "path"),
    [(429, "GET", "/jobs/demo-plan"), (500, "POST", "/jobs"), (503, "GET", "/pods"), (409, "POST", "/jobs")],
    ids=["busy", "broken", "away", "somebody else creates it"],
)
def test_what_may_pass_is_tried_again(code: int, method: str, path: str, server: FakeApiServer, run: Run) -> None:
    server.faults = [Fault(method, path, code, {"Retry-After": "0"}) for _ in range(2)]
    server.script("demo-plan", active(), active(), complete())
    assert run(PLAN) == {"plan": "done"}
    assert server.faults == []


def test_what_stays_broken_ends_the_run_with_what_the_server_said(server: FakeApiServer, run: Run) -> None:
    server.faults = [Fault("POST", "/jobs", 500, message="etcd is down") for _ in range(10)]
    with pytest.raises(ClusterError, match="cannot create Job demo-plan: 500: etcd is down; try again later"):
        run(PLAN)


def test_a_server_that_is_away_is_asked_again_for_long(server: FakeApiServer, reporter: Reporter, said: io.StringIO) -> None:
    paused: list[float] = []
    connection = Connection(outage_seconds=3600, say=reporter.say, sleep=paused.append)
    server.faults = [Fault("GET", "/jobs/demo-plan", 503, message="apiserver is shutting down") for _ in range(60)]
    assert run_on_kubernetes(settings(), PLAN, reporter, Cluster("gaudi-bert", connection)) == {"plan": "done"}
    assert sum(paused) > 20 * 60
    assert said.getvalue().count("apiserver is shutting down") == 1
    assert "retrying for at most 1 h" in said.getvalue()
    assert said.getvalue().count("the cluster answers again") == 1


def test_an_outage_that_lasts_too_long_ends_the_run(server: FakeApiServer, reporter: Reporter) -> None:
    paused: list[float] = []
    connection = Connection(outage_seconds=120, say=reporter.say, sleep=paused.append)
    server.faults = [Fault("GET", "/jobs/demo-plan", 503, message="gone") for _ in range(60)]
    with pytest.raises(ClusterError, match="cannot read Job demo-plan: 503: gone"):
        run_on_kubernetes(settings(), PLAN, reporter, Cluster("gaudi-bert", connection))
    assert 60 < sum(paused) <= 120


def test_a_server_that_never_answered_is_not_asked_for_long(server: FakeApiServer) -> None:
    paused: list[float] = []
    lines: list[str] = []
    server.faults = [Fault("GET", "/version", 503) for _ in range(60)]
    with pytest.raises(ClusterError, match="503"):
        Cluster("gaudi-bert", Connection(outage_seconds=3600, say=lines.append, sleep=paused.append)).version()
    assert sum(paused) <= 16
    (line,) = lines
    assert line.startswith("cannot ask for the version: 503: ")
    assert line.endswith("retrying for at most 16 s")


def test_logs_that_may_not_be_read_are_named_once(server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    server.forbidden = {("get", "pods/log")}
    pods = [running("plan-a"), running("plan-b")]
    server.script("demo-plan", *[active(*pods)] * 4, complete(succeeded("plan-a")))
    assert run(PLAN) == {"plan": "done"}
    assert said.getvalue().count("cannot read the log of plan-") == 1
    assert "the run continues without this log" in said.getvalue()


REFUSED = 'worker pod created failed: pods "demo-train-worker-0" is forbidden: violates PodSecurity "restricted:latest"'


def test_an_mpijob_that_pod_security_refuses_ends_at_once_with_its_remedy(server: FakeApiServer, run: Run) -> None:
    server.warn("demo-train", REFUSED, "2099-01-01T00:00:00Z")
    server.script("demo-train", State({}))
    with pytest.raises(FailedError, match=r"gets no pods: worker pod created failed.*pod security forbids such pods"):
        run(["train"], "resources.workers=2", "kubernetes.start_seconds=600")


def test_what_the_cluster_said_of_an_earlier_object_of_that_name_does_not_count(server: FakeApiServer, run: Run) -> None:
    server.warn("demo-train", REFUSED, "2020-01-01T00:00:00Z")
    done = State({"conditions": [{"type": "Succeeded", "status": "True"}]})
    server.script("demo-train", State({}), State({}), done)
    assert run(["train"], "resources.workers=2") == {"train": "done"}


QUOTA = 'Error creating: pods "demo-histogram-{}" is forbidden: exceeded quota: compute, requested: cpu=1'


def test_a_quota_with_room_for_some_is_said_once(
    server: FakeApiServer, said: io.StringIO, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the pod that is refused changes with every attempt; the pods that are there do the work."""
    wait, number = Cluster.wait_for_change, iter(range(60))

    def refuse_another(cluster: Cluster, item: Any, seconds: float) -> None:
        attempt = next(number)
        server.warn("demo-histogram", QUOTA.format(attempt), f"2026-01-01T00:00:{attempt:02d}Z")
        wait(cluster, item, seconds)

    monkeypatch.setattr(Cluster, "wait_for_change", refuse_another)
    server.script("demo-histogram", *[active(running("h-0"), running("h-1"))] * 12, complete())
    assert run(["histogram"], "resources.data_workers=4") == {"histogram": "done"}
    lines = [line for line in said.getvalue().splitlines() if "exceeded quota" in line]
    assert len(lines) == 1
    assert "Job demo-histogram gets 2 of 4 pods: " in lines[0]
    assert "wait until the quota has room" in lines[0]


def test_an_mpijob_whose_workers_the_quota_refuses_ends_with_that_remedy(server: FakeApiServer, run: Run) -> None:
    worker = running("w-0", "worker")
    worker["metadata"]["labels"] = {"training.kubeflow.org/job-role": "worker"}
    server.script("demo-train", State({}, [worker]))
    server.warn("demo-train", 'pods "demo-train-worker-1" is forbidden: exceeded quota: compute')
    with pytest.raises(FailedError, match=r"demo-train gets 1 of 2 pods: .*quota.*was removed\); wait until the quota"):
        run(["train"], "resources.workers=2")


def test_pods_that_run_well_meanwhile_give_the_next_wait_its_whole_time(server: FakeApiServer, run: Run) -> None:
    stuck = active(unschedulable("p", "0/3 nodes are available: 3 Insufficient cpu."))
    well = active(running("p"))
    server.script("demo-plan", *[stuck, stuck, well] * 8, complete())
    assert run(PLAN) == {"plan": "done"}


def test_an_expired_token_is_read_again(
    server: FakeApiServer, reporter: Reporter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connected = Cluster("gaudi-bert")
    server.token = "second"
    server.on_unauthorized = lambda: (tmp_path / "kubeconfig").write_text(server.kubeconfig("second")) and None
    assert run_on_kubernetes(settings(), PLAN, reporter, connected) == {"plan": "done"}


def test_credentials_that_stay_wrong_are_told(server: FakeApiServer, run: Run) -> None:
    server.token = "another"
    with pytest.raises(ClusterError, match="401: Unauthorized; your credentials have expired or are wrong: log in"):
        run(PLAN)


def test_a_job_that_somebody_removes_ends_the_run(server: FakeApiServer, run: Run) -> None:
    def vanish(kind: str, name: str) -> Any:
        del server.objects[kind, name]
        return {"metadata": {"name": name}, "status": ACTIVE}

    server.advance = vanish  # type: ignore[method-assign]
    with pytest.raises(FailedError, match="Job demo-plan was removed while it ran"):
        run(PLAN)


def test_two_workers_are_an_mpijob_whose_launcher_is_followed(server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    launcher, worker = running("launcher", "train"), running("worker-0", "worker")
    launcher["metadata"]["labels"] = {"training.kubeflow.org/job-role": "launcher"}
    worker["metadata"]["labels"] = {"training.kubeflow.org/job-role": "worker"}
    server.logs = {"launcher": ["2026-01-01T00:00:01Z update 1"], "worker-0": ["2026-01-01T00:00:01Z sshd"]}
    done = State({"conditions": [{"type": "Succeeded", "status": "True"}]}, [launcher])
    server.script("demo-train", State({}, [launcher, worker]), State({}, [launcher, worker]), done)
    assert run(["train"], "resources.workers=2") == {"train": "done"}
    assert server.created("MPIJob") == ["demo-train"]
    assert "update 1" in said.getvalue()
    assert "sshd" not in said.getvalue()


@pytest.mark.parametrize(
    ("message", "log", "reason"),
    [
        (MPIRUN_OUTPUT, None, "rank 1: error: settings.yaml: depth is 3 there, 4 here; give another --out;"),
        (MPIRUN_FOOTER_ONLY, MPIRUN_OUTPUT, "rank 1: error: settings.yaml: depth is 3 there, 4 here; give another --out;"),
        (MPIRUN_FOOTER_ONLY, None, "error: rank 1 has left; the same command goes on from the last checkpoint;"),
    ],
    ids=["message", "log", "neither"],
)
def test_the_error_of_the_rank_that_failed_is_the_reason(
    message: str, log: str | None, reason: str, server: FakeApiServer, cluster: Cluster, run: Run
) -> None:
    """The last words of the launcher's log are mpirun's; the message that a pod leaves holds only the end of its log."""
    if log is None:
        server.forbidden = {("get", "pods/log")}
    else:
        server.logs["launcher"] = [f"2026-01-01T00:00:00Z {line}" for line in log.splitlines()]
    launcher = failed("launcher", 2, message, container="train")
    server.script("demo-train", State({}, [running("launcher", "train")]), State(FAILED, [launcher]))
    with pytest.raises(FailedError) as raised:
        run(["train"], "resources.workers=2")
    expected = f"pod launcher, container train: exit code 2: {reason} correct the pipeline file"
    assert str(raised.value).startswith(expected)
    status = manage.status(settings("resources.workers=2"), cluster)["train"]
    assert str(status.problem).startswith(expected)


@pytest.mark.parametrize(
    ("stage", "overrides", "said_why"),
    [
        ("train", ["resources.workers=2"], "this cluster serves no MPIJobs; install the MPI operator"),
        (
            "train",
            ["resources.workers=2", "training.engine=pytorch", "kubernetes.training=trainjob"],
            "serves no TrainJobs; install Kubeflow Trainer 2 .*or set kubernetes.training to job",
        ),
        ("plan", ["kubernetes.namespace=nowhere"], "namespace nowhere does not exist .*`kubectl create"),
        ("plan", ["kubernetes.data_claim=corpus"], "kubernetes.data_claim: no claim corpus in namespace gaudi"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(
    stage: str, overrides: list[str], said_why: str, server: FakeApiServer, run: Run
) -> None:
    server.kinds_unknown = {"MPIJob", "TrainJob", "TrainingRuntime"}
    with pytest.raises(InputError, match=said_why):
        run([stage], *overrides)
    assert server.objects == {}, "something was made before"


def test_without_kubeconfig_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("kubernetes")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InputError, match=r"no cluster: .*set KUBECONFIG to your kubeconfig file"):
        Cluster("gaudi-bert")


def test_a_cluster_that_does_not_answer_is_told(server: FakeApiServer, run: Run) -> None:
    server.__exit__()
    with pytest.raises(
        ClusterError, match=r"no answer from the cluster at http://127.* \(Failed .*refused\); check the network"
    ):
        run(PLAN)
