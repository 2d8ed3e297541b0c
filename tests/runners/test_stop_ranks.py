"""The parent of mpirun on a cluster: it waits for its workers, and starts ranks again that a stopped worker has stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gaudi_bert.runners import stop_ranks

HOSTFILE = "OMPI_MCA_orte_default_hostfile"
# In the position of mpirun: it counts its starts, and ends the first of them as ranks that were stopped.
COUNTS = """
import pathlib, sys
starts = pathlib.Path(sys.argv[1])
starts.write_text((starts.read_text() if starts.exists() else "") + "x")
sys.exit(int(sys.argv[2]) if len(starts.read_text()) == 1 else 0)
"""


@pytest.fixture
def worker() -> Iterator[socket.socket]:
    """A port of this machine that refuses connections until somebody lets it listen."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield server


def over_ssh(port: int, *program: str) -> list[str]:
    """A command of the form of mpirun's: the words after it name the port of the workers' sshd."""
    return [*program, "--mca", "plm_rsh_args", f"-p {port} -o LogLevel=ERROR"]


def write_hosts(folder: Path, *names: str) -> dict[str, str]:
    (folder / "hostfile").write_text("".join(f"{name} slots=2\n" for name in names))
    return {HOSTFILE: str(folder / "hostfile")}


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    wrapper = [sys.executable, "-m", "gaudi_bert.runners.stop_ranks", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(wrapper, env={**os.environ, **environment}, **pipes)  # type: ignore[call-overload,no-any-return]


def test_ranks_are_started_when_all_workers_answer(worker: socket.socket, tmp_path: Path) -> None:
    """As after a suspension, when the launcher is made together with its workers."""
    port = worker.getsockname()[1]
    ranks = over_ssh(port, sys.executable, "-c", "print('training')")
    process = start(ranks, write_hosts(tmp_path, "127.0.0.1", "localhost"))
    assert process.stderr is not None
    waits = f"waiting for 2 workers, at most 600 s: worker 127.0.0.1 does not answer on port {port} (Connection refused)\n"
    assert process.stderr.readline() == waits
    worker.listen()
    assert process.communicate(timeout=60) == ("training\n", "")
    assert process.returncode == 0


def test_a_launcher_that_waits_for_names_can_be_stopped(tmp_path: Path) -> None:
    process = start(over_ssh(2222, "mpirun"), write_hosts(tmp_path, "demo-train-worker-0.invalid"))
    assert process.stderr is not None
    assert "worker demo-train-worker-0.invalid does not answer on port 2222 (" in process.stderr.readline()
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert said == "error: stopped on request before training had started; the same command resumes\n"


def test_workers_that_never_answer_end_the_wait(
    worker: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(*next(iter(write_hosts(tmp_path, "localhost").items())))
    monkeypatch.setattr(stop_ranks, "LONGEST_WAIT_SECONDS", 0.0)
    assert stop_ranks.run_ranks(over_ssh(worker.getsockname()[1], "mpirun")) == 1
    assert "error: worker localhost does not answer on port" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "starts"), [(75, 2), (1, 1), (2, 1), (0, 1)])
def test_ranks_that_a_stopped_worker_has_stopped_are_started_again_and_others_are_not(
    code: int, starts: int, worker: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an end of the launcher, so that the Job counts nothing and waits for no backoff."""
    worker.listen()
    monkeypatch.setenv(*next(iter(write_hosts(tmp_path, "127.0.0.1").items())))
    monkeypatch.setattr(stop_ranks, "REMOVAL_SECONDS", 0.0)
    ranks = [sys.executable, "-c", COUNTS, str(tmp_path / "starts"), str(code)]
    ended = stop_ranks.run_ranks(over_ssh(worker.getsockname()[1], *ranks))
    assert (ended, len((tmp_path / "starts").read_text())) == (0 if starts == 2 else code, starts)


def test_a_launcher_that_is_stopped_itself_starts_nothing_again(worker: socket.socket, tmp_path: Path) -> None:
    worker.listen()
    saves = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75)); print('x', flush=True); "
    ranks = over_ssh(worker.getsockname()[1], sys.executable, "-c", f"{saves}time.sleep(60)")
    process = start(ranks, write_hosts(tmp_path, "127.0.0.1"))
    assert process.stdout is not None
    assert process.stdout.readline() == "x\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 75


def test_mpirun_inside_one_pod_waits_for_nobody(tmp_path: Path) -> None:
    environment = write_hosts(tmp_path, "demo-train-worker-0.invalid")
    assert stop_ranks.workers_of(["mpirun", "-np", "8", "gaudi-bert"], environment) == []
    assert stop_ranks.workers_of(over_ssh(22, "mpirun"), {}) == []
    assert stop_ranks.workers_of(over_ssh(22, "mpirun"), environment) == [("demo-train-worker-0.invalid", 22)]
