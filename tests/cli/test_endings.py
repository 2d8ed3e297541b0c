"""How a command ends when it is stopped, when its output has no room, or when a path cannot be: in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.builders.command_line import run_command
from tests.builders.packing_case import PackingCase, make_case

COMMAND = [sys.executable, "-m", "gaudi_bert"]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    return make_case(tmp_path_factory.mktemp("endings"), files=3)


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start a command that hears SIGINT, even where the tests themselves run in the background of a shell."""
    command = [sys.executable, "-c", HEARING, *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


HEARING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from gaudi_bert.cli import main; main()"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_both_signals_end_a_command_with_75_and_the_same_command_goes_on(
    case: PackingCase, tmp_path: Path, number: int
) -> None:
    records = tmp_path / "records"
    records.mkdir()
    for copy in range(1500):
        os.link(case.records / "part-0", records / f"part-{copy}")
    process = start(tmp_path, "histogram", records, "--out", "histogram.json", "--workers", "2")
    while not (tmp_path / "histogram.settings.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.stderr is not None
    assert process.stderr.read() == "error: stopped; the same command goes on from what is finished\n"
    assert process.wait() == 75
    assert not (tmp_path / "histogram.json").exists()
    done = run_command("histogram", records, "--out", "histogram.json", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == 1500


def test_a_full_standard_output_is_one_line(case: PackingCase, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "histogram", str(case.records), "--out", "histogram.json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "error: standard output: No space left on device; send it where there is room\n"
    assert (tmp_path / "histogram.json").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["histogram", "{records}", "--out", "."], "'.': has no name of its own"),
        (["histogram", "{records}", "--out", "/", "--overwrite"], "'/': has no name of its own"),
        (["histogram", "{records}", "--out", ""], "has no name of its own"),
        (["plan", "{histogram}", "--out", "."], "has no name of its own"),
        (["pack", "{records}", "--out", "."], "has no name of its own"),
        (["pack", "{records}", "--out", "/"], "has no name of its own"),
        (["histogram", "{records}", "--out", "x" * 256 + ".json"], "File name too long"),
        (["pack", "{records}", "--out", "x" * 256], "File name too long"),
        (["histogram", "x" * 256, "--out", "a.json"], "File name too long"),
        (["plan", "x" * 256, "--out", "a.json"], "File name too long"),
        (["verify", "{records}", "x" * 256], "File name too long"),
        (["run", "x" * 256], "File name too long"),
    ],
)
def test_paths_that_cannot_be_are_one_line(case: PackingCase, tmp_path: Path, arguments: list[str], reason: str) -> None:
    places = {"records": str(case.records), "histogram": str(case.plan.with_name("histogram.json"))}
    done = run_command(*(argument.format(**places) for argument in arguments), folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 500
