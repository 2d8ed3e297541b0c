"""Measure the solvers of the packing algorithms: the NNLS solver next to `scipy.optimize.nnls`, the complete algorithms, and
packs of 8192 slots.

`packing.py --parts speed` calls this module. Each figure is the median of several repeats, which alternate between the
compared programs. The times are elapsed seconds without compilation. For times on one thread, set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import scipy
from measuring import print_table
from scipy.optimize import nnls

from gaudi_bert.common.progress import Reporter
from gaudi_bert.packing.algorithms import pack_histogram, resolve_depth, run_algorithm
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.nnls import compute_single_nnls_residual_weights
from gaudi_bert.packing.nnls_solver import solve_nnls
from gaudi_bert.reporting.estimate import _read_histogram

REPEATS = 3
LONG = 8192


def load_histogram(name: str) -> Histogram:
    """Load one of the published histograms."""
    return _read_histogram(name, Reporter(quiet=True))


def print_speed() -> None:
    """Print three tables: the NNLS solver, the complete algorithms, and packs of 8192 slots."""
    print_table(
        f"One weighted NNLS at depth 3, beside scipy.optimize.nnls {scipy.__version__}",
        ("histogram", "columns", "scipy s", "ours s", "ratio", "relative difference of the objective"),
        (build_nnls_row(name) for name in ("squad-384", "wikipedia-512")),
    )
    print_table(
        "The default (`nnls`: the whole loop) and `optimal`, seconds",
        ("histogram", "depth", "nnls", "optimal"),
        (
            build_algorithm_times_row(name, depth)
            for name in ("wikipedia-512", "wikipedia-1024", "wikipedia-2048")
            for depth in (3, 4, "max")
        ),
    )
    print_table(
        f"Length {LONG}, lognormal lengths, seed 0",
        ("data", "sequences", "depth", "packs", "proven bound", "above it %", "seconds"),
        (row for name, histogram in iterate_long_histograms() for row in iterate_long_rows(name, histogram)),
    )


def build_nnls_row(name: str) -> Sequence[Any]:
    """Return a row that compares one NNLS solution with SciPy's solution for the explicit matrix."""
    histogram = load_histogram(name)
    weights = compute_single_nnls_residual_weights(histogram.max_sequence_length)
    matrix = depth_3_matrix(histogram.max_sequence_length) * weights[:, None]
    target = histogram.counts * weights
    ours, theirs = [], []
    for _ in range(REPEATS):
        seconds, solution = call_with_seconds(partial(solve_nnls, histogram.counts, weights, 3))
        ours.append(seconds)
        seconds, (_, norm) = call_with_seconds(partial(nnls, matrix, target))
        theirs.append(seconds)
    difference = abs(solution.objective - norm) / norm
    ratio = median(theirs) / median(ours)
    return name, matrix.shape[1], f"{median(theirs):.2f}", f"{median(ours):.4f}", f"{ratio:.0f} x", f"{difference:.1e}"


def depth_3_matrix(capacity: int) -> np.ndarray:
    """Return a matrix in which each column is a strategy of up to three lengths that fills a pack exactly: float64
    [capacity, strategies].
    """
    shortest, middle = np.meshgrid(np.arange(capacity), np.arange(capacity), indexing="ij")
    longest = capacity - shortest - middle
    keep = (shortest <= middle) & (middle <= longest)
    matrix = np.zeros((capacity + 1, int(keep.sum())))
    for lengths in (shortest[keep], middle[keep], longest[keep]):
        np.add.at(matrix, (lengths, np.arange(matrix.shape[1])), 1.0)
    return matrix[1:]


def build_algorithm_times_row(name: str, depth: int | str) -> Sequence[Any]:
    """Return a row with the median times of complete algorithms. If an algorithm computes a lower bound, its time includes
    the bound.
    """
    histogram = load_histogram(name)
    most = resolve_depth(depth, histogram.max_sequence_length)
    seconds = {
        algorithm: median(
            call_with_seconds(partial(run_algorithm, histogram.counts, algorithm, most))[0] for _ in range(REPEATS)
        )
        for algorithm in ("nnls", "optimal")
    }
    return name, depth, f"{seconds['nnls']:.2f}", f"{seconds['optimal']:.2f}"


def iterate_long_histograms() -> Iterable[tuple[str, Histogram]]:
    """Yield histograms of log-normal lengths up to 8192, each with a million and with a hundred million sequences."""
    for name, typical, sigma in (("sft", 600, 1.1), ("long", 2000, 1.0)):
        lengths = np.random.default_rng(0).lognormal(np.log(typical), sigma, 1_000_000)
        counts = np.bincount(np.clip(lengths, 1, LONG).astype(np.int64), minlength=LONG + 1)[1:]
        yield name, Histogram(LONG, counts)
        yield f"{name} x 100", Histogram(LONG, 100 * counts)


def iterate_long_rows(name: str, histogram: Histogram) -> Iterable[Sequence[Any]]:
    """Yield the results of `optimal` at several depths."""
    for depth in (4, 8, 16, "max"):
        seconds, packing = call_with_seconds(partial(pack_histogram, histogram, "optimal", depth))
        above = f"{100 * packing.gap / packing.lower_bound:.5f}"
        yield (
            name,
            f"{histogram.sequences:,}",
            depth,
            f"{packing.packs:,}",
            f"{packing.lower_bound:,}",
            above,
            f"{seconds:.1f}",
        )


def call_with_seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call `function`, and return the elapsed seconds and the result."""
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result
