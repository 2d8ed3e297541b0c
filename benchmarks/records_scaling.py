"""Measure the memory, the parallel speed-up and the effect of groups when records are packed. These are parts of
`benchmarks/records.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from measuring import BenchmarkProcess, print_figure
from records_data import (
    DEPTH,
    HISTOGRAM,
    LENGTH,
    QUIET,
    SEED,
    SEQUENCES_PER_FILE,
    draw_lengths,
    write_record_files,
    write_records_and_plan,
)
from watched import MIB, watch

GROUPS_PACKED, GROUP_SEQUENCES = 30, 100_000


def measure_memory(folder: Path, rounds: int) -> None:
    """Measure the peak memory of histogram, plan, write and verify on 4 and on 16 groups, and compare it with an upper
    bound.
    """
    del rounds
    threads = min(2, os.cpu_count() or 1)
    print("\nPeak memory (resident), each stage as its command")
    for count in (4, 16):
        data = folder / f"groups-{count}"
        records, histogram, plan, out = (data / name for name in ("unpacked", "histogram.json", "plan.json", "out"))
        write_record_files(records, count, SEQUENCES_PER_FILE, SEED)
        group = max(path.stat().st_size for path in records.iterdir()) / MIB
        bound = group + 200e6 / MIB + 16 * threads
        grouping = ["--set", f"packing.group_sequences={SEQUENCES_PER_FILE}", "--set", "packing.algorithm=spfhp"]
        shutil.rmtree(out, ignore_errors=True)
        for stage, words in (
            ("histogram", [records, "--out", histogram, "--overwrite"]),
            ("plan", [histogram, "--out", plan, "--overwrite", *grouping]),
            ("write", [records, "--plan", plan, "--out", out]),
            ("verify", [records, out]),
        ):
            seen = watch([sys.executable, "-m", "gaudi_bert", stage, *words])
            if seen.code:
                raise SystemExit(seen.output)
            verdict = "" if seen.peak <= bound else "   OVER"
            print(f"  {count:>2} groups of {group:.0f} MiB, {stage:<9} {seen.peak:6.0f} MiB, bound {bound:.0f}{verdict}")


class Writer:
    """Writes one part of the groups in a process of its own."""

    def __init__(self, records: Path, planned: Path, packed: Path, part: tuple[int, int], workers: int) -> None:
        from gaudi_bert.artefacts.results import StageRun
        from gaudi_bert.tfrecords.write import write_packed_records

        self._write = lambda: write_packed_records(records, planned, packed, StageRun(QUIET, workers=workers, part=part))

    def run(self, times: int) -> None:
        """Write the part a number of times."""
        for _ in range(times):
            self._write()


def measure_processes(folder: Path, rounds: int) -> None:
    """Measure the elapsed time of one process, of two processes (`--shard K/2`), and of one process with two threads."""
    records, planned = write_records_and_plan(folder, group_sequences=SEQUENCES_PER_FILE)
    packed = folder / "packed"
    kinds = {"1 process": (1, 1), "2 processes": (2, 1), "1 process, 2 threads": (1, 2)}
    ways = {
        name: [BenchmarkProcess(Writer, records, planned, packed, (shard, shards), workers) for shard in range(shards)]
        for name, (shards, workers) in kinds.items()
    }
    figures: dict[str, list[float]] = {name: [] for name in ways}
    with ThreadPoolExecutor(2) as pool:
        for turn in range(max(3, rounds) + 1):
            for name, writers in ways.items():
                shutil.rmtree(packed, ignore_errors=True)
                os.sync()
                started = time.perf_counter()
                list(pool.map(lambda writer: writer.measure_run(1), writers))
                if turn:  # the first round is a warm-up, in which processes start and load compiled code
                    figures[name].append(time.perf_counter() - started)
    print("\nWriting 8 groups, from when all processes are ready (numba loaded) to when the last is done")
    for name, values in figures.items():
        print_figure(name, values, "s")
    for name in list(ways)[1:]:
        ratios = [one / other for one, other in zip(figures["1 process"], figures[name], strict=True)]
        print_figure(f"speed-up of {name}", ratios, "times")


def measure_groups(folder: Path, rounds: int) -> None:
    """Compare the efficiency of packing separate groups of 100,000 sequences with that of packing all of Wikipedia."""
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
        print_figure(f"{algorithm}: plan of one group", seconds, "s")
