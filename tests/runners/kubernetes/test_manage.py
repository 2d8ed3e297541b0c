"""`k8s status | logs | open | delete`, the rights that all of it needs, and how far a step is by the logs of its pods."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.doctor.cluster import needed_rights
from gaudi_bert.runners.kubernetes import manage
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.follow import _StepProgress
from gaudi_bert.runners.kubernetes.manage import _received_files, _sent_lines, open_results
from gaudi_bert.runners.kubernetes.run import run_on_kubernetes
from tests.builders.command_line import run_command
from tests.builders.fake_api_server import FakeApiServer, Run, State
from tests.builders.plans import write_workdir
from tests.builders.recorded_answers import ACTIVE, active, complete, failed, gave_up, running, succeeded, unschedulable
from tests.builders.s3_server import S3Server, contents, quick
from tests.k8s.manifest_checks import check_pod

SETTINGS = load_pipeline(None)
TWO = ["name=two", "resources.workers=2", "kubernetes.access_mode=ReadWriteMany"]


def test_status_tells_each_step(server: FakeApiServer, cluster: Cluster) -> None:
    for name in ("demo-prepare", "demo-plan", "demo-write"):
        server.put("Job", {"metadata": {"name": name}, "status": ACTIVE})
    server.script("demo-prepare", complete())
    server.script("demo-plan", active(running("p-1"), running("p-2"), failed("p-0", 1, "disk full")))
    server.script("demo-write", active(unschedulable("w", "1 Insufficient cpu.")))
    found = manage.status(SETTINGS, cluster)
    assert found["prepare"].as_json() == {"state": "complete", "pods": {}, "problem": None}
    assert found["plan"].state == "running"
    assert found["plan"].pods == {"Failed": 1, "Running": 2}
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
    for name, kind in (("three", "job"), ("four", "trainjob")):
        server.script(f"{name}-train", State({}), complete())
        nodes = [*TWO, f"name={name}", "training.engine=pytorch", f"kubernetes.training={kind}"]
        run_on_kubernetes(load_pipeline(None, nodes), ["train"], reporter, cluster)
        run_on_kubernetes(load_pipeline(None, [*nodes, "training.seed=3"]), ["train"], reporter, cluster)
        manage.delete(load_pipeline(None, nodes), cluster, data=True)
    cluster.events("demo-work")
    manage.status(SETTINGS, cluster)
    manage.delete(load_pipeline(None, TWO), cluster, data=True)
    _, role, _ = yaml.safe_load_all((repository / "k8s" / "in-cluster" / "account.yaml").read_text())
    allowed = {(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert server.verbs == allowed
    kinds = ("job", "nodes", "mpijob", "trainjob")
    rights = [right for kind in kinds for right in needed_rights(training=kind, queue=True, network_policy=True)]
    assert {(right.verb, right.resource) for right in rights} == allowed


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
    progress = _StepProgress(SHARED, Reporter(said), clock)
    progress.take("a", "[a] ", ["--- write", "write: 40 %, 100.0 MB/s, 30 s left"])
    progress.take("b", "[b] ", ["group 3 is there already"])
    for clock.now in range(0, 125, 5):
        progress.show({"status": {"succeeded": 3}}, [*pods("a", "b", "c"), succeeded("d", "write")])
    expected = "demo-write: 3 of 8 parts done, 3 at work; a: write: 40 %, 100.0 MB/s, 30 s left; b: group 3 is there already"
    assert said.getvalue().splitlines() == [expected, expected]


def test_a_pod_that_is_alone_is_shown_line_by_line_or_for_how_long_it_has_been_silent(said: io.StringIO) -> None:
    clock = Clock()
    progress = _StepProgress(ALONE, Reporter(said), clock)
    for clock.now in (30, 61, 90, 121):
        progress.show({"status": {}}, pods("a"))
        if clock.now == 30:
            progress.take("a", "", ["train: update 50/800 (6%)"])
    assert said.getvalue().splitlines() == ["train: update 50/800 (6%)", "demo-train: running for 1 min 30 s"]


def test_on_a_terminal_the_passing_line_is_always_there(said: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # a passing line is cut off where the terminal ends
    reporter = Reporter(said)
    reporter.live = True
    progress = _StepProgress(SHARED, reporter, Clock())
    for _ in range(3):
        progress.show({}, pods("a"))
    assert said.getvalue().count("demo-write: 0 of 8 parts done, 1 at work; running for 0.0 s") == 3


def test_what_is_waited_for_is_said_at_once_when_it_changes_and_then_every_minute(said: io.StringIO) -> None:
    clock = Clock()
    progress = _StepProgress(ALONE, Reporter(said), clock)
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
    monkeypatch.setattr("gaudi_bert.runners.kubernetes.follow._EVERY_SECONDS", 0.0)
    moment = "2026-01-01T00:00:00Z"
    for name, share in (("write-0", 20), ("write-1", 40)):
        server.logs[name] = [f"{moment} --- write", f"{moment} write: {share} %, 10.0 MB/s, 9.0 s left"]
    at_work: list[State] = [active(*pods("write-0", "write-1"))] * 4
    server.script("demo-write", *at_work, complete(succeeded("write-0"), succeeded("write-1")))
    server.watches.extend(["silence"] * 3)
    run(["write"], "resources.data_workers=2")
    assert "write-0: write: 20 %, 10.0 MB/s, 9.0 s left; write-1: write: 40 %, 10.0 MB/s, 9.0 s left" in said.getvalue()
    assert said.getvalue().count("--- write\n") == 0, "that of its pods"


# --- `k8s open`: a small Job sends the page of a run, which is then here


DEMO = load_pipeline(None, ["kubernetes.start_seconds=1"])
Open = Callable[[], Any]


@pytest.fixture
def work_folder(server: FakeApiServer, tmp_path: Path) -> Path:
    """A work folder whose pod sends it."""
    folder = tmp_path / "work" / "demo"
    (folder / "train" / "tensorboard").mkdir(parents=True)
    (folder / "report.html").write_text("<html>a page</html>")
    (folder / "train" / "tensorboard" / "events").write_bytes(b"curves")
    server.put("PersistentVolumeClaim", {"metadata": {"name": "demo-work"}, "spec": {}, "status": {"phase": "Bound"}})
    server.script("demo-open", active(running("open-x", "report")), complete(succeeded("open-x", "report")))
    server.logs["open-x"] = [f"2026-01-01T00:00:00Z {line}" for line in _sent_lines(folder, Reporter(quiet=True))]
    return folder


@pytest.fixture
def open_demo(cluster: Cluster, work_folder: Path, tmp_path: Path, reporter: Reporter) -> Open:
    return lambda: open_results(DEMO, cluster, tmp_path / "here", reporter)


def test_the_page_and_the_curves_come_here_and_the_job_goes(
    server: FakeApiServer, open_demo: Open, said: io.StringIO
) -> None:
    found = open_demo()
    assert found.report.read_text() == "<html>a page</html>"
    assert found.tensorboard is not None
    assert (found.tensorboard / "events").read_bytes() == b"curves"
    assert server.created("Job") == ["demo-open"]
    assert "BEGIN RESULTS" not in said.getvalue()
    assert ("Job", "demo-open") not in server.objects


def test_the_job_is_a_short_one_that_no_run_takes_for_its_own(
    server: FakeApiServer, cluster: Cluster, open_demo: Open, reporter: Reporter
) -> None:
    made = []
    put = server.put
    server.put = lambda kind, item: made.append(item) or put(kind, item)  # type: ignore[method-assign, func-returns-value]
    open_demo()
    (job,) = (item for item in made if item["metadata"]["name"] == "demo-open")
    assert "app.kubernetes.io/instance" not in job["metadata"]["labels"]
    assert (job["spec"]["backoffLimit"], job["spec"]["ttlSecondsAfterFinished"]) == (0, 600)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python3", "-m", "gaudi_bert.runners.kubernetes.manage", "/work/demo"]
    # `kubectl apply -k` names the ConfigMap by its content, so the Job must do without one.
    names = {"PersistentVolumeClaim": {"demo-work"}, "ServiceAccount": {"demo-stages"}}
    assert list(check_pod("open", job["spec"]["template"]["spec"], names)) == []
    server.put("Job", {**job, "status": {"active": 1}})
    assert run_on_kubernetes(DEMO, ["plan"], reporter, cluster) == {"plan": "done"}


def test_one_that_was_left_over_is_replaced(server: FakeApiServer, open_demo: Open) -> None:
    server.put("Job", {"metadata": {"name": "demo-open"}, "status": {"active": 1}})
    assert open_demo().report.exists()


def test_what_cannot_be_brought_is_said_and_nothing_is_left(server: FakeApiServer, open_demo: Open, tmp_path: Path) -> None:
    server.script("demo-open", gave_up(failed("open-x", 2, "error: /work/demo: holds nothing to report on")))
    with pytest.raises(FailedError, match="exit code 2: error: /work/demo: holds nothing to report on"):
        open_demo()
    server.script("demo-open", complete(succeeded("open-x", "report")))
    server.logs["open-x"] = server.logs["open-x"][:1]
    with pytest.raises(FailedError, match="are incomplete"):
        open_demo()
    server.script("demo-open", complete())
    with pytest.raises(FailedError, match="removed before its log was read"):
        open_demo()
    del server.objects["PersistentVolumeClaim", "demo-work"]
    with pytest.raises(InputError, match="no claim demo-work in namespace gaudi-bert: nothing has run"):
        open_demo()
    assert ("Job", "demo-open") not in server.objects
    assert not (tmp_path / "here").exists()


def test_a_work_folder_in_a_store_is_opened_from_there(cluster: Cluster, tmp_path: Path, reporter: Reporter) -> None:
    stored = load_pipeline(None, ["kubernetes.store=s3://bucket/prefix"])
    with pytest.raises(InputError, match=r"s3://bucket/prefix/demo/report\.html: the work folder is in a store"):
        open_results(stored, cluster, tmp_path / "here", reporter)


def test_the_command_says_where_the_page_is(work_folder: Path, tmp_path: Path, repository: Path) -> None:
    done = run_command("k8s", "open", repository / "pipelines" / "demo.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "page: opened/demo/report.html",
        "curves: tensorboard --logdir opened/demo/train/tensorboard",
    ]


# What a pod's log carries: the same files at the other end, and nothing that was cut short.

FILES = {
    "report.html": b"<html>a page</html>" * 1000,
    "train/metrics.jsonl": b'{"update": 1}\n',
    "train/tensorboard/events.1": os.urandom(20_011),
    "train/tensorboard/old/events.2": b"",
    "finetune/metrics.jsonl": b'{"update": 2}\n',
    "finetune/tensorboard/events.3": b"curves",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    others = {"packed/train/packed-00000-00000.tfrecord": b"data", "train/checkpoints/1.safetensors": b"weights"}
    for name, data in {**FILES, **others}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def received(lines: list[str]) -> dict[str, bytes]:
    return {path.relative_to("/out").as_posix(): data for path, data in _received_files(lines, Path("/out")).items()}


def lines_of(members: Sequence[tuple[tarfile.TarInfo, bytes]]) -> list[str]:
    """The lines of a pod that sends an archive of its own making."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    data = content.getvalue()
    first = f"-----BEGIN RESULTS {len(data)} {hashlib.sha256(data).hexdigest()}-----"
    return [first, base64.b64encode(data).decode(), "-----END RESULTS-----"]


