"""Packing a table, beside pyarrow reading and writing the same rows; CPU seconds of all threads, alternating.

python benchmarks/tables.py [--rows N] [--rounds N] [--algorithms A,B]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from measuring import show, show_processor, timed
from pyarrow import parquet

from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.tables.pack import pack_table

QUIET = Reporter(quiet=True)
SLOTS = 2048
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


def copy_by_pyarrow(source: Path, target: Path) -> None:
    """Read the rows and write them again, row group by row group."""
    table = parquet.ParquetFile(source)
    with parquet.ParquetWriter(target, table.schema_arrow, compression=COMPRESSION) as writer:
        for number in range(table.num_row_groups):
            writer.write_table(table.read_row_group(number, use_threads=False))


def pack(source: Path, out: Path, **settings: Any) -> Any:
    """One packing of its own, from the start."""
    shutil.rmtree(out, ignore_errors=True)
    return pack_table(source, out, TableSettings(max_sequence_length=SLOTS, **settings), StageRun(QUIET, workers=1))


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
    parser.add_argument("--algorithms", default="lpfhp,optimal", help="of the full output")
    given = parser.parse_args()
    show_processor()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        full_output(folder, given.rows, given.rounds, given.algorithms.split(","))


if __name__ == "__main__":
    main()
