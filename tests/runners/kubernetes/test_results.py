"""`k8s open`: a small Job sends the page of a run, which is then here."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import load_pipeline
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.results import open_results
from gaudi_bert.runners.kubernetes.run import run_on_kubernetes
from gaudi_bert.runners.send_results import sent_lines
from tests.builders.command_line import run_command
from tests.builders.fake_api_server import FakeApiServer
from tests.builders.recorded_answers import active, complete, failed, gave_up, running, succeeded
from tests.k8s.manifest_checks import check_pod

DEMO = load_pipeline(None, ["kubernetes.start_seconds=1"])


@pytest.fixture
def work_folder(server: FakeApiServer, tmp_path: Path) -> Path:
    """A work folder whose pod sends it."""
    folder = tmp_path / "work" / "demo"
    (folder / "train" / "tensorboard").mkdir(parents=True)
    (folder / "report.html").write_text("<html>a page</html>")
    (folder / "train" / "tensorboard" / "events").write_bytes(b"curves")
    server.put("PersistentVolumeClaim", {"metadata": {"name": "demo-work"}, "spec": {}, "status": {"phase": "Bound"}})
    server.script("demo-open", active(running("open-x", "report")), complete(succeeded("open-x", "report")))
    server.logs["open-x"] = [f"2026-01-01T00:00:00Z {line}" for line in sent_lines(folder, Reporter(quiet=True))]
    return folder


def test_the_page_and_the_curves_come_here_and_the_job_goes(
    server: FakeApiServer, cluster: Cluster, work_folder: Path, tmp_path: Path, reporter: Reporter, said: io.StringIO
) -> None:
    found = open_results(DEMO, cluster, tmp_path / "here", reporter)
    assert found.report.read_text() == "<html>a page</html>"
    assert found.tensorboard is not None
    assert (found.tensorboard / "events").read_bytes() == b"curves"
    assert server.created("Job") == ["demo-open"]
    assert "BEGIN RESULTS" not in said.getvalue()
    assert ("Job", "demo-open") not in server.objects


def test_the_job_is_a_short_one_that_no_run_takes_for_its_own(
    server: FakeApiServer, cluster: Cluster, work_folder: Path, tmp_path: Path, reporter: Reporter
) -> None:
    made = []
    put = server.put
    server.put = lambda kind, item: made.append(item) or put(kind, item)  # type: ignore[method-assign, func-returns-value]
    open_results(DEMO, cluster, tmp_path / "here", reporter)
    (job,) = (item for item in made if item["metadata"]["name"] == "demo-open")
    assert "app.kubernetes.io/instance" not in job["metadata"]["labels"]
    assert (job["spec"]["backoffLimit"], job["spec"]["ttlSecondsAfterFinished"]) == (0, 600)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python3", "-m", "gaudi_bert.runners.send_results", "/work/demo"]
    names = {"ConfigMap": {"demo-pipeline"}, "PersistentVolumeClaim": {"demo-work"}, "ServiceAccount": {"demo-stages"}}
    assert list(check_pod("open", job["spec"]["template"]["spec"], names)) == []
    server.put("Job", {**job, "status": {"active": 1}})
    assert run_on_kubernetes(DEMO, ["plan"], reporter, cluster) == {"plan": "done"}


def test_one_that_was_left_over_is_replaced(
    server: FakeApiServer, cluster: Cluster, work_folder: Path, tmp_path: Path, reporter: Reporter
) -> None:
    server.put("Job", {"metadata": {"name": "demo-open"}, "status": {"active": 1}})
    assert open_results(DEMO, cluster, tmp_path / "here", reporter).report.exists()


def test_what_cannot_be_brought_is_said_and_nothing_is_left(
    server: FakeApiServer, cluster: Cluster, work_folder: Path, tmp_path: Path, reporter: Reporter
) -> None:
    server.script("demo-open", gave_up(failed("open-x", 2, "error: /work/demo: holds nothing to report on")))
    with pytest.raises(FailedError, match="exit code 2: error: /work/demo: holds nothing to report on"):
        open_results(DEMO, cluster, tmp_path / "here", reporter)
    server.script("demo-open", complete(succeeded("open-x", "report")))
    server.logs["open-x"] = server.logs["open-x"][:1]
    with pytest.raises(FailedError, match="did not come whole"):
        open_results(DEMO, cluster, tmp_path / "here", reporter)
    server.script("demo-open", complete())
    with pytest.raises(FailedError, match="removed before its log was read"):
        open_results(DEMO, cluster, tmp_path / "here", reporter)
    del server.objects["PersistentVolumeClaim", "demo-work"]
    with pytest.raises(InputError, match="no claim demo-work in namespace gaudi-bert: nothing has run"):
        open_results(DEMO, cluster, tmp_path / "here", reporter)
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
