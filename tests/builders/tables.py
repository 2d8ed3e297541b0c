"""Tables to pack, in every format; nothing here is of the package."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def random_rows(count: int, longest: int, seed: int) -> list[Row]:
    """Rows with labels, a loss mask of truths, weights and two scalars (some null)."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        size = rng.randint(1, longest)
        ids = [rng.randrange(50_000) for _ in range(size)]
        row = {
            "input_ids": ids,
            "labels": [id_ if rng.random() < 0.4 else -100 for id_ in ids],
            "loss_mask": [rng.random() < 0.5 for _ in ids],
            "weights": [rng.random() for _ in ids],
            "name": None if rng.random() < 0.1 else f"row {number} \u00e4",
            "score": rng.random(),
        }
        rows.append(row)
    return rows


def as_table(rows: Sequence[Row] | Any) -> Any:
    """Rows as a table; what is one already stays as it is."""
    import pyarrow

    return rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(list(rows))


def write_parquet(path: Path, rows: Sequence[Row], row_group_size: int = 7) -> None:
    from pyarrow import parquet

    parquet.write_table(as_table(rows), path, row_group_size=row_group_size)


def write_stream(path: Path, rows: Sequence[Row], batch: int = 7) -> None:
    """As Hugging Face datasets do."""
    import pyarrow

    table = as_table(rows)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def write_file(path: Path, rows: Sequence[Row], batch: int = 7) -> None:
    import pyarrow

    table = as_table(rows)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def write_lines(path: Path, rows: Sequence[Row], batch: int = 0) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def write_dataset(folder: Path, rows: Sequence[Row], batch: int = 7) -> None:
    """What `Dataset.save_to_disk` leaves: Arrow streams, and state.json with their names."""
    folder.mkdir(parents=True)
    half = len(rows) // 2
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (rows[:half], rows[half:]), strict=True):
        write_stream(folder / name, part, batch)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
