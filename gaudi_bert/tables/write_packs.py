"""Packed tables: shards of Parquet, one row per pack, written a row group at a time.

input_ids, and each aligned column [L]   its own type; padded with 0, `labels` with -100
position_ids [L]                         restarting at 0 in each sequence, and in the padding
sequence_ids [L]                         1..1 2..2 .. 0..0: two tokens may attend to each other where it is equal
seq_lens                                 tokens of each sequence
indices                                  number of the row of the table that each sequence is of
starts                                   its first token in that row; only where rows are split
each scalar column                       one value for each sequence
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.artefacts.shards import Shard
from gaudi_bert.common.arrays import NOT_PREDICTED, AnyArray, ByteArray, Int32Array, IntArray
from gaudi_bert.common.arrow import require_pyarrow
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.memory import address_of, as_word, copy_bytes
from gaudi_bert.tables.rows import GroupRows
from gaudi_bert.tables.sources import LABELS_COLUMN, TableColumns, is_list
from gaudi_bert.tfrecords.files import input_file

_SLOTS_PER_ROW_GROUP = 2**21
_VALUES_AT_ONCE = 2**14


class PackLayout(NamedTuple):
    """Columns and sizes of the shards of a folder: packs of so many tokens, of rows that may be split (`with_starts`)."""

    columns: TableColumns
    max_sequence_length: int
    with_starts: bool

    @property
    def pack_bytes(self) -> int:
        """About what a pack takes before it is compressed: what is counted (positions, numbers) takes next to nothing."""
        along: int = sum(max(1, kind.bit_width // 8) for kind in self.columns.aligned.values())
        return self.max_sequence_length * along + 64

    def schema(self) -> Any:
        """The pyarrow schema of a shard."""
        pyarrow = require_pyarrow()
        int32, int64 = pyarrow.int32(), pyarrow.int64()
        of_sequences = {"seq_lens": int32, "indices": int64, **({"starts": int32} if self.with_starts else {})}
        fields = [pyarrow.field(name, _list(kind)) for name, kind in of_sequences.items()]
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


def pad_value(name: str) -> int:
    """Return what fills the slots behind the last sequence in an aligned column."""
    return NOT_PREDICTED if name == LABELS_COLUMN else 0


def write_table_shard(
    path: Path, layout: PackLayout, rows: GroupRows, packs: PackSequences, scalars: Any, bounds: tuple[int, int]
) -> Shard:
    """Write the packs `bounds[0]` .. `bounds[1]` - 1 of a group to `path`.

    `scalars` are the scalar columns in the order of the sequences of `packs`, a pyarrow table; None where there are none.
    """
    pyarrow = require_pyarrow()
    from pyarrow import parquet

    first, last = bounds
    most = max(1, _SLOTS_PER_ROW_GROUP // layout.max_sequence_length)
    schema = layout.schema()
    with (
        atomic_file(path) as handle,
        parquet.ParquetWriter(handle, schema, compression="zstd", **_encodings(layout)) as writer,
    ):
        for start in range(first, last, most):
            end = min(start + most, last)
            columns = _index_columns(rows, packs, start, end)
            columns |= _token_columns(layout, rows, packs, start, end)
            columns |= _scalar_columns(layout, scalars, packs, start, end)
            writer.write_batch(pyarrow.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema))
    return Shard(name=path.name, packs=last - first, **input_file(path).identity)


def _encodings(layout: PackLayout) -> dict[str, Any]:
    """Return how columns are encoded: numbers of L values per pack byte by byte (all first bytes, then all second ones).

    zstd takes that in half the time of a dictionary, and to fewer bytes. Nobody looks for a pack by its least token: no
    statistics.
    """
    types = require_pyarrow().types
    split, others, counted = [], [], []
    for field in layout.schema():
        if not is_list(field.type):
            counted.append(field.name)
            continue
        kind, element = field.type.value_type, f"{field.name}.list.element"
        along = types.is_fixed_size_list(field.type)
        if along and (types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)):
            split.append(element)
        elif field.name in ("seq_lens", "indices"):
            counted.append(element)
        else:
            others.append(element)
    return {
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "use_dictionary": others,
        "write_statistics": [*counted, *others],
        "write_batch_size": _VALUES_AT_ONCE,
    }


def _index_columns(rows: GroupRows, packs: PackSequences, first: int, last: int) -> dict[str, Any]:
    pyarrow = require_pyarrow()
    begin, end = packs.offsets[first], packs.offsets[last]
    offsets = _offsets(packs, first, last)
    values: dict[str, AnyArray] = {"seq_lens": packs.lengths, "starts": packs.starts}
    columns = {name: _lists(offsets, pyarrow.array(of[begin:end])) for name, of in values.items()}
    columns["indices"] = _lists(offsets, pyarrow.array(rows.numbers[packs.rows[begin:end]]))
    return columns


def _token_columns(layout: PackLayout, rows: GroupRows, packs: PackSequences, first: int, last: int) -> dict[str, Any]:
    pyarrow = require_pyarrow()
    slots = layout.max_sequence_length
    positions, numbers = (np.empty((last - first) * slots, np.int32) for _ in range(2))
    _number(packs, first, last, slots, positions, numbers)
    columns = {"position_ids": _rows(pyarrow.array(positions), slots), "sequence_ids": _rows(pyarrow.array(numbers), slots)}
    for name, kind in layout.columns.aligned.items():
        # (`to_pandas_dtype` would say the same, and needs pandas.)
        stored = np.dtype(np.uint8) if pyarrow.types.is_boolean(kind) else pyarrow.array([], kind).to_numpy().dtype
        padding = np.full(slots, pad_value(name), stored)
        values = np.empty((last - first) * slots, stored)
        _gather(packs, first, last, rows.addresses[name], padding.view(np.uint8), padding.itemsize, values.view(np.uint8))
        columns[name] = _rows(pyarrow.array(values).cast(kind), slots)
    return columns


def _scalar_columns(layout: PackLayout, scalars: Any, packs: PackSequences, first: int, last: int) -> dict[str, Any]:
    pyarrow = require_pyarrow()
    begin, end = int(packs.offsets[first]), int(packs.offsets[last])
    offsets = pyarrow.array(_offsets(packs, first, last))
    columns = {}
    for name in layout.columns.scalars:
        values = scalars.column(name).slice(begin, end - begin)
        values = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
        columns[name] = pyarrow.ListArray.from_arrays(offsets, values)
    return columns


def _offsets(packs: PackSequences, first: int, last: int) -> AnyArray:
    """int32 [packs + 1]: where the sequences of each pack begin among those of the packs `first` .. `last` - 1."""
    offsets: IntArray = packs.offsets[first : last + 1] - packs.offsets[first]
    return offsets.astype(np.int32)


def _lists(offsets: AnyArray, values: Any) -> Any:
    pyarrow = require_pyarrow()
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), values, type=_list(values.type))


def _rows(values: Any, slots: int) -> Any:
    return require_pyarrow().FixedSizeListArray.from_arrays(values, type=_list(values.type, slots))


# --- rows of packs, gathered from the rows of a table (numba kernels)
#
# Values are copied as bytes, whatever their type; what follows them is copied from a row of padding.


class PackSequences(NamedTuple):
    """The sequences of packs, in the order in which they are written: pack p holds those from offsets[p] to offsets[p + 1].

    Attributes:
        offsets: int64 [packs + 1].
        rows: int64 [sequences], the row of the group that each is of.
        starts: int32 [sequences], its first token in the row.
        lengths: int32 [sequences].
    """

    offsets: IntArray
    rows: IntArray
    starts: Int32Array
    lengths: Int32Array

    @property
    def packs(self) -> int:
        """Number of packs."""
        return self.offsets.size - 1


@borrowing_kernel
def _gather(
    packs: PackSequences, first: int, last: int, addresses: IntArray, padding: ByteArray, value_bytes: int, out: ByteArray
) -> None:
    """Fill `out` with the values of one column in the packs `first` .. `last` - 1.

    `addresses`, int64 [rows], are of the first value of each row; `padding` is a row of nothing but padding.
    """
    at, pad = address_of(out), address_of(padding)
    for pack in range(first, last):
        end = at + padding.size
        for index in range(packs.offsets[pack], packs.offsets[pack + 1]):
            size = as_word(packs.lengths[index]) * value_bytes
            copy_bytes(at, addresses[packs.rows[index]] + as_word(packs.starts[index]) * value_bytes, size)
            at += size
        copy_bytes(at, pad, end - at)
        at = end


@borrowing_kernel
def _number(packs: PackSequences, first: int, last: int, row_slots: int, positions: Int32Array, numbers: Int32Array) -> None:
    """Set, for every slot, the position in its sequence and the number of the sequence (from 1).

    Padding has the number 0, and positions from 0 as one more sequence.
    """
    at = 0
    for pack in range(first, last):
        end = at + row_slots
        begin = packs.offsets[pack]
        for index in range(begin, packs.offsets[pack + 1]):
            for position in range(packs.lengths[index]):
                positions[at + position] = position
                numbers[at + position] = index - begin + 1
            at += packs.lengths[index]
        for position in range(end - at):
            positions[at + position] = position
            numbers[at + position] = 0
        at = end
