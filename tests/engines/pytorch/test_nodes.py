"""Two pods that train together, as processes with the variables of their Job: to the end, killed, stopped, resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from gaudi_bert.common.launch import free_port
from gaudi_bert.training.checkpoint import checkpoint_files, read_checkpoint
from tests.builders import training_data as data
from tests.builders.agree import identical

UPDATES = 8
SETTINGS = {
    "updates": UPDATES,
    "warmup_updates": 1,
    "global_batch_sequences": 16,
    "micro_batch_packs": 2,
    "log_every_updates": 1,
    "save_every_updates": 2,
    "measure_speedup": "false",
    "stall_seconds": 60,
    "meeting_seconds": 60,
    "threads": 1,
}
# A command whose pod is killed, or stopped, when it has done so many updates; 0: never.
POD = """
import os, signal, sys
from gaudi_bert.cli import main
from gaudi_bert.training.objective import TrainingStep
at, number = int(sys.argv[1]), int(sys.argv[2])
right = TrainingStep.run

def run(self, micro_batches, update, learning_rate):
    sums = right(self, micro_batches, update, learning_rate)
    if update == at:
        os.kill(os.getpid(), number)
    return sums

TrainingStep.run = run
main(sys.argv[3:])
"""


def pods(packed: Path, out: Path, ends: tuple[int, int] = (0, 0), at: int = 0, **settings: object) -> list[tuple[int, str]]:
    """How both pods end, and what they print; pod `rank` gets the signal `ends[rank]` after update `at`."""
    model = [word for name, value in data.MODEL.items() for word in ("--set", f"model.{name}={value}")]
    values = {**SETTINGS, **settings}
    loop = [word for name, value in values.items() for word in ("--set", f"training.{name}={value}")]
    command = ["train", "--data", str(packed), "--out", str(out), "--engine", "pytorch", *model, *loop]
    shared = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(free_port()),
    }
    running = []
    for rank in range(2):
        environment = {**os.environ, **shared, "PET_NODE_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        arguments = [str(at if ends[rank] else 0), str(ends[rank]), *command]
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", POD, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    printed = [process.communicate(timeout=240)[0] for process in running]
    return [(process.returncode, text) for process, text in zip(running, printed, strict=True)]


@pytest.mark.slow
def test_pods_that_are_killed_and_stopped_end_with_the_bits_of_those_that_are_not(tmp_path: Path) -> None:
    packed, whole, broken = tmp_path / "packed", tmp_path / "whole", tmp_path / "broken"
    data.write_packed(packed, data.make_packs(29))
    done = pods(packed, whole)
    assert [code for code, _ in done] == [0, 0], done
    assert done[1][1] == "", "the first pod reports for both"

    (lost, text), (killed, _) = pods(packed, broken, ends=(0, 9), at=3)
    assert (lost, killed) == (1, -9), text
    assert "rank 0 aborts: rank 1 (" in text
    assert "is lost" in text
    stopped = pods(packed, broken, ends=(0, 15), at=5)
    assert [code for code, _ in stopped] == [75, 75], stopped
    assert "resuming after update 2" in stopped[0][1]
    assert "stopped on request after update 5 of 8; run it again to resume" in stopped[0][1]
    resumed = pods(packed, broken)
    assert [code for code, _ in resumed] == [0, 0], resumed
    assert "resuming after update 5" in resumed[0][1]

    ends = [read_checkpoint(checkpoint_files(out / "checkpoints")[-1]) for out in (whole, broken)]
    assert [end.update for end in ends] == [UPDATES] * 2
    for part in ("variables", "first_moments", "second_moments"):
        identical(*(getattr(end, part) for end in ends))
    losses = [
        [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()] for out in (whole, broken)
    ]
    identical(*losses)
