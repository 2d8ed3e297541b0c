"""Packing many lengths from Python: time, memory and distance from the proven bound.

    python benchmarks/pack_lengths.py                        ten million lengths, rows of 8,192
    python benchmarks/pack_lengths.py --sequences 100000 --row 2048 --runs 5

The lengths are log-normal (median 545 tokens), cut at the row. Each run is a process of its own; its memory is what the peak
of resident memory rises above what numpy and the lengths take, the library's own code and its imports included.
Beside it, what numpy alone takes to sort the same lengths (`argsort`), which any packer of decreasing lengths has to do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from measuring import show, show_processor

from gaudi_bert.common.progress import measured


def lengths_of(sequences: int, row: int) -> np.ndarray:
    """Int32 lengths, the same each time."""
    drawn = np.random.default_rng(1).lognormal(6.3, 1.1, sequences).astype(np.float32)
    return np.clip(drawn, 1, row).astype(np.int32)


def run_once(sequences: int, row: int) -> dict[str, float]:
    """Pack in this process."""
    lengths = lengths_of(sequences, row)
    sorting = time.perf_counter()
    np.argsort(lengths, kind="stable")
    sorting = time.perf_counter() - sorting

    def pack():
        from gaudi_bert import pack_lengths

        return pack_lengths(lengths, row)

    cpu = time.process_time()
    found = measured(pack)
    packs = found.result
    return {
        "seconds": found.seconds,
        "cpu": time.process_time() - cpu,
        "MiB": (found.memory_bytes or 0) / 2**20,
        "gap": packs.gap,
        "gap %": 100 * packs.gap / packs.lower_bound,
        "packs": len(packs),
        "sorting": sorting,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10_000_000)
    parser.add_argument("--row", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--once", action="store_true", help="one run in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(run_once(arguments.sequences, arguments.row)))
        return
    show_processor()
    print(f"{arguments.sequences:,} lengths in rows of {arguments.row:,}, {arguments.runs} runs")
    command = [sys.executable, __file__, "--once", "--sequences", str(arguments.sequences), "--row", str(arguments.row)]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(arguments.runs)
    ]
    show("planned and assigned, wall time", [run["seconds"] for run in runs], "s", "60")
    show("planned and assigned, CPU time", [run["cpu"] for run in runs], "s")
    show("memory beyond the input", [run["MiB"] for run in runs], "MiB", "500")
    show("packs above the proven bound", [run["gap"] for run in runs], "packs")
    show("the same, of the bound", [run["gap %"] for run in runs], "%", "0.01")
    show("CPU time beside numpy's argsort of the same", [run["cpu"] / run["sorting"] for run in runs], "times")


if __name__ == "__main__":
    main()
