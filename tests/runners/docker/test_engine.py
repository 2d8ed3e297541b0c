"""What is said about the daemon's answers: the real SDK, over HTTP, to a server that answers as a daemon would."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import ImageSettings
from gaudi_bert.runners.docker.engine import Engine

pytest.importorskip("docker.client")


class FakeDaemon(ThreadingHTTPServer):
    """Answers by the ending of the path; 404 to all else."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, object]] = {"/_ping": (200, "OK"), "/version": (200, {"ApiVersion": "1.41"})}
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeDaemon

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        known = (answer for ending, answer in self.server.answers.items() if path.endswith(ending))
        status, value = next(known, (404, {"message": f"page not found: {path}"}))
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(value, str) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_DELETE = do_HEAD = answer

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        thread = threading.Thread(target=fake.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", fake.address)
        yield fake
        fake.shutdown()


def test_no_daemon_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(InputError, match=r"no Docker daemon answers at unix://.*none\.sock; install Docker and start it"):
        Engine()


def test_a_refused_connection_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    with pytest.raises(InputError, match=r"no Docker daemon answers at tcp://127\.0\.0\.1:9"):
        Engine()


@pytest.mark.parametrize(
    ("status", "message", "error", "remedy"),
    [
        (400, "Unknown runtime specified habana", InputError, "docker.runtime"),
        (400, 'invalid mount config for type "bind": bind source path does not exist: /x', InputError, "this machine"),
        (500, "write /var/lib/docker: no space left on device", FailedError, "free some space"),
        (500, "something of its own", FailedError, "see the daemon's log"),
    ],
)
def test_a_refusal_names_its_remedy(
    daemon: FakeDaemon, status: int, message: str, error: type[Exception], remedy: str
) -> None:
    daemon.answers["/containers/create"] = (status, {"message": message})
    with pytest.raises(error) as caught:
        Engine().create({"image": "some:1", "name": "one"})
    assert message in str(caught.value)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_image_that_is_not_here_and_has_no_registry_is_not_fetched(daemon: FakeDaemon) -> None:
    with pytest.raises(InputError, match=r"image own:1: not on this machine.*build it with `make images`"):
        Engine().need_image("own:1", ImageSettings(), Reporter(quiet=True))
    assert "/images/create" not in daemon.answers


def test_an_image_of_a_registry_is_fetched_or_the_reason_said(daemon: FakeDaemon) -> None:
    images = ImageSettings(registry="registry.example")
    said = io.StringIO()
    daemon.answers["/images/create"] = (200, {"status": "Downloaded"})
    Engine().need_image("registry.example/own:1", images, Reporter(said))
    assert said.getvalue() == "docker: fetching registry.example/own:1\n"
    daemon.answers["/images/create"] = (200, {"error": "denied: log in first"})
    with pytest.raises(InputError, match=r"denied: log in first; check images\.registry and `docker login`"):
        Engine().need_image("registry.example/own:1", images, Reporter(quiet=True))


def test_never_means_never(daemon: FakeDaemon) -> None:
    images = ImageSettings(registry="registry.example", pull_policy="Never")
    with pytest.raises(InputError, match="not on this machine"):
        Engine().need_image("registry.example/own:1", images, Reporter(quiet=True))


def test_a_daemon_that_goes_away_is_said(daemon: FakeDaemon) -> None:
    engine = Engine()
    daemon.shutdown()
    daemon.server_close()
    with pytest.raises(FailedError, match="does not answer any more"):
        engine.containers_in("/some/work")
