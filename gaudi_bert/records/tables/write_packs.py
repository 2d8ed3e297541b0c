"""Packed tables: shards of Parquet, one row a pack, written a row group at a time.

    input_ids, and each aligned column [L]   its own type; padded with 0, `labels` with -100
    position_ids [L]                         restarting at 0 in each sequence, and in the padding
    sequence_ids [L]                         1..1 2..2 .. 0..0: two tokens may attend to each other where it is equal
    seq_lens                                 tokens of each sequence
    indices                                  number of the row of the table that each sequence is of
    starts                                   its first token in that row; only where rows are split
    each scalar column                       one value for each sequence

Index-only shards hold `row` (number of the pack in its group), `indices`, `seq_lens` (and `starts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.artefacts.metadata import Shard
from gaudi_bert.common.arrays import AnyArray, IntArray
from gaudi_bert.common.files import atomic_file
from gaudi_bert.records.tables.arrow import require_pyarrow
from gaudi_bert.records.tables.columns import LABELS_COLUMN, TableColumns, is_list
from gaudi_bert.records.tables.gather import PackSequences, gather_values, number_tokens
from gaudi_bert.records.tables.rows import GroupRows
from gaudi_bert.records.tables.sources import file_identity

__all__ = ["COMPRESSION", "PackLayout", "pack_bytes", "pad_value", "table_shard_name", "write_table_shard"]

COMPRESSION = "zstd"
SLOTS_PER_ROW_GROUP = 2**21
INDEX_PACKS_PER_ROW_GROUP = 2**17
VALUES_AT_ONCE = 2**14
IGNORED_LABEL = -100


class PackLayout(NamedTuple):
    """What the shards of a folder hold.

    Attributes:
        columns: of the table that is packed.
        max_sequence_length: L.
        index_only: no tokens.
        with_starts: rows may be split.
    """

    columns: TableColumns
    max_sequence_length: int
    index_only: bool
    with_starts: bool

    def schema(self) -> Any:
        """The pyarrow schema of a shard."""
        pyarrow = require_pyarrow()
        int32, int64 = pyarrow.int32(), pyarrow.int64()
        of_sequences = {"seq_lens": int32, "indices": int64, **({"starts": int32} if self.with_starts else {})}
        fields = [pyarrow.field(name, _list(kind)) for name, kind in of_sequences.items()]
        if self.index_only:
            return pyarrow.schema([pyarrow.field("row", int64), *fields])
        along = {**self.columns.aligned, "position_ids": int32, "sequence_ids": int32}
        return pyarrow.schema(
            [
                *(pyarrow.field(name, _list(kind, self.max_sequence_length), False) for name, kind in along.items()),
                *fields,
                *(pyarrow.field(name, pyarrow.list_(kind)) for name, kind in self.columns.scalars.items()),
            ]
        )


def _list(kind: Any, size: int = -1) -> Any:
    pyarrow = require_pyarrow()
    return pyarrow.list_(pyarrow.field("element", kind, nullable=False), size)


def pack_bytes(layout: PackLayout) -> int:
    """About what a pack takes before it is compressed: what is counted (positions, numbers) takes next to nothing."""
    if layout.index_only:
        return 64
    along: int = sum(max(1, kind.bit_width // 8) for kind in layout.columns.aligned.values())
    return layout.max_sequence_length * along + 64


def pad_value(name: str) -> int:
    """What fills the slots behind the last sequence in an aligned column."""
    return IGNORED_LABEL if name == LABELS_COLUMN else 0


def table_shard_name(group: int, shard: int) -> str:
    """`packed-GGGGG-SSSSS.parquet`."""
    return f"packed-{group:05d}-{shard:05d}.parquet"


def write_table_shard(
    path: Path, layout: PackLayout, rows: GroupRows, packs: PackSequences, scalars: Any, bounds: tuple[int, int]
) -> Shard:
    """Write the packs `bounds[0]` .. `bounds[1]` - 1 of a group to `path`.

    Args:
        path: the shard.
        layout: what it holds.
        rows: of the group.
        packs: of the group.
        scalars: the scalar columns in the sequence of `packs`, a pyarrow table; None where there is none.
        bounds: the first pack, and the one after the last.

    Raises:
        FailedError: the file cannot be written.
    """
    from pyarrow import parquet

    first, last = bounds
    most = INDEX_PACKS_PER_ROW_GROUP if layout.index_only else max(1, SLOTS_PER_ROW_GROUP // layout.max_sequence_length)
    schema = layout.schema()
    with (
        atomic_file(path) as handle,
        parquet.ParquetWriter(handle, schema, compression=COMPRESSION, **_encodings(layout)) as writer,
    ):
        for start in range(first, last, most):
            end = min(start + most, last)
            columns = _index_columns(layout, rows, packs, start, end)
            if not layout.index_only:
                columns |= _token_columns(layout, rows, packs, start, end)
                columns |= _scalar_columns(layout, scalars, packs, start, end)
            writer.write_batch(_batch(columns, schema))
    return Shard(name=path.name, packs=last - first, **file_identity(path))


def _encodings(layout: PackLayout) -> dict[str, Any]:
    """How columns are encoded: numbers of L values a pack byte by byte (all first bytes, then all second ones), which zstd
    takes in half the time of a dictionary, and to fewer bytes. Nobody looks for a pack by its least token: no statistics."""
    types = require_pyarrow().types
    split, others, counted = [], [], []
    for field in layout.schema():
        if not is_list(field.type):
            counted.append(field.name)
            continue
        kind, place = field.type.value_type, f"{field.name}.list.element"
        along = types.is_fixed_size_list(field.type)
        if along and (types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)):
            split.append(place)
        elif field.name in ("seq_lens", "indices"):
            counted.append(place)
        else:
            others.append(place)
    return {
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "use_dictionary": others,
        "write_statistics": [*counted, *others],
        "write_batch_size": VALUES_AT_ONCE,
    }


def _batch(columns: Mapping[str, Any], schema: Any) -> Any:
    pyarrow = require_pyarrow()
    return pyarrow.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _index_columns(layout: PackLayout, rows: GroupRows, packs: PackSequences, first: int, last: int) -> dict[str, Any]:
    pyarrow = require_pyarrow()
    begin, end = packs.offsets[first], packs.offsets[last]
    offsets = _offsets(packs, first, last)
    values: dict[str, AnyArray] = {"seq_lens": packs.lengths, "starts": packs.starts}
    columns = {name: _lists(offsets, pyarrow.array(of[begin:end])) for name, of in values.items()}
    columns["indices"] = _lists(offsets, pyarrow.array(rows.numbers[packs.rows[begin:end]]))
    columns["row"] = pyarrow.array(np.arange(first, last))
    return columns


def _token_columns(layout: PackLayout, rows: GroupRows, packs: PackSequences, first: int, last: int) -> dict[str, Any]:
    pyarrow = require_pyarrow()
    slots = layout.max_sequence_length
    made = dict(zip(("position_ids", "sequence_ids"), number_tokens(packs, first, last, slots), strict=True))
    columns = {name: _rows(pyarrow.array(values), slots) for name, values in made.items()}
    for name, kind in layout.columns.aligned.items():
        # (`to_pandas_dtype` would say the same, and needs pandas.)
        stored = np.dtype(np.uint8) if pyarrow.types.is_boolean(kind) else pyarrow.array([], kind).to_numpy().dtype
        padding = np.full(slots, pad_value(name), stored)
        values = pyarrow.array(gather_values(packs, first, last, rows.addresses[name], padding))
        columns[name] = _rows(values.cast(kind), slots)
    return columns


def _scalar_columns(layout: PackLayout, scalars: Any, packs: PackSequences, first: int, last: int) -> dict[str, Any]:
    pyarrow = require_pyarrow()
    begin, end = int(packs.offsets[first]), int(packs.offsets[last])
    offsets = pyarrow.array(_offsets(packs, first, last))
    return {
        name: pyarrow.ListArray.from_arrays(offsets, _one_chunk(scalars.column(name).slice(begin, end - begin)))
        for name in layout.columns.scalars
    }


def _one_chunk(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _offsets(packs: PackSequences, first: int, last: int) -> AnyArray:
    """int32 [packs + 1]: where the sequences of each pack begin among those of the packs `first` .. `last` - 1."""
    offsets: IntArray = packs.offsets[first : last + 1] - packs.offsets[first]
    return offsets.astype(np.int32)


def _lists(offsets: AnyArray, values: Any) -> Any:
    pyarrow = require_pyarrow()
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), values, type=_list(values.type))


def _rows(values: Any, slots: int) -> Any:
    return require_pyarrow().FixedSizeListArray.from_arrays(values, type=_list(values.type, slots))
