"""Tables of sequences (Parquet, Arrow, Hugging Face datasets) read as unpacked examples.

A row is a sequence. Only `input_ids` is needed; the other columns may go by the names of the contract or by
Hugging Face's:

    input_ids                                   token ids, padded or not
    attention_mask | input_mask                 1..1 0..0; without it every id of the row is real
    token_type_ids | segment_ids                without it all 0
    labels                                      the id that was masked, -100 elsewhere
    masked_lm_positions, masked_lm_ids (, masked_lm_weights)
                                                the contract's form of the same, padded or not; without either: none
    next_sentence_label | next_sentence_labels  0 or 1, a number or a list of one; without it 0

Tables are read batch by batch, so memory does not grow with the file. Nothing is cut or dropped: a row that
does not fit is refused with its file, number and reason. pyarrow is imported only here and in
`packed_parquet`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaudi_bert.common.arrays import AnyArray, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.schema import MAX_SEGMENT_ID, MAX_SEQUENCE_LENGTH, MAX_TOKEN_ID
from gaudi_bert.records.tables.arrow_files import column_names, read_batches

__all__ = ["NOT_PREDICTED", "TableSizes", "measure_tables", "read_examples"]

NOT_PREDICTED = -100

MASK_COLUMNS = ("attention_mask", "input_mask")
SEGMENT_COLUMNS = ("token_type_ids", "segment_ids")
LABEL_COLUMNS = ("next_sentence_label", "next_sentence_labels")
MASKED_COLUMNS = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")


@dataclass(frozen=True)
class TableSizes:
    """What a set of tables holds at most: the sizes that its examples need."""

    rows: int
    tokens: int
    max_sequence_length: int
    max_predictions: int
    ignored_columns: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One sequence, without padding. All int64, of length n (ids, segments) and k (positions, masked ids)."""

    input_ids: IntArray
    segment_ids: IntArray
    masked_lm_positions: IntArray
    masked_lm_ids: IntArray
    next_sentence_label: int


def measure_tables(files: Sequence[Path]) -> TableSizes:
    """Read `files` once for the sizes that their examples need (`max_predictions` is at least 1).

    Raises:
        InputError: as `read_rows`.
    """
    rows = tokens = longest = most_masked = 0
    ignored: set[str] = set()
    for path in files:
        ignored |= set(_columns(path)[1])
        for row in read_rows(path):
            rows += 1
            tokens += row.input_ids.size
            longest = max(longest, row.input_ids.size)
            most_masked = max(most_masked, row.masked_lm_ids.size)
    if rows == 0:
        raise InputError(f"{files[0].parent}: the tables hold no row; there is nothing to pack")
    return TableSizes(rows, tokens, longest, max(1, most_masked), tuple(sorted(ignored)))


def read_examples(path: Path, max_sequence_length: int, max_predictions: int) -> Iterator[dict[str, AnyArray]]:
    """The rows of a table as features of unpacked examples, padded to the contract's sizes.

    Raises:
        InputError: a row is longer than `max_sequence_length`, has more than `max_predictions` masked
            positions, or as `read_rows`.
    """
    for number, row in enumerate(read_rows(path)):
        length, masked = row.input_ids.size, row.masked_lm_ids.size
        if length > max_sequence_length:
            raise InputError(
                f"{path}: row {number}: has {length} tokens, allowed are 1 to {max_sequence_length}; "
                "raise --max-sequence-length, or cut the sequences before"
            )
        if masked > max_predictions:
            raise InputError(
                f"{path}: row {number}: has {masked} masked positions, allowed are 0 to {max_predictions}; "
                "raise --max-predictions"
            )
        yield {
            "input_ids": _padded(row.input_ids, max_sequence_length),
            "input_mask": _padded(np.ones(length, np.int64), max_sequence_length),
            "segment_ids": _padded(row.segment_ids, max_sequence_length),
            "masked_lm_positions": _padded(row.masked_lm_positions, max_predictions),
            "masked_lm_ids": _padded(row.masked_lm_ids, max_predictions),
            "masked_lm_weights": _padded(np.ones(masked, np.float32), max_predictions),
            "next_sentence_labels": np.array([row.next_sentence_label], np.int64),
        }


def _padded(values: AnyArray, size: int) -> AnyArray:
    out = np.zeros(size, values.dtype)
    out[: values.size] = values
    return out


def read_rows(path: Path) -> Iterator[Row]:
    """The sequences of one table, in order.

    Raises:
        InputError: the file is not a table, has no column `input_ids`, or a row is not a sequence; row and
            reason are named.
    """
    used, _ = _columns(path)
    number = 0
    for columns in read_batches(path, used, or_numbers=LABEL_COLUMNS):
        for index in range(columns["input_ids"].rows):
            cells = {name: lists.row(index, number) for name, lists in columns.items()}
            try:
                yield _row(cells)
            except ValueError as error:
                raise InputError(f"{path}: row {number}: {error}") from error
            number += 1


def _row(cells: Mapping[str, IntArray]) -> Row:
    """A sequence from the cells of a row. Raises ValueError with the reason, when it is none."""
    ids = cells["input_ids"]
    mask = _first(cells, MASK_COLUMNS)
    length = ids.size if mask is None else _prefix_length(mask, ids.size)
    if length == 0:
        raise ValueError("has no token; leave empty rows out")
    if length > MAX_SEQUENCE_LENGTH:
        raise ValueError(f"has {length} tokens, at most {MAX_SEQUENCE_LENGTH} are allowed; split it, or leave it out")
    _check_range("input_ids", ids[:length], MAX_TOKEN_ID)
    segments = _segments(cells, length, ids.size)
    positions, masked_ids = _masked(cells, length, ids.size)
    _check_range("masked positions", positions, length - 1)
    _check_range("ids of masked positions", masked_ids, MAX_TOKEN_ID)
    label = _first(cells, LABEL_COLUMNS)
    if label is not None and (label.size != 1 or label[0] not in (0, 1)):
        raise ValueError(f"next_sentence_label is {label.tolist()}; it must be one number, 0 or 1")
    return Row(ids[:length], segments, positions, masked_ids, 0 if label is None else int(label[0]))


def _check_range(name: str, values: IntArray, most: int) -> None:
    outside = np.flatnonzero((values < 0) | (values > most))
    if outside.size:
        raise ValueError(f"{name}: holds {values[outside[0]]} at {outside[0]}, 0 to {most} is allowed")


def _segments(cells: Mapping[str, IntArray], length: int, size: int) -> IntArray:
    """The segment ids of the `length` real ones of `size` tokens."""
    segments = _first(cells, SEGMENT_COLUMNS)
    if segments is None:
        return np.zeros(length, np.int64)
    if segments.size != size:
        raise ValueError(f"has {segments.size} segment ids for {size} input_ids; give as many")
    _check_range("segment ids", segments[:length], MAX_SEGMENT_ID)
    return segments[:length]


def _first(cells: Mapping[str, IntArray], names: tuple[str, ...]) -> IntArray | None:
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


def _columns(path: Path) -> tuple[list[str], list[str]]:
    """The columns of a table that are read, and those that are not."""
    names = column_names(path)
    if "input_ids" not in names:
        raise InputError(f"{path}: has no column input_ids (it has {', '.join(names)}); tokenise the text first")
    known = ("input_ids", "labels", *MASK_COLUMNS, *SEGMENT_COLUMNS, *LABEL_COLUMNS, *MASKED_COLUMNS)
    return [name for name in names if name in known], [name for name in names if name not in known]
