"""What a pod's log carries: the same files at the other end, and nothing that was cut short."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.runners import send_results
from gaudi_bert.runners.send_results import received_files, sent_lines
from tests.builders.report_work_folder import write_workdir

FILES = {
    "report.html": b"<html>a page</html>" * 1000,
    "train/metrics.jsonl": b'{"update": 1}\n',
    "train/tensorboard/events.1": os.urandom(20_011),
    "train/tensorboard/old/events.2": b"",
    "finetune/metrics.jsonl": b'{"update": 2}\n',
    "finetune/tensorboard/events.3": b"curves",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    others = {"packed/train/packed-00000-00000.tfrecord": b"data", "train/checkpoints/1.safetensors": b"weights"}
    for name, data in {**FILES, **others}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def received(lines: list[str]) -> dict[str, bytes]:
    return {str(name): data for name, data in received_files(lines).items()}


def test_what_is_sent_is_received_among_other_lines(folder: Path) -> None:
    lines = list(sent_lines(folder, Reporter(quiet=True)))
    assert received(["work/demo/report.html: written", *lines, "the end"]) == FILES
    assert max(map(len, lines)) < 16_384, "longer lines are split by the node"


def test_curves_that_are_too_large_are_left_out_and_that_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_results, "MOST_BYTES", 10_000)
    said = io.StringIO()
    lines = list(sent_lines(folder, Reporter(said)))
    assert received(lines).keys() == {"report.html", "train/metrics.jsonl", "finetune/metrics.jsonl"}
    assert "TensorBoard's files are too large for a log, left out" in said.getvalue()
    monkeypatch.setattr(send_results, "MOST_BYTES", 10)
    with pytest.raises(FailedError, match=r"the page has .* too much for a log"):
        list(sent_lines(folder, Reporter(quiet=True)))


@pytest.mark.parametrize("what", ["first", "line", "last", "changed", "no base64"])
def test_a_log_that_is_not_whole_is_refused(what: str, folder: Path) -> None:
    lines = list(sent_lines(folder, Reporter(quiet=True)))
    broken = {
        "first": lines[1:],
        "line": [lines[0], *lines[2:]],
        "last": lines[:-2],
        "changed": [lines[0], lines[1][:-4] + "AAAA", *lines[2:]],
        "no base64": [lines[0], "?" + lines[1][1:], *lines[2:]],
    }
    with pytest.raises(FailedError, match="holds no results" if what == "first" else "did not come whole"):
        received(broken[what])


def test_the_pods_command_writes_the_page_and_sends_it(tmp_path: Path, repository: Path) -> None:
    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gaudi_bert.runners.send_results", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=repository)

    folder = write_workdir(tmp_path / "demo")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert received(done.stdout.splitlines())["report.html"] == (folder / "report.html").read_bytes()
    missing = run(tmp_path / "absent")
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: ")
    assert len(missing.stderr.splitlines()) == 1
