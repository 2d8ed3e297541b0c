"""Several training processes on this machine: their environment, their signals, their exit codes; and a run of two."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from gaudi_bert.common.errors import FailedError, InputError, StoppedError
from gaudi_bert.common.launch import LauncherInfo, detect_launcher, detect_training_node
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline, section_from_mapping
from gaudi_bert.runners import training_processes
from gaudi_bert.runners.training_processes import (
    _assign_cores,
    build_training_command,
    run_training_processes,
)

TWO = section_from_mapping(PipelineSettings, {"resources": {"workers": 2}, "training": {"engine": "pytorch"}}, "test")
RANK = "import os, sys, time; rank = int(os.environ['RANK']); "


def run(code: str, settings: PipelineSettings = TWO) -> None:
    run_training_processes(settings, "train", [sys.executable, "-c", RANK + code])


@pytest.fixture(autouse=True)
def _short_grace_and_horovod(monkeypatch) -> None:
    """What is told to processes depends on which engines are installed."""
    monkeypatch.setattr(training_processes, "_GRACE_SECONDS", 1.0)
    monkeypatch.setattr(training_processes, "find_spec", lambda name: True)


@pytest.mark.parametrize(("engine", "has_horovod"), [("pytorch", True), ("auto", True), ("auto", False)])
def test_each_process_is_told_its_number_and_where_the_others_are(
    engine: str, has_horovod: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun tells it; who chooses the engine in the process itself gets the variables of both, where both are."""
    if engine == "auto" and has_horovod:
        pytest.importorskip("horovod.runner")
    monkeypatch.setattr(training_processes, "find_spec", lambda name: name != "horovod" or has_horovod or None)
    settings = section_from_mapping(PipelineSettings, {"resources": {"workers": 3}, "training": {"engine": engine}}, "test")
    code = f"import json, os; json.dump(dict(os.environ), open('{tmp_path}/' + os.environ['RANK'], 'w'))"
    run_training_processes(settings, "train", [sys.executable, "-c", code])
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    for rank, each in enumerate(found):
        assert (each["LOCAL_RANK"], each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) == (str(rank), "3", "3")
        assert (each["MASTER_ADDR"], each["MASTER_PORT"]) == ("127.0.0.1", found[0]["MASTER_PORT"])
        if engine == "auto" and has_horovod:
            assert (each["HOROVOD_RANK"], each["HOROVOD_LOCAL_RANK"], each["HOROVOD_SIZE"]) == (str(rank), str(rank), "3")
            assert each["HOROVOD_GLOO_RENDEZVOUS_PORT"] == found[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        else:
            assert "HOROVOD_RANK" not in each


NODE = {
    "PET_NODE_RANK": "1",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "2",
    "PET_MASTER_ADDR": "first",
    "PET_MASTER_PORT": "99",
}


def test_a_pod_starts_the_ranks_of_its_cards_whatever_launchers_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in NODE.items():
        monkeypatch.setenv(name, value)
    settings = section_from_mapping(PipelineSettings, {"resources": {"workers": 3, "cards": 2}}, "test")
    code = f"import json, os; json.dump(dict(os.environ), open('{tmp_path}/' + os.environ['RANK'], 'w'))"
    run_training_processes(settings, "train", [sys.executable, "-c", code])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    for local_rank, rank in enumerate(("2", "3")):
        told = json.loads((tmp_path / rank).read_text())
        wanted = {"RANK": rank, "WORLD_SIZE": "6", "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "2"}
        wanted |= {"MASTER_ADDR": "first", "MASTER_PORT": "99"}
        assert told.items() >= wanted.items()
        assert detect_launcher(told) == LauncherInfo("torchrun", int(rank), 6), "its own number counts, not the pod's"
    with pytest.raises(FailedError, match=r"train: rank 3 of 6 \(process \d+\) was killed by SIGKILL"):
        run_training_processes(
            settings,
            "train",
            [sys.executable, "-c", "import os; os.environ['LOCAL_RANK'] == '1' and os.kill(os.getpid(), 9)"],
        )


def test_a_pod_of_one_process_is_a_rank_itself() -> None:
    assert detect_launcher({**NODE, "PET_NPROC_PER_NODE": "1"}) == LauncherInfo("Kubernetes", 1, 3)
    assert detect_launcher(NODE) is None, "it starts two"
    assert detect_training_node(NODE) is not None
    assert detect_training_node({**NODE, "RANK": "0"}) is None, "it is a rank of the node"
    assert detect_training_node({name: value for name, value in NODE.items() if name != "PET_NODE_RANK"}) is None
    with pytest.raises(
        InputError, match="PET_NODE_RANK=3, PET_NNODES=3, PET_NPROC_PER_NODE=2, PET_MASTER_PORT=99: must be "
    ):
        detect_training_node({**NODE, "PET_NODE_RANK": "3"})


def test_processes_are_bound_to_cores_of_their_own_where_the_pipeline_says_so(tmp_path: Path) -> None:
    """Where there are too few, one line says so."""
    allowed = os.sched_getaffinity(0)
    resources = {"workers": 1 if len(allowed) < 2 else 2, "cores_per_process": 1}
    settings = section_from_mapping(PipelineSettings, {"resources": resources, "training": {"engine": "pytorch"}}, "test")
    code = f"""
import os, time
time.sleep(0.3)
open('{tmp_path}/' + os.environ['RANK'], 'w').write(str(os.sched_getaffinity(0)))
"""
    cores = _assign_cores(settings.resources, resources["workers"])
    assert all(own <= allowed for own in cores)
    run_training_processes(settings, "train", [sys.executable, "-c", code])
    assert [(tmp_path / str(rank)).read_text() for rank in range(len(cores))] == [str(own) for own in cores]
    many = section_from_mapping(PipelineSettings, {"resources": {"workers": 2, "cores_per_process": 10_000}}, "test")
    with pytest.raises(
        InputError, match=r"resources.cores_per_process = 10000: 2 processes need 20000 cores, but this process"
    ):
        run(RANK, many)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        *(("sys.exit(2)", InputError), ("sys.exit(1)", FailedError), ("os.abort()", FailedError)),
        *(("sys.exit(75)", StoppedError), ("sys.exit(75 if rank else 1)", FailedError), ("sys.exit(2 - rank)", InputError)),
    ],
)
def test_the_exit_code_says_what_kind_of_end_it_was(code: str, error: type[Exception]) -> None:
    """A run is stopped if all are."""
    with pytest.raises(error, match="train: ") as caught:
        run(code)
    assert type(caught.value) is error


