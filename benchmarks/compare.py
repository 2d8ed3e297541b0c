"""Everybody's packers on the six published histograms: the table of docs/compare.md.

    python benchmarks/compare.py                                     the table
    python benchmarks/compare.py --histograms squad-384 --depth 3    others
    python benchmarks/compare.py --picture docs/compare-wikipedia-512.svg

Cells are packs above the proven bound, and the share of the bound that this is. Seconds are of one run on one thread.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measuring import show_processor

from gaudi_bert.common.progress import Reporter
from gaudi_bert.stages.compare import CompareResult, compare
from gaudi_bert.stages.estimate import shipped_histograms

PICTURED = "wikipedia-512"


def print_table(results: list[CompareResult]) -> None:
    """A Markdown table, a row for each packer, in the order of the largest histogram's packs."""
    names = [f"{row.tool} `{row.algorithm}`" for row in results[-1].rows]
    cells = [{f"{row.tool} `{row.algorithm}`": row for row in result.rows} for result in results]
    made_by = {"gaudi-bert": "-", "package": "its package", "stand-in": "stand-in"}
    print("| packer | called | " + " | ".join(result.source for result in results) + " |")
    print("|" + "---|" * (len(results) + 2))
    print("| *proven bound, packs* | | " + " | ".join(f"*{result.lower_bound:,}*" for result in results) + " |")
    for name in names:
        rows = [found[name] for found in cells]
        texts = [f"{row.gap:,} ({100 * row.gap_share:.2g} %)" if row.gap else "0" for row in rows]
        print(f"| {name} | {made_by[rows[0].made_by]} | " + " | ".join(texts) + " |")
    print("\nSeconds:\n")
    for name in names:
        print(f"  {name:<28}" + "".join(f"{found[name].seconds:>10.3f}" for found in cells))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histograms", nargs="+", default=list(shipped_histograms()))
    parser.add_argument("--depth", default="max")
    parser.add_argument("--picture", type=Path, help=f"the picture of {PICTURED}")
    arguments = parser.parse_args()
    show_processor()
    quiet = Reporter(stream=io.StringIO())
    print_table(
        [
            compare(name, depth=arguments.depth, picture=arguments.picture if name == PICTURED else None, reporter=quiet)
            for name in arguments.histograms
        ]
    )


if __name__ == "__main__":
    main()
