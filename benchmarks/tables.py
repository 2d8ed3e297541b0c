"""Compare `pack` of a table with pyarrow reading and writing the same rows, by the CPU time of all threads. The two programs
run in turn.

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
from measuring import measure_seconds, print_figure, print_processor
from pyarrow import parquet

from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.tables.pack import pack_table

QUIET = Reporter(quiet=True)
SLOTS = 2048
COMPRESSION = "zstd"


def make_table(rows: int, mean: float, most: int, seed: int, labelled: float = 2 / 3) -> Any:
    """Return a table of token ids that are distributed like those of texts (a few are frequent), with labels. A fraction
    `labelled` of the labels equals the token id, and all other labels are -100.
    """
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(mean), 0.6, rows).astype(np.int64), 4, most)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = (rng.zipf(1.3, offsets[-1]) % 30_000).astype(np.int32)
    labels = np.where(rng.random(offsets[-1]) < labelled, ids, -100).astype(np.int32)
    return pyarrow.table(
        {name: pyarrow.ListArray.from_arrays(offsets, of) for name, of in (("input_ids", ids), ("labels", labels))}
    )


def copy_by_pyarrow(source: Path, target: Path) -> None:
    """Read the rows and write them again, one row group at a time."""
    table = parquet.ParquetFile(source)
    with parquet.ParquetWriter(target, table.schema_arrow, compression=COMPRESSION) as writer:
        for number in range(table.num_row_groups):
            writer.write_table(table.read_row_group(number, use_threads=False))


def pack(source: Path, out: Path, **settings: Any) -> Any:
    """Pack the table into an empty output folder."""
    shutil.rmtree(out, ignore_errors=True)
    return pack_table(source, out, TableSettings(max_sequence_length=SLOTS, **settings), StageRun(QUIET, workers=1))


def full_output(folder: Path, rows: int, rounds: int, algorithms: list[str]) -> None:
    """Compare the rows per CPU second of `pack` with those of pyarrow reading and writing the same rows."""
    source, copy = folder / "rows.parquet", folder / "copy.parquet"
    parquet.write_table(make_table(rows, 300, SLOTS, seed=2), source, compression=COMPRESSION, row_group_size=20_000)
    pack(source, folder / "packed")
    ratios: dict[str, list[float]] = {algorithm: [] for algorithm in algorithms}
    copies = []
    for _ in range(rounds):
        for algorithm, of_algorithm in ratios.items():
            theirs, _ = measure_seconds(lambda: copy_by_pyarrow(source, copy))
            own, _ = measure_seconds(lambda algorithm=algorithm: pack(source, folder / "packed", algorithm=algorithm))
            of_algorithm.append(theirs / own)
            copies.append(rows / theirs)
    print_figure("rows a CPU second, pyarrow reads and writes them", copies, "rows/s")
    for algorithm, of_algorithm in ratios.items():
        print_figure(f"full output ({algorithm}) beside it", of_algorithm, "x", "0.7")
    size = sum(path.stat().st_size for path in (folder / "packed").glob("*.parquet"))
    print(f"  bytes: {source.stat().st_size:,} in, {copy.stat().st_size:,} copied, {size:,} packed")


def main() -> None:
    """Parse the command line, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--algorithms", default="lpfhp,optimal", help="packing algorithms to compare")
    given = parser.parse_args()
    print_processor()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        full_output(folder, given.rows, given.rounds, given.algorithms.split(","))


if __name__ == "__main__":
    main()
