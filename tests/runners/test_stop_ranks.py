"""The parent of mpirun on a cluster: it waits for its workers, stops ranks, and starts them again; also over real sshd."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners import stop_ranks
from gaudi_bert.runners.stop_ranks import (
    _build_rendezvous_variables,
    _expand_mpirun_environment_patterns,
    _run_mpirun,
    _Worker,
)
from gaudi_bert.runners.training_processes import build_training_command
from tests.builders.ssh_hosts import WORKERS, made_hosts, wait_until

WRAPPER = [sys.executable, "-m", "gaudi_bert.runners.stop_ranks"]
HOSTFILE = "OMPI_MCA_orte_default_hostfile"
# How a stand-in waits for a signal, for a minute at most: one that comes between two steps of the interpreter is handled
# after the sleep that follows, so no sleep may be long.
WAIT = "for _ in range(1200): time.sleep(0.05)\n"
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
    pipe, variables = subprocess.PIPE, {**os.environ, **environment}
    return subprocess.Popen([*WRAPPER, *command], env=variables, stdout=pipe, stderr=pipe, text=True)


def start_ranks(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Return when they have said so."""
    process = start(command, environment)
    assert process.stdout.readline() == "started\n"
    return process


def test_a_launcher_that_waits_for_names_can_be_stopped(tmp_path: Path) -> None:
    process = start(over_ssh(2222, "mpirun"), write_hosts(tmp_path, "demo-train-worker-0.invalid"))
    assert "worker demo-train-worker-0.invalid does not answer on port 2222 (" in process.stderr.readline()
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert said == "error: stopped on request before training had started; run the same command again to resume\n"


def test_workers_that_never_answer_end_the_wait(
    worker: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(*next(iter(write_hosts(tmp_path, "localhost").items())))
    monkeypatch.setattr(stop_ranks, "_LONGEST_WAIT_SECONDS", 0.0)
    assert _run_mpirun(over_ssh(worker.getsockname()[1], "mpirun")) == 1
    assert "error: worker localhost does not answer on port" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "starts"), [(75, 2), (1, 1), (2, 1), (0, 1)])
