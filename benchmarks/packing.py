"""Compare packing results with tables 1, 5 and 7 of the packing paper (Krell et al. 2021), and all algorithms with the
proven lower bound.

    python benchmarks/packing.py                     everything except `limits` (a few minutes)
    python benchmarks/packing.py --parts tables      only the paper's tables
    python benchmarks/packing.py --parts algorithms --histograms wikipedia-512 squad-384 --depths 3 4 max
    python benchmarks/packing.py --parts speed       compare the solvers with scipy.optimize.nnls, and pack rows of 8192
    python benchmarks/packing.py --parts limits      histograms that are hard to pack (up to an hour; only on request)

The times are from a single run on one thread. A first call compiles the numba code, so that compilation is not measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from measuring import print_table
from packing_limits import print_limits
from packing_solvers import load_histogram, print_speed

from gaudi_bert.packing.algorithms import pack_histogram, resolve_depth, run_algorithm
from gaudi_bert.packing.estimate import Estimate, estimate_packing
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.strategies import count_packs
from gaudi_bert.reporting.estimate import list_bundled_histograms

EXPECTED = Path(__file__).resolve().parent.parent / "tests" / "data" / "expected_packing.json"
NAMES = tuple(list_bundled_histograms())
DEPTHS = ("2", "3", "4", "5", "8", "16", "max")
ALGORITHMS = ("spfhp", "lpfhp", "ffd", "nnlshp", "ennlshp", "nnls", "optimal")
LONGEST_FOR_ENNLSHP = 512
PARTS = ("tables", "algorithms", "speed")


def warm_up() -> None:
    """Compile the packing algorithms, or load them from numba's cache."""
    tiny = Histogram(32, [count % 7 for count in range(32)])
    for algorithm in (*ALGORITHMS, "greedy"):
        pack_histogram(tiny, algorithm, 3)


def estimate_with_seconds(histogram: Histogram, algorithm: str, depth: int | str) -> tuple[Estimate, float]:
    """Return an estimate and the seconds that it took."""
    started = time.perf_counter()
    estimate = estimate_packing(histogram, algorithm, depth, None)
    return estimate, time.perf_counter() - started


def print_paper_tables() -> None:
    """Print tables 1, 5 and 7 of the paper, with our results next to the published ones."""
    paper = json.loads(EXPECTED.read_text(encoding="utf-8"))["paper"]
    wikipedia, squad = load_histogram("wikipedia-512"), load_histogram("squad-384")
    print_table(
        "Table 1 of the paper: wikipedia-512",
        ("depth", "algorithm", "paper: efficiency %", "factor", "ours: efficiency %", "factor", "seconds"),
        iterate_table_1_rows(wikipedia, paper["table1_wikipedia_512"]),
    )
    header = (
        "depth",
        "algorithm",
        "paper: strategies",
        "packs",
        "padding",
        "%",
        "ours: strategies",
        "packs",
        "padding",
        "%",
    )
    rows = [(row["depth"], row["alg"], row) for row in paper["table5_squad_384"]]
    print_table(
        "Table 5 of the paper: squad-384", header, iterate_full_rows(squad, [*rows, (3, "nnls", None), (3, "optimal", None)])
    )
    rows = [(row["depth"], "LPFHP", row) for row in paper["table7_wikipedia_512_lpfhp"]]
    print_table(
        "Table 7 of the paper: wikipedia-512", header, iterate_full_rows(wikipedia, [*rows, ("max", "optimal", None)])
    )


def iterate_table_1_rows(histogram: Histogram, rows: list[dict[str, Any]]) -> Iterable[Sequence[Any]]:
    """Yield the rows of table 1 and appendix H, followed by rows for algorithms that the paper does not contain."""
    yield from (
        build_table_1_row(histogram, row["depth"], row["alg"].lower(), row)
        for row in [*rows, {"depth": 1, "alg": "SORT", "eff": 99.9, "p": 2.0}]
    )
    for separators, efficiency in ((1, "78.11"), (2, "77.97")):
        yield build_table_1_row(histogram, "max", f"greedy+{separators}", {"eff": efficiency, "p": "-"})
    for depth, algorithm in ((3, "nnls"), (3, "optimal"), (4, "nnls"), (4, "optimal")):
        yield build_table_1_row(histogram, depth, algorithm, {"eff": "-", "p": "-"})


