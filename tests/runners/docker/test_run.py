"""Running stages in containers, on a daemon that does as the test says: results, failures, stopping, leftovers."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.errors import FailedError, InputError, StoppedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import pipeline_from_mapping
from gaudi_bert.config.places import ImageSettings
from gaudi_bert.runners.docker import run as docker_run
from gaudi_bert.runners.docker.daemon import Daemon
from gaudi_bert.runners.docker.run import run_on_docker
from tests.builders.recorded_answers import MPIRUN_OUTPUT

Pieces = Sequence[tuple[bytes | None, bytes | None]]


class FakeContainer:
    def __init__(self, name: str, status: str = "running") -> None:
        self.name, self.status = name, status


class FakeEngine:
    """A daemon whose containers say what `says` has for their stage, and end as `ends` says."""

    def __init__(self) -> None:
        self.says: dict[str, Pieces] = {}
        self.ends: dict[str, dict[str, Any]] = {}
        self.on_start: Callable[[str], None] = lambda name: None
        self.images: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.present: list[FakeContainer] = []
        self.networks: list[str] = []

    def part(self, container: FakeContainer) -> str:
        return container.name.removeprefix("gaudi-bert-tiny-").rpartition("-")[0]

    def need_image(self, reference: str, images: ImageSettings, reporter: Reporter) -> None:
        self.images.append(reference)

    def containers_in(self, work: str) -> list[FakeContainer]:
        return list(self.present)

    def create(self, options: dict[str, Any]) -> FakeContainer:
        self.created.append(options)
        container = FakeContainer(options["name"])
        self.present.append(container)
        return container

    def output(self, container: FakeContainer) -> Iterator[tuple[bytes | None, bytes | None]]:
        return iter(self.says.get(self.part(container), ()))

    def start(self, container: FakeContainer) -> None:
        self.on_start(self.part(container))

    def end_state(self, container: FakeContainer) -> dict[str, Any]:
        return {"ExitCode": 0, "OOMKilled": False, "Error": "", **self.ends.get(self.part(container), {})}

    def stop(self, container: FakeContainer, seconds: int) -> None:
        self.stopped.append(self.part(container))

    def remove(self, container: FakeContainer) -> None:
        self.present.remove(container)

    @contextmanager
    def network(self, name: str, labels: dict[str, str], *, way_out: bool = False) -> Iterator[None]:
        self.networks.append(name)
        try:
            yield
        finally:
            self.networks.remove(name)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(docker_run, "Daemon", lambda: fake)
    return fake


def run(
    folder: Path, stages: Sequence[str], said: io.StringIO | None = None, *, engine: str = "auto", **resources: Any
) -> dict[str, list[str]]:
    settings = pipeline_from_mapping({"name": "tiny", "training": {"engine": engine}, "resources": resources}, "a test")
    reporter = Reporter(said or io.StringIO())
    return run_on_docker(settings, stages, folder / "tiny.yaml", folder / "work", reporter)


def test_each_stage_runs_in_its_container_and_its_result_comes_back(engine: FakeEngine, tmp_path: Path) -> None:
    """Lines and letters that arrive in two pieces are put together."""
    result, letters = json.dumps({"plan": {"train": {"packs": 7}}}).encode(), "Zürich\n".encode()
    pieces = [(None, b"plan: 50 %\npl"), (result[:9], b"an: 100 %\n"), (result[9:] + b"\n", None)]
    engine.says = {"plan": [*pieces, (None, letters[:2]), (None, letters[2:])]}
    said = io.StringIO()
    engine.says["write"] = [(b"a library's line\nwrite train: 9 sequences\n", None)]
    printed = {"plan": ['{"plan": {"train": {"packs": 7}}}'], "write": ["write train: 9 sequences"]}
    assert run(tmp_path, ["plan", "write"], said) == printed
    assert "plan: 50 %\nplan: 100 %\nZürich\n" in said.getvalue()
    assert "a library's line\n" in said.getvalue()
    assert [container["labels"]["gaudi-bert.stage"] for container in engine.created] == ["plan", "write"]
    assert engine.images == [engine.created[0]["image"]], "each image is made sure of once"
    assert engine.present == []
    assert not (tmp_path / "work" / "tiny" / ".pipeline-in-docker.yaml").exists()


REFUSED = b"reading\nerror: plan.json: other settings\n"
KILLED = {"ExitCode": 137, "OOMKilled": True}


@pytest.mark.parametrize(
    ("stage", "writes", "end", "error", "message"),
    [
        *(
            ("plan", REFUSED, {"ExitCode": code}, error, r"^plan.json: other settings$")
            for code, error in ((1, FailedError), (2, InputError), (75, StoppedError), (139, FailedError))
        ),
        ("plan", b"reading\nstopped; it goes on\n", {"ExitCode": 75}, StoppedError, r"^stopped; it goes on$"),
        ("plan", b"one\ntwo\n", {"ExitCode": 139}, FailedError, r"ended with exit code 139: one \| two"),
        ("write", b"", KILLED, FailedError, r"used more memory than it may; raise resources\.data\.memory_limit"),
        ("train", b"", KILLED, FailedError, r"raise resources\.training\.memory_limit"),
        ("train", MPIRUN_OUTPUT.encode(), {"ExitCode": 2}, InputError, r"^rank 1: settings.yaml: .* 4 here; .*--out$"),
    ],
)
def test_a_failing_stage_ends_the_run_with_its_own_error(
    engine: FakeEngine, tmp_path: Path, stage: str, writes: bytes, end: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine.says, engine.ends = {stage: [(None, writes)]}, {stage: end}
    said = io.StringIO()
    with pytest.raises(error, match=message):
        run(tmp_path, [stage, "report"], said)
    assert "error:" not in said.getvalue()
    assert len(engine.created) == 1
    assert engine.present == []


def test_only_the_first_process_of_mpirun_is_taken_at_its_word(engine: FakeEngine, tmp_path: Path) -> None:
    lines = b'[1,1]<stdout>:{"train": {"update": 9}}\n[1,0]<stdout>:{"train": {"update": 3}}\n[1,0]<stderr>:update 3\n'
    engine.says = {"train": [(lines, None)]}
    said = io.StringIO()
    assert run(tmp_path, ["train"], said)["train"] == ['{"train": {"update": 3}}']
    assert "update 3\n" in said.getvalue()


def test_sigterm_stops_the_container_first(engine: FakeEngine, tmp_path: Path) -> None:
    engine.on_start = lambda part: os.kill(os.getpid(), signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StoppedError, match="run the same command again to resume"):
        run(tmp_path, ["train"])
    assert engine.stopped == ["train"]
    assert engine.present == []
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, also where this process was started in the background, with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_stops_all_workers(engine: FakeEngine, tmp_path: Path) -> None:
    engine.says = {"rendezvous": [(b"rendezvous: ready\n", None)]}

    def interrupt(part: str) -> None:
        if part == "train-1":
            os.kill(os.getpid(), signal.SIGINT)

    engine.on_start = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, ["train"], workers=2)
    assert sorted(engine.stopped) == ["train-0", "train-1"]
    assert engine.present == []
    assert engine.networks == []


def test_workers_meet_at_the_rendezvous_and_the_first_answers(engine: FakeEngine, tmp_path: Path) -> None:
    engine.says = {
        "rendezvous": [(b"rendezvous: ready\n", None)],
        "train-0": [(b'{"train": {"updates": 5}}\n', b"update 5\n")],
        "train-1": [(b'{"train": {"updates": 4}}\n', b"waiting\n")],
    }
    said = io.StringIO()
    assert run(tmp_path, ["train"], said, workers=2) == {"train": ['{"train": {"updates": 5}}']}
    assert "[worker 0] update 5\n" in said.getvalue()
    assert "[worker 1] waiting\n" in said.getvalue()
    assert engine.present == []


def test_workers_of_pytorch_need_no_rendezvous(engine: FakeEngine, tmp_path: Path) -> None:
    engine.says = {"train-0": [(b'{"train": {"updates": 5}}\n', None)]}
    assert run(tmp_path, ["train"], engine="pytorch", workers=2) == {"train": ['{"train": {"updates": 5}}']}
    assert [container["image"].partition(":")[0] for container in engine.created] == ["gaudi-bert-train-cpu-pytorch"] * 2


def test_one_failing_worker_ends_the_others(engine: FakeEngine, tmp_path: Path) -> None:
    engine.says = {"rendezvous": [(b"rendezvous: ready\n", None)], "train-1": [(None, b"error: disk full\n")]}
    engine.ends = {"train-1": {"ExitCode": 1}}
    with pytest.raises(FailedError, match=r"^\[worker 1\] disk full$"):
        run(tmp_path, ["train"], workers=2)
    assert engine.present == []


def test_a_rendezvous_that_dies_is_not_waited_for(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(FailedError, match="ended before the training workers could meet"):
        run(tmp_path, ["train"], workers=2)
    assert engine.present == []


def test_a_container_that_a_killed_run_left_behind_is_found(engine: FakeEngine, tmp_path: Path) -> None:
    engine.present = [FakeContainer("gaudi-bert-tiny-train-old", "running")]
    with pytest.raises(FailedError, match="docker rm --force gaudi-bert-tiny-train-old"):
        run(tmp_path, ["plan"])
    engine.present = [FakeContainer("gaudi-bert-tiny-train-old", "exited")]
    run(tmp_path, ["plan"])
    assert engine.present == []


def test_two_runs_in_one_work_folder_exclude_each_other(engine: FakeEngine, tmp_path: Path) -> None:
    def second_run(part: str) -> None:
        with pytest.raises(FailedError, match=r"process \d+ on \S+ is writing it"):
            run(tmp_path, ["plan"])

    engine.on_start = second_run
    run(tmp_path, ["plan"])


# What is said about the daemon's answers: the real SDK, over HTTP, to a server that answers as a daemon would.


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
    pytest.importorskip("docker.client")
    with FakeDaemon() as fake:
        threading.Thread(target=fake.serve_forever, daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", fake.address)
        yield fake
        fake.shutdown()


@pytest.mark.parametrize("address", ["unix:///nowhere/none.sock", "tcp://127.0.0.1:9"])
def test_no_daemon_is_said_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docker.client")
    monkeypatch.setenv("DOCKER_HOST", address)
    with pytest.raises(InputError, match=f"no Docker daemon answers at {address}; install Docker and start it"):
        Daemon()


@pytest.mark.parametrize(
    ("status", "message", "error", "remedy"),
    [
        (400, "Unknown runtime specified habana", InputError, "docker.runtime"),
        (400, 'invalid mount config for type "bind": bind source path does not exist: /x', InputError, "this machine"),
        (500, "write /var/lib/docker: no space left on device", FailedError, "free some space"),
        (500, "something of its own", FailedError, "see the daemon's log"),
    ],
)
def test_refusals_name_a_remedy(daemon: FakeDaemon, status: int, message: str, error: type[Exception], remedy: str) -> None:
    daemon.answers["/containers/create"] = (status, {"message": message})
    with pytest.raises(error, match=f"{re.escape(message)}.*{re.escape(remedy)}") as caught:
        Daemon().create({"image": "some:1", "name": "one"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("images", [{}, {"registry": "registry.example", "pull_policy": "Never"}])
def test_an_image_that_is_not_here_and_may_not_be_fetched_is_refused(daemon: FakeDaemon, images: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"image own:1: not on this machine.*build it with `make images`"):
        Daemon().need_image("own:1", ImageSettings(**images), Reporter(quiet=True))


def test_an_image_of_a_registry_is_fetched_or_the_reason_said(daemon: FakeDaemon) -> None:
    images = ImageSettings(registry="registry.example")
    said = io.StringIO()
    daemon.answers["/images/create"] = (200, {"status": "Downloaded"})
    Daemon().need_image("registry.example/own:1", images, Reporter(said))
    assert said.getvalue() == "docker: fetching registry.example/own:1\n"
    daemon.answers["/images/create"] = (200, {"error": "denied: log in first"})
    with pytest.raises(InputError, match=r"denied: log in first; check images\.registry and `docker login`"):
        Daemon().need_image("registry.example/own:1", images, Reporter(quiet=True))


def test_a_daemon_that_goes_away_is_said(daemon: FakeDaemon) -> None:
    engine = Daemon()
    daemon.shutdown()
    daemon.server_close()
    with pytest.raises(FailedError, match="does not answer any more"):
        engine.containers_in("/some/work")
