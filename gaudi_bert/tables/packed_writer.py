"""Write the shards of a packed table: Parquet files with one row per pack.

The columns are:

- `input_ids` and each aligned column [L]: values of the column's own type. Padding is 0, and -100 in `labels`.
- `position_ids` [L]: positions, which restart at 0 in each sequence and in the padding.
- `sequence_ids` [L]: 1..1 2..2 .. 0..0. Two tokens may attend to each other if their values are equal.
- `seq_lens`: the number of tokens in each sequence.
- `indices`: the table row that each sequence comes from.
- `starts`: the first token of each sequence in that row. This column exists only if rows are split.
- each scalar column: one value for each sequence.

L is the row length. Shards are written one row group at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.artefacts.shards import Shard
from gaudi_bert.common.arrays import NOT_PREDICTED, AnyArray, Int32Array, IntArray
from gaudi_bert.common.arrow import require_pyarrow
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.files import atomic_file
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.tables.groups import GroupRows
from gaudi_bert.tables.sources import LABELS_COLUMN, TableColumns, is_list_type
from gaudi_bert.tfrecords.files import identify_file

_SLOTS_PER_ROW_GROUP = 2**21
_VALUES_AT_ONCE = 2**14


class PackLayout(NamedTuple):
    """The columns of a packed table, and the number of slots in its packs.

    Attributes:
        columns: The columns of the table.
        max_sequence_length: The number of slots in a pack.
        with_starts: Whether rows may be split, so that the column `starts` exists.
    """

    columns: TableColumns
    max_sequence_length: int
    with_starts: bool

    @classmethod
    def from_settings(cls, columns: TableColumns, settings: TableSettings) -> PackLayout:
        """Return the layout of packs that are written with these settings."""
        return cls(columns, settings.max_sequence_length, settings.too_long == "split")

    @property
    def estimated_pack_bytes(self) -> int:
        """The approximate size of a pack before compression.

        Positions and sequence numbers are not included, because they compress to almost nothing.
        """
        along: int = sum(max(1, kind.bit_width // 8) for kind in self.columns.aligned.values())
        return self.max_sequence_length * along + 64

    def build_schema(self) -> Any:
        """Return the pyarrow schema of a shard."""
        pyarrow = require_pyarrow()
        int32, int64 = pyarrow.int32(), pyarrow.int64()
        of_sequences = {"seq_lens": int32, "indices": int64, **({"starts": int32} if self.with_starts else {})}
        fields = [pyarrow.field(name, _list_type(kind)) for name, kind in of_sequences.items()]
        along = {**self.columns.aligned, "position_ids": int32, "sequence_ids": int32}
        return pyarrow.schema(
            [
                *(pyarrow.field(name, _list_type(kind, self.max_sequence_length), False) for name, kind in along.items()),
                *fields,
                *(pyarrow.field(name, pyarrow.list_(kind)) for name, kind in self.columns.scalars.items()),
            ]
        )


def _list_type(value_type: Any, size: int = -1) -> Any:
    """Return the pyarrow type of a list without nulls. If `size` is not -1, all lists have this size."""
    pyarrow = require_pyarrow()
    return pyarrow.list_(pyarrow.field("element", value_type, nullable=False), size)


def padding_value(column: str) -> int:
    """Return the value that fills the padding slots of an aligned column: -100 for `labels`, otherwise 0."""
    return NOT_PREDICTED if column == LABELS_COLUMN else 0


def write_table_shard(
    path: Path, layout: PackLayout, rows: GroupRows, packs: PackSequences, scalars: Any, pack_range: tuple[int, int]
) -> Shard:
    """Write some packs of a group to a Parquet file.

    Args:
        path: The file.
        layout: The columns and sizes.
        rows: The rows of the group.
        packs: The packs of the group.
        scalars: A pyarrow table of the scalar columns, in the order of the sequences of `packs`, or None.
        pack_range: The first pack, and the end of the packs to write.

    Returns:
        The name, the number of packs, the size and the CRC-32C of the file.
    """
    pyarrow = require_pyarrow()
    from pyarrow import parquet

    first, last = pack_range
    most = max(1, _SLOTS_PER_ROW_GROUP // layout.max_sequence_length)
    schema = layout.build_schema()
    with (
        atomic_file(path) as handle,
        parquet.ParquetWriter(handle, schema, compression="zstd", **_choose_encodings(layout)) as writer,
    ):
        for start in range(first, last, most):
            end = min(start + most, last)
            columns = _build_columns(layout, rows, packs, scalars, start, end)
            writer.write_batch(pyarrow.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema))
    return Shard(name=path.name, packs=last - first, **identify_file(path).identity)


def _choose_encodings(layout: PackLayout) -> dict[str, Any]:
    """Return the options of pyarrow's Parquet writer that set the encodings of the columns in a shard.

    Columns with L numbers per pack are split into their bytes: first all first bytes, then all second bytes, and so on. zstd
    compresses this in half the time of a dictionary encoding, and to fewer bytes. These columns have no statistics, because
    nobody searches for packs by their smallest token id.
    """
    types = require_pyarrow().types
    split, others, counted = [], [], []
    for field in layout.build_schema():
        if not is_list_type(field.type):
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


def _build_columns(
    layout: PackLayout, rows: GroupRows, packs: PackSequences, scalars: Any, first_pack: int, end_pack: int
) -> dict[str, Any]:
    """Return all columns of the packs from `first_pack` to `end_pack` - 1, as pyarrow arrays by name."""
    pyarrow = require_pyarrow()
    slots, (begin, end) = layout.max_sequence_length, packs.offsets[[first_pack, end_pack]].tolist()
    of_rows, starts, lengths = packs.rows[begin:end], packs.starts[begin:end], packs.lengths[begin:end]
    offsets = pyarrow.array((packs.offsets[first_pack : end_pack + 1] - begin).astype(np.int32))

    def lists(values: Any, kind: Any = None) -> Any:
        """Return a pyarrow array with one list per pack."""
        return pyarrow.ListArray.from_arrays(offsets, values, type=kind)

    counted: dict[str, AnyArray] = {"seq_lens": lengths, "starts": starts, "indices": rows.numbers[of_rows]}
    columns = {}
    for name, each in counted.items():
        array = pyarrow.array(each)
        columns[name] = lists(array, _list_type(array.type))
    positions, numbers = (np.empty((end_pack - first_pack) * slots, np.int32) for _ in range(2))
    _fill_positions_and_numbers(packs, first_pack, end_pack, slots, positions, numbers)
    along = {"position_ids": pyarrow.array(positions), "sequence_ids": pyarrow.array(numbers)}
    tokens, is_token = rows.find_token_positions(of_rows, starts, lengths), numbers > 0
    for name, kind in layout.columns.aligned.items():
        values = np.full(is_token.size, padding_value(name), rows.values[name].dtype)
        values[is_token] = rows.values[name][tokens]
        along[name] = pyarrow.array(values).cast(kind)
    for name, array in along.items():
        columns[name] = pyarrow.FixedSizeListArray.from_arrays(array, type=_list_type(array.type, slots))
    for name in layout.columns.scalars:
        values = scalars.column(name).slice(begin, end - begin)
        columns[name] = lists(values.chunk(0) if values.num_chunks == 1 else values.combine_chunks())
    return columns


class PackSequences(NamedTuple):
    """The sequences of all packs of a group, in the order in which the packs contain them.

    Pack p contains sequences offsets[p] to offsets[p + 1] - 1.

    Attributes:
        offsets: int64 [packs + 1].
        rows: int64 [sequences], the row of the group that each sequence comes from.
        starts: int32 [sequences], the first token of each sequence in its row.
        lengths: int32 [sequences], the number of tokens in each sequence.
    """

    offsets: IntArray
    rows: IntArray
    starts: Int32Array
    lengths: Int32Array

    @property
    def pack_count(self) -> int:
        """The number of packs of the group."""
        return self.offsets.size - 1


@borrowing_kernel
def _fill_positions_and_numbers(
    packs: PackSequences, first_pack: int, end_pack: int, row_slots: int, positions: Int32Array, sequence_numbers: Int32Array
) -> None:
    """Fill two arrays with one value for each slot of some packs: its position in its sequence, and the number of this
    sequence in the pack, from 1.

    Padding gets the sequence number 0, and its positions count from 0 like those of a sequence.
    """
    at = 0
    for pack in range(first_pack, end_pack):
        end = at + row_slots
        begin = packs.offsets[pack]
        for index in range(begin, packs.offsets[pack + 1]):
            for position in range(packs.lengths[index]):
                positions[at + position] = position
                sequence_numbers[at + position] = index - begin + 1
            at += packs.lengths[index]
        for position in range(end - at):
            positions[at + position] = position
            sequence_numbers[at + position] = 0
        at = end
