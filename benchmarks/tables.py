"""Packing tables, beside what others need for the same rows; CPU seconds of all threads, alternating.

    python benchmarks/tables.py [--only PART] [--rows N] [--rounds N] [--algorithms A,B] [--peer PYTHON]

`--peer` is a Python that has trl and datasets; without it, TRL's `pack_dataset` is re-implemented here from its documented
algorithm (best fit decreasing over batches of 1,000 rows, as `Dataset.map` hands them to it), and that is said.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from bisect import bisect_left, insort
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from measuring import show, show_processor, timed
from pyarrow import compute, parquet

from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.tables.pack import pack_table

QUIET = Reporter(quiet=True)
SLOTS = 2048
MAP_ROWS = 1000
COMPRESSION = "zstd"


def make_table(rows: int, mean: float, most: int, seed: int, labelled: float = 2 / 3) -> Any:
    """Token ids as texts have them (few are frequent), and labels, of which the others are ignored."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(mean), 0.6, rows).astype(np.int64), 4, most)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = (rng.zipf(1.3, offsets[-1]) % 30_000).astype(np.int32)
    labels = np.where(rng.random(offsets[-1]) < labelled, ids, -100).astype(np.int32)
    return pyarrow.table(
        {name: pyarrow.ListArray.from_arrays(offsets, of) for name, of in (("input_ids", ids), ("labels", labels))}
    )


