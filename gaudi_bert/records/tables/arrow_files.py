"""Parquet and Arrow files, read batch by batch as numpy slices. pyarrow is imported only here and in
`packed_parquet`.

A folder that `Dataset.save_to_disk` of Hugging Face datasets wrote names its files in `state.json`; other files in it
are left from an earlier save and are no part of the data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json

__all__ = ["ListColumn", "TableFiles", "column_names", "read_batches", "require_pyarrow", "table_files"]

TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
ROWS_PER_BATCH = 1024
DATASET_STATE = "state.json"
LARGEST_EXACT = 2.0**53


def require_pyarrow() -> Any:
    """The module pyarrow.

    Raises:
        InputError: it is not installed, or does not go with the numpy that is installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"Parquet and Arrow need pyarrow ({reason}); install it: pip install 'gaudi-bert[parquet]'"
        ) from error
    return pyarrow


class TableFiles(NamedTuple):
    """The tables of a source, sorted by name, and the names of tables beside them that are no part of it."""

    files: list[Path]
    left_out: list[str]


def table_files(source: str | Path) -> TableFiles:
    """The table files of `source`: one file, a folder of them, or one that `Dataset.save_to_disk` wrote.

    Raises:
        InputError: there is none; a file that `state.json` names is missing; or the folder holds splits, of which one must
            be chosen.
    """
    source = Path(source)
    if source.is_file():
        return TableFiles([source], [])
    if not source.is_dir():
        raise InputError(f"{source}: does not exist; pass a .parquet or .arrow file, or a folder of them")
    found = sorted(
        path for path in source.iterdir() if path.suffix in TABLE_SUFFIXES and not path.name.startswith((".", "cache-"))
    )
    named = _files_of_saved_dataset(source)
    if named is not None:
        return TableFiles(named, [path.name for path in found if path not in named])
    if found:
        return TableFiles(found, [])
    splits = sorted(child.name for child in source.iterdir() if child.is_dir() and any(child.glob("*.arrow")))
    if splits:
        raise InputError(
            f"{source}: holds the splits {', '.join(splits)}; pass one of them, for example {source / splits[0]}"
        )
    raise InputError(f"{source}: holds no {', '.join(TABLE_SUFFIXES)} file; pass a folder of tables with a column input_ids")


def _files_of_saved_dataset(folder: Path) -> list[Path] | None:
    """The files that `state.json` names, sorted; None where the folder is not one of `Dataset.save_to_disk`."""
    path = folder / DATASET_STATE
    state = read_json(path) if path.exists() else None
    if not isinstance(state, dict) or "_data_files" not in state:
        return None
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise InputError(f"{path}: the dataset is a selection of rows; save `dataset.flatten_indices()` instead")
    entries = state["_data_files"]
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries or []]
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise InputError(f"{path}: `_data_files` names no files; save the dataset again")
    files = sorted(folder / str(name) for name in names)
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: missing, {DATASET_STATE} names it; copy it, or save the dataset again")
    return files


class ListColumn:
    """A column of lists as numpy slices, without a Python object for each value.

    Args:
        path, name: how errors call it.
        column: a pyarrow array.
        or_numbers: it may also hold plain numbers, which are taken as lists of one.
    """

    def __init__(self, path: Path, name: str, column: Any, or_numbers: bool = False) -> None:
        pyarrow = require_pyarrow()
        types = pyarrow.types
        self.path, self.name, self.column, self.rows = path, name, column, len(column)
        is_list = types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
        value_type = column.type.value_type if is_list else column.type
        numbers = types.is_integer(value_type) or types.is_floating(value_type) or types.is_boolean(value_type)
        if not numbers or not (is_list or or_numbers):
            raise InputError(f"{path}: column {name} holds {column.type}; it must hold lists of whole numbers")
        if types.is_fixed_size_list(column.type):
            column = column.cast(pyarrow.list_(value_type))
        values = column.values if is_list else column
        self.has_nulls = column.null_count > 0
        self.values_have_nulls = values.null_count > 0
        self.values = values.to_numpy(zero_copy_only=False)
        self.offsets = column.offsets.to_numpy() if is_list else np.arange(len(column) + 1)

    def row(self, index: int, number: int) -> IntArray:
        """The values of row `index` of this batch, which is row `number` of the file."""
        if self.has_nulls and not self.column[index].is_valid:
            raise InputError(f"{self.path}: row {number}: {self.name} is null; fill it, or leave the row out")
        values = self.values[self.offsets[index] : self.offsets[index + 1]]
        if values.dtype.kind == "f":
            if not np.array_equal(values, np.rint(values)) or np.any(np.abs(values) > LARGEST_EXACT):
                reason = "holds a null" if self.values_have_nulls else "holds numbers that are not whole"
                raise InputError(f"{self.path}: row {number}: {self.name} {reason}; it must hold whole numbers")
        elif values.dtype.kind not in "iub":
            raise InputError(f"{self.path}: row {number}: {self.name} holds a null; it must hold whole numbers")
        whole: IntArray = values.astype(np.int64)
        return whole


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(4) == b"PAR1"


def _open_arrow(pyarrow: Any, source: Any) -> Any:
    """A reader of an Arrow file or, as Hugging Face datasets writes, an Arrow stream."""
    if source.read(6) == b"ARROW1":
        source.seek(0)
        return pyarrow.ipc.open_file(source)
    source.seek(0)
    return pyarrow.ipc.open_stream(source)


def column_names(path: Path) -> list[str]:
    """The columns of a table.

    Raises:
        InputError: the file is not a table.
    """
    pyarrow = require_pyarrow()
    try:
        if _is_parquet(path):
            from pyarrow import parquet

            return list(parquet.read_schema(path).names)
        with pyarrow.OSFile(str(path)) as source:
            return list(_open_arrow(pyarrow, source).schema.names)
    except (OSError, pyarrow.ArrowException) as error:
        raise _not_a_table(path, error) from error


def read_batches(path: Path, columns: list[str], or_numbers: Collection[str] = ()) -> Iterator[dict[str, ListColumn]]:
    """The columns of a table, at most ROWS_PER_BATCH rows at a time; those `or_numbers` need not hold lists.

    Raises:
        InputError: the file is not a table, or a column does not hold lists of numbers.
    """
    for batch in _record_batches(path, columns):
        yield {
            name: ListColumn(path, name, batch.column(index), name in or_numbers)
            for index, name in enumerate(batch.schema.names)
        }


def _record_batches(path: Path, columns: list[str]) -> Iterator[Any]:
    pyarrow = require_pyarrow()
    try:
        if _is_parquet(path):
            from pyarrow import parquet

            with parquet.ParquetFile(path) as table:
                yield from table.iter_batches(batch_size=ROWS_PER_BATCH, columns=columns, use_threads=False)
            return
        with pyarrow.memory_map(str(path)) as source:
            reader = _open_arrow(pyarrow, source)
            stored = (
                (reader.get_batch(index) for index in range(reader.num_record_batches))
                if hasattr(reader, "num_record_batches")
                else reader
            )
            for batch in stored:
                for start in range(0, batch.num_rows, ROWS_PER_BATCH):
                    yield batch.select(columns).slice(start, ROWS_PER_BATCH)
    except (OSError, pyarrow.ArrowException) as error:
        raise _not_a_table(path, error) from error


def _not_a_table(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: cannot be read as a Parquet or Arrow table: {' '.join(str(error).split())}; write it again")
