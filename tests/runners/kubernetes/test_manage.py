"""`k8s status | logs | delete`, the rights that all of it needs, and how far a step is by the logs of its pods."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes import manage
from gaudi_bert.runners.kubernetes.client import Cluster, needed_rights
from gaudi_bert.runners.kubernetes.logs import StepProgress
from gaudi_bert.runners.kubernetes.run import run_on_kubernetes
from tests.builders.fake_api_server import FakeApiServer, Run, State
from tests.builders.recorded_answers import ACTIVE, active, complete, failed, running, succeeded, unschedulable
from tests.builders.s3_server import S3Server, contents, quick

SETTINGS = load_pipeline(None)
TWO = ["name=two", "resources.workers=2", "kubernetes.access_mode=ReadWriteMany"]


def test_status_tells_each_step(server: FakeApiServer, cluster: Cluster) -> None:
    for name in ("demo-prepare", "demo-plan", "demo-write"):
        server.put("Job", {"metadata": {"name": name}, "status": ACTIVE})
    server.script("demo-prepare", complete())
    server.script("demo-plan", active(running("p-1"), failed("p-0", 1, "disk full")))
    server.script("demo-write", active(unschedulable("w", "1 Insufficient cpu.")))
    found = manage.status(SETTINGS, cluster)
    assert found["prepare"].as_json() == {"state": "complete", "pods": {}, "problem": None}
    assert found["plan"].state == "running"
    assert found["plan"].pods == {"Failed": 1, "Running": 1}
    assert "exit code 1: disk full" in str(found["plan"].problem)
    assert found["write"].state == "waiting"
    assert found["train"].as_json() == {"state": "not submitted"}


def test_an_mpijob_of_a_pipeline_that_has_one_worker_by_now_is_seen(server: FakeApiServer, cluster: Cluster) -> None:
    server.put("MPIJob", {"metadata": {"name": "demo-train"}, "spec": {}, "status": {}})
    server.script("demo-train", State({}, [running("launcher", "train")]))
    assert manage.status(SETTINGS, cluster)["train"].state == "running"
    server.kinds_unknown = {"MPIJob"}
    assert manage.status(SETTINGS, cluster)["train"].state == "not submitted"


def test_logs_are_shown_with_the_name_of_their_pod(server: FakeApiServer, cluster: Cluster) -> None:
    server.put("Job", {"metadata": {"name": "demo-plan"}, "status": ACTIVE})
    server.script("demo-plan", active(running("p-1")))
    server.advance("Job", "demo-plan")
    server.logs["p-1"] = ["2026-01-01T00:00:00Z packing", "2026-01-01T00:00:01Z done"]
    lines: list[str] = []
    assert manage.show_logs(SETTINGS, "plan", cluster, lines.append) == 1
    assert lines == ["[p-1] packing", "[p-1] done"]


def test_logs_of_nothing_are_refused(server: FakeApiServer, cluster: Cluster) -> None:
    with pytest.raises(InputError, match="no pod of plan has started in namespace gaudi-bert"):
        manage.show_logs(SETTINGS, "plan", cluster, print)
    with pytest.raises(InputError, match="--step pack: no such step; steps are prepare"):
        manage.show_logs(SETTINGS, "pack", cluster, print)


@pytest.mark.parametrize("data", [False, True])
def test_delete_keeps_the_work_folder(data: bool, server: FakeApiServer, cluster: Cluster, reporter: Reporter) -> None:
    run_on_kubernetes(SETTINGS, ["plan", "verify"], reporter, cluster)
    server.put("Job", {"metadata": {"name": "other-plan", "labels": {"app.kubernetes.io/instance": "other"}}})
    server.put("ConfigMap", {"metadata": {"name": "demo-pipeline-1a2b", "labels": {"app.kubernetes.io/instance": "demo"}}})
    removed = manage.delete(SETTINGS, cluster, data=data)
    assert {"Job demo-plan", "Job demo-verify", "ConfigMap demo-pipeline", "ConfigMap demo-pipeline-1a2b"} <= set(removed)
    left = {key for key in server.objects if key[0] != "Pod"}
    assert left == {("Job", "other-plan")} | (set() if data else {("PersistentVolumeClaim", "demo-work")})
    assert manage.delete(SETTINGS, cluster, data=data) == []


def test_the_role_allows_all_that_is_used_and_no_more(
    repository: Path, server: FakeApiServer, cluster: Cluster, reporter: Reporter
) -> None:
    server.logs["p"] = ["2026-01-01T00:00:00Z x"]
    server.script("demo-plan", active(running("p")), active(running("p")), complete(running("p")))
    trained = State({"conditions": [{"type": "Succeeded", "status": "True"}]})
    server.script("two-train", State({}, suspended=True), State({}), trained)
    for overrides in ([], ["packing.depth=4"], [*TWO, "kubernetes.queue=gpus"]):
        run_on_kubernetes(load_pipeline(None, overrides), ["plan", "train"], reporter, cluster)
    run_on_kubernetes(load_pipeline(None, overrides), ["train"], reporter, cluster)
    cluster.events("demo-work")
    manage.status(SETTINGS, cluster)
    manage.delete(load_pipeline(None, TWO), cluster, data=True)
    _, role, _ = yaml.safe_load_all((repository / "k8s" / "in-cluster" / "account.yaml").read_text())
    allowed = {(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert server.verbs == allowed
    assert {(right.verb, right.resource) for right in needed_rights(mpijob=True, queue=True, network_policy=True)} == allowed


@pytest.mark.parametrize("data", [False, True])
def test_a_bucket_is_touched_only_with_data(
    data: bool, server: FakeApiServer, cluster: Cluster, reporter: Reporter, s3: S3Server
) -> None:
    settings = load_pipeline(None, ["kubernetes.store=s3://bucket/cluster", f"store.endpoint_url={s3.endpoint}"])
    objects = Objects(quick(s3.endpoint))
    before = {"demo/plan.json": b"plan", "demo/packed/train/metadata.json": b"metadata", "demo-2/plan.json": b"another's"}
    for name, content in before.items():
        objects.write(f"s3://bucket/cluster/{name}", content)
    run_on_kubernetes(settings, ["plan"], reporter, cluster)
    assert server.created("PersistentVolumeClaim") == []
    removed = manage.delete(settings, cluster, data=data)
    assert "Job demo-plan" in removed
    assert ("2 objects below s3://bucket/cluster/demo" in removed) is data
    assert contents("s3://bucket/cluster", objects) == ({"demo-2/plan.json": b"another's"} if data else before)


# --- how far a step is, in one line a minute


SHARED = {"metadata": {"name": "demo-write"}, "spec": {"completions": 8}}
ALONE = {"metadata": {"name": "demo-train"}, "spec": {}}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


DASHES = "-" * 76
ADVICE = [DASHES, "WARNING: Open MPI accepted a TCP connection from what appears to be a process of another job.", DASHES]
FOOTER = [DASHES, "Primary job  terminated normally, but 1 process returned", "a non-zero exit code.", DASHES]
CAUSE = [DASHES, "ORTE was unable to reliably start one or more daemons.", DASHES]


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["a", *ADVICE, "[1,0]<stderr>:b", *FOOTER], ["a", "[1,0]<stderr>:b"]),
        (["a", *CAUSE], ["a", *CAUSE]),
        (["[1,0]<stderr>:b", *CAUSE, *FOOTER], ["[1,0]<stderr>:b", *CAUSE]),
    ],
    ids=["advice", "cause", "cause-and-footer"],
)
def test_advice_of_mpirun_is_shown_as_a_cause(
    lines: list[str], shown: list[str], server: FakeApiServer, said: io.StringIO, run: Run
) -> None:
    server.logs["plan-x"] = [f"2026-01-01T00:00:{number:02d}Z {line}" for number, line in enumerate(lines)]
    server.script("demo-plan", active(running("plan-x")), complete(succeeded("plan-x")))
    run(["plan"])
    of_pod = [line for line in said.getvalue().splitlines() if line in lines]
    assert of_pod == shown


def pods(*names: str) -> list[dict[str, Any]]:
    return [running(name, "write") for name in names]


def test_the_last_line_of_each_pod_that_shares_a_stage_is_shown_once_a_minute(said: io.StringIO) -> None:
    clock = Clock()
    progress = StepProgress(SHARED, Reporter(said), clock)
    progress.take("a", "[a] ", ["--- write", "write: 40 %, 100.0 MB/s, 30 s left"])
    progress.take("b", "[b] ", ["group 3 is there already"])
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
            progress.take("a", "", ["train: update 50/800 (6%)"])
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
    monkeypatch.setattr("gaudi_bert.runners.kubernetes.logs.EVERY_SECONDS", 0.0)
    moment = "2026-01-01T00:00:00Z"
    for name, share in (("write-0", 20), ("write-1", 40)):
        server.logs[name] = [f"{moment} --- write", f"{moment} write: {share} %, 10.0 MB/s, 9.0 s left"]
    at_work: list[State] = [active(*pods("write-0", "write-1"))] * 4
    server.script("demo-write", *at_work, complete(succeeded("write-0"), succeeded("write-1")))
    server.watches.extend(["silence"] * 3)
    run(["write"], "resources.data_workers=2")
    assert "write-0: write: 20 %, 10.0 MB/s, 9.0 s left; write-1: write: 40 %, 10.0 MB/s, 9.0 s left" in said.getvalue()
    assert said.getvalue().count("--- write\n") == 0, "that of its pods"
