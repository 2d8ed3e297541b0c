"""`gaudi-bert finetune` killed with SIGKILL, whatever it is doing: the same command goes on and leaves the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.builders.bert_folder import write_bert
from tests.builders.task_files import write_rows

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = {
    "max_sequence_length": 61,
    "depth": 5,
    "epochs": 3,
    "batch_sequences": 10,
    "learning_rate": 1e-3,
    "log_every_updates": 1,
    "save_every_updates": 1,
    "evaluate_every_updates": 2,
}
# What is there for the first time when it is killed: soon after the start, in the middle, when the model is being written.
MOMENTS = ("checkpoints/update-00000002.safetensors", "checkpoints/update-00000009.safetensors", "model.safetensors")


def command(folder: Path, out: Path) -> list[str]:
    changes = [word for key, value in SETTINGS.items() for word in ("--set", f"finetune.{key}={value}")]
    words = ["--task", "classification", "--data", "train.jsonl", "--evaluation", "dev.jsonl", "--model", "bert"]
    return [sys.executable, "-m", "gaudi_bert", "finetune", *words, "--out", str(out.relative_to(folder)), *changes]


def start(folder: Path, out: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen(
        command(folder, out), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def content(out: Path) -> dict[str, bytes]:
    """All that a run leaves, but for how fast it was."""
    files = [path for path in out.rglob("*") if path.is_file()]
    clocks = {out / "metrics.jsonl", out / "tensorflow.log", *out.glob("tensorboard/*")}
    return {str(path.relative_to(out)): path.read_bytes() for path in files if path not in clocks}


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_leaves_the_same_bytes(tmp_path) -> None:
    write_rows(tmp_path / "train.jsonl", "classification", 53, 1)
    write_rows(tmp_path / "dev.jsonl", "classification", 19, 2)
    write_bert(tmp_path / "bert")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = start(tmp_path, whole)
    said = undisturbed.communicate()[0]
    assert undisturbed.returncode == 0, said
    for moment in MOMENTS:
        process = start(tmp_path, killed)
        while not (killed / moment).exists() and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[0]
        assert process.returncode in (-signal.SIGKILL, 0), said
        assert (killed / moment).exists(), said
    last = start(tmp_path, killed)
    said = last.communicate()[0]
    assert last.returncode == 0, said
    assert content(killed) == content(whole)
    assert {"model.safetensors", "metrics.json", "predictions.jsonl"} <= content(whole).keys()