def test_only_ranks_of_a_stopped_worker_are_started_again(
    code: int, starts: int, worker: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an end of the launcher, so that the Job counts nothing and waits for no backoff."""
    worker.listen()
    monkeypatch.setenv(*next(iter(write_hosts(tmp_path, "127.0.0.1").items())))
    monkeypatch.setattr(stop_ranks, "_REMOVAL_SECONDS", 0.0)
    ranks = [sys.executable, "-c", COUNTS, str(tmp_path / "starts"), str(code)]
    ended = _run_mpirun(over_ssh(worker.getsockname()[1], *ranks))
    assert (ended, len((tmp_path / "starts").read_text())) == (0 if starts == 2 else code, starts)


def test_a_launcher_that_is_stopped_itself_starts_nothing_again(worker: socket.socket, tmp_path: Path) -> None:
    worker.listen()
    ranks = over_ssh(worker.getsockname()[1], sys.executable, "-c", SAVES)
    process = start_ranks(ranks, write_hosts(tmp_path, "127.0.0.1"))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("saved\n", "")
    assert process.returncode == 75


# --- stopping what mpirun started: ranks save and end by themselves, and a lost rank ends the others soon

# Says that it has started, saves when it is told to, and ends as a stopped training does. The handler does not print: the
# signal can come before the `print` that it answers has returned, and Python's files are not reentrant.
SAVES = f"""
import os, signal, sys, time
def save(number, frame):
    os.write(1, b"saved\\n")
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
os.write(1, b"started\\n")
{WAIT}"""
DEAF = SAVES.replace("    sys.exit(75)\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_request_lets_ranks_save_and_their_exit_code_is_kept(number: int) -> None:
    process = start_ranks([sys.executable, "-c", SAVES], {})
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("saved\n", 75)


def test_the_second_request_ends_what_does_not_listen() -> None:
    process = start_ranks([sys.executable, "-c", DEAF], {})
    process.terminate()
    assert process.stdout.readline() == "saved\n"
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("is_ready", [True, False])
def test_requests_that_come_while_mpirun_starts_reach_it(
    requests: int, is_ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the parent knows of a process at all: as one that came later, or as one before training had started."""
    starts, ready = subprocess.Popen, tmp_path / "ready"

    def start_and_be_stopped(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = starts(command, **options)
        while is_ready and not ready.exists():
            time.sleep(0.01)
        for _ in range(requests):
            os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(stop_ranks.subprocess, "Popen", start_and_be_stopped)
    script = (SAVES if requests == 1 else DEAF) + f"open({str(ready)!r}, 'w').close()\n{WAIT}"
    script = script.replace(WAIT, "", 1) if is_ready else f"import time\ntime.sleep(0.5)\n{script}"
    code = _run_mpirun([sys.executable, "-c", script])
    output, said = capfd.readouterr()
    if is_ready:
        assert (code, said) == ((75, "") if requests == 1 else (128 + signal.SIGTERM, ""))
        assert requests == 2 or output == "started\nsaved\n"
    else:
        assert (code, output) == (75, "")
        assert said == "error: stopped on request before training had started; run the same command again to resume\n"


def test_when_the_process_that_started_it_is_killed_ranks_save_and_end() -> None:
    starter = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [sys.executable, "-c", starter, *WRAPPER, sys.executable, "-c", SAVES]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.kill()
    # The pipe ends when the last of its writers has.
    assert process.communicate(timeout=30)[0] == "saved\n"


def test_a_launcher_that_is_not_there_is_one_line() -> None:
    done = subprocess.run([*WRAPPER, "/opt/none/mpirun"], capture_output=True, text=True, check=False)
    reason = "/opt/none/mpirun: No such file or directory"
    said = f"error: {reason}; set resources.mpi_prefix to the installation folder of Open MPI\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.fixture
def ranks() -> list[str]:
    """The command that starts two ranks by the real mpirun; the script of a rank comes after it."""
    if shutil.which("mpirun") is None:
        pytest.skip("OPEN MPI MISSING: what a lost rank and a stop do to the others is not tried")
    settings = load_pipeline(None, ["resources.cards=2"])
    return build_training_command(settings, [sys.executable, "-c"], over_ssh=False, python_program=sys.executable)


def test_ranks_have_longer_to_save_than_a_lost_rank_is_waited_for(ranks: list[str], tmp_path: Path) -> None:
    rank = f"""
import os, signal, sys, time
def save(number, frame):
    for _ in range(60): time.sleep(0.05)
    open(f"{tmp_path}/saved-" + os.environ["OMPI_COMM_WORLD_RANK"], "w").close()
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
open(f"{tmp_path}/started-" + os.environ["OMPI_COMM_WORLD_RANK"], "w").close()
{WAIT}"""
    timeout = ranks.index("odls_base_sigkill_timeout") + 1
    ranks[timeout] = "1"  # as 9 s of saving are to 4
    process = subprocess.Popen([*ranks, rank], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list(tmp_path.glob("started-*"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(timeout=60) == 75
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_a_lost_rank_ends_the_others_within_ten_seconds(ranks: list[str], tmp_path: Path) -> None:
    rank = f"""
import os, signal, time
signal.signal(signal.SIGTERM, lambda number, frame: None)
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    open("{tmp_path}/lost", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
{WAIT}"""
    process = subprocess.Popen([*ranks, rank], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "lost").exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert process.wait(timeout=10 + 5 * (os.getloadavg()[0] > 2)) != 0


def test_variables_that_are_there_are_named_one_by_one() -> None:
    command = ["mpirun", "-x", "PATH", "-x", "HABANA_LOGS", "-x", "AWS_*", "-x", "AZURE_*", "gaudi-bert", "run", "x*"]
    environment = {"AWS_SECRET_ACCESS_KEY": "s", "PATH": "/bin", "AWS_ACCESS_KEY_ID": "k", "MY_AWS_X": ""}
    assert _expand_mpirun_environment_patterns(command, environment) == [
        *("mpirun", "-x", "PATH", "-x", "AWS_ACCESS_KEY_ID", "-x", "AWS_SECRET_ACCESS_KEY", "gaudi-bert", "run", "x*")
    ]


def test_ranks_of_pytorch_meet_at_the_first_worker_or_on_this_machine(ranks: list[str], tmp_path: Path) -> None:
    """By the real mpirun, which hands on what its parent adds."""
    workers = [_Worker(f"demo-train-worker-{number}.demo-train.ns.svc", 22) for number in range(2)]
    first = _build_rendezvous_variables(workers, {})
    assert first == {"MASTER_ADDR": "demo-train-worker-0.demo-train.ns.svc", "MASTER_PORT": "29500"}
    assert _build_rendezvous_variables([_Worker("a", 22)], {"MASTER_PORT": "4711"}) == {
        "MASTER_ADDR": "a",
        "MASTER_PORT": "4711",
    }
    code = """
import os
with open(os.environ["OUT"] + os.environ["OMPI_COMM_WORLD_RANK"], "w") as file:
    file.write(os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"])
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    subprocess.run([*ranks, code], check=True, env={**environment, "OUT": f"{tmp_path}/"})
    told = {(tmp_path / rank).read_text() for rank in ("0", "1")}
    assert len(told) == 1
    assert re.fullmatch(r"127\.0\.0\.1:\d{4,5}", told.pop())


# --- the MPIJob's own commands as a user without rights: sshd on two hosts, and mpirun that starts ranks on them


# It saves when it is asked to, and is done when it is started the second time.
RANK = """
trap 'echo saved; exit 75' USR1 TERM
echo x >> {folder}/$(hostname)/starts
[ $(wc -l < {folder}/$(hostname)/starts) = 2 ] && echo done && exit 0
echo training on $(hostname)
while :; do sleep 0.1; done
"""


def test_a_launcher_outlives_the_end_of_a_worker_and_waits_for_names_that_come_later() -> None:
    """A suspended MPIJob that is resumed, and then a drained node: the launcher that was started first ends well."""
    root = str(Path(__file__).resolve().parents[2])
    with made_hosts() as hosts:
        names, log = (hosts.folder / "hosts").read_text(), hosts.folder / "launcher.log"
        (hosts.folder / "hosts").write_text("127.0.0.1 localhost\n")
        command = hosts.mpirun(["sh", "-c", RANK.format(folder=hosts.folder)])
        with log.open("w") as output:
            environment = {**os.environ, "PYTHONPATH": root}
            launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        wait_until("waiting for 2 workers, at most 600 s: worker worker-1 does not answer", log, [launcher])
        (hosts.folder / "hosts").write_text(names)
        with hosts.workers() as servers:
            for host in WORKERS:
                wait_until(f"training on {host}", log, [*servers, launcher])
            hosts.stop_worker(servers[1], PYTHONPATH=root, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            servers[1].wait(30)
            wait_until("a worker was stopped after its ranks had saved", log, [servers[0], launcher])
            servers.append(hosts.start_worker(WORKERS[1]))
            assert launcher.wait(120) == 0, log.read_text()
