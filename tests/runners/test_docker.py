"""Stages in containers: what a pipeline file means in Docker's terms; and real containers, where a daemon is ready."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gaudi_bert import __version__
from gaudi_bert.common.errors import FailedError, InputError, StoppedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
from gaudi_bert.runners.docker import _build_container_options, _ContainerStopper, _run_container, run_on_docker
from tests.builders.real_containers import BASE, DOCKER
from tests.builders.reporters import QUIET

CARDS = {"cards": 8, "training": {"cpu": "95", "memory": "409Gi"}}
SECRET = {"AWS_SECRET_ACCESS_KEY": "the-secret", "GOOGLE_API_KEY": "other", "EDITOR": "vi"}


def container(
    folder: Path, stage: str, mapping: dict[str, Any] | None = None, *flags: str, work: str | None = None
) -> dict[str, Any]:
    settings = section_from_mapping(PipelineSettings, {"name": "tiny", **(mapping or {})}, "a test")
    return _build_container_options(
        settings, stage, folder / "pipelines" / "tiny.yaml", Path(work or folder / "work"), flags
    )


def mounts(options: dict[str, Any]) -> dict[str, bool]:
    """The paths that a container sees, and whether it may not write there; they are those of the host."""
    assert all(mount["Source"] == mount["Target"] for mount in options["mounts"])
    return {mount["Target"]: mount["ReadOnly"] for mount in options["mounts"]}


def test_a_data_stage_gets_its_image_its_folder_and_nothing_else(tmp_path: Path) -> None:
    options = container(tmp_path, "write", {"resources": {"data_processes": 3}}, "--set", "packing.depth=4")
    work, pipeline = str(tmp_path / "work" / "tiny"), str(tmp_path / "pipelines" / "tiny.yaml")
    owner = (tmp_path / "work" / "tiny").stat()
    confined = {"user": f"{owner.st_uid}:{owner.st_gid}", "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"]}
    limits = {"mem_limit": 2 * 2**30, "memswap_limit": 2 * 2**30, "cpu_shares": 81}
    assert {**confined, **limits, "image": f"gaudi-bert-data:{__version__}"}.items() <= options.items()
    assert mounts(options) == {work: False, pipeline: True}
    command = ["gaudi-bert", "run", pipeline, "--work", str(tmp_path / "work"), "--stages", "write"]
    assert options["entrypoint"] == [*command, "--set", "packing.depth=4", "--workers", "3"]
    assert options["environment"] == {"HOME": "/tmp"}
    assert not {"runtime", "ipc_mode", "cap_add", "privileged", "ulimits", "network_mode", "devices"} & options.keys()


def test_training_without_cards_gets_shared_memory_and_the_training_resources(tmp_path: Path) -> None:
    mapping = {
        "images": {"train": "own-train", "registry": "registry.example/team", "tag": "7"},
        "resources": {"training": {"cpu": "1500m", "memory": "1Gi"}, "shared_memory": "64Mi", "environment": {"A": "b"}},
        "docker": {"cpus": 0.5},
    }
    options = container(tmp_path, "train", mapping, "--overwrite")
    limits = {"mem_limit": 2**30, "shm_size": 64 * 2**20, "cpu_shares": 1536, "nano_cpus": 500_000_000}
    assert {**limits, "image": "registry.example/team/own-train:7"}.items() <= options.items()
    assert options["environment"] == {"HOME": "/tmp", "A": "b"}
    assert options["entrypoint"][-2:] == ["train", "--overwrite"]


def test_cards_bring_what_the_vendor_asks_for_and_no_privilege(tmp_path: Path) -> None:
    docker = {"visible_devices": "0,1", "unlimited_memory_lock": True, "host_network": True}
    mapping = {"resources": {**CARDS, "environment": {"A": "b"}}, "docker": docker}
    options = container(tmp_path, "train", mapping)
    as_the_vendor_asks = {"runtime": "habana", "user": "0:0", "ipc_mode": "host", "cap_add": ["SYS_NICE"]}
    more = {"nano_cpus": 95 * 10**9, "network_mode": "host", "ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}]}
    assert {**as_the_vendor_asks, **more}.items() <= options.items()
    assert {"HABANA_VISIBLE_DEVICES": "0,1", "PT_HPU_LAZY_MODE": "0", "A": "b"}.items() <= options["environment"].items()
    assert not {"privileged", "shm_size", "cpu_shares"} & options.keys()
    assert "runtime" not in container(tmp_path, "plan", mapping)
    with pytest.raises(InputError):
        container(tmp_path, "train", {"resources": {**CARDS, "workers": 2}})


def test_a_stage_sees_what_it_reads_where_it_lies(tmp_path: Path) -> None:
    for name in (
        "pipelines/text/a",
        "books/a/one.txt",
        "vocab.txt",
        "given/train/a",
        "given/vocab.txt",
        "old/m.ckpt-7.index",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    text = ["text", str(tmp_path / "books" / "*" / "*.txt"), "python-docs"]
    training = {"init_checkpoint": str(tmp_path / "old" / "m.ckpt-7")}
    mapping = {"prepare": {"text": text, "vocab": "../vocab.txt"}, "training": training}
    own = {str(tmp_path / name) for name in ("work/tiny", "pipelines/tiny.yaml")}
    seen = {stage: mounts(container(tmp_path, stage, mapping)).keys() - own for stage in ("prepare", "plan", "train")}
    named = {stage: {str(tmp_path / name) for name in names} for stage, names in {
        "prepare": ("pipelines/text", "books", "vocab.txt"), "plan": (), "train": ("old",)}.items()}  # fmt: skip
    assert seen == named
    records = mounts(container(tmp_path, "histogram", {"prepare": {"records": "../given/train"}})).keys() - own
    assert records == {str(tmp_path / "given" / name) for name in ("train", "vocab.txt")}


@pytest.mark.parametrize("place", ["/", "/usr", "/opt", "/etc", "/tmp"])
def test_nothing_of_the_host_hides_the_images_own_files(place: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=place):
        container(tmp_path, "prepare", {"prepare": {"text": place}})


def test_work_in_a_bucket_brings_the_stores_log_in_and_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".aws").mkdir()
    for name in (".aws/config", "ca.pem", "token"):
        (tmp_path / name).write_text("x")
    caller = {**SECRET, "HOME": str(tmp_path), "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token")}
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    for name, value in caller.items():
        monkeypatch.setenv(name, value)
    mapping = {"store": {"ca_file": str(tmp_path / "ca.pem"), "scratch": str(tmp_path / "scratch")}}
    options = container(tmp_path, "write", mapping, work="s3://bucket/work")
    assert options["environment"]["AWS_SECRET_ACCESS_KEY"] == "the-secret"
    assert not {"GOOGLE_API_KEY", "EDITOR"} & options["environment"].keys()
    assert options["environment"]["AWS_CONFIG_FILE"] == str(tmp_path / ".aws" / "config")
    read = {str(tmp_path / name): True for name in ("pipelines/tiny.yaml", ".aws/config", "ca.pem", "token")}
    assert mounts(options) == {**read, str(tmp_path / "scratch"): False}
    assert options["network_mode"] == "host"
    assert options["entrypoint"][4] == "s3://bucket/work"
    assert "the-secret" not in str(options["entrypoint"])
    with_cards = container(tmp_path, "train", {**mapping, "resources": CARDS}, work="s3://bucket/work")["environment"]
    assert with_cards["AWS_SECRET_ACCESS_KEY"] == "the-secret"
    without = container(tmp_path, "write", mapping)
    assert (without["environment"], "network_mode" in without) == ({"HOME": "/tmp"}, False)


@pytest.mark.parametrize("address", ["unix:///nowhere/none.sock", "tcp://127.0.0.1:9"])
def test_a_daemon_that_is_not_there_is_one_line(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docker.client")
    monkeypatch.setenv("DOCKER_HOST", address)
    settings = section_from_mapping(PipelineSettings, {"name": "tiny"}, "a test")
    with pytest.raises(InputError, match=address):
        run_on_docker(settings, ["plan"], tmp_path / "tiny.yaml", tmp_path / "work", Reporter(io.StringIO()))


# --- how a container ends, without a daemon


class Container:
    """One of the SDK that ends with `code`; with None, when it is told to stop."""

    name = "gaudi-bert-tiny-plan-1"
    client = SimpleNamespace(api=SimpleNamespace(timeout=0))

    def __init__(self, code: int | None, attached: Callable[[], None] = lambda: None, **state: object) -> None:
        self.code, self.attached, self.calls, self.told_to_stop = code, attached, list[str](), threading.Event()
        self.attrs = {"State": {"ExitCode": code, **state}}

    def attach(self, **options: object) -> Iterator[tuple[bytes | None, bytes | None]]:
        self.attached()
        return self.pieces()

    def pieces(self) -> Iterator[tuple[bytes | None, bytes | None]]:
        yield b"7 pa", b"error: plan.json: l"
        yield b"cks\n", b"ost\n"
        if self.code is None:
            assert self.told_to_stop.wait(20), "nobody told it to stop"

    def stop(self, timeout: int) -> None:
        self.attrs["State"]["ExitCode"] = 75
        self.told_to_stop.set()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda **options: self.calls.append(name)


def run_one(container: Container, stop: _ContainerStopper) -> list[str]:
    daemon = SimpleNamespace(containers=SimpleNamespace(create=lambda **options: container))
    try:
        return _run_container(daemon, {}, stop, QUIET, "resources.data.memory_limit")
    finally:
        assert container.calls[0] == "start"
        assert container.calls[-1] == "remove"


@pytest.mark.parametrize(
    ("code", "state", "kind", "named"),
    [
        (2, {}, InputError, "plan.json: lost"),
        (139, {}, FailedError, "plan.json: lost"),
        (75, {}, StoppedError, "plan.json: lost"),
        (137, {"OOMKilled": True}, FailedError, "resources.data.memory_limit"),
    ],
)
def test_an_exit_code_is_kept(code: int, state: dict[str, object], kind: type[Exception], named: str) -> None:
    assert run_one(Container(0), _ContainerStopper()) == ["7 packs"]
    with pytest.raises(kind, match=named) as caught:
        run_one(Container(code, **state), _ContainerStopper())
    assert type(caught.value) is kind


def test_a_stop_that_comes_before_the_container_runs_reaches_it() -> None:
    pytest.importorskip("docker")
    stop = _ContainerStopper()
    with pytest.raises(StoppedError):
        run_one(Container(None, attached=lambda: stop.handle_signal(signal.SIGTERM, None)), stop)


# --- real containers, of an image whose `gaudi-bert` is a stand-in that does what the file `does` says

STAND_IN = """#!/usr/bin/python3
import os, pathlib, signal, sys, time
stage = sys.argv[sys.argv.index("--stages") + 1]
def say(line):
    print(line, file=sys.stderr, flush=True)
