"""The groups of a table: parts of its files that are read, packed and held in memory together.

As with TFRecords, a group has at most `group_sequences` rows and `group_bytes` bytes, and is a function of the files and the
settings; here it consists of the parts that the formats have (row groups, record batches, blocks of lines), dealt by a
seeded permutation, so that each group mixes all regions of the table. A part that is larger is a group of its own.

Where rows stay together by a column, groups are runs of the table instead, and a row goes to the group in which its value
first occurs: a group then reads, besides its own parts, those other parts that hold rows of its values. Where equal values
are neighbours, that is at most one part more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import TableSettings

if TYPE_CHECKING:
    from gaudi_bert.packing.groups import FileCounts
    from gaudi_bert.records.tables.columns import TableColumns
    from gaudi_bert.records.tables.parts import TablePart
    from gaudi_bert.records.tables.rows import PartShare

__all__ = ["GroupedTable", "is_table", "open_table"]

_INDEX_ROW_BYTES = 32
"""What a row takes in memory where only its length is kept."""


@dataclass(frozen=True)
class GroupedTable:
    """A table that is ready to be read.

    Attributes:
        files: in the order of their names.
        file_rows: rows of each file.
        columns: what is packed.
        read_columns: what is read: for an index, only what tells the lengths.
        groups: of each group, which rows of which parts.
    """

    files: Sequence[Path]
    file_rows: Sequence[int]
    columns: TableColumns
    read_columns: TableColumns
    groups: Sequence[Sequence[PartShare]]

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(self.file_rows)


def is_table(source: str | Path) -> bool:
    """Whether `source` is a table by its ending, or a folder of tables; anything else is taken for TFRecords."""
    from gaudi_bert.records.tables.sources import is_table

    return is_table(source)


def open_table(source: str | Path, settings: TableSettings, reporter: Reporter) -> GroupedTable:
    """List the parts of a table and form its groups.

    Args:
        source: a table: a file, a folder or a glob.
        settings: how it is packed.
        reporter: what is unusual is said.

    Raises:
        InputError: there is no table, it holds no row, its files differ in their columns, or a column is missing or cannot
            be packed.
    """
    from gaudi_bert.records.tables.columns import check_same_columns, check_storable, columns_of
    from gaudi_bert.records.tables.parts import list_parts
    from gaudi_bert.records.tables.sources import table_files

    files, left_out = table_files(source)
    if left_out:
        reporter.say(f"{source}: state.json does not name {', '.join(left_out)}; left out, as of an earlier save")
    columns = columns_of(files[0], settings.columns)
    check_same_columns(files, columns)
    if not settings.index_only:
        check_storable(files[0], columns)
    together = settings.keep_together
    if together is not None and together not in columns.scalars:
        raise InputError(
            f"{files[0]}: has no column {together} with one value a row, which --keep-together names; "
            f"it has {', '.join(columns.scalars) or 'none'}"
        )
    read = columns.tokens_only(*([together] if together else [])) if settings.index_only else columns
    parts = [list_parts(file, read.names, settings.group_sequences, settings.group_bytes) for file in files]
    file_rows = [sum(part.rows for part in of_file) for of_file in parts]
    if not sum(file_rows):
        raise InputError(f"{source}: the table holds no row; there is nothing to pack")
    groups = _form_groups(parts, file_rows, read, settings, reporter)
    return GroupedTable(files, file_rows, columns, read, groups)


def _form_groups(
    parts: Sequence[Sequence[TablePart]],
    file_rows: Sequence[int],
    columns: TableColumns,
    settings: TableSettings,
    reporter: Reporter,
) -> list[list[PartShare]]:
    from gaudi_bert.packing.groups import FileCounts, form_groups, form_runs, too_large_files
    from gaudi_bert.records.tables.rows import PartShare
    from gaudi_bert.records.tables.together import share_by_value

    first_rows = np.concatenate([[0], np.cumsum(file_rows)]).tolist()
    shares: dict[str, PartShare] = {}
    counts: list[FileCounts] = []
    nothing = np.zeros((0, 3), np.int64)
    for file, of_file in enumerate(parts):
        for part in of_file:
            name = f"{file:08d} {part.first_row:020d}"
            size = part.rows * _INDEX_ROW_BYTES if settings.index_only else part.bytes
            shares[name] = PartShare(part, first_rows[file])
            counts.append(FileCounts(name, size, 0, part.rows, 0, nothing))
    limits = settings.group_sequences, settings.group_bytes
    large = too_large_files(counts, *limits)
    if large:
        largest = max(large, key=lambda part: part.bytes)
        reporter.say(
            f"{shares[largest.name].part.path.name}: {largest.sequences:,} rows, about {largest.bytes:,} bytes, can only be "
            f"read at once: larger than a group may be ({limits[0]:,} rows, {limits[1]:,} bytes), so they are a group; "
            f"there are {len(large):,} such parts"
        )
    if settings.keep_together is None:
        dealt = form_groups(counts, *limits, settings.seed)
        return [[shares[part.name] for part in group] for group in dealt]
    runs = [[shares[part.name] for part in group] for group in form_runs(counts, *limits)]
    return share_by_value(runs, columns, settings.keep_together)
