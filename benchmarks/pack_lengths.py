"""Measure `pack_lengths` on many lengths: time, memory and distance from the proven lower bound.

    python benchmarks/pack_lengths.py                        ten million lengths, rows of 8,192
    python benchmarks/pack_lengths.py --sequences 100000 --row 2048 --runs 5
    python benchmarks/pack_lengths.py --grid                 compare `optimal` with `lpfhp` in 216 cases, by CPU time
    python benchmarks/pack_lengths.py --grid --sequences 1000 --save cells.json      only cases of 1,000 lengths
    python benchmarks/pack_lengths.py --grid --sequences 10000000 --row 8192         only cases of one row length
    python benchmarks/pack_lengths.py --grid --before cells.json       also compare with gaps that another commit saved

The lengths are log-normal (with a median of 545 tokens), and are clipped to the row length. Each run is a process of its
own. The memory of a run is the rise of the peak resident memory above the memory that numpy and the lengths need, so it
includes the imports and the code of the library. For comparison, the benchmark measures the time that numpy needs to sort
the same lengths (`argsort`), which every packer of decreasing lengths has to do. In separate processes, it also measures a
plain best fit of decreasing lengths, compiled with numba.

A case of the grid passes if `optimal` takes at most three times as long as `lpfhp`, or at most two seconds (three seconds
for ten million lengths in rows of 8,192), whichever is more, and if its gap does not exceed the saved gap by more than 0.001
% of the packs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from measuring import measure_time_and_memory, print_figure, print_processor


def draw_lengths(sequences: int, row: int) -> np.ndarray:
    """Return int32 lengths, which are the same in every call."""
    lengths = np.random.default_rng(1).lognormal(6.3, 1.1, sequences).astype(np.float32)
    return np.clip(lengths, 1, row).astype(np.int32)


def pack_by_plain_best_fit(lengths: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices and offsets of packs. In descending order, each length goes to the pack with the least sufficient
    room.
    """
    from numba import njit

    @njit
    def assign(order: np.ndarray, lengths: np.ndarray, row: int, pack_of: np.ndarray) -> int:
        newest = np.full(row + 1, -1, np.int32)  # for each amount of room, the pack that reached it last
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


def measure_plain_best_fit(sequences: int, row: int) -> dict[str, float]:
    """Measure the plain best fit in this process."""
    lengths = draw_lengths(sequences, row)
    np.argsort(lengths, kind="stable")
    plain = measure_time_and_memory(lambda: pack_by_plain_best_fit(lengths, row))
    indices, offsets = plain.result
    if np.add.reduceat(lengths[indices].astype(np.int64), offsets[:-1]).max() > row:
        raise SystemExit("the plain best fit overfills a pack")
    return {"MiB": (plain.memory_bytes or 0) / 2**20, "packs": offsets.size - 1}


def measure_pack_lengths(sequences: int, row: int) -> dict[str, float]:
    """Measure `pack_lengths` in this process."""
    lengths = draw_lengths(sequences, row)
    sorting = time.perf_counter()
    np.argsort(lengths, kind="stable")
    sorting = time.perf_counter() - sorting

    def pack():
        from gaudi_bert import pack_lengths

        return pack_lengths(lengths, row)

    cpu = time.process_time()
    found = measure_time_and_memory(pack)
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


MEDIANS, SPREADS, SIZES, ROWS = (
    (4.5, 5.25, 6.0, 6.75, 7.5),
    (0.5, 1.1, 1.5),
    (10**3, 10**5, 10**7),
    (512, 2048, 8192, 65_536),
)
KINDS = (*(f"log-normal {mu} {sigma}" for mu in MEDIANS for sigma in SPREADS), "uniform", "bimodal", "one in 10,000 odd")
LENIENCE_SECONDS, LENIENCE_TIMES, LENIENCE_GAP = 2.0, 3.0, 1e-5


def draw_lengths_of_kind(kind: str, sequences: int, row: int) -> np.ndarray:
    """Return int64 lengths of one of `KINDS`."""
    source = np.random.default_rng(5)
    if kind == "uniform":
        lengths = source.integers(1, row + 1, sequences)
    elif kind == "bimodal":
        is_short = source.random(sequences) < 0.7
        lengths = np.where(
            is_short, source.normal(row / 8, row / 40, sequences), source.normal(0.6 * row, row / 20, sequences)
        )
    elif kind == "one in 10,000 odd":
        even = 2 * np.maximum(1, np.exp(source.normal(np.log(row / 20), 0.8, sequences)).astype(int))
        lengths = np.minimum(even, row) - (source.random(sequences) < 1e-4)
    else:
        mu, sigma = map(float, kind.split()[1:])
        lengths = np.exp(source.normal(mu, sigma, sequences))
    return np.clip(lengths.astype(int), 1, row)