def wait():
    for _ in range(1200): time.sleep(0.05)
def save(number, frame):
    say("saved"); sys.exit(75)
exec(pathlib.Path("records/does").read_text())
"""
TINY = "name: tiny\nimages: {data: gaudi-bert-stand-in, tag: '1'}\nprepare: {records: records}\n"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if os.environ.get("GAUDI_BERT_TEST_CONTAINERS") != "1":
        pytest.skip("CONTAINERS ARE NOT TESTED HERE: run scripts/test-containers.sh")
    folder = tmp_path_factory.mktemp("image")
    (folder / "gaudi-bert").write_text(STAND_IN)
    (folder / "Dockerfile").write_text(f"FROM {BASE}\nCOPY --chmod=755 gaudi-bert /usr/local/bin/\n")
    build = [DOCKER, "build", "--quiet", "--tag", "gaudi-bert-stand-in:1", str(folder)]
    subprocess.run(build, check=True, env={**os.environ, "DOCKER_BUILDKIT": "1"}, stdout=subprocess.DEVNULL)
    yield
    subprocess.run([DOCKER, "image", "rm", "gaudi-bert-stand-in:1"], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def tiny(image: None, tmp_path: Path) -> Iterator[Path]:
    """A folder with a pipeline; no container may be left behind."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "records").mkdir()
    yield tmp_path
    assert leftovers(tmp_path) == ""


