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
    assert "\nupdate 1\nmpirun: all is well\n" in said.getvalue()
    assert "sshd" not in said.getvalue()


def test_how_many_parts_are_done_is_shown_once_a_minute(said: io.StringIO) -> None:
    """Whatever the first pod writes meanwhile."""
    clock = Clock()
    progress = StepProgress(SHARED, Reporter(said), clock)
    for clock.now in range(0, 125, 5):
        progress.take("write: 40 %")
        progress.show({"status": {"succeeded": 3}}, [*pods("a", "b", "c"), succeeded("d", "write")])
    lines = [line for line in said.getvalue().splitlines() if "40 %" not in line]
    assert lines == [f"demo-write: 3 of 8 parts done, 3 at work, running for {each} min 00 s" for each in (1, 2)]


def test_a_pod_that_is_alone_is_shown_line_by_line_or_for_how_long_it_has_been_silent(said: io.StringIO) -> None:
    clock = Clock()
    progress = StepProgress(ALONE, Reporter(said), clock)
    for clock.now in (30, 61, 90, 121):
        progress.show({"status": {}}, pods("a"))
        if clock.now == 30:
            progress.take("train: update 50/800 (6%)")
    assert said.getvalue().splitlines() == ["train: update 50/800 (6%)", "demo-train: running for 1 min 30 s"]


def test_on_a_terminal_the_passing_line_is_always_there(said: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # a passing line is cut off where the terminal ends
    reporter = Reporter(said)
    reporter.live = True
    progress = StepProgress(SHARED, reporter, Clock())
    for _ in range(3):
        progress.show({}, pods("a"))
    assert said.getvalue().count("demo-write: 0 of 8 parts done, 1 at work, running for 0.0 s") == 3


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
