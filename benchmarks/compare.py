"""Compare how many packs the packers of several tools need for the six published histograms, and print the table of
docs/figures.md#other-tools-packers.

    python benchmarks/compare.py                                     the published histograms
    python benchmarks/compare.py --histograms squad-384 --depth 3    built-in histograms, histogram.json files or TFRecords

A cell contains the number of packs above the proven lower bound, also as a percentage of the lower bound. The sequences are
packed in a random order that is the same in every run. The times are from a single run on one thread, without compilation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from measuring import measure_time_and_memory, print_processor
from peers import PEERS, ListedLengths

from gaudi_bert.common.progress import Reporter
from gaudi_bert.packing.algorithms import pack_histogram, resolve_depth
from gaudi_bert.packing.heuristics import _shuffle_lengths
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.reporting.estimate import _read_histogram, list_bundled_histograms, parse_packing_depth

OURS = ("optimal", "nnls", "lpfhp")
SEED = 12345


@dataclass(frozen=True)
class Row:
    """The result of one packer. `called` says whether the tool's package was called or a stand-in for its heuristic, and is
    `-` for gaudi-bert.
    """

    name: str
    called: str
    packs: int
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """The results of all packers for one histogram, sorted by the number of packs, and the proven lower bound on this
    number.
    """

    source: str
    lower_bound: int
    rows: list[Row]


def compare(source: str, depth: str) -> Comparison:
    """Pack the same lengths with the packers of all tools. Each packer first packs a few other lengths, so that compilation
    is not measured.
    """
    histogram = _read_histogram(source, Reporter(quiet=True))
    lengths = _shuffle_lengths(histogram.counts, SEED)
    listed = ListedLengths(
        lengths, lengths, histogram, resolve_depth(parse_packing_depth(depth), histogram.max_sequence_length)
    )
    lengths = np.repeat(np.arange(1, 17, dtype=np.int32), np.arange(1, 17))
    few = ListedLengths(lengths, lengths, Histogram(16, np.arange(1, 17)), 3)
    bounds: list[int] = []

    def ours(algorithm: str) -> Callable[[ListedLengths], int]:
        def count(lengths: ListedLengths) -> int:
            packing = pack_histogram(lengths.histogram, algorithm, lengths.depth)
            bounds.append(packing.lower_bound if lengths is listed else 0)
            return packing.packs

        return count

    packers = [(f"gaudi-bert `{name}`", "-", ours(name)) for name in OURS]
    for peer in PEERS:
        is_called = peer.installed is not None and peer.callable_for(listed)
        called, count = ("its package", peer.installed) if is_called else ("stand-in", peer.count)
        packers.append((f"{peer.tool} `{peer.algorithm}`", called, count))
    rows = []
    for name, called, count in packers:
        count(few)
        run = measure_time_and_memory(lambda count=count: count(listed))
        rows.append(Row(name, called, run.result, run.seconds))
    return Comparison(source, max(bounds), sorted(rows, key=lambda row: row.packs))


def print_table(results: list[Comparison]) -> None:
    """Print a Markdown table with a row for each packer, sorted by the number of packs for the last histogram."""
    cells = [{row.name: row for row in result.rows} for result in results]
    print("| packer | called | " + " | ".join(result.source for result in results) + " |")
    print("|" + "---|" * (len(results) + 2))
    print("| *proven bound, packs* | | " + " | ".join(f"*{result.lower_bound:,}*" for result in results) + " |")
    for row in results[-1].rows:
        gaps = [found[row.name].packs - result.lower_bound for found, result in zip(cells, results, strict=True)]
        shares = [100 * gap / result.lower_bound for gap, result in zip(gaps, results, strict=True)]
        texts = [f"{gap:,} ({share:.2g} %)" if gap else "0" for gap, share in zip(gaps, shares, strict=True)]
        print(f"| {row.name} | {cells[0][row.name].called} | " + " | ".join(texts) + " |")
    print("\nSeconds:\n")
    for row in results[-1].rows:
        print(f"  {row.name:<28}" + "".join(f"{found[row.name].seconds:>10.3f}" for found in cells))


def main() -> None:
    """Parse the command line, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histograms", nargs="+", default=list(list_bundled_histograms()))
    parser.add_argument("--depth", default="max")
    arguments = parser.parse_args()
    print_processor()
    print_table([compare(name, arguments.depth) for name in arguments.histograms])


if __name__ == "__main__":
    main()
