"""Packing many lengths from Python: time, memory and distance from the proven bound.

    python benchmarks/pack_lengths.py                        ten million lengths, rows of 8,192
    python benchmarks/pack_lengths.py --sequences 100000 --row 2048 --runs 5

The lengths are log-normal (median 545 tokens), cut at the row. Each run is a process of its own; its memory is what the peak
of resident memory rises above what numpy and the lengths take, the library's own code and its imports included.
Beside it, what numpy alone takes to sort the same lengths (`argsort`), which any packer of decreasing lengths has to do; and
a plain best fit of decreasing lengths, compiled by numba, in separate processes.
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
from measuring import measured, show, show_processor


def lengths_of(sequences: int, row: int) -> np.ndarray:
    """Int32 lengths, the same each time."""
    drawn = np.random.default_rng(1).lognormal(6.3, 1.1, sequences).astype(np.float32)
    return np.clip(drawn, 1, row).astype(np.int32)


def plain_best_fit(lengths: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and offsets of packs: each length, the longest first, goes to the pack with the least room that is enough."""
    from numba import njit

    @njit
    def assign(order: np.ndarray, lengths: np.ndarray, row: int, pack_of: np.ndarray) -> int:
        newest = np.full(row + 1, -1, np.int32)  # of each room, the pack that was opened or filled to it last
        older = np.empty(lengths.size, np.int32)
        with_room = np.zeros(row // 64 + 1, np.uint64)
        packs = 0
        for index in order:
            length = lengths[index]
            word, room = length >> 6, row
            bits = with_room[word] >> np.uint64(length & 63) << np.uint64(length & 63)
            while bits == 0 and word + 1 < with_room.size:
                word += 1
                bits = with_room[word]
            if bits == 0:
                pack = packs
                packs += 1
            else:
                room = word << 6
                while not bits & np.uint64(1):
                    bits >>= np.uint64(1)
                    room += 1
                pack = newest[room]
                newest[room] = older[pack]
                if newest[room] < 0:
                    with_room[room >> 6] &= ~(np.uint64(1) << np.uint64(room & 63))
            pack_of[index] = pack
            rest = room - length
            older[pack] = newest[rest]
            newest[rest] = pack
            with_room[rest >> 6] |= np.uint64(1) << np.uint64(rest & 63)
        return packs

    order = np.argsort(lengths, kind="stable")[::-1]
    pack_of = np.empty(lengths.size, np.int32)
    packs = assign(order, lengths, row, pack_of)
    del order
    return np.argsort(pack_of, kind="stable"), np.concatenate([[0], np.cumsum(np.bincount(pack_of, minlength=packs))])


def run_plain(sequences: int, row: int) -> dict[str, float]:
    """The plain best fit in this process."""
    lengths = lengths_of(sequences, row)
    np.argsort(lengths, kind="stable")
    plain = measured(lambda: plain_best_fit(lengths, row))
    indices, offsets = plain.result
    if np.add.reduceat(lengths[indices].astype(np.int64), offsets[:-1]).max() > row:
        raise SystemExit("the plain best fit overfills a pack")
    return {"MiB": (plain.memory_bytes or 0) / 2**20, "packs": offsets.size - 1}


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
    parser.add_argument("--once", choices=("ours", "plain"), help="one run in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.once:
        once = run_once if arguments.once == "ours" else run_plain
        print(json.dumps(once(arguments.sequences, arguments.row)))
        return
    show_processor()
    print(f"{arguments.sequences:,} lengths in rows of {arguments.row:,}, {arguments.runs} runs")
    sizes = ["--sequences", str(arguments.sequences), "--row", str(arguments.row)]

    def run(which: str) -> dict[str, float]:
        command = [sys.executable, __file__, "--once", which, *sizes]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    both = [(run("ours"), run("plain")) for _ in range(arguments.runs)]
    runs = [ours for ours, _ in both]
    show("planned and assigned, wall time", [run["seconds"] for run in runs], "s", "60")
    show("planned and assigned, CPU time", [run["cpu"] for run in runs], "s")
    show("memory beyond the input", [run["MiB"] for run in runs], "MiB", "500")
    show("memory of a plain best fit", [plain["MiB"] for _, plain in both], "MiB")
    show("memory beside it", [ours["MiB"] / plain["MiB"] for ours, plain in both], "times", "1.2")
    show("packs beside it", [ours["packs"] / plain["packs"] for ours, plain in both], "times")
    show("packs above the proven bound", [run["gap"] for run in runs], "packs")
    show("the same, of the bound", [run["gap %"] for run in runs], "%", "0.01")
    show("CPU time beside numpy's argsort of the same", [run["cpu"] / run["sorting"] for run in runs], "times")


if __name__ == "__main__":
    main()
