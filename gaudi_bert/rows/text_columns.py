"""Rows of Parquet with texts, and the tables of tokens that texts become."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gaudi_bert.common.arrow import opened_parquet, require_pyarrow, validated
from gaudi_bert.common.files import atomic_file

_ROWS_AT_ONCE = 256
_ROW_GROUP_TOKENS = 1 << 20


def row_groups(path: Path) -> list[tuple[int, int]]:
    """(rows, bytes) of each row group of a Parquet file."""
    with opened_parquet(path) as table:
        groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
        return [(group.num_rows, group.total_byte_size) for group in groups]


def read_columns(path: Path, needed: str, columns: Sequence[str], groups: range | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, or of some row groups: those of `columns` that it has, or all if `needed` is missing."""
    with opened_parquet(path) as table:
        names = table.schema_arrow.names
        chosen = [name for name in names if name in columns] if needed in names else None
        parts = None if groups is None else list(groups)
        for batch in table.iter_batches(_ROWS_AT_ONCE, row_groups=parts, columns=chosen, use_threads=False):
            yield from validated(path, batch).to_pylist()


def token_table(columns: Sequence[str], values: Sequence[Sequence[Sequence[int]]]) -> Any:
    """A pyarrow Table of lists of int32: of each column, the list of each row."""
    pyarrow = require_pyarrow()
    kind = pyarrow.list_(pyarrow.int32())
    return pyarrow.table({name: pyarrow.array(rows, kind) for name, rows in zip(columns, values, strict=True)})


def write_token_tables(path: Path, columns: Sequence[str], tables: Iterable[Any]) -> int:
    """Write tables of tokens to one file, in row groups of about 2^20 tokens, completely or not at all; its bytes."""
    pyarrow = require_pyarrow()
    from pyarrow import parquet

    options = {
        "compression": "zstd",
        "use_dictionary": False,
        "column_encoding": {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in columns},
    }
    schema = token_table(columns, [[] for _ in columns]).schema
    held: list[Any] = []
    tokens = 0
    with atomic_file(path) as handle, parquet.ParquetWriter(handle, schema, **options) as writer:
        for table in tables:
            held.append(table)
            tokens += len(table.column(0).combine_chunks().values) if table.num_rows else 0
            if tokens >= _ROW_GROUP_TOKENS:
                writer.write_table(pyarrow.concat_tables(held).combine_chunks())
                held, tokens = [], 0
        if tokens:
            writer.write_table(pyarrow.concat_tables(held).combine_chunks())
    return path.stat().st_size
