"""Data-parallel training on one machine: one process, and two joined by Horovod, each with one thread.

Started by itself, this module is one of the processes; `measure` starts them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from measuring import show

ROWS, UPDATES = 8, 6
MARK = "measured: "


def measure(folder: Path, rounds: int) -> None:
    """Print sequences a second of one process of one thread, two of one thread, and one of two threads."""
    kinds = {
        "1 process, 1 thread": (1, 1),
        "2 processes, 1 thread each": (2, 1),
        "1 process, 2 threads": (1, 2),
    }
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, (processes, threads) in kinds.items():
            rates[name].append(run_processes(folder, processes, threads))
    for name, values in rates.items():
        show(f"sequences/s, {name}", values, "/s")
    one, two, threaded = (np.array(values) for values in rates.values())
    show("2 processes / 1 process (1 thread each)", list(two / one), "", "2 at most")
    show("2 processes / 1 process of 2 threads", list(two / threaded), "")


def run_processes(folder: Path, processes: int, threads: int) -> float:
    """Sequences a second of all processes together."""
    worker = [sys.executable, str(Path(__file__).resolve()), str(folder), str(threads)]
    launcher = Path(sys.executable).with_name("horovodrun")
    command = worker if processes == 1 else [str(launcher), "--gloo", "-np", str(processes), *worker]
    environment = {**os.environ, "PATH": f"{launcher.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    lines = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return float(json.loads(lines[0])["sequences_per_second"])


def work(folder: Path, threads: int) -> None:
    """Be one of the processes."""
    from training_data import SMALL, Trainer

    from gaudi_bert.config.sections import TrainingSettings
    from gaudi_bert.engines.tensorflow.engine import open_device
    from gaudi_bert.engines.tensorflow.horovod import connect
    from gaudi_bert.training.input.source import open_source

    settings = TrainingSettings(device="cpu", threads=threads)
    communicator = connect(settings, {})
    open_device(TrainingSettings(device="cpu"), threads=threads)
    source = open_source(folder / "packed")
    with communicator.watched(settings) as watched:
        trainer = Trainer(SMALL, source, ROWS, communicator=watched)
        trainer.run(3)
        watched.barrier()
        started = time.perf_counter()
        trainer.run(UPDATES)
        watched.barrier()
        seconds = time.perf_counter() - started
    if communicator.is_first:
        sequences = UPDATES * ROWS * communicator.size * source.packing_factor
        print(MARK + json.dumps({"sequences_per_second": sequences / seconds}), flush=True)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