@pytest.mark.parametrize(
    "name", ["../report.html", "train/../../report.html", "..", "train/../../out2/report.html", ".", "/"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(FailedError, match="cannot be unpacked"):
        received(lines_of([(tarfile.TarInfo("report.html"), b"page"), (tarfile.TarInfo(name), b"evil")]))


def test_an_absolute_name_stays_below_the_folder() -> None:
    assert received(lines_of([(tarfile.TarInfo("//etc/passwd"), b"evil")])) == {"etc/passwd": b"evil"}


def test_only_regular_files_are_received() -> None:
    link, device, folder = (tarfile.TarInfo(name) for name in ("link", "device", "folder"))
    link.type, link.linkname, device.type, folder.type = tarfile.SYMTYPE, "/etc/passwd", tarfile.CHRTYPE, tarfile.DIRTYPE
    members = [(member, b"") for member in (link, device, folder)]
    assert received(lines_of([*members, (tarfile.TarInfo("report.html"), b"page")])) == {"report.html": b"page"}


def test_what_is_sent_is_received_among_other_lines(folder: Path) -> None:
    lines = list(_sent_lines(folder, Reporter(quiet=True)))
    assert received(["work/demo/report.html: written", *lines, "the end"]) == FILES
    assert max(map(len, lines)) < 16_384, "longer lines are split by the node"


def test_curves_that_are_too_large_are_left_out_and_that_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manage, "_MOST_BYTES", 10_000)
    said = io.StringIO()
    lines = list(_sent_lines(folder, Reporter(said)))
    assert received(lines).keys() == {"report.html", "train/metrics.jsonl", "finetune/metrics.jsonl"}
    assert "TensorBoard's files are too large for a log and not included" in said.getvalue()
    monkeypatch.setattr(manage, "_MOST_BYTES", 10)
    with pytest.raises(FailedError, match=r"the page has .* too much for a log"):
        list(_sent_lines(folder, Reporter(quiet=True)))


@pytest.mark.parametrize("what", ["first", "line", "last", "changed", "no base64"])
def test_a_log_that_is_not_whole_is_refused(what: str, folder: Path) -> None:
    lines = list(_sent_lines(folder, Reporter(quiet=True)))
    broken = {
        "first": lines[1:],
        "line": [lines[0], *lines[2:]],
        "last": lines[:-2],
        "changed": [lines[0], lines[1][:-4] + "AAAA", *lines[2:]],
        "no base64": [lines[0], "?" + lines[1][1:], *lines[2:]],
    }
    with pytest.raises(FailedError, match="holds no results" if what == "first" else "are incomplete"):
        received(broken[what])


def test_the_pods_command_writes_the_page_and_sends_it(tmp_path: Path, repository: Path) -> None:
    for module in ("jinja2", "matplotlib"):
        pytest.importorskip(module, reason=f"THE PAGE NEEDS {module}: install gaudi-bert")

    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gaudi_bert.runners.kubernetes.manage", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=repository)

    folder = write_workdir(tmp_path / "demo")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert received(done.stdout.splitlines())["report.html"] == (folder / "report.html").read_bytes()
    missing = run(tmp_path / "absent")
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: ")
    assert len(missing.stderr.splitlines()) == 1