def run_cell(kind: str, sequences: int, row: int) -> dict[str, Any]:
    """Pack the same lengths with `lpfhp` and with `optimal` in this process, and return the packs, the lower bound and the
    CPU seconds of both.
    """
    from gaudi_bert import pack_lengths

    cell: dict[str, Any] = {"kind": kind, "sequences": sequences, "row": row}
    lengths = draw_lengths_of_kind(kind, sequences, row)
    for algorithm in ("lpfhp", "optimal"):
        started = time.process_time()
        packs = pack_lengths(lengths, row, algorithm=algorithm)
        cell[algorithm] = {"packs": len(packs), "bound": packs.lower_bound, "seconds": time.process_time() - started}
    return cell


def print_grid(sequences: int | None, only_row: int | None, save: Path | None, before: Path | None) -> None:
    """Run all cases of the grid, print the result of each, and list the cases that do not pass."""
    earlier = {} if before is None else {tuple(cell["key"]): cell for cell in json.loads(before.read_text(encoding="utf-8"))}
    run_cell("uniform", 60_000, 512)  # load the compiled code first
    cells, slow, worse = [], [], []
    print(
        f"{'lengths':>18} {'sequences':>10} {'row':>6} {'packs':>9} {'gap':>5} {'before':>6} {'lpfhp s':>8} {'optimal s':>9}"
    )
    for size in SIZES if sequences is None else (sequences,):
        for row in ROWS if only_row is None else (only_row,):
            for kind in KINDS:
                cell = run_cell(kind, size, row)
                lpfhp, optimal = cell["lpfhp"], cell["optimal"]
                key, gap = (kind, size, row), optimal["packs"] - optimal["bound"]
                cells.append({**cell, "key": key, "gap": gap})
                known = earlier.get(key)
                most = max(LENIENCE_SECONDS, LENIENCE_TIMES * lpfhp["seconds"])
                if size == 10**7 and row == 8192:
                    most = 3.0
                slow += [key] if optimal["seconds"] > most else []
                worse += [key] if known and gap - known["gap"] > LENIENCE_GAP * optimal["packs"] else []
                print(
                    f"{kind:>18} {size:>10,} {row:>6,} {optimal['packs']:>9,} {gap:>5,} {known['gap'] if known else '':>6}"
                    f" {lpfhp['seconds']:>8.2f} {optimal['seconds']:>9.2f}",
                    flush=True,
                )
                if save is not None:
                    save.write_text(json.dumps(cells), encoding="utf-8")
    print(
        f"{len(cells)} cells; {len(slow)} slower than they may be {slow}; {len(worse)} with a larger gap than before {worse}"
    )
    shares = [cell["gap"] / cell["optimal"]["packs"] for cell in cells]
    print(f"gap 0 in {shares.count(0.0)}; at most {100 * max(shares):.4f} % of the packs")


def main() -> None:
    """Parse the command line, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sequences", type=int, help="number of lengths; default: 10,000,000; for --grid: 1,000, 100,000 and 10,000,000"
    )
    parser.add_argument("--row", type=int, help="row length; default: 8,192; for --grid: 512 to 65,536")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--once", choices=("ours", "plain"), help="measure once in this process, and print JSON")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--save", type=Path, metavar="FILE", help="save the cases of the grid as JSON")
    parser.add_argument("--before", type=Path, metavar="FILE", help="compare with the cases that another commit saved")
    arguments = parser.parse_args()
    if arguments.grid:
        print_processor()
        print_grid(arguments.sequences, arguments.row, arguments.save, arguments.before)
        return
    arguments.sequences, arguments.row = arguments.sequences or 10_000_000, arguments.row or 8192
    if arguments.once:
        once = measure_pack_lengths if arguments.once == "ours" else measure_plain_best_fit
        print(json.dumps(once(arguments.sequences, arguments.row)))
        return
    print_processor()
    print(f"{arguments.sequences:,} lengths in rows of {arguments.row:,}, {arguments.runs} runs")
    sizes = ["--sequences", str(arguments.sequences), "--row", str(arguments.row)]

    def run(which: str) -> dict[str, float]:
        command = [sys.executable, __file__, "--once", which, *sizes]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    both = [(run("ours"), run("plain")) for _ in range(arguments.runs)]
    runs = [ours for ours, _ in both]
    print_figure("planned and assigned, wall time", [run["seconds"] for run in runs], "s", "60")
    print_figure("planned and assigned, CPU time", [run["cpu"] for run in runs], "s")
    print_figure("memory beyond the input", [run["MiB"] for run in runs], "MiB", "500")
    print_figure("memory of a plain best fit", [plain["MiB"] for _, plain in both], "MiB")
    print_figure("memory beside it", [ours["MiB"] / plain["MiB"] for ours, plain in both], "times", "1.2")
    print_figure("packs beside it", [ours["packs"] / plain["packs"] for ours, plain in both], "times")
    print_figure("packs above the proven bound", [run["gap"] for run in runs], "packs")
    print_figure("the same, of the bound", [run["gap %"] for run in runs], "%", "0.01")
    print_figure("CPU time beside numpy's argsort of the same", [run["cpu"] / run["sorting"] for run in runs], "times")


if __name__ == "__main__":
    main()