def build_table_1_row(histogram: Histogram, depth: int | str, algorithm: str, row: dict[str, Any]) -> Sequence[Any]:
    """Return one row of table 1. If the depth is not limited, the paper states a depth such as "~10"."""
    number = "max" if str(depth).startswith("~") else depth
    estimate, seconds = estimate_with_seconds(histogram, algorithm, number)
    ours = f"{100 * estimate.efficiency:.3f}", f"{estimate.packing_factor:.4f}", f"{seconds:.3f}"
    return depth, algorithm, row["eff"], row["p"], *ours


def iterate_full_rows(
    histogram: Histogram, rows: Iterable[tuple[int | str, str, dict[str, Any] | None]]
) -> Iterable[Sequence[Any]]:
    """Yield the rows of tables 5 and 7."""
    for depth, name, row in rows:
        algorithm = name.lower() if depth != 1 else "none"
        number: int | str = "max" if str(depth).endswith("max") else depth
        strategy_counts = run_algorithm(
            histogram.counts, algorithm, resolve_depth(number, histogram.max_sequence_length)
        ).strategy_counts
        packs = count_packs(strategy_counts)
        slots = packs * histogram.max_sequence_length
        theirs = (row["strategies"], f"{row['packs']:,}", f"{row['padding']:,}", row["eff"]) if row else ("-",) * 4
        ours = (len(strategy_counts), f"{packs:,}", f"{slots - histogram.tokens:,}", f"{100 * histogram.tokens / slots:.3f}")
        yield depth, algorithm, *theirs, *ours


def print_algorithms(names: Sequence[str], depths: Sequence[str]) -> None:
    """Print for each algorithm how many packs it uses beyond the proven lower bound."""
    for name in names:
        histogram = load_histogram(name)
        print_table(
            f"{name}: packs above the proven bound (seconds)",
            ("depth", "proven bound", *ALGORITHMS, "optimal: efficiency %"),
            (build_algorithm_row(histogram, depth if depth == "max" else int(depth)) for depth in depths),
        )


def build_algorithm_row(histogram: Histogram, depth: int | str) -> Sequence[Any]:
    """Return the row for one depth. ENNLSHP is only run for short packs, where it takes seconds."""
    started = time.perf_counter()
    optimum = pack_histogram(histogram, "optimal", depth)
    seconds = {"optimal": time.perf_counter() - started}
    packs = {"optimal": optimum.packs}
    for algorithm in ALGORITHMS[:-1]:
        if algorithm == "ennlshp" and histogram.max_sequence_length > LONGEST_FOR_ENNLSHP:
            continue
        estimate, seconds[algorithm] = estimate_with_seconds(histogram, algorithm, depth)
        packs[algorithm] = estimate.packs
    cells = [
        f"+{packs[algorithm] - optimum.lower_bound:,} ({seconds[algorithm]:.3g})" if algorithm in packs else "-"
        for algorithm in ALGORITHMS
    ]
    return depth, f"{optimum.lower_bound:,}", *cells, f"{100 * optimum.efficiency:.5f}"


def main() -> None:
    """Parse the command line, and print the selected parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=("tables", "algorithms", "speed", "limits"), default=["tables", "algorithms", "speed"]
    )
    parser.add_argument("--histograms", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--depths", nargs="+", default=list(DEPTHS))
    arguments = parser.parse_args()
    started = time.perf_counter()
    warm_up()
    print(f"compiling or loading the kernels: {time.perf_counter() - started:.1f} s")
    if "tables" in arguments.parts:
        print_paper_tables()
    if "algorithms" in arguments.parts:
        print_algorithms(arguments.histograms, arguments.depths)
    if "speed" in arguments.parts:
        print_speed()
    if "limits" in arguments.parts:
        print_limits()


if __name__ == "__main__":
    main()
