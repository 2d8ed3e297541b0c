"""Histograms made to be hard: what plans of them cost and how near to the proven bound they are.

Called by `packing.py --parts limits`. Seconds are CPU time of one thread; the share of the work limit that was used is the
same on every machine. The first rows are perfect fills by triples of different lengths, alone and with a core that takes a
pack more than its linear program says, in the manner of the AI and ANI instances of Delorme, Iori and Martello (2016); the
last are random sets at a length of 8192.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from packing_tables import print_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.algorithms import depth_of, solve
from gaudi_bert.packing.exact.bounds import prove_bound
from gaudi_bert.packing.exact.optimal import FULL_WORK
from gaudi_bert.packing.mixture import NNLS_WORK, Work, packs_of
from tests.builders.histograms import bimodal, lognormal, perfect_triplets, scattered, uniform

DEPTHS = (3, 8, "max")
LONG = 8192
LONG_KINDS = (
    (lognormal, 3000),
    (lognormal, 100_000),
    (lognormal, 1_000_000),
    (uniform, 3000),
    (uniform, 30_000),
    (uniform, 1_000_000),
    (bimodal, 3000),
    (bimodal, 10_000),
    (bimodal, 100_000),
    (bimodal, 1_000_000),
)
HARD = {
    "402 perfect fills at 5,000": (perfect_triplets, 5000, 402),
    "400 lengths at 20,000": (scattered, 20_000, 400, 1000),
    "2,000 lengths at 20,000": (scattered, 20_000, 2000, 10**6),
    "lognormal at 32,768": (lognormal, 32_768, 10**12),
    "uniform at 32,768": (uniform, 32_768, 10**12),
    "bimodal at 32,768": (bimodal, 32_768, 10**6),
    "one of each at 32,768": (scattered, 32_768, 16_384, 1),
}
"""By name the function that makes each, and its arguments."""
CORE = {44: 2, 33: 3, 12: 6}
CORE_LENGTH = 132
"""Known from the literature: 259 tokens, with fractions 1.962 packs of 132, but no two packs hold these 11 sequences."""


def print_limits() -> None:
    """Print the table, row by row."""
    print_table(
        "Hard histograms",
        ("data", "algorithm", "depth", "packs", "proven bound", "above it %", "CPU seconds", "of the work limit %"),
        _rows(),
    )


def _rows() -> Iterator[Sequence[Any]]:
    for sequences, length in ((201, 2500), (402, 10_000)):
        counts = perfect_triplets(length, sequences)
        yield from (_row(f"AI: {sequences} perfect fills at {length:,}", counts, "optimal", depth) for depth in (3, "max"))
    for sequences, length in ((200, 2500), (401, 10_000)):
        counts = rounded_up_is_not_enough(length, sequences)
        yield _row(f"ANI: {sequences} sequences at {length:,}", counts, "optimal", "max")
    for name in HARD:
        counts = hard_histogram(name)
        yield from (_row(name, counts, algorithm, 8) for algorithm in ("spfhp", "lpfhp", "ffd"))
        for algorithm in ("nnls", "optimal"):
            yield from (_row(name, counts, algorithm, depth) for depth in DEPTHS)
    for seed, (function, sequences) in enumerate(LONG_KINDS):
        name, counts = f"{function.__name__}, {sequences:,} at {LONG}", function(LONG, sequences, seed)
        yield from (_row(name, counts, "optimal", depth) for depth in (4, 8, 16, "max"))


def _row(name: str, counts: np.ndarray, algorithm: str, depth: int | str) -> Sequence[Any]:
    """One plan, with the proof of its bound."""
    limit = NNLS_WORK if algorithm == "nnls" else FULL_WORK
    most, work = depth_of(depth, len(counts)), Work(limit)
    started = time.process_time()
    solved = solve(counts, algorithm, most, work=work)
    bound = (solved.certificate or prove_bound(counts, most)).bound
    seconds, packs = time.process_time() - started, packs_of(solved.mixture)
    above, used = 100 * (packs - bound) / bound, 100 * (1 - max(work.remaining, 0) / limit)
    return name, algorithm, depth, f"{packs:,}", f"{bound:,}", f"{above:.4f}", f"{seconds:.1f}", f"{used:.0f}"


def rounded_up_is_not_enough(max_length: int, sequences: int, seed: int = 0) -> IntArray:
    """`perfect_triplets` and a core of 11 sequences that takes a pack more than its linear program rounded up: int64 [L].

    In the manner of the ANI instances of Delorme, Iori and Martello (2016): bound and optimum may differ by one.
    """
    counts = perfect_triplets(max_length, sequences - sum(CORE.values()), seed)
    for length, number in CORE.items():
        counts[length * max_length // CORE_LENGTH - 1] += number
    return counts


def hard_histogram(name: str) -> IntArray:
    """The counts of one of `HARD`."""
    function, *arguments = HARD[name]
    return function(*arguments)
