"""Following a step: how long pods that cannot start are waited for, what is reported once, stops, suspensions; logs."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.runners.kubernetes.follow import _StartTimer, _StepProgress
from gaudi_bert.runners.kubernetes.reasons import Problem, ProblemState
from tests.builders.fake_api_server import FakeApiServer, Fault, Run
from tests.builders.fake_api_server import State as Moment
from tests.builders.recorded_answers import (
    ACTIVE,
    COMPLETE,
    active,
    complete,
    failed,
    pod,
    preempted,
    running,
    succeeded,
    unschedulable,
)

Json = dict[str, Any]

FULL = Problem(ProblemState.WAITING, "pod q: Unschedulable: 1 Insufficient cpu.", "add nodes")
DISK = Problem(ProblemState.CONTINUES, "pod p-1: error: disk full", "run it again to resume")


class Told:
    """What is reported of problems at moments of a clock that the test turns."""

    def __init__(self, reporter: Reporter, said: io.StringIO) -> None:
        self.now, self._said = 0.0, said
        self._waits = _StartTimer(600, reporter, clock=lambda: self.now)

    def at(self, now: float, problem: Problem | None) -> list[str]:
        """The new lines, after this problem was seen at `now`."""
        self.now, before = now, len(self._said.getvalue())
        if problem is None:
            self._waits.reset()
        else:
            assert not self._waits.should_stop_waiting_for_pods(problem)
        return self._said.getvalue()[before:].splitlines()


@pytest.fixture
def told(reporter: Reporter, said: io.StringIO) -> Told:
    return Told(reporter, said)


def test_only_a_wait_that_lasts_15_seconds_is_reported_and_once(told: Told) -> None:
    assert told.at(0, FULL) + told.at(14, FULL) + told.at(14.9, None) == []
    assert told.at(100, FULL) + told.at(114.9, FULL) == []
    assert told.at(115, FULL) == [f"{FULL} (the run gives up after 10 min 00 s)"]
    assert told.at(116, FULL) + told.at(200, FULL) == []


def test_what_has_ended_is_reported_at_once_without_what_a_person_would_do(told: Told) -> None:
    assert told.at(0, DISK) == ["pod p-1: error: disk full; the cluster retries"]
    assert told.at(10, Problem(ProblemState.CONTINUES, DISK.reason.replace("p-1", "p-2"))) == []


def test_every_pod_that_is_lost_is_reported_once(server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    """For the same reason too, and a container that is started again in the same pod."""
    killed = [failed(f"p-{number}", 137, reason="OOMKilled") for number in (0, 1, 1)]
    killed[2]["status"]["containerStatuses"][0]["restartCount"] = 1
    for number, item in enumerate(killed):
        item["metadata"]["uid"] = item["metadata"]["name"]
        item["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:0{number}Z"
    server.script("demo-plan", *(active(item) for item in killed for _ in range(2)), complete(succeeded("p-2")))
    assert run(["plan"]) == {"plan": "done"}
    lines = [line for line in said.getvalue().splitlines() if "OOMKilled" in line]
    message = "a container exceeded its memory limit (OOMKilled, memory limit: 2Gi); the cluster retries"
    assert lines == [f"pod p-{number}: {message}" for number in (0, 1, 1)]


def test_the_time_that_a_pod_may_wait_begins_when_none_has_started(told: Told) -> None:
    told.at(0, DISK)
    assert told.at(700, FULL) == []
    assert len(told.at(1299, FULL)) == 1


@pytest.mark.parametrize("about", ["demo-plan", "p"])
def test_a_pod_that_never_comes_up_is_not_waited_for_for_ever(about: str, server: FakeApiServer, run: Run) -> None:
    creating = pod("p", "Pending", waiting={"reason": "ContainerCreating"})
    server.script("demo-plan", active(*([creating] if about == "p" else [])))
    server.warn(
        about, "exceeded quota: team" if about == "demo-plan" else "MountVolume.SetUp failed", "2099-01-01T00:00:00Z"
    )
    with pytest.raises(
        FailedError, match=r"(exceeded quota: team|MountVolume.SetUp failed) after .*Job demo-plan was deleted"
    ):
        run(["plan"])
    assert ("Job", "demo-plan") not in server.objects


def test_what_is_hopeless_ends_at_once_with_its_remedy_and_code_2(server: FakeApiServer, run: Run) -> None:
    server.warn("demo-train", 'pods "w-0" is forbidden: violates PodSecurity "restricted:latest"', "2099-01-01T00:00:00Z")
    server.script("demo-train", Moment({}))
    with pytest.raises(InputError, match=r"has no pods: .*violates PodSecurity.* \(MPIJob demo-train was deleted\)"):
        run(["train"], "resources.workers=2", "kubernetes.start_seconds=600")


# --- suspended by a queue

SUSPENDED = {"conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended", "message": "Job suspended"}]}


def waiting() -> Moment:
    return Moment(SUSPENDED, [], suspended=True)


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
    no_room = {"conditions": [{"type": "QuotaReserved", "status": "False", "message": "no room"}]}
    held = Moment(SUSPENDED, [], suspended=True, workload={"metadata": {}, "status": no_room})
    server.script("demo-plan", held, held, active(running("p")), complete(succeeded("p")))
    assert run(["plan"], "kubernetes.queue=gpus") == {"plan": "done"}
    assert ("waits for its queue gpus: no room" in said.getvalue()) == (hidden == "older Kueue")


def test_a_queue_that_can_never_admit_a_step_ends_the_run_with_the_remedy(server: FakeApiServer, run: Run) -> None:
    words = "couldn't assign flavors to pod set main: resource ephemeral-storage unavailable in ClusterQueue"
    status = {"conditions": [{"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": words}]}
    server.script("demo-plan", Moment(SUSPENDED, [], suspended=True, workload={"metadata": {}, "status": status}))
    with pytest.raises(InputError, match=f"{words} .*Job demo-plan was deleted.*; set kubernetes.request_scratch to false"):
        run(["plan"], "kubernetes.queue=gpus")
    assert ("Job", "demo-plan") not in server.objects


# --- pods that train together, as an Indexed Job or a TrainJob: lost, stopped, late

KINDS = {"Job": "job", "TrainJob": "trainjob"}
STOPPED = "error: /work/demo/train: stopped on request after update 174 of 800; run it again to resume"


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


AGAIN = Moment(ACTIVE, both("b", "2026-01-01T00:00:20Z"))
TRAINED = Moment(COMPLETE)
DELETED = [ended(0, 75, STOPPED), node(1, running("", "train"), deletionTimestamp="2026-01-01T00:00:05Z")]
EVICTED = [ended(0, 75, STOPPED), node(1, preempted(""))]
SAVED = [ended(0, 75, STOPPED), ended(1, 75, STOPPED)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """What trains on two nodes."""
    return str(request.param)


def options(kind: str) -> list[str]:
    return ["resources.workers=2", "training.engine=pytorch", f"kubernetes.training={KINDS[kind]}"]


def test_two_pods_train_and_the_first_one_reports(kind: str, server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    server.logs = {"demo-train-0-a": ["2026-01-01T00:00:01Z update 1"], "demo-train-1-a": ["2026-01-01T00:00:01Z silence"]}
    server.script("demo-train", Moment(ACTIVE, both()), Moment(ACTIVE, both()), Moment(COMPLETE, both()))
    assert run(["train"], *options(kind)) == {"train": "done"}
    assert server.created(kind) == ["demo-train"]
    assert "update 1" in said.getvalue()
    assert "silence" not in said.getvalue()
    assert (("Service", "demo-train") in server.objects) == (kind == "Job")
    assert (("TrainingRuntime", "demo-train") in server.objects) == (kind == "TrainJob")
    assert run(["train"], *options(kind)) == {"train": "skipped"}


@pytest.mark.parametrize("taken", [DELETED, EVICTED, SAVED], ids=["deleted", "preempted", "saved"])
def test_pods_that_are_taken_away_save_and_their_successors_go_on(
    taken: list[Json], kind: str, server: FakeApiServer, said: io.StringIO, run: Run
) -> None:
    server.script("demo-train", Moment(ACTIVE, both()), Moment(ACTIVE, taken), AGAIN, TRAINED)
    assert run(["train"], *options(kind)) == {"train": "done"}
    assert server.created(kind) == ["demo-train"], "the Job itself makes them anew"
    assert "stopped on request after update 174 of 800; the cluster retries" in said.getvalue()


# --- what is shown of the logs of pods, and how far a step is, in one line a minute


OF_EIGHT = {"metadata": {"name": "demo-write"}, "spec": {"completions": 8}}
ALONE = {"metadata": {"name": "demo-train"}, "spec": {}}


def pods(*names: str) -> list[dict[str, Any]]:
    return [running(name, "write") for name in names]


def test_logs_are_streamed_once_also_after_a_drop(server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    server.logs["plan-x"] = [f"2026-01-01T00:00:0{number}Z line {number}" for number in range(6)]
    server.log_drops["plan-x"] = 3
    server.script("demo-plan", active(), *[active(running("plan-x"))] * 3, *[complete(succeeded("plan-x"))] * 2)
    # Let the first log end before the Job is looked at again, as in life.
    server.watches.extend(["silence"] * 3)
    run(["plan"])
    lines = [line for line in said.getvalue().splitlines() if line.startswith("line")]
    assert lines == [f"line {number}" for number in range(6)]


@pytest.mark.parametrize("refusal", [403, 502])
def test_logs_that_cannot_be_read_are_named_once(refusal: int, server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    """A node that is lost answers 502 for the server, which is well: it is not said to answer again."""
    server.faults = [Fault("GET", "/log", refusal) for _ in range(50)]
    at_work = [running("plan-a"), running("plan-b")]
    server.script("demo-plan", *[active(*at_work)] * 4, complete(succeeded("plan-a")))
    assert run(["plan"]) == {"plan": "done"}
    assert said.getvalue().count("cannot read the log of plan-") == 1
    assert "answers again" not in said.getvalue()


def test_a_launcher_is_followed_without_the_tags_of_mpirun(server: FakeApiServer, said: io.StringIO, run: Run) -> None:
    launcher, worker = running("launcher", "train"), running("worker-0", "worker")
    launcher["metadata"]["labels"] = {"training.kubeflow.org/job-role": "launcher"}
    worker["metadata"]["labels"] = {"training.kubeflow.org/job-role": "worker"}
    server.logs = {
        "launcher": ["2026-01-01T00:00:01Z [1,0]<stderr>:update 1", "2026-01-01T00:00:02Z mpirun: all is well"],
        "worker-0": ["2026-01-01T00:00:01Z sshd"],
    }
    done = Moment({"conditions": [{"type": "Succeeded", "status": "True"}]}, [launcher])
    server.script("demo-train", Moment({}, [launcher, worker]), Moment({}, [launcher, worker]), done)
    assert run(["train"], "resources.workers=2") == {"train": "done"}
    assert server.created("MPIJob") == ["demo-train"]
    assert "\nupdate 1\nmpirun: all is well\n" in said.getvalue()
    assert "sshd" not in said.getvalue()


def test_how_many_parts_are_done_is_shown_once_a_minute(said: io.StringIO) -> None:
    """Whatever the first pod writes meanwhile."""
    clock = SimpleNamespace(now=0.0)
    progress = _StepProgress(OF_EIGHT, Reporter(said), lambda: clock.now)
    for clock.now in range(0, 125, 5):
        progress.show_log_line("write: 40 %")
        progress.show_progress({"status": {"succeeded": 3}}, [*pods("a", "b", "c"), succeeded("d", "write")])
    lines = [line for line in said.getvalue().splitlines() if "40 %" not in line]
    assert lines == [f"demo-write: 3 of 8 parts are done, 3 are running, running for {each} min 00 s" for each in (1, 2)]


def test_a_pod_that_is_alone_is_shown_line_by_line_or_for_how_long_it_has_been_silent(said: io.StringIO) -> None:
    clock = SimpleNamespace(now=0.0)
    progress = _StepProgress(ALONE, Reporter(said), lambda: clock.now)
    for clock.now in (30, 61, 90, 121):
        progress.show_progress({"status": {}}, pods("a"))
        if clock.now == 30:
            progress.show_log_line("train: update 50/800 (6%)")
    assert said.getvalue().splitlines() == ["train: update 50/800 (6%)", "demo-train: running for 1 min 30 s"]


def test_what_is_waited_for_is_said_at_once_when_it_changes_and_then_every_minute(said: io.StringIO) -> None:
    clock = SimpleNamespace(now=0.0)
    progress = _StepProgress(ALONE, Reporter(said), lambda: clock.now)
    for clock.now in range(0, 151, 5):
        progress.show_waiting_reason("no room" if clock.now < 30 else "others first")
    assert said.getvalue().splitlines() == [
        "no room",
        "others first",
        "others first (1 min 30 s so far)",
        "others first (2 min 30 s so far)",
    ]
