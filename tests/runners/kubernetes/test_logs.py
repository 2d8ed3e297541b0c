"""What a run shows of the logs of pods, and how far a step is, in one line a minute."""

from __future__ import annotations

import io
from typing import Any

import pytest

from gaudi_bert.common.progress import Reporter
from gaudi_bert.runners.kubernetes.logs import StepProgress
from tests.builders.fake_api_server import FakeApiServer, Fault, Run, State
from tests.builders.recorded_answers import active, complete, running, succeeded

SHARED = {"metadata": {"name": "demo-write"}, "spec": {"completions": 8}}
ALONE = {"metadata": {"name": "demo-train"}, "spec": {}}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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
    done = State({"conditions": [{"type": "Succeeded", "status": "True"}]}, [launcher])
    server.script("demo-train", State({}, [launcher, worker]), State({}, [launcher, worker]), done)
    assert run(["train"], "resources.workers=2") == {"train": "done"}
    assert server.created("MPIJob") == ["demo-train"]
    assert "[launcher] update 1\n[launcher] mpirun: all is well\n" in said.getvalue()
    assert "sshd" not in said.getvalue()


def test_the_last_line_of_each_pod_that_shares_a_stage_is_shown_once_a_minute(said: io.StringIO) -> None:
    clock = Clock()
    progress = StepProgress(SHARED, Reporter(said), clock)
    for line in ("--- write", "write: 40 %, 100.0 MB/s, 30 s left"):
        progress.take("a", "[a] ", line)
    progress.take("b", "[b] ", "group 3 is there already")
    for clock.now in range(0, 125, 5):
        progress.show({"status": {"succeeded": 3}}, [*pods("a", "b", "c"), succeeded("d", "write")])
    expected = "demo-write: 3 of 8 parts done, 3 at work; a: write: 40 %, 100.0 MB/s, 30 s left; b: group 3 is there already"
    assert said.getvalue().splitlines() == [expected, expected]


def test_a_pod_that_is_alone_is_shown_line_by_line_or_for_how_long_it_has_been_silent(said: io.StringIO) -> None:
    clock = Clock()
    progress = StepProgress(ALONE, Reporter(said), clock)
    for clock.now in (30, 61, 90, 121):
        progress.show({"status": {}}, pods("a"))
        if clock.now == 30:
            progress.take("a", "", "train: update 50/800 (6%)")
    assert said.getvalue().splitlines() == ["train: update 50/800 (6%)", "demo-train: running for 1 min 30 s"]


def test_on_a_terminal_the_passing_line_is_always_there(said: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # a passing line is cut off where the terminal ends
    reporter = Reporter(said)
    reporter.live = True
    progress = StepProgress(SHARED, reporter, Clock())
    for _ in range(3):
        progress.show({}, pods("a"))
    assert said.getvalue().count("demo-write: 0 of 8 parts done, 1 at work; running for 0.0 s") == 3


def test_what_is_waited_for_is_said_at_once_when_it_changes_and_then_every_minute(said: io.StringIO) -> None:
    clock = Clock()
    progress = StepProgress(ALONE, Reporter(said), clock)
    for clock.now in range(0, 151, 5):
        progress.show_waiting("no room" if clock.now < 30 else "others first")
    assert said.getvalue().splitlines() == [
        "no room",
        "others first",
        "others first (1 min 30 s so far)",
        "others first (2 min 30 s so far)",
    ]


def test_pods_that_share_a_step_show_no_log(
    server: FakeApiServer, said: io.StringIO, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr("gaudi_bert.runners.kubernetes.logs._EVERY_SECONDS", 0.0)
    moment = "2026-01-01T00:00:00Z"
    for name, share in (("write-0", 20), ("write-1", 40)):
        server.logs[name] = [f"{moment} --- write", f"{moment} write: {share} %, 10.0 MB/s, 9.0 s left"]
    at_work: list[State] = [active(*pods("write-0", "write-1"))] * 4
    server.script("demo-write", *at_work, complete(succeeded("write-0"), succeeded("write-1")))
    server.watches.extend(["silence"] * 3)
    run(["write"], "resources.data_workers=2")
    assert "write-0: write: 20 %, 10.0 MB/s, 9.0 s left; write-1: write: 40 %, 10.0 MB/s, 9.0 s left" in said.getvalue()
    assert said.getvalue().count("--- write\n") == 0, "that of its pods"
