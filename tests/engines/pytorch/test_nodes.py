"""Two pods that train together, with the variables, names and network of their Job: lost, stopped, cut off, resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")

from gaudi_bert.training.checkpoint import checkpoint_files, read_checkpoint
from tests.builders import training_data as data
from tests.builders.agree import identical
from tests.builders.machines import pod_network

UPDATES = 8
SETTINGS = {
    "updates": UPDATES,
    "warmup_updates": 1,
    "global_batch_sequences": 16,
    "micro_batch_packs": 2,
    "log_every_updates": 1,
    "save_every_updates": 2,
    "measure_speedup": "false",
    "stall_seconds": 10,
    "meeting_seconds": 60,
    "threads": 1,
}
# A command whose pod gets a signal, or loses its network, when it meets the others or has done so many updates.
POD = """
import os, signal, subprocess, sys
from gaudi_bert.cli import main
from gaudi_bert.engines.pytorch import meeting
from gaudi_bert.training.objective import TrainingStep
end, at = sys.argv[1:3]
introduce, step = meeting._introduce, TrainingStep.run

def end_now():
    if end == "no network":
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    else:
        os.kill(os.getpid(), signal.Signals[end])

def meet(*arguments):
    if at == "meeting":
        end_now()
    introduce(*arguments)

def run(self, micro_batches, update, learning_rate):
    sums = step(self, micro_batches, update, learning_rate)
    if at == str(update):
        end_now()
    return sums

meeting._introduce, TrainingStep.run = meet, run
main(sys.argv[3:])
"""
Ends = list[tuple[int, str]]


@pytest.fixture
def pods() -> Iterator[list[list[str]]]:
    with pod_network("train", 2) as commands:
        yield commands


@dataclass
class Run:
    """A run by two pods: how each ends, and what it prints."""

    pods: list[list[str]]
    packed: Path
    out: Path

    def __call__(
        self, end: str = "", pod: int = 1, at: str = "", started: tuple[int, ...] = (0, 1), **changes: object
    ) -> Ends:
        """One pod meets its `end`; the codes and the output of those that are started."""
        model = [f"model.{name}={value}" for name, value in data.MODEL.items()]
        values = [f"training.{name}={value}" for name, value in {**SETTINGS, **changes}.items()]
        command = ["train", "--data", str(self.packed), "--out", str(self.out), "--engine", "pytorch"]
        command += [word for value in [*model, *values] for word in ("--set", value)]
        shared = {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": "train-0.train",
            "PET_MASTER_PORT": "29500",
        }
        running = []
        for rank in started:
            words = [*self.pods[rank], sys.executable, "-c", POD, end, at if rank == pod else "never", *command]
            own = {**os.environ, **shared, "PET_NODE_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            pipe = subprocess.PIPE
            running.append(subprocess.Popen(words, env=own, stdout=pipe, stderr=subprocess.STDOUT, text=True))
        printed = [process.communicate(timeout=240)[0] for process in running]
        return [(process.returncode, text) for process, text in zip(running, printed, strict=True)]


def test_x(tmp_path, pods):
    packed = tmp_path / "packed"
    data.write_packed(packed, data.make_packs(29))
    run = Run(pods, packed, tmp_path / "broken")

    def show(*a, **k):
        t = time.time()
        r = run(*a, **k)
        print("=====", a, k, round(time.time() - t, 1))
        for c, x in r:
            print("--", c)
            print(x)

    show("SIGKILL", 0, "meeting")
    show("SIGTERM", 0, "meeting")
    show("SIGTERM", 1, "meeting")
    show("SIGKILL", 1, "meeting", meeting_seconds=10)
    show("no network", 0, "meeting", meeting_seconds=10)
    show("no network", 1, "meeting", meeting_seconds=10)
    show("SIGKILL", 1, "3")
    show("SIGTERM", 1, "5")
    show("no network", 1, "7")
    show("no network", 0, "7")
    show()
    show(started=(1,))
    show(started=(0,))
    run.out = tmp_path / "whole"
    show()
