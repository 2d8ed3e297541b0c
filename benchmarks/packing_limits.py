"""Pack histograms that are hard to pack, and report the time, the memory and the gap to the proven lower bound. The table
also shows for which histograms packing fails.

    python benchmarks/packing_limits.py                 all cases (up to an hour), like `packing.py --parts limits`
    python benchmarks/packing_limits.py fills zipf      cases whose names contain one of these words

Each plan is computed in a process of its own, which may use `MOST_SECONDS` of CPU time and `MOST_BYTES` of address space.
The goal for every histogram is 60 s of CPU time on one thread and 2 GiB of resident memory. The used fraction of the work
limit is the same on every machine. The first cases can be packed perfectly by triples of different lengths. Some of these
cases also contain a core that needs one pack more than its linear program states, like the AI and ANI instances of Delorme,
Iori and Martello (2016). The last cases are very long packs with very few or very many different lengths.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from measuring import print_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.algorithms import resolve_depth, run_algorithm
from gaudi_bert.packing.bounds import prove_lower_bound
from gaudi_bert.packing.histogram import MAX_ROW_LENGTH
from gaudi_bert.packing.optimal import FULL_WORK
from gaudi_bert.packing.strategies import NNLS_WORK, OperationBudget, count_packs
from tests.builders.histograms import bimodal, lognormal, perfect_triplets, scattered, uniform

MOST_SECONDS, MOST_BYTES = 150, 6 * 2**30
LONG = 8192
CORE = {44: 2, 33: 3, 12: 6}
CORE_LENGTH = 132
"""An example from the literature. These 11 sequences have 259 tokens and need 1.962 packs of 132 tokens if fractions of
packs are allowed, but they do not fit into two packs."""


class Case(NamedTuple):
    """A histogram, and the depths and algorithms with which it is packed."""

    make: Callable[[], IntArray]
    depths: tuple[int | str, ...]
    algorithms: tuple[str, ...] = ("optimal",)


def rounded_up_is_not_enough(max_length: int, sequences: int, seed: int = 0) -> IntArray:
    """Return the histogram of `perfect_triplets` with a core of 11 sequences, which needs one pack more than its linear
    program states, rounded up: int64 [L].

    In the ANI instances of Delorme, Iori and Martello (2016), the lower bound and the optimum may also differ by one.
    """
    counts = perfect_triplets(max_length, sequences - sum(CORE.values()), seed)
    for length, number in CORE.items():
        counts[length * max_length // CORE_LENGTH - 1] += number
    return counts


def few_lengths(max_length: int, counts_of_shares: dict[float, int]) -> IntArray:
    """Return a histogram with the given number of sequences for each fraction of the pack length: int64 [L]."""
    counts = np.zeros(max_length, dtype=np.int64)
    for share, count in counts_of_shares.items():
        counts[max(round(share * max_length), 1) - 1] += count
    return counts


def zipf(max_length: int, sequences: int) -> IntArray:
    """Return a histogram of lengths that follow Zipf's law with exponent 1.5. At most a million lengths are drawn, and their
    counts are multiplied: int64 [L].
    """
    drawn = min(sequences, 10**6)
    lengths = np.minimum(np.random.default_rng(0).zipf(1.5, drawn), max_length)
    return np.bincount(lengths, minlength=max_length + 1)[1:] * (sequences // drawn)


CASES = {
    "AI: 201 perfect fills at 2,500": Case(partial(perfect_triplets, 2500, 201), (3, "max")),
    "AI: 402 perfect fills at 10,000": Case(partial(perfect_triplets, 10_000, 402), (3, "max")),
    "ANI: 200 sequences at 2,500": Case(partial(rounded_up_is_not_enough, 2500, 200), ("max",)),
    "ANI: 401 sequences at 10,000": Case(partial(rounded_up_is_not_enough, 10_000, 401), ("max",)),
    **{
        name: Case(make, (3, 8, "max"), ("lpfhp", "nnls", "optimal"))
        for name, make in {
            "402 perfect fills at 5,000": partial(perfect_triplets, 5000, 402),
            "400 lengths at 20,000": partial(scattered, 20_000, 400, 1000),
            "2,000 lengths at 20,000": partial(scattered, 20_000, 2000, 10**6),
            "lognormal at 32,768": partial(lognormal, 32_768, 10**12),
            "uniform at 32,768": partial(uniform, 32_768, 10**12),
            "bimodal at 32,768": partial(bimodal, 32_768, 10**6),
            "one of each at 32,768": partial(scattered, 32_768, 16_384, 1),
        }.items()
    },
    **{
        f"{make.__name__}, {sequences:,} at {LONG}": Case(partial(make, LONG, sequences, seed), (4, 8, 16, "max"))
        for seed, (make, sequences) in enumerate(
            [
                *((lognormal, size) for size in (3000, 100_000, 1_000_000)),
                *((uniform, size) for size in (3000, 30_000, 1_000_000)),
                *((bimodal, size) for size in (3000, 10_000, 100_000, 1_000_000)),
            ]
        )
    },
    "all distinct, 2^24": Case(partial(np.ones, MAX_ROW_LENGTH, np.int64), (3, "max")),
    "three of each, 2^24": Case(partial(np.full, MAX_ROW_LENGTH, 3), ("max",)),
    "a million lengths, 2^24": Case(partial(scattered, MAX_ROW_LENGTH, 10**6, 1), (3, "max")),
    "100,000 lengths, 2^24": Case(partial(scattered, MAX_ROW_LENGTH, 10**5, 3), (4,)),
    "two lengths, 1/2 and more, 2^24": Case(partial(few_lengths, MAX_ROW_LENGTH, {0.5: 1000, 0.5000001: 1000}), (3, "max")),
    "two lengths, 1 and L, 2^24": Case(partial(few_lengths, MAX_ROW_LENGTH, {0.0: 3_000_000, 1.0: 100}), (3, 7, "max")),
    "two lengths, 0.3 L and 0.36 L, 2^24": Case(partial(few_lengths, MAX_ROW_LENGTH, {0.3: 7001, 0.36: 5003}), (3, "max")),
    "four lengths, 2^24": Case(
        partial(few_lengths, MAX_ROW_LENGTH, {0.006: 9007, 0.13: 900, 0.27: 7001, 0.55: 5003}), (3, 7, "max")
    ),
    "zipf, a million, 2^17": Case(partial(zipf, 1 << 17, 10**6), (3, 8)),
    "zipf, 10^9, 2^24": Case(partial(zipf, MAX_ROW_LENGTH, 10**9), (8, "max")),
    "bimodal, 10^9, 2^24": Case(partial(bimodal, MAX_ROW_LENGTH, 10**9), (3, "max")),
}
"""The cases by name. Packs of 2^24 slots are the longest that are supported."""


def run_case(name: str, algorithm: str, depth: str) -> None:
    """Compute one plan and its lower bound, and print the row of the table. Each call runs in a process of its own."""
    run_algorithm(np.ones(8, np.int64), algorithm, 3)  # load the compiled code first
    counts = CASES[name].make()
    limit = NNLS_WORK if algorithm == "nnls" else FULL_WORK
    most, budget = resolve_depth(depth if depth == "max" else int(depth), len(counts)), OperationBudget(limit)
    started = time.process_time()
    solved = run_algorithm(counts, algorithm, most, budget=budget)
    bound = (solved.certificate or prove_lower_bound(counts, most)).bound
    seconds, packs = time.process_time() - started, count_packs(solved.strategy_counts)
    used, memory = 100 * (1 - max(budget.remaining, 0) / limit), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{packs:,}\t{bound:,}\t{100 * (packs - bound) / bound:.4f}\t{seconds:.1f}\t{used:.0f}\t{memory:.2f}")


def print_limits(words: Sequence[str] = ()) -> None:
    """Print the table. Each row is printed as soon as it was computed."""
    header = (
        "data",
        "algorithm",
        "depth",
        "packs",
        "proven bound",
        "above it %",
        "CPU seconds",
        "of the work limit %",
        "GiB",
    )
    print_table("Hard histograms", header, _rows(words))


def _rows(words: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the rows of all cases whose names contain one of the words, or of all cases if there are no words."""
    for name, case in CASES.items():
        if not words or any(word in name for word in words):
            for algorithm in case.algorithms:
                for depth in map(str, case.depths):
                    yield name, algorithm, depth, *_in_own_process(name, algorithm, depth)


def _in_own_process(*case: str) -> Sequence[str]:
    """Run a case in a process with limited time and memory, and return the cells of its row. If the case fails, return the
    last line of its error output, or the signal that ended the process.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))

    command = [sys.executable, __file__, "--one", *case]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    if done.returncode == 0:
        return done.stdout.strip().split("\t")
    return [done.stderr.strip().splitlines()[-1][:60] if done.returncode == 1 else f"signal {-done.returncode}"]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_case(*sys.argv[2:])
    else:
        print_limits(sys.argv[1:])
