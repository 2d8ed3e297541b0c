"""The edges of what can be packed: very long packs, with very few lengths or very many, at a glance.

    python benchmarks/packing_edges.py                     all cases (an hour at most)
    python benchmarks/packing_edges.py zipf two-lengths    cases whose name contains one of these words

Each case runs in a process of its own, which may take `MOST_SECONDS` of CPU and `MOST_BYTES` of addresses. The contract is
60 s of CPU and 2 GiB resident for any histogram. One of more different lengths, or of strategies that list more sequences,
than a plan may have is refused.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from packing_tables import print_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.histogram import MOST_SLOTS, Histogram

MOST_SECONDS, MOST_BYTES = 150, 6 * 2**30
LONG = 1 << 17


def _given(max_length: int, counts: dict[int, int]) -> np.ndarray:
    """These counts of these lengths: int64 [L]."""
    result = np.zeros(max_length, dtype=np.int64)
    for length, count in counts.items():
        result[length - 1] = count
    return result


def _drawn(max_length: int, lengths: np.ndarray, times: int = 1) -> np.ndarray:
    clipped = np.clip(lengths, 1, max_length).astype(np.int64)
    return np.bincount(clipped, minlength=max_length + 1)[1:].astype(np.int64) * times


def _zipf(max_length: int, sequences: int, exponent: float = 1.5) -> np.ndarray:
    drawn = min(sequences, 10**6)
    lengths = np.minimum(np.random.default_rng(0).zipf(exponent, drawn).astype(np.float64), max_length)
    return _drawn(max_length, lengths, sequences // drawn)


def _bimodal(max_length: int, sequences: int) -> np.ndarray:
    generator, drawn = np.random.default_rng(0), min(sequences, 10**6)
    short = generator.normal(max_length / 20, max_length / 60, drawn)
    long = generator.normal(0.55 * max_length, max_length / 8, drawn)
    return _drawn(max_length, np.where(generator.random(drawn) < 0.6, short, long), sequences // drawn)


def _between_quarter_and_half(max_length: int, lengths: int, most: int) -> np.ndarray:
    generator, counts = np.random.default_rng(0), np.zeros(max_length, dtype=np.int64)
    chosen = generator.choice(max_length // 4, lengths, replace=False) + max_length // 4
    counts[chosen] = generator.integers(1, most, lengths, endpoint=True)
    return counts


def _scattered(max_length: int, lengths: int, count: int) -> np.ndarray:
    counts = np.zeros(max_length, dtype=np.int64)
    counts[np.random.default_rng(0).choice(max_length, lengths, replace=False)] = count
    return counts


CASES: dict[str, tuple[Callable[[], np.ndarray], int | str]] = {
    "all distinct, 2^24": (lambda: np.ones(MOST_SLOTS, dtype=np.int64), "max"),
    "all distinct, 2^24, depth 3": (lambda: np.ones(MOST_SLOTS, dtype=np.int64), 3),
    "three of each, 2^24": (lambda: np.full(MOST_SLOTS, 3, dtype=np.int64), "max"),
    "a million lengths, 2^24": (lambda: _scattered(MOST_SLOTS, 10**6, 1), "max"),
    "a million lengths, 2^24, depth 3": (lambda: _scattered(MOST_SLOTS, 10**6, 1), 3),
    "a million lengths, three of each, 2^24": (lambda: _scattered(MOST_SLOTS, 10**6, 3), "max"),
    "100,000 lengths, 2^24": (lambda: _scattered(MOST_SLOTS, 10**5, 3), 4),
    **{
        f"{name}, {length:,}, depth {depth}": (lambda counts=counts, length=length: _given(length, counts), depth)
        for length in (1 << 16, LONG, MOST_SLOTS)
        for name, counts in (
            ("two-lengths L/2 and L/2 + 1", {length // 2: 1000, length // 2 + 1: 1000}),
            ("two-lengths 1 and L", {1: 3_000_000, length: 100}),
            ("two-lengths 0.3 L and 0.36 L", {length * 3 // 10: 7001, length * 36 // 100: 5003}),
            ("three lengths", {length * 7 // 100: 900, length * 31 // 100: 7001, length * 45 // 100: 5003}),
            (
                "four lengths",
                {length * 6 // 1000: 9007, length * 13 // 100: 900, length * 27 // 100: 7001, length * 55 // 100: 5003},
            ),
        )
        for depth in (3, 7, "max")
    },
    **{
        f"zipf, a million, {length:,}, depth {depth}": (lambda length=length: _zipf(length, 10**6), depth)
        for length in (4096, 8192, LONG)
        for depth in (3, 8)
    },
    "zipf, 10^9, 2^24": (lambda: _zipf(MOST_SLOTS, 10**9), "max"),
    "zipf, 10^9, 2^24, depth 8": (lambda: _zipf(MOST_SLOTS, 10**9), 8),
    "bimodal, 10^9, 2^24": (lambda: _bimodal(MOST_SLOTS, 10**9), "max"),
    "bimodal, 10^9, 2^24, depth 3": (lambda: _bimodal(MOST_SLOTS, 10**9), 3),
    "1,000 lengths in L/4 .. L/2, 2^24": (lambda: _between_quarter_and_half(MOST_SLOTS, 1000, 1000), "max"),
    "1,000 lengths in L/4 .. L/2, one of each, 2^24": (lambda: _between_quarter_and_half(MOST_SLOTS, 1000, 1), "max"),
}
"""By name the histogram and the depth."""


def run_case(name: str, algorithm: str) -> None:
    """Pack one case and print its row; for a process of its own."""
    make, depth = CASES[name]
    started = time.process_time()
    counts = make()
    histogram = Histogram(len(counts), counts)
    packing = pack_histogram(histogram, algorithm, depth)
    used = resource.getrusage(resource.RUSAGE_SELF)
    above = 100 * packing.gap / max(packing.lower_bound, 1)
    seconds = time.process_time() - started
    print(f"{packing.packs}\t{packing.lower_bound}\t{above:.4f}\t{seconds:.1f}\t{used.ru_maxrss / 2**20:.2f}")


def _row(name: str, algorithm: str) -> list[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))

    command = [sys.executable, __file__, "--one", name, algorithm]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    if done.returncode:
        error = done.stderr.strip().splitlines()[-1][:60] if done.returncode == 1 else f"signal {-done.returncode}"
        return [name, algorithm, error, "", "", "", ""]
    return [name, algorithm, *done.stdout.strip().split("\t")]


def main() -> None:
    """All cases that were named, or the one of this process."""
    if sys.argv[1:2] == ["--one"]:
        run_case(*sys.argv[2:])
        return
    algorithm = next((word.split("=")[1] for word in sys.argv[1:] if word.startswith("--algorithm=")), "optimal")
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    names = [name for name in CASES if not words or any(word in name for word in words)]
    header = ("case", "algorithm", "packs", "proven bound", "above it %", "CPU seconds", "GiB")
    print_table("The edges of packing", header, (_row(name, algorithm) for name in names))


if __name__ == "__main__":
    main()
