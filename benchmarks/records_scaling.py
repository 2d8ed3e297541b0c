"""Memory, processes, groups and compilation of the record engine: parts of `benchmarks/records.py`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measuring import show
from records_data import DEPTH, HISTOGRAM, LENGTH, SEED, SEQUENCES_PER_FILE, draw_lengths, make_files, prepared

STAGE_PROGRAM = str(Path(__file__).with_name("records_stage.py"))
MIB = 2**20
GROUPS_PACKED, GROUP_SEQUENCES = 30, 100_000


def memory(folder: Path, rounds: int) -> None:
    """Peak memory of histogram, write and verify on 16 groups, against the bound."""
    del rounds
    threads = min(2, os.cpu_count() or 1)
    print("\nPeak memory (resident), 16 groups, in a process of its own")
    for groups_count in (4, 16):
        data = folder / f"groups-{groups_count}"
        make_files(data / "unpacked", groups_count, SEQUENCES_PER_FILE, SEED)
        group = max(path.stat().st_size for path in (data / "unpacked").iterdir())
        bound = group / MIB + 200e6 / MIB + 16 * threads
        for name in ("out", "histogram.json", "histogram.settings.json", "plan.json", "plan.settings.json"):
            path = data / name
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        for stage in ("histogram", "plan", "write", "verify"):
            done = subprocess.run(
                [sys.executable, STAGE_PROGRAM, stage, data, str(SEQUENCES_PER_FILE)],
                check=True,
                capture_output=True,
                text=True,
            )
            peak = float(done.stdout.split()[-1])
            if stage != "plan":
                verdict = "" if peak <= bound else "   OVER"
                size = f"{groups_count:>2} groups of {group / MIB:.0f} MiB"
                print(f"  {size}, {stage:<9} {peak:6.0f} MiB, bound {bound:.0f}{verdict}", flush=True)


def processes(folder: Path, rounds: int) -> None:
    """Wall time of one process, of two (`--shard K/2`), and of one with two threads."""
    records, planned = prepared(folder, group_sequences=SEQUENCES_PER_FILE)
    packed = folder / "packed"
    ways = {"1 process": (1, 1), "2 processes": (2, 1), "1 process, 2 threads": (1, 2)}
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(max(3, rounds)):
        for name, (shards, workers) in ways.items():
            shutil.rmtree(packed, ignore_errors=True)
            os.sync()
            figures[name].append(_write_in_processes([records, planned, packed], shards, workers))
    print("\nWriting 8 groups, from when all processes are ready (numba loaded) to when the last is done")
    for name, values in figures.items():
        show(name, values, "s")
    for name in list(ways)[1:]:
        ratios = [one / other for one, other in zip(figures["1 process"], figures[name], strict=True)]
        show(f"speed-up of {name}", ratios, "times")


def _write_in_processes(paths: list[Path], shards: int, workers: int) -> float:
    """Wall seconds of writing, each process its share of the groups."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [
        subprocess.Popen([sys.executable, STAGE_PROGRAM, "write-shard", *paths, f"{shard}/{shards}", str(workers)], **pipes)
        for shard in range(shards)
    ]
    for process in running:
        process.stdout.readline()
    started = time.perf_counter()
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        process.wait()
    return time.perf_counter() - started


def groups(folder: Path, rounds: int) -> None:
    """Efficiency of packing groups of 100,000 within themselves, against packing all of Wikipedia at once."""
    del folder, rounds
    from gaudi_bert.packing.algorithms import pack_histogram
    from gaudi_bert.packing.histogram import Histogram

    everything = Histogram(LENGTH, np.array(json.loads(HISTOGRAM.read_text(encoding="utf-8"))["counts"]))
    drawn = [draw_lengths(GROUP_SEQUENCES, SEED + number) for number in range(GROUPS_PACKED)]
    parts = [Histogram(LENGTH, np.bincount(lengths - 1, minlength=LENGTH)) for lengths in drawn]
    print(f"\n{GROUPS_PACKED} groups of {GROUP_SEQUENCES:,} against all {everything.sequences:,} at once, depth {DEPTH}")
    for algorithm in ("nnls", "optimal"):
        whole = 100 * everything.tokens / (LENGTH * pack_histogram(everything, algorithm, DEPTH).packs)
        packs, seconds = 0, []
        for part in parts:
            started = time.perf_counter()
            packs += pack_histogram(part, algorithm, DEPTH).packs
            seconds.append(time.perf_counter() - started)
        share = 100 * sum(part.tokens for part in parts) / (LENGTH * packs)
        lost = f"{whole - share:.4f} points lost, goal at most 0.1"
        print(f"  {algorithm}: efficiency {whole:.4f} % at once, {share:.4f} % in groups: {lost}")
        show(f"{algorithm}: plan of one group", seconds, "s")


def compile_time(folder: Path, rounds: int) -> None:
    """What numba adds to the very first run on a machine, and to every later one."""
    del rounds
    records, planned = prepared(folder)
    print("\nnumba: from the start of the interpreter to the end of `write` of the 400 MB")
    with tempfile.TemporaryDirectory() as cache:
        for name in ("first run, nothing compiled", "second run, from the cache"):
            shutil.rmtree(folder / "packed", ignore_errors=True)
            command = [sys.executable, STAGE_PROGRAM, "write-shard"]
            started = time.perf_counter()
            subprocess.run(
                [*command, records, planned, folder / "packed", "0/1", "1"],
                input="go\n",
                text=True,
                check=True,
                capture_output=True,
                env={**os.environ, "NUMBA_CACHE_DIR": cache},
            )
            print(f"  {name:<58} {time.perf_counter() - started:9.3g} s")
