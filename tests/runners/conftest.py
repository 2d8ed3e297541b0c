"""A fake cluster, and a client that talks to it over HTTP."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes import follow
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.run import run_on_kubernetes
from tests.builders.fake_api_server import FakeApiServer, Json, Run


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    """A fake API server that the kubeconfig file of this test names."""
    pytest.importorskip("kubernetes")
    with FakeApiServer() as fake:
        file = tmp_path / "kubeconfig"
        file.write_text(fake.kubeconfig())
        monkeypatch.setenv("KUBECONFIG", str(file))
        yield fake


@pytest.fixture
def cluster(server: FakeApiServer) -> Cluster:
    """A client that does not wait between attempts."""
    return Cluster("gaudi-bert", sleep=lambda seconds: None)


@pytest.fixture
def said() -> io.StringIO:
    """What the reporter says."""
    return io.StringIO()


@pytest.fixture
def reporter(said: io.StringIO) -> Reporter:
    return Reporter(said)


@pytest.fixture
def short_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_SHORTEST_ROUND_SECONDS", 0.01)
    monkeypatch.setattr(follow, "_WATCH_SECONDS", 1)
    monkeypatch.setattr(follow, "_PASSING_SECONDS", 0.0)


@pytest.fixture
def run(cluster: Cluster, reporter: Reporter, short_watches: None) -> Run:
    def run_demo(stages: Sequence[str], *overrides: str) -> Json:
        settings = load_pipeline(None, ["kubernetes.start_seconds=1", *overrides])
        cluster.namespace = settings.kubernetes.namespace
        return run_on_kubernetes(settings, stages, reporter, cluster)

    return run_demo