def test_when_one_fails_the_others_are_not_waited_for(capfd) -> None:
    started = time.monotonic()
    with pytest.raises(InputError, match="one of 2 processes ended with exit code 2; see its error above"):
        run("print('the reason', file=sys.stderr) if rank else time.sleep(600); sys.exit(2)")
    assert time.monotonic() - started < 60
    assert "the reason" in capfd.readouterr().err


def test_a_process_that_is_killed_is_named_because_it_cannot_say_so_itself() -> None:
    """Also after the last update, when the others have ended well."""
    killed = r"rank 1 of 2 \(process \d+\) was killed by SIGKILL"
    with pytest.raises(FailedError, match=f"train: {killed}; .* run the same command again to resume"):
        run("os.kill(os.getpid(), 9) if rank else sys.exit(0)")
    with pytest.raises(FailedError, match=f"one of 2 processes ended with exit code 1; see its error above; {killed}"):
        run("os.kill(os.getpid(), 9) if rank else sys.exit(1)")


def test_a_signal_goes_to_all_and_they_are_waited_for(tmp_path) -> None:
    code = (
        f"import signal; from pathlib import Path; asked = []; signal.signal(signal.SIGTERM, lambda *_: asked.append(1)); "
        f"Path(r'{tmp_path}', str(rank)).touch()\n"
        "while not asked: time.sleep(0.05)\n"
        "time.sleep(0.5); sys.exit(75)"
    )

    def ask() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=ask).start()
    with pytest.raises(StoppedError, match="run the same command again to resume"):
        run(code)
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_horovod_the_remedy_is_named(monkeypatch) -> None:
    monkeypatch.setattr(training_processes, "find_spec", lambda name: None)
    said = "2 TensorFlow processes need Horovod, which is not installed; run `make setup-horovod`, or set training.engine to"
    with pytest.raises(InputError, match=said):
        run("pass", section_from_mapping(PipelineSettings, {"resources": {"workers": 2}}, "test"))
    values = {"resources": {"workers": 2}, "training": {"engine": "tensorflow"}}
    by_name = section_from_mapping(PipelineSettings, values, "test")
    monkeypatch.setattr(training_processes, "find_spec", lambda name: None if name == "horovod" else True)
    with pytest.raises(InputError, match=said):
        run("pass", by_name)


def test_with_cards_mpirun_starts_them(monkeypatch, tmp_path) -> None:
    program = tmp_path / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n')
    program.chmod(0o755)
    settings = section_from_mapping(PipelineSettings, {"resources": {"cards": 8, "mpi_prefix": str(tmp_path)}}, "test")
    run_training_processes(settings, "train", ["gaudi-bert", "train"])
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[arguments.index("-np") + 1] == "8"
    assert arguments[-2:] == ["gaudi-bert", "train"]


# How training processes are started, and what their containers ask for.

STAGE = ["gaudi-bert", "run", "p.yaml", "--stages", "train"]


def test_one_process_needs_no_launcher() -> None:
    assert build_training_command(load_pipeline(None), STAGE, over_ssh=False) == STAGE


def test_one_server_starts_a_process_a_card() -> None:
    settings = load_pipeline(None, ["resources.cards=8", "resources.cores_per_process=6", "resources.mpi_prefix=/opt/mpi"])
    command = build_training_command(settings, STAGE, over_ssh=False)
    assert command[:3] == ["python3", "-m", "gaudi_bert.runners.stop_ranks"]
    assert command[3:15] == [
        *("/opt/mpi/bin/mpirun", "--allow-run-as-root", "--tag-output", "-np", "8"),
        *("--mca", "odls_base_sigkill_timeout", "4"),
        *("--bind-to", "core", "--map-by", "socket:PE=6"),
    ]
    assert command[15:] == ["--host", "localhost:8", *STAGE]
    assert "-x" not in command
