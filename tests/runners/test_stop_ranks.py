"""Stopping what mpirun started: ranks save and end by themselves, and a lost rank ends the others soon."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gaudi_bert.config import load_pipeline
from gaudi_bert.runners.mpirun import training_command
from gaudi_bert.runners.stop_ranks import named_variables

WRAPPER = [sys.executable, "-m", "gaudi_bert.runners.stop_ranks"]
# Says that it has started, saves when it is told to, and ends as a stopped training does.
SAVES = """
import signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
print("started", flush=True)
time.sleep(60)
"""
DEAF = SAVES.replace("    sys.exit(75)\n", "")


def start(script: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([*WRAPPER, sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_request_lets_ranks_save_and_their_exit_code_is_kept(number: int) -> None:
    process = start(SAVES)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("saved\n", 75)


def test_the_second_request_ends_what_does_not_listen() -> None:
    process = start(DEAF)
    process.terminate()
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


def test_when_the_process_that_started_it_is_killed_ranks_save_and_end() -> None:
    starter = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [sys.executable, "-c", starter, *WRAPPER, sys.executable, "-c", SAVES]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.kill()
    # The pipe ends when the last of its writers has.
    assert process.communicate(timeout=30)[0] == "saved\n"


def test_a_launcher_that_is_not_there_is_one_line() -> None:
    done = subprocess.run([*WRAPPER, "/opt/none/mpirun"], capture_output=True, text=True, check=False)
    said = "error: /opt/none/mpirun: No such file or directory; set resources.mpi_prefix to where Open MPI lies\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.fixture
def ranks() -> list[str]:
    """The command that starts two ranks by the real mpirun; the script of a rank comes after it."""
    if shutil.which("mpirun") is None:
        pytest.skip("OPEN MPI MISSING: what a lost rank and a stop do to the others is not tried")
    settings = load_pipeline(None, ["resources.cards=2"])
    return training_command(settings, [sys.executable, "-c"], over_ssh=False, python=sys.executable)


@pytest.mark.slow
def test_ranks_have_longer_to_save_than_a_lost_rank_is_waited_for(ranks: list[str], tmp_path: Path) -> None:
    rank = f"""
import os, signal, sys, time
def save(number, frame):
    time.sleep(9)
    open(f"{tmp_path}/saved-" + os.environ["OMPI_COMM_WORLD_RANK"], "w").close()
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
open(f"{tmp_path}/started-" + os.environ["OMPI_COMM_WORLD_RANK"], "w").close()
time.sleep(60)
"""
    process = subprocess.Popen([*ranks, rank], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list(tmp_path.glob("started-*"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(timeout=60) == 75
    assert len(list(tmp_path.glob("saved-*"))) == 2


@pytest.mark.slow
def test_a_lost_rank_ends_the_others_within_ten_seconds(ranks: list[str], tmp_path: Path) -> None:
    rank = f"""
import os, signal, time
signal.signal(signal.SIGTERM, lambda number, frame: None)
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    open("{tmp_path}/lost", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(120)
"""
    process = subprocess.Popen([*ranks, rank], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "lost").exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert process.wait(timeout=10 + 5 * (os.getloadavg()[0] > 2)) != 0


def test_variables_that_are_there_are_named_one_by_one() -> None:
    command = ["mpirun", "-x", "PATH", "-x", "AWS_*", "-x", "AZURE_*", "gaudi-bert", "run", "x*"]
    environment = {"AWS_SECRET_ACCESS_KEY": "s", "PATH": "/bin", "AWS_ACCESS_KEY_ID": "k", "MY_AWS_X": ""}
    assert named_variables(command, environment) == [
        *("mpirun", "-x", "PATH", "-x", "AWS_ACCESS_KEY_ID", "-x", "AWS_SECRET_ACCESS_KEY", "gaudi-bert", "run", "x*")
    ]
