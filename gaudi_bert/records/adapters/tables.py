"""Tables of sequences (Parquet, Arrow, Hugging Face datasets) read as unpacked examples.

A row is a sequence. Only `input_ids` is needed; the other columns may go by the names of the contract or by
Hugging Face's:

    input_ids                             token ids, padded or not attention_mask | input_mask           1..1
    0..0; without it every id of the row is real token_type_ids | segment_ids          without it all 0 labels
    Hugging Face's form of masked positions: the id that was masked, -100 elsewhere; or masked_lm_positions,
    masked_lm_ids (, masked_lm_weights)   the contract's form, padded or not; without either: none
    next_sentence_label | next_sentence_labels                 0 or 1, a number or a list of one; without it 0

Tables are read batch by batch, so memory does not grow with the file. Nothing is cut or dropped: a row that
does not fit is refused with its file, number and reason. pyarrow is imported only here and in
`packed_parquet`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.common.errors import InputError

__all__ = ["TableSizes", "measure_tables", "read_examples", "require_pyarrow", "table_files"]

TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
ROWS_A_BATCH = 1024
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

    input_ids: np.ndarray
    segment_ids: np.ndarray
    masked_lm_positions: np.ndarray
    masked_lm_ids: np.ndarray
    next_sentence_label: int


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


def table_files(source: str | Path) -> list[Path]:
    """The table files of `source` (one file, or a folder such as `Dataset.save_to_disk` writes), sorted by
    name.

    Raises:
        InputError: there is none; or the folder holds splits, of which one must be chosen.
    """
    source = Path(source)
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise InputError(f"{source}: does not exist; pass a .parquet or .arrow file, or a folder of them")
    files = [
        path for path in source.iterdir() if path.suffix in TABLE_SUFFIXES and not path.name.startswith((".", "cache-"))
    ]
    if files:
        return sorted(files)
    splits = sorted(child.name for child in source.iterdir() if child.is_dir() and any(child.glob("*.arrow")))
    if splits:
        raise InputError(
            f"{source}: holds the splits {', '.join(splits)}; pass one of them, for example {source / splits[0]}"
        )
    raise InputError(f"{source}: holds no {', '.join(TABLE_SUFFIXES)} file; pass a folder of tables with a column input_ids")


def measure_tables(files: list[Path]) -> TableSizes:
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


def read_examples(path: Path, max_sequence_length: int, max_predictions: int) -> Iterator[dict[str, np.ndarray]]:
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


def _padded(values: np.ndarray, size: int) -> np.ndarray:
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
    for batch in _batches(path, used):
        columns = {name: _Lists(path, name, batch.column(index)) for index, name in enumerate(batch.schema.names)}
        for index in range(batch.num_rows):
            cells = {name: lists.row(index, number) for name, lists in columns.items()}
            try:
                yield _row(cells)
            except ValueError as error:
                raise InputError(f"{path}: row {number}: {error}") from error
            number += 1


class _Lists:
    """A column of lists (or of plain numbers, as lists of one) as numpy slices, without a Python object for
    each value."""

    def __init__(self, path: Path, name: str, column: Any) -> None:
        pyarrow = require_pyarrow()
        types = pyarrow.types
        self.path, self.name, self.column = path, name, column
        is_list = types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
        value_type = column.type.value_type if is_list else column.type
        if not (types.is_integer(value_type) or types.is_floating(value_type) or types.is_boolean(value_type)):
            raise InputError(f"{path}: column {name} holds {column.type}; it must hold lists of whole numbers")
        if types.is_fixed_size_list(column.type):
            column = column.cast(pyarrow.list_(value_type))
        values = column.values if is_list else column
        self.has_nulls = column.null_count > 0
        self.values_have_nulls = values.null_count > 0
        self.values = values.to_numpy(zero_copy_only=False)
        self.offsets = column.offsets.to_numpy() if is_list else np.arange(len(column) + 1)

    def row(self, index: int, number: int) -> np.ndarray:
        """The values of row `index` of this batch, which is row `number` of the file."""
        if self.has_nulls and not self.column[index].is_valid:
            raise InputError(f"{self.path}: row {number}: {self.name} is null; fill it, or leave the row out")
        values = self.values[self.offsets[index] : self.offsets[index + 1]]
        if values.dtype.kind == "f":
            if not np.array_equal(values, np.rint(values)):
                reason = "holds a null" if self.values_have_nulls else "holds numbers that are not whole"
                raise InputError(f"{self.path}: row {number}: {self.name} {reason}; it must hold whole numbers")
        elif values.dtype.kind not in "iub":
            raise InputError(f"{self.path}: row {number}: {self.name} holds a null; it must hold whole numbers")
        return values.astype(np.int64)


def _row(cells: Mapping[str, np.ndarray]) -> Row:
    """A sequence from the cells of a row. Raises ValueError with the reason, when it is none."""
    ids = cells["input_ids"]
    mask = _first(cells, MASK_COLUMNS)
    length = ids.size if mask is None else _prefix_length(mask, ids.size)
    if length == 0:
        raise ValueError("has no token; leave empty rows out")
    if ids[:length].min() < 0 or ids[:length].max() >= 2**31:
        raise ValueError("input_ids holds numbers outside 0 .. 2147483647")
    segments = _first(cells, SEGMENT_COLUMNS)
    if segments is None:
        segments = np.zeros(length, np.int64)
    elif segments.size != ids.size:
        raise ValueError(f"has {segments.size} segment ids for {ids.size} input_ids; give as many")
    segments = segments[:length]
    if segments.min() < 0 or segments.max() > 127:
        raise ValueError("segment ids are outside 0 .. 127")
    positions, masked_ids = _masked(cells, length, ids.size)
    if positions.size and (positions.min() < 0 or positions.max() >= length):
        raise ValueError(f"a masked position is outside the sequence, 0 .. {length - 1}")
    if masked_ids.size and (masked_ids.min() < 0 or masked_ids.max() >= 2**31):
        raise ValueError("the id of a masked position is outside 0 .. 2147483647")
    label = _first(cells, LABEL_COLUMNS)
    if label is not None and (label.size != 1 or label[0] not in (0, 1)):
        raise ValueError(f"next_sentence_label is {label.tolist()}; it must be one number, 0 or 1")
    return Row(ids[:length], segments, positions, masked_ids, 0 if label is None else int(label[0]))


def _first(cells: Mapping[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray | None:
    return next((cells[name] for name in names if name in cells), None)


def _prefix_length(mask: np.ndarray, size: int) -> int:
    """n of a mask of n ones and then zeros."""
    length = int(np.count_nonzero(mask))
    if mask.size != size:
        raise ValueError(f"has {mask.size} mask values for {size} input_ids; give as many")
    if not (np.all(mask[:length] == 1) and np.all(mask[length:] == 0)):
        raise ValueError("its mask is not 1..1 0..0; pad on the right, with a mask of zeros and ones")
    return length


def _masked(cells: Mapping[str, np.ndarray], length: int, size: int) -> tuple[np.ndarray, np.ndarray]:
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
    positions, ids, weights = (cells.get(name) for name in MASKED_COLUMNS)
    if positions is None or ids is None or positions.size != ids.size:
        raise ValueError("masked_lm_positions and masked_lm_ids differ in number")
    masked = positions.size if weights is None else _prefix_length(weights, positions.size)
    return positions[:masked], ids[:masked]


def _columns(path: Path) -> tuple[list[str], list[str]]:
    """The columns of a table that are read, and those that are not."""
    names = list(_schema(path).names)
    if "input_ids" not in names:
        raise InputError(f"{path}: has no column input_ids (it has {', '.join(names)}); tokenise the text first")
    known = ("input_ids", "labels", *MASK_COLUMNS, *SEGMENT_COLUMNS, *LABEL_COLUMNS, *MASKED_COLUMNS)
    return [name for name in names if name in known], [name for name in names if name not in known]


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


def _schema(path: Path) -> Any:
    pyarrow = require_pyarrow()
    try:
        if _is_parquet(path):
            from pyarrow import parquet

            return parquet.read_schema(path)
        with pyarrow.OSFile(str(path)) as source:
            return _open_arrow(pyarrow, source).schema
    except (OSError, pyarrow.ArrowException) as error:
        raise _not_a_table(path, error) from error


def _batches(path: Path, columns: list[str]) -> Iterator[Any]:
    """Record batches of `columns`, at most ROWS_A_BATCH rows each."""
    pyarrow = require_pyarrow()
    try:
        if _is_parquet(path):
            from pyarrow import parquet

            with parquet.ParquetFile(path) as table:
                yield from table.iter_batches(batch_size=ROWS_A_BATCH, columns=columns, use_threads=False)
            return
        with pyarrow.memory_map(str(path)) as source:
            reader = _open_arrow(pyarrow, source)
            stored = (
                (reader.get_batch(index) for index in range(reader.num_record_batches))
                if hasattr(reader, "num_record_batches")
                else reader
            )
            for batch in stored:
                for start in range(0, batch.num_rows, ROWS_A_BATCH):
                    yield batch.select(columns).slice(start, ROWS_A_BATCH)
    except (OSError, pyarrow.ArrowException) as error:
        raise _not_a_table(path, error) from error


def _not_a_table(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: cannot be read as a Parquet or Arrow table: {' '.join(str(error).split())}; write it again")
