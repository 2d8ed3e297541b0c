"""Packed tables: the rows of Parquet files by their numbers, one row group of each file in memory.

Columns of L values a row are matrices, those of one value a sequence are cut by their offsets. pyarrow is imported inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.tables.arrow import explained_arrow_errors, require_pyarrow

__all__ = ["TableFiles"]

NEEDED = ("input_ids", "position_ids", "seq_lens", "sequence_ids")
TOKENLESS = {"row", "indices", "seq_lens"}


class _Column(NamedTuple):
    values: AnyArray
    offsets: IntArray


class _Group(NamedTuple):
    first: int
    last: int
    columns: dict[str, _Column]


class TableFiles:
    """Packed Parquet files.

    Args:
        paths: the files; their numbers are their places here.

    Raises:
        InputError: a file is no packed table, or pyarrow is missing.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._files: dict[int, Any] = {}
        self._groups: dict[int, _Group] = {}
        self._ends: list[IntArray] = []
        for number, path in enumerate(self.paths):
            file = self._open(number)
            names = file.schema_arrow.names
            if TOKENLESS.issubset(names) and "input_ids" not in names:
                raise InputError(
                    f"{path}: is an index, which holds no tokens; pack the table again without --index-only to read packs"
                )
            for name in NEEDED:
                if name not in names:
                    raise InputError(
                        f"{path}: column {name} is missing, so this is no packed table; pack it with `gaudi-bert pack`"
                    )
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            self._ends.append(np.cumsum(sizes, dtype=np.int64))
        self._files.clear()

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which opens the files itself."""
        return {**self.__dict__, "_files": {}, "_groups": {}}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each file."""
        return tuple(int(ends[-1]) if len(ends) else 0 for ends in self._ends)

    @property
    def window_rows(self) -> int:
        """Rows of the largest row group: packs that change places within so many need no other group."""
        return max((int(np.diff(ends, prepend=0).max()) for ends in self._ends if len(ends)), default=1)

    def read(self, files: IntArray, records: IntArray) -> list[dict[str, AnyArray]]:
        """Rows by file and number, int64 [n] each.

        Raises:
            InputError: a file is damaged.
        """
        found = []
        for file, record in zip(files.tolist(), records.tolist(), strict=True):
            group = self._group(file, record)
            place = record - group.first
            found.append(
                {
                    name: column.values[column.offsets[place] : column.offsets[place + 1]]
                    for name, column in group.columns.items()
                }
            )
        return found

    def _open(self, number: int) -> Any:
        if number not in self._files:
            require_pyarrow()
            from pyarrow import parquet

            with explained_arrow_errors(self.paths[number]):
                self._files[number] = parquet.ParquetFile(self.paths[number], memory_map=True)
        return self._files[number]

    def _group(self, file: int, record: int) -> _Group:
        group = self._groups.get(file)
        if group is None or not group.first <= record < group.last:
            ends = self._ends[file]
            number = int(np.searchsorted(ends, record, side="right"))
            self._groups.pop(file, None)
            first = int(ends[number - 1]) if number else 0
            group = self._groups[file] = _Group(first, int(ends[number]), self._read_group(file, number))
        return group

    def _read_group(self, file: int, number: int) -> dict[str, _Column]:
        pyarrow = require_pyarrow()
        opened = self._open(file)
        with explained_arrow_errors(self.paths[file]):
            table = opened.read_row_group(number)
        columns = {}
        for name in table.column_names:
            array = table.column(name).combine_chunks()
            array = array.chunk(0) if isinstance(array, pyarrow.ChunkedArray) else array
            kind = array.type
            if pyarrow.types.is_fixed_size_list(kind):
                offsets = np.arange(len(array) + 1, dtype=np.int64) * kind.list_size
                columns[name] = _Column(array.flatten().to_numpy(zero_copy_only=False), offsets)
            elif pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
                offsets = array.offsets.to_numpy().astype(np.int64)
                columns[name] = _Column(array.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0])
        return columns
