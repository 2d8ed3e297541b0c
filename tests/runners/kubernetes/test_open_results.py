"""`k8s open`: a small Job sends the page of a run, which is then here; what its log carries."""

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

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes import open_results as module
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.open_results import (
    _decode_results_from_log,
    _iterate_results_as_base64_lines,
    copy_results,
)
from gaudi_bert.runners.kubernetes.run import run_on_kubernetes
from tests.builders.fake_api_server import FakeApiServer
from tests.builders.plans import write_workdir
from tests.builders.recorded_answers import active, complete, failed, gave_up, running, succeeded
from tests.k8s.manifest_checks import check_pod

DEMO = load_pipeline(None, ["kubernetes.start_seconds=1"])
Open = Callable[[], Any]


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
    """A work folder."""
    others = {"packed/train/packed-00000-00000.tfrecord": b"data", "train/checkpoints/1.safetensors": b"weights"}
    for name, data in {**FILES, **others}.items():
        path = tmp_path / "work" / "demo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "work" / "demo"


@pytest.fixture
def open_demo(server: FakeApiServer, cluster: Cluster, folder: Path, tmp_path: Path, reporter: Reporter) -> Open:
    """Opens the work folder, which a pod sends."""
    server.put_own("PersistentVolumeClaim", "demo-work", spec={}, status={"phase": "Bound"})
    server.script("demo-open", active(running("open-x", "report")), complete(succeeded("open-x", "report")))
    server.logs["open-x"] = [
        f"2026-01-01T00:00:00Z {line}" for line in _iterate_results_as_base64_lines(folder, Reporter(quiet=True))
    ]
    return lambda: copy_results(DEMO, cluster, tmp_path / "here", reporter)


def test_the_page_and_the_curves_come_here_and_the_job_goes(
    server: FakeApiServer, open_demo: Open, said: io.StringIO
) -> None:
    found = open_demo()
    assert found.report.read_bytes() == FILES["report.html"]
    assert (found.tensorboard / "events.1").read_bytes() == FILES["train/tensorboard/events.1"]
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
    assert (job["spec"]["backoffLimit"], job["spec"]["ttlSecondsAfterFinished"]) == (0, 600)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python3", "-m", "gaudi_bert.runners.kubernetes.open_results", "/work/demo"]
    # `kubectl apply -k` names the ConfigMap by its content, so the Job must do without one.
    names = {"PersistentVolumeClaim": {"demo-work"}, "ServiceAccount": {"demo-stages"}}
    assert list(check_pod("open", job["spec"]["template"]["spec"], names)) == []
    server.put("Job", {**job, "status": {"active": 1}})
    assert run_on_kubernetes(DEMO, ["plan"], reporter, cluster) == {"plan": "done"}


def test_one_that_was_left_over_is_replaced(server: FakeApiServer, open_demo: Open) -> None:
    server.put_own("Job", "demo-open", status={"active": 1})
    assert open_demo().report.exists()
    server.put("Job", {"metadata": {"name": "demo-open"}})
    with pytest.raises(InputError, match="Job demo-open in namespace gaudi-bert does not belong to this pipeline"):
        open_demo()


def test_what_cannot_be_brought_is_said_and_nothing_is_left(server: FakeApiServer, open_demo: Open, tmp_path: Path) -> None:
    server.script("demo-open", gave_up(failed("open-x", 2, "error: /work/demo: holds nothing to report on")))
    with pytest.raises(InputError, match="pod open-x: error: /work/demo: holds nothing to report on"):
        open_demo()
    server.script("demo-open", complete(succeeded("open-x", "report")))
    server.logs["open-x"] = server.logs["open-x"][:1]
    with pytest.raises(FailedError, match="are incomplete"):
        open_demo()
    server.script("demo-open", complete())
    with pytest.raises(FailedError, match="deleted before its log was read"):
        open_demo()
    del server.objects["PersistentVolumeClaim", "demo-work"]
    with pytest.raises(InputError, match="claim demo-work does not exist in namespace gaudi-bert, so nothing"):
        open_demo()
    assert ("Job", "demo-open") not in server.objects
    assert not (tmp_path / "here").exists()


def test_a_work_folder_in_a_store_is_opened_from_there(cluster: Cluster, tmp_path: Path, reporter: Reporter) -> None:
    stored = load_pipeline(None, ["kubernetes.store=s3://bucket/prefix"])
    with pytest.raises(InputError, match=r"s3://bucket/prefix/demo/report\.html: the work folder is in an object store"):
        copy_results(stored, cluster, tmp_path / "here", reporter)


# What a pod's log carries: the same files at the other end, and nothing that was cut short.


def received(lines: list[str]) -> dict[str, bytes]:
    return {
        path.relative_to("/out").as_posix(): data for path, data in _decode_results_from_log(lines, Path("/out")).items()
    }


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


@pytest.mark.parametrize("name", ["train/../../report.html", "..", "/"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(FailedError, match="cannot be unpacked"):
        received(lines_of([(tarfile.TarInfo("report.html"), b"page"), (tarfile.TarInfo(name), b"evil")]))


def test_only_regular_files_are_received() -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    assert received(lines_of([(link, b""), (tarfile.TarInfo("report.html"), b"page")])) == {"report.html": b"page"}


def test_what_is_sent_is_received_among_other_lines(folder: Path) -> None:
    lines = list(_iterate_results_as_base64_lines(folder, Reporter(quiet=True)))
    assert received(["work/demo/report.html: written", *lines, "the end"]) == FILES
    assert max(map(len, lines)) < 16_384, "longer lines are split by the node"


def test_curves_that_are_too_large_are_left_out_and_that_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 10_000)
    said = io.StringIO()
    lines = list(_iterate_results_as_base64_lines(folder, Reporter(said)))
    assert received(lines).keys() == {"report.html", "train/metrics.jsonl", "finetune/metrics.jsonl"}
    assert "the TensorBoard files are too large for a log, so they are left out" in said.getvalue()
    monkeypatch.setattr(module, "_MOST_BYTES", 10)
    with pytest.raises(FailedError, match="the report is too large for a log"):
        list(_iterate_results_as_base64_lines(folder, Reporter(quiet=True)))


@pytest.mark.parametrize("what", ["first", "line", "last", "changed", "no base64"])
def test_a_log_that_is_not_whole_is_refused(what: str, folder: Path) -> None:
    lines = list(_iterate_results_as_base64_lines(folder, Reporter(quiet=True)))
    broken = {
        "first": lines[1:],
        "line": [lines[0], *lines[2:]],
        "last": lines[:-2],
        "changed": [lines[0], lines[1][:-4] + "AAAA", *lines[2:]],
        "no base64": [lines[0], "?" + lines[1][1:], *lines[2:]],
    }
    with pytest.raises(FailedError, match="contains no results" if what == "first" else "are incomplete"):
        received(broken[what])


def test_the_pods_command_writes_the_page_and_sends_it(tmp_path: Path, repository: Path) -> None:
    for name in ("jinja2", "matplotlib"):
        pytest.importorskip(name, reason=f"THE PAGE NEEDS {name}: install gaudi-bert")

    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gaudi_bert.runners.kubernetes.open_results", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=repository)

    folder = write_workdir(tmp_path / "demo")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert received(done.stdout.splitlines())["report.html"] == (folder / "report.html").read_bytes()
    missing = run(tmp_path / "absent")
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: ")
    assert len(missing.stderr.splitlines()) == 1