def leftovers(folder: Path) -> str:
    label = f"label=gaudi-bert.work={folder / 'work' / 'tiny'}"
    return subprocess.run([DOCKER, "ps", "-aq", "--filter", label], capture_output=True, text=True, check=True).stdout


def start(folder: Path, does: str, stages: str = "plan", *options: str) -> subprocess.Popen[str]:
    (folder / "records" / "does").write_text(does)
    command = [sys.executable, "-m", "gaudi_bert", "run", "tiny.yaml", "--on", "docker", "--stages", stages, *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_output_comes_as_it_is_written_and_each_result_comes_back(tiny: Path) -> None:
    does = "say(f'{stage}: Zürich'); print(f'{stage} train: 7 packs'); pathlib.Path('work/tiny', stage).touch()"
    process = start(tiny, does, "plan,write")
    said = "docker: {0} in gaudi-bert-stand-in:1\n{0}: Zürich\n"
    assert process.communicate(timeout=60) == (
        "plan train: 7 packs\nwrite train: 7 packs\n",
        said.format("plan") + said.format("write"),
    )
    assert {(tiny / "work/tiny" / stage).stat().st_uid for stage in ("plan", "write")} == {tiny.stat().st_uid}
    process = start(tiny, """print('{"plan": {"packs": 7}}')""", "plan", "--json")
    assert json.loads(process.communicate(timeout=60)[0]) == {"plan": {"packs": 7}}


def test_a_stage_that_uses_too_much_memory_names_its_setting(tiny: Path) -> None:
    process = start(tiny, "x = b'x' * 2**28", "plan", "--set", "resources.data={memory: 24Mi}")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "resources.data.memory_limit" in said.splitlines()[-1]


def test_an_image_that_is_not_there_and_a_runtime_that_is_not_are_wrong_input(tiny: Path) -> None:
    process = start(tiny, "", "plan", "--set", "images.data=not-built")
    assert "image not-built:1" in process.communicate(timeout=60)[1]
    assert process.returncode == 2
    cards = ("--set", "resources.cards=1", "--set", "images.train=gaudi-bert-stand-in")
    process = start(tiny, "", "evaluate", *cards)
    assert "habana" in process.communicate(timeout=60)[1].splitlines()[-1]
    assert process.returncode == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_passed_on_and_waited_for(number: int, tiny: Path) -> None:
    process = start(tiny, "signal.signal(signal.SIGTERM, save); say('started'); wait()", "plan,write")
    while "started" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.splitlines()[0]) == (75, "saved")


def test_a_second_stop_ends_what_does_not_listen(tiny: Path) -> None:
    process = start(tiny, "signal.signal(signal.SIGTERM, lambda *_: say('deaf')); say('started'); wait()")
    for awaited in ("started", "deaf"):
        while awaited not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75


def test_the_container_of_a_killed_run_is_named_until_it_has_ended(tiny: Path) -> None:
    first = start(tiny, "say('started'); [time.sleep(0.05) for _ in iter(pathlib.Path('records/go').exists, True)]")
    while "started" not in first.stderr.readline():
        assert first.poll() is None
    first.kill()
    first.communicate(timeout=60)
    second = start(tiny, (tiny / "records" / "does").read_text())
    assert "docker rm --force gaudi-bert-tiny-plan-" in second.communicate(timeout=60)[1]
    assert second.returncode == 1
    (tiny / "records" / "go").touch()
    until = time.monotonic() + 60
    while (third := start(tiny, "print('plan train: done')")).wait(60) != 0 and time.monotonic() < until:
        third.communicate()
    assert third.communicate()[0] == "plan train: done\n"
