"""The lengths in a column of a Parquet file: its whole numbers, or how many values each of its lists has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError

__all__ = ["read_column_lengths"]

USUAL_COLUMN = "input_ids"


def read_column_lengths(path: Path, column: str | None = None) -> IntArray:
    """int64 [rows]: the lengths that a column (default: `input_ids`) of a Parquet file holds.

    Raises:
        InputError: the file is no Parquet, has no such column, or the column holds neither whole numbers nor lists; a null
            is named by its row.
    """
    import pyarrow
    from pyarrow import parquet

    name = USUAL_COLUMN if column is None else column
    parts: list[IntArray] = []
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if name not in names:
                raise InputError(f"{path}: has no column {name}; it has {', '.join(names)}: write FILE:COLUMN")
            rows = 0
            for batch in table.iter_batches(columns=[name]):
                parts.append(_lengths(batch.column(0), f"{path}: row {{row}}: {name}", rows))
                rows += len(batch)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: cannot be read as Parquet: {' '.join(str(error).split())}") from error
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _lengths(cells: Any, place: str, first_row: int) -> IntArray:
    """The lengths of one batch of rows; `place` is how errors name a row."""
    from pyarrow import compute, types

    if cells.null_count:
        row = first_row + cells.is_null().to_pylist().index(True)
        raise InputError(f"{place.format(row=row)} is null; fill it, or leave the row out")
    if types.is_integer(cells.type):
        numbers = cells
    elif types.is_list(cells.type) or types.is_large_list(cells.type) or types.is_fixed_size_list(cells.type):
        numbers = compute.list_value_length(cells)
    else:
        raise InputError(f"{place.format(row=first_row)} is of type {cells.type}; wanted are whole numbers, or lists")
    values: IntArray = numbers.to_numpy(zero_copy_only=False).astype(np.int64)
    return values
