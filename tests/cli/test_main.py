"""The command as a user meets it: help at once, exit codes, one line per error."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gaudi_bert import __version__
from gaudi_bert.cli.main import GROUPS, _interrupt_on_signals
from tests.builders.command_line import refusal, run_command, run_python, succeed
from tests.builders.effort import sampled
from tests.builders.packing_case import PackingCase, make_case

COMMANDS = [name for group in GROUPS.values() for name in group]


def test_as_a_module_of_its_own_process() -> None:
    done = subprocess.run([sys.executable, "-m", "gaudi_bert", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == run_command("--version").stdout == f"gaudi-bert {__version__}\n"


DEMO = Path(__file__).resolve().parents[2] / "pipelines" / "demo.yaml"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "absent.json", "--out", "plan.json", "--algorithm", "nnl"], "did you mean nnls?"),
        (["write", ".", "--plan", "p.json", "--out", "o", "--finish", "--shard", "0/2"], "cannot be combined with"),
        (["prepare", "a.txt", "--out", "o", "--vocab", "v", "--train-vocab", "99"], "cannot be combined with"),
        (["inspect", "absent", "--record", "x"], "Invalid value for '--record': must be an integer; see: "),
        (["pack"], "Missing argument 'RECORDS'; see: "),
        (["pack", "records", "--otu", "o"], "No such option: --otu (Possible options: --out, --set); see: "),
        (["pakc"], "No such command 'pakc'. Did you mean 'pack'? see: "),
        (["run", DEMO, "--stages", "pack"], "prepare, histogram, plan"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments, folder=tmp_path)
    assert not list(tmp_path.iterdir()), "nothing may be written for a refused request"


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tmp_path: Path, repository: Path) -> None:
    text = tmp_path / "mine.yaml"
    text.write_text("name: mine\nprepare: {text: [absent/*.txt]}\npacking: {depth: 7}\n")
    asked = ("run", text, "--dry-run", "--stages", "prepare,histogram")
    assert succeed(*asked, folder=tmp_path).stdout.splitlines() == [
        "work folder: work/mine",
        "to do here: prepare, histogram",
        f"MISSING: prepare.text = absent/*.txt: {tmp_path}/absent/*.txt does not exist",
        "settings that differ from the defaults: name = mine, prepare.text = ['absent/*.txt'], packing.depth = 7",
        "every setting: --verbose",
    ]
    made = tmp_path / "work" / "mine" / "examples" / "examples.json"
    made.parent.mkdir(parents=True)
    made.touch()
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "a.txt").touch()
    lines = run_command(*asked, folder=tmp_path).stdout.splitlines()
    assert lines[1:3] == ["already finished, and repeated only with --overwrite: prepare", "to do here: histogram"]
    assert "MISSING" not in "".join(lines)
    assert "depth: 7" in run_command(*asked, "--verbose", folder=tmp_path).stdout
    assert "  prepare: 1 x gaudi-bert-data:" in run_command(*asked, "--on", "kubernetes", folder=tmp_path).stdout
    printed = json.loads(run_command(*asked, "--json", folder=tmp_path).stdout)
    assert printed["settings"]["packing"]["depth"] == 7
    assert [stage["stage"] for stage in printed["outlook"]] == printed["stages"] == ["prepare", "histogram"]


def test_what_one_process_does_is_refused_under_a_launcher(tmp_path: Path) -> None:
    launched = {**os.environ, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    one = "mpirun started 2 processes, but prepare, histogram, plan, write, "
    assert refusal("run", DEMO, folder=tmp_path, environment=launched).startswith(one)
    assert "without mpirun" in refusal("run", DEMO, "--on", "docker", folder=tmp_path, environment=launched)
    shared = ("run", DEMO, "--stages", "histogram", "--shard", "1/2")
    assert "run the stage `prepare` first" in run_command(*shared, folder=tmp_path, environment=launched).stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_process_alone_prints_what_all_did(rank: int, tmp_path: Path) -> None:
    launched = {**os.environ, "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "2"}
    done = succeed("run", DEMO, "--stages", "train", "--dry-run", folder=tmp_path, environment=launched)
    assert bool(done.stdout) == (rank == 0)


# --- how a command ends when it is stopped, when its output has no room, or when a path cannot be


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    return make_case(tmp_path_factory.mktemp("endings"), files=3)


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start a command that hears SIGINT, even where the tests themselves run in the background of a shell."""
    command = [sys.executable, "-c", HEARING, *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


HEARING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from gaudi_bert.cli import main; main()"


@pytest.mark.parametrize(
    ("number", "second_after"),
    sampled([(number, after) for after in (None, 0.0, 0.02, 0.1) for number in (signal.SIGTERM, signal.SIGINT)], 5),
)
def test_signals_end_a_command_with_75_and_the_same_command_goes_on(
    case: PackingCase, tmp_path: Path, number: int, second_after: float | None
) -> None:
    """Also where a second one comes: while the command stops, and while the interpreter ends."""
    records = tmp_path / "records"
    records.mkdir()
    for copy in range(1500):
        os.link(case.records / "part-0", records / f"part-{copy}")
    process = start(tmp_path, "histogram", records, "--out", "histogram.json", "--workers", "2")
    while not (tmp_path / "histogram.settings.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    if second_after is not None:
        time.sleep(second_after)
        process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300)[1] == "stopped; run the same command again to resume\n"
    assert process.returncode == 75
    assert not (tmp_path / "histogram.json").exists()
    if second_after is not None:
        return
    done = succeed("histogram", records, "--out", "histogram.json", "--json", folder=tmp_path)
    assert json.loads(done.stdout)["files"] == 1500


STUCK = """
import importlib, threading
from concurrent.futures import ThreadPoolExecutor
from gaudi_bert.tfrecords import inspect

module = importlib.import_module("gaudi_bert.cli.main")

def wait_forever(*_, **__):
    lock = threading.Lock()
    lock.acquire()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lock.acquire)
        print("started", flush=True)
        future.result()

inspect.inspect_record = wait_forever
module._SECONDS_TO_STOP = 0.5
module.main(["inspect", "part-0"])
"""


def test_a_command_whose_threads_wait_forever_ends_after_a_signal() -> None:
    """A signal may interrupt the main thread just after it has acquired a lock that its threads need to end."""
    command = [sys.executable, "-c", STUCK]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[1] == "stopped\n", "there is nothing to resume in `inspect`"
    assert process.returncode == 75


def test_a_signal_that_follows_at_once_does_not_interrupt_what_the_first_unwinds() -> None:
    with _interrupt_on_signals():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            pytest.fail("it interrupted")


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    """As shells have it for what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _interrupt_on_signals():
            signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pytest.fail("it interrupted")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_lock_that_a_signal_breaks_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Condition.wait` releases a lock that it may not have yet."""

    def interrupted(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    monkeypatch.setattr("gaudi_bert.tfrecords.inspect.inspect_record", interrupted)
    done = run_command("inspect", "part-0")
    assert (done.returncode, done.stderr) == (75, "stopped\n")


@pytest.mark.slow
def test_a_second_ctrl_c_interrupts_a_training_that_saves_with_75(case: PackingCase, tmp_path: Path) -> None:
    settings = ("training.updates=100000", "training.warmup_updates=1", "training.log_every_updates=1")
    process = start(tmp_path, "train", "--data", case.packed, "--out", "run", *(f"--set={each}" for each in settings))
    next(line for line in process.stderr if "update 2/" in line)
    process.send_signal(signal.SIGINT)
    time.sleep(0.02)  # two at once would be one
    process.send_signal(signal.SIGINT)
    assert "stopped" in process.stderr.read().splitlines()[-1]
    assert process.wait() == 75


def test_a_full_standard_output_is_one_line(case: PackingCase, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "gaudi_bert", "histogram", str(case.records), "--out", "histogram.json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"error: standard output: .*No space left on device.*; .*\n", done.stderr)
    assert (tmp_path / "histogram.json").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["histogram", "{records}", "--out", "."], "'.': the path has no"),
        (["pack", "{records}", "--out", "/"], "has no"),
        (["histogram", "{records}", "--out", "x" * 256 + ".json"], "File name too long"),
        (["histogram", "x" * 256, "--out", "a.json"], "File name too long"),
    ],
)
def test_paths_that_cannot_be_are_one_line(case: PackingCase, tmp_path: Path, arguments: list[str], reason: str) -> None:
    line = refusal(*(argument.format(records=case.records) for argument in arguments), folder=tmp_path)
    assert reason in line
    assert len(line) < 500


# --- extras that are not installed


def without(modules: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    missing = f"import sys; sys.modules |= dict.fromkeys({modules.split()!r})"
    return run_python(f"{missing}; from gaudi_bert.cli import main; main(sys.argv[1:])", *arguments)


def test_what_no_extra_brings_is_a_defect_and_keeps_its_traceback() -> None:
    done = without("numpy", "histogram", "records", "--out", "histogram.json")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
