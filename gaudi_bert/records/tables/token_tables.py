"""Tables of sequences (Parquet, Arrow, JSON lines, Hugging Face datasets) read as unpacked examples.

A row is a sequence. Only `input_ids` is needed; the other columns may go by the names of the contract or by
Hugging Face's:

    input_ids                                   token ids, padded or not
    attention_mask | input_mask                 1..1 0..0; without it every id of the row is real
    token_type_ids | segment_ids                without it all 0
    labels                                      the id that was masked, -100 elsewhere
    masked_lm_positions, masked_lm_ids (, masked_lm_weights)
                                                the contract's form of the same, padded or not; without either: none
    next_sentence_label | next_sentence_labels  0 or 1, a number or a list of one; without it 0

Tables are read batch by batch, so memory does not grow with the file; a batch is checked by a kernel, and only a row that is
at fault is looked at by itself, to say why. Nothing is cut or dropped. Whoever measures tables before reading them gets what
was read while there is room for it, and reads only the others again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.schema import MAX_SEGMENT_ID, MAX_SEQUENCE_LENGTH, MAX_TOKEN_ID
from gaudi_bert.records.tables.arrow import require_pyarrow
from gaudi_bert.records.tables.columns import is_list
from gaudi_bert.records.tables.parts import TablePart, list_parts, read_parts, table_schema
from gaudi_bert.records.tables.rows import list_values
from gaudi_bert.records.tables.token_check import NOT_PREDICTED, RowLists, TokenLists, collect_predicted, first_bad_row
from gaudi_bert.records.write.unpacked import SequenceArrays

__all__ = ["NOT_PREDICTED", "KeptBatch", "TableSizes", "measure_tables", "read_sequences"]

MASK_COLUMNS = ("attention_mask", "input_mask")
SEGMENT_COLUMNS = ("token_type_ids", "segment_ids")
LABEL_COLUMNS = ("next_sentence_label", "next_sentence_labels")
MASKED_COLUMNS = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
ROWS_PER_BATCH = 2048
"""So few that the numbers of a batch, about 3 MB a column, lie where those of the one before it lay: larger arrays are new
memory each time, and zeroing its pages took as long as all else."""

BYTES_PER_BATCH = 64 << 20
MOST_KEPT_BYTES = 256 << 20
LARGEST_EXACT = 2.0**53
_ABSENT = RowLists(np.zeros(0, np.int64), np.zeros(0, np.int64))


KeptBatch = tuple[TablePart, SequenceArrays]
"""A batch of rows that was read and checked, and where it lies."""


@dataclass(frozen=True)
class TableSizes:
    """What a set of tables holds at most: the sizes that its examples need.

    Attributes:
        kept: all batches of those tables, from the first on, that fit into `MOST_KEPT_BYTES`.
    """

    rows: int
    tokens: int
    max_sequence_length: int
    max_predictions: int
    ignored_columns: tuple[str, ...]
    kept: Mapping[Path, Sequence[KeptBatch]]


def measure_tables(files: Sequence[Path]) -> TableSizes:
    """Read `files` once for the sizes that their examples need (`max_predictions` is at least 1).

    Raises:
        InputError: as `read_sequences`; or there is no row.
    """
    rows = tokens = longest = most_masked = 0
    ignored: set[str] = set()
    kept: dict[Path, list[KeptBatch]] = {}
    room = MOST_KEPT_BYTES
    for path in files:
        used, unused = _columns(path)
        ignored |= set(unused)
        of_file: list[KeptBatch] = []
        for part, sequences in _checked_batches(path, used):
            rows += sequences.lengths.size
            tokens += int(sequences.lengths.sum())
            longest = max(longest, int(sequences.lengths.max()))
            most_masked = max(most_masked, int(sequences.masked.max()))
            room -= sum(array.nbytes for array in sequences)
            if room >= 0:
                of_file.append((part, sequences))
        if room >= 0:
            kept[path] = of_file
    if rows == 0:
        raise InputError(f"{files[0].parent}: the tables hold no row; there is nothing to pack")
    return TableSizes(rows, tokens, longest, max(1, most_masked), tuple(sorted(ignored)), kept)


def read_sequences(
    path: Path,
    max_sequence_length: int | None = None,
    max_predictions: int | None = None,
    kept: Sequence[KeptBatch] | None = None,
) -> Iterator[SequenceArrays]:
    """The sequences of one table, in order, a batch of rows at a time.

    Args:
        path: the table.
        max_sequence_length, max_predictions: what a row may hold; None for the limits of the contract.
        kept: what measuring has kept of it, so that it need not be read again; None where that is nothing.

    Raises:
        InputError: the file is not a table, has no column `input_ids`, or a row is not a sequence or does not fit; row and
            reason are named.
    """
    for part, sequences in _checked_batches(path, _columns(path)[0]) if kept is None else kept:
        _check_sizes(part, sequences, max_sequence_length, max_predictions)
        yield sequences


def _checked_batches(path: Path, used: Sequence[str]) -> Iterator[KeptBatch]:
    """Batches of rows with these columns, each found to be sequences."""
    parts = list_parts(path, used, ROWS_PER_BATCH, BYTES_PER_BATCH)
    for part, table in zip(parts, read_parts(parts, used, table_schema(path), threads=False), strict=True):
        for start in range(0, part.rows, ROWS_PER_BATCH):
            rows = table.slice(start, ROWS_PER_BATCH)
            batch = part._replace(first_row=part.first_row + start, rows=rows.num_rows)
            yield batch, _sequences(batch, {name: _row_lists(batch, name, rows.column(name)) for name in used})


def _columns(path: Path) -> tuple[list[str], list[str]]:
    """The columns of a table that are read, and those that are not."""
    schema = table_schema(path)
    names = list(schema.names)
    if "input_ids" not in names:
        raise InputError(f"{path}: has no column input_ids (it has {', '.join(names)}); tokenise the text first")
    known = ("input_ids", "labels", *MASK_COLUMNS, *SEGMENT_COLUMNS, *LABEL_COLUMNS, *MASKED_COLUMNS)
    used = [name for name in names if name in known]
    for name in used:
        _check_type(path, name, schema.field(name).type)
    return used, [name for name in names if name not in known]


def _check_type(path: Path, name: str, kind: Any) -> None:
    types = require_pyarrow().types
    value = kind.value_type if is_list(kind) else kind
    numbers = types.is_integer(value) or types.is_floating(value) or types.is_boolean(value)
    if not numbers or not (is_list(kind) or name in LABEL_COLUMNS):
        raise InputError(f"{path}: column {name} holds {kind}; it must hold lists of whole numbers")


def _row_lists(part: TablePart, name: str, column: Any) -> RowLists:
    """A column as int64; plain numbers as lists of one."""
    pyarrow = require_pyarrow()
    if not is_list(column.type):
        offsets = pyarrow.array(np.arange(part.rows + 1, dtype=np.int32))
        column = pyarrow.ListArray.from_arrays(offsets, column.combine_chunks())
    values, offsets = list_values(part.path, part.first_row, name, column)
    values = values[offsets[0] : offsets[-1]]
    offsets = offsets.astype(np.int64) - offsets[0]
    if values.dtype.kind == "f":
        broken = (values != np.rint(values)) | (np.abs(values) > LARGEST_EXACT)
        if broken.any():
            row = int(np.searchsorted(offsets, int(np.argmax(broken)), side="right")) - 1
            place = f"{part.path}: row {part.first_row + row}"
            raise InputError(f"{place}: {name} holds numbers that are not whole; it must hold whole numbers")
    return RowLists(values.astype(np.int64), offsets)


def _sequences(part: TablePart, columns: Mapping[str, RowLists]) -> SequenceArrays:
    """The sequences of a batch of rows, once all are found to be some."""
    ids, labels = columns["input_ids"], _first(columns, LABEL_COLUMNS)
    mask, segments = _first(columns, MASK_COLUMNS), _first(columns, SEGMENT_COLUMNS)
    predicted = columns.get("labels", _ABSENT)
    positions, masked_ids, weights = (columns.get(name, _ABSENT) for name in MASKED_COLUMNS)
    lengths, masked = np.zeros(part.rows, np.int64), np.zeros(part.rows, np.int64)
    checked = TokenLists(ids, mask, segments, predicted, positions, masked_ids, weights, labels)
    bad = first_bad_row(checked, lengths, masked)
    if bad >= 0:
        raise InputError(f"{part.path}: row {part.first_row + bad}: {_fault(columns, bad)}")
    masked_starts = positions.offsets[:-1] if positions.offsets.size else np.zeros(part.rows, np.int64)
    masked_positions, its_ids = positions.values, masked_ids.values
    if predicted.offsets.size:
        masked_starts = np.cumsum(masked) - masked
        masked_positions, its_ids = np.empty(masked.sum(), np.int64), np.empty(masked.sum(), np.int64)
        collect_predicted(predicted, masked_positions, its_ids)
    return SequenceArrays(
        lengths,
        ids.values,
        ids.offsets[:-1],
        segments.values,
        segments.offsets[:-1] if segments.offsets.size else np.zeros(part.rows, np.int64),
        masked,
        masked_positions,
        its_ids,
        masked_starts,
        labels.values if labels.offsets.size else np.zeros(part.rows, np.int64),
    )


def _check_sizes(
    part: TablePart, sequences: SequenceArrays, max_sequence_length: int | None, max_predictions: int | None
) -> None:
    for what, counted, most, remedy in (
        ("tokens", sequences.lengths, max_sequence_length, "raise --max-sequence-length, or cut the sequences before"),
        ("masked positions", sequences.masked, max_predictions, "raise --max-predictions"),
    ):
        if most is not None and (counted > most).any():
            row = int(np.argmax(counted > most))
            least = 1 if what == "tokens" else 0
            place = f"{part.path}: row {part.first_row + row}"
            raise InputError(f"{place}: has {counted[row]} {what}, allowed are {least} to {most}; {remedy}")


def _first(columns: Mapping[str, RowLists], names: tuple[str, ...]) -> RowLists:
    return next((columns[name] for name in names if name in columns), _ABSENT)


def _fault(columns: Mapping[str, RowLists], row: int) -> str:
    """What is wrong with a row that the kernel found."""
    cells = {name: values[offsets[row] : offsets[row + 1]] for name, (values, offsets) in columns.items()}
    try:
        _check_row(cells)
    except ValueError as error:
        return str(error)
    return "is no sequence; compare it with the columns that docs/tables.md describes"


def _check_row(cells: Mapping[str, IntArray]) -> None:
    """Raise ValueError with the reason why the cells of a row are no sequence."""
    ids = cells["input_ids"]
    mask = _first_cell(cells, MASK_COLUMNS)
    length = ids.size if mask is None else _prefix_length(mask, ids.size)
    if length == 0:
        raise ValueError("has no token; leave empty rows out")
    if length > MAX_SEQUENCE_LENGTH:
        raise ValueError(f"has {length} tokens, at most {MAX_SEQUENCE_LENGTH} are allowed; split it, or leave it out")
    _check_range("input_ids", ids[:length], MAX_TOKEN_ID)
    _check_segments(cells, length, ids.size)
    positions, masked_ids = _masked(cells, length, ids.size)
    _check_range("masked positions", positions, length - 1)
    _check_range("ids of masked positions", masked_ids, MAX_TOKEN_ID)
    label = _first_cell(cells, LABEL_COLUMNS)
    if label is not None and (label.size != 1 or label[0] not in (0, 1)):
        raise ValueError(f"next_sentence_label is {label.tolist()}; it must be one number, 0 or 1")


def _check_range(name: str, values: IntArray, most: int) -> None:
    outside = np.flatnonzero((values < 0) | (values > most))
    if outside.size:
        raise ValueError(f"{name}: holds {values[outside[0]]} at {outside[0]}, 0 to {most} is allowed")


def _check_segments(cells: Mapping[str, IntArray], length: int, size: int) -> None:
    """The segment ids of the `length` real ones of `size` tokens."""
    segments = _first_cell(cells, SEGMENT_COLUMNS)
    if segments is None:
        return
    if segments.size != size:
        raise ValueError(f"has {segments.size} segment ids for {size} input_ids; give as many")
    _check_range("segment ids", segments[:length], MAX_SEGMENT_ID)


def _first_cell(cells: Mapping[str, IntArray], names: tuple[str, ...]) -> IntArray | None:
    return next((cells[name] for name in names if name in cells), None)


def _prefix_length(mask: IntArray, size: int) -> int:
    """n of a mask of n ones and then zeros."""
    length = int(np.count_nonzero(mask))
    if mask.size != size:
        raise ValueError(f"has {mask.size} mask values for {size} input_ids; give as many")
    if not (np.all(mask[:length] == 1) and np.all(mask[length:] == 0)):
        raise ValueError("its mask is not 1..1 0..0; pad on the right, with a mask of zeros and ones")
    return length


def _masked(cells: Mapping[str, IntArray], length: int, size: int) -> tuple[IntArray, IntArray]:
    """Masked positions and the ids that belong there."""
    if "labels" in cells:
        labels = cells["labels"]
        if labels.size != size:
            raise ValueError(
                f"has {labels.size} labels for {size} input_ids; give as many, {NOT_PREDICTED} where nothing is masked"
            )
        positions = np.flatnonzero(labels != NOT_PREDICTED)
        if positions.size and positions[-1] >= length:
            raise ValueError(f"labels predict a token in the padding; they must be {NOT_PREDICTED} there")
        return positions, labels[positions]
    if "masked_lm_positions" not in cells:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if "masked_lm_ids" not in cells:
        raise ValueError("has masked_lm_positions, but the table has no column masked_lm_ids")
    positions, ids = cells["masked_lm_positions"], cells["masked_lm_ids"]
    weights = cells.get("masked_lm_weights")
    if positions.size != ids.size:
        raise ValueError("masked_lm_positions and masked_lm_ids differ in number")
    masked = positions.size if weights is None else _prefix_length(weights, positions.size)
    return positions[:masked], ids[:masked]