def save_dataset(table: Any, folder: Path) -> None:
    """As `Dataset.save_to_disk`: an Arrow stream of batches of 1,000 rows, and state.json."""
    folder.mkdir()
    with pyarrow.OSFile(str(folder / "data.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=MAP_ROWS)
    (folder / "state.json").write_text(
        '{"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "0", "_format_columns": null,'
        ' "_format_kwargs": {}, "_format_type": null, "_output_all_columns": false, "_split": null}'
    )
    (folder / "dataset_info.json").write_text("{}")


PEER = """
import sys, time, datasets
from trl import pack_dataset
datasets.disable_progress_bars()
data = datasets.load_from_disk(sys.argv[1])
started = time.process_time()
packed = pack_dataset(data, int(sys.argv[2]), strategy="bfd", map_kwargs={"load_from_cache_file": False})
print(time.process_time() - started, len(packed))
"""


def peer_seconds(python: str, folder: Path) -> tuple[float, int]:
    """TRL's `pack_dataset` of a saved dataset: CPU seconds without its imports, and its packs."""
    done = subprocess.run([python, "-c", PEER, str(folder), str(SLOTS)], capture_output=True, text=True, check=True)
    seconds, packs = done.stdout.split()[-2:]
    return float(seconds), int(packs)


def pack_as_documented(folder: Path, out: Path) -> int:
    """Best fit decreasing on batches of rows, as TRL documents its strategy `bfd`; the packs."""
    packs = 0
    with pyarrow.memory_map(str(folder / "data.arrow")) as source, pyarrow.OSFile(str(out), "wb") as sink:
        reader = pyarrow.ipc.open_stream(source)
        with pyarrow.ipc.new_stream(sink, reader.schema) as writer:
            for batch in reader:
                lengths = compute.list_value_length(batch.column(0)).to_numpy()
                bins: list[list[int]] = []
                spaces: list[int] = [SLOTS]
                of_space: dict[int, deque[list[int]]] = defaultdict(deque)
                for row in np.argsort(-lengths, kind="stable"):
                    space = spaces[bisect_left(spaces, lengths[row])]
                    if space < SLOTS:
                        chosen = of_space[space].popleft()
                        if not of_space[space]:
                            spaces.remove(space)
                    else:
                        chosen = []
                        bins.append(chosen)
                    chosen.append(int(row))
                    left = space - int(lengths[row])
                    if left and not of_space[left]:
                        insort(spaces, left)
                    of_space[left].append(chosen)
                taken = pyarrow.Table.from_batches([batch]).take([row for one in bins for row in one]).combine_chunks()
                ends = np.cumsum([0] + [int(lengths[one].sum()) for one in bins]).astype(np.int32)
                columns = [pyarrow.ListArray.from_arrays(ends, column.chunk(0).values) for column in taken.columns]
                writer.write_table(pyarrow.table(columns, names=taken.column_names))
                packs += len(bins)
    return packs


def copy_by_pyarrow(source: Path, target: Path) -> None:
    """Read the rows and write them again, row group by row group."""
    table = parquet.ParquetFile(source)
    with parquet.ParquetWriter(target, table.schema_arrow, compression=COMPRESSION) as writer:
        for number in range(table.num_row_groups):
            writer.write_table(table.read_row_group(number, use_threads=False))


def read_by_pyarrow(source: Path) -> None:
    """Read the rows on one thread, and leave it at that."""
    table = parquet.ParquetFile(source)
    for number in range(table.num_row_groups):
        table.read_row_group(number, use_threads=False)


def pack(source: Path, out: Path, **settings: Any) -> Any:
    """One packing of its own, from the start."""
    shutil.rmtree(out, ignore_errors=True)
    return pack_table(source, out, TableSettings(max_sequence_length=SLOTS, **settings), StageRun(QUIET, workers=1))


def index_only(folder: Path, rows: int, rounds: int, peer: str | None) -> None:
    """Rows a CPU second of `--index-only` beside TRL."""
    name = "TRL pack_dataset, bfd" if peer else "bfd as TRL documents it, re-implemented here"
    for columns in (["input_ids"], ["input_ids", "labels"]):
        table = make_table(rows, 300, SLOTS, seed=1).select(columns)
        save_dataset(table, folder / "saved")
        pack(folder / "saved", folder / "index", index_only=True)  # compiles
        ratios: dict[str, list[float]] = {"lpfhp": [], "optimal": []}
        rates: dict[str, list[float]] = {"lpfhp": [], "optimal": [], "peer": []}
        for _ in range(rounds):
            if peer:
                seconds, packs = peer_seconds(peer, folder / "saved")
            else:
                made: list[int] = []
                seconds, _ = timed(
                    lambda made=made: made.append(pack_as_documented(folder / "saved", folder / "peer.arrow"))
                )
                packs = made[0]
            rates["peer"].append(rows / seconds)
            for algorithm, of_algorithm in ratios.items():
                found: list[Any] = []
                own, _ = timed(
                    lambda algorithm=algorithm, found=found: found.append(
                        pack(folder / "saved", folder / "index", index_only=True, algorithm=algorithm)
                    )
                )
                of_algorithm.append(seconds / own)
                rates[algorithm].append(rows / own)
                ours = found[0].metadata.packs
        print(f"{rows:,} rows of {', '.join(columns)}, {SLOTS} slots; {name}: {packs:,} packs, ours {ours:,}")
        for algorithm in ratios:
            show(f"rows a CPU second, --index-only, {algorithm}", rates[algorithm], "rows/s")
        show(f"rows a CPU second, {name}", rates["peer"], "rows/s")
        for algorithm, of_algorithm in ratios.items():
            show(f"--index-only ({algorithm}) beside it", of_algorithm, "x", "20")
        shutil.rmtree(folder / "saved")


def full_output(folder: Path, rows: int, rounds: int, algorithms: list[str]) -> None:
    """Rows a CPU second of the full output, beside pyarrow reading and writing the same rows."""
    source, copy = folder / "rows.parquet", folder / "copy.parquet"
    parquet.write_table(make_table(rows, 300, SLOTS, seed=2), source, compression=COMPRESSION, row_group_size=20_000)
    pack(source, folder / "packed")
    ratios: dict[str, list[float]] = {algorithm: [] for algorithm in algorithms}
    copies = []
    for _ in range(rounds):
        for algorithm, of_algorithm in ratios.items():
            theirs, _ = timed(lambda: copy_by_pyarrow(source, copy))
            own, _ = timed(lambda algorithm=algorithm: pack(source, folder / "packed", algorithm=algorithm))
            of_algorithm.append(theirs / own)
            copies.append(rows / theirs)
    show("rows a CPU second, pyarrow reads and writes them", copies, "rows/s")
    for algorithm, of_algorithm in ratios.items():
        show(f"full output ({algorithm}) beside it", of_algorithm, "x", "0.7")
    size = sum(path.stat().st_size for path in (folder / "packed").glob("*.parquet"))
    print(f"  bytes: {source.stat().st_size:,} in, {copy.stat().st_size:,} copied, {size:,} packed")


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer")
    parser.add_argument("--algorithms", default="lpfhp,optimal", help="of the full output")
    parser.add_argument("--only", choices=["index", "full"])
    given = parser.parse_args()
    show_processor()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.only in (None, "index"):
            index_only(folder, given.rows, given.rounds, given.peer)
        if given.only in (None, "full"):
            full_output(folder, given.rows, given.rounds, given.algorithms.split(","))


if __name__ == "__main__":
    main()
