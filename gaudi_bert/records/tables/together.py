"""Rows that stay together go to one group of parts: that in which their value first occurs.

The column is read once. What is kept of it is the distinct values of each part, so memory grows with the number of different
values and not with the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.tables.arrow import require_pyarrow
from gaudi_bert.records.tables.columns import TableColumns
from gaudi_bert.records.tables.parts import read_parts
from gaudi_bert.records.tables.rows import PartShare
from gaudi_bert.records.tables.sequences import value_codes

__all__ = ["share_by_value"]


def share_by_value(runs: Sequence[Sequence[PartShare]], columns: TableColumns, column: str) -> list[list[PartShare]]:
    """Which rows of which parts belong to each group, if rows with one value of `column` may not be parted.

    Args:
        runs: of each group, its own parts, in the order of the table.
        columns: of the table.
        column: a scalar column.

    Raises:
        InputError: a value is missing, or values cannot be compared.
    """
    pyarrow = require_pyarrow()
    own = [share for run in runs for share in run]
    group_of = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
    distinct = [_distinct_values(share, columns, column) for share in own]
    groups: list[list[PartShare]] = [[] for _ in runs]
    for share, group, values, homes in zip(
        own, group_of.tolist(), distinct, _homes(distinct, group_of, column), strict=True
    ):
        foreign = values.filter(pyarrow.array(homes != group))
        groups[group].append(share._replace(column=column, values=foreign, without=True) if len(foreign) else share)
        for visited in np.unique(homes[homes != group]).tolist():
            visiting = values.filter(pyarrow.array(homes == visited))
            groups[visited].append(share._replace(column=column, values=visiting))
    return groups


def _distinct_values(share: PartShare, columns: TableColumns, column: str) -> Any:
    (table,) = read_parts([share.part], [column], columns.schema)
    values = table.column(column)
    if values.null_count:
        row = share.part.first_row + int(np.argmax(values.is_null().to_numpy()))
        raise InputError(
            f"{share.part.path}: row {row}: {column} is null, --keep-together needs a value; fill it, or leave the row out"
        )
    value_codes(values, column)  # refuses what cannot be compared
    distinct = values.unique()
    return distinct.combine_chunks() if isinstance(distinct, require_pyarrow().ChunkedArray) else distinct


def _homes(distinct: Sequence[Any], group_of: IntArray, column: str) -> list[IntArray]:
    """Of each part, the groups in which its distinct values first occur."""
    pyarrow = require_pyarrow()
    sizes = [len(values) for values in distinct]
    codes = value_codes(pyarrow.chunked_array(distinct), column)
    homes = np.full(int(codes.max(initial=0)) + 1, group_of.size)
    np.minimum.at(homes, codes, np.repeat(group_of, sizes))
    return np.split(homes[codes], np.cumsum(sizes)[:-1])
