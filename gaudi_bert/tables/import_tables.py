"""The stage `import`: tables of token ids (Parquet, Arrow, JSON lines, Hugging Face datasets) to unpacked TFRecords.

One table file becomes one TFRecord file of the same stem, so files can be shared out (`shard=(K, N)` takes files
K, K + N, ...) and everything after it (histogram, plan, write, verify) sees ordinary records. The folder is complete when
`examples.json` is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.examples import ImportedExamples, ImportedSoFar, ImportedTable
from gaudi_bert.artefacts.grouped_output import GroupedOutput
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.work_folder import EXAMPLES_NAME
from gaudi_bert.common.arrays import IntArray, first_not_whole
from gaudi_bert.common.arrow import require_pyarrow
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.progress import Reporter
from gaudi_bert.tables.parts import TablePart, list_parts, read_parts, table_schema
from gaudi_bert.tables.rows import ListValues, list_values, refuse_rows, refuse_unequal
from gaudi_bert.tables.sources import TOKENS_COLUMN, is_list, table_files
from gaudi_bert.tfrecords.files import input_file
from gaudi_bert.tfrecords.wire.schema import MAX_SEGMENT_ID, MAX_SEQUENCE_LENGTH, MAX_TOKEN_ID, NOT_PREDICTED, UnpackedSchema
from gaudi_bert.tfrecords.wire.unpacked_encoder import SequenceArrays, UnpackedEncoder


def import_tables(
    source: str | Path,
    out: Path,
    *,
    max_sequence_length: int | None = None,
    max_predictions: int | None = None,
    shard: tuple[int, int] | None = None,
    reporter: Reporter,
    overwrite: bool = False,
    input_column: str = TOKENS_COLUMN,
) -> StageOutput[ImportedSoFar]:
    """Write the sequences of `source` to `out` as unpacked examples.

    Args:
        source: a .parquet, .arrow or .jsonl[.gz] file, a folder or a glob of them, or a split of a saved `Dataset`.
        max_sequence_length: L; the longest row when None (data that does not fit into memory is then read twice).
        max_predictions: P; the most masked positions of a row when None, and 1 where nothing is masked.
        input_column: what `input_ids` is called.
    """
    require_pyarrow()
    files = table_files(source, reporter)
    if shard is not None and (max_sequence_length is None or max_predictions is None):
        raise InputError(
            "--shard needs --max-sequence-length and --max-predictions, so that all shards write the same sizes"
        )
    targets = dict(zip((out / name for name in _record_names(files)), files, strict=True))
    settings: dict[str, object] = {"max_sequence_length": max_sequence_length, "max_predictions": max_predictions}
    if input_column != TOKENS_COLUMN:
        settings["input_column"] = input_column
    inputs = {path.name: input_file(path).identity for path in files}
    signature = Signature("import", settings, inputs)
    output: GroupedOutput[Path, ImportedTable] = GroupedOutput(
        out, out / EXAMPLES_NAME, signature, ImportedTable, lambda path: path.with_suffix(".json"), reporter
    )
    if output.begin(overwrite):
        return StageOutput(ImportedExamples.read(out), skipped=True)
    number, shards = shard or (0, 1)
    share = list(targets)[number::shards]
    with output.removed_on_bad_input() if shard is None else nullcontext():
        schema, read_before, ignored_columns = _sizes(files, max_sequence_length, max_predictions, input_column)
        with reporter.task("import", sum(targets[target].stat().st_size for target in share), "bytes") as task:
            for target in share:
                cached = read_before.pop(targets[target], None)
                _import_file(targets[target], target, schema, cached, output, input_column)
                task.advance(targets[target].stat().st_size)
    if ignored_columns:
        reporter.say(f"columns that are not used: {', '.join(ignored_columns)}")
    return StageOutput(_finish(output, list(targets), schema, ignored_columns))


def _finish(
    output: GroupedOutput[Path, ImportedTable], targets: Sequence[Path], schema: UnpackedSchema, ignored: tuple[str, ...]
) -> ImportedSoFar:
    """Write examples.json when all tables are there; the content so far."""
    complete = output.whole(targets)
    content = ImportedSoFar(
        sequences=sum(table.sequences for table in complete.values()),
        files=len(complete),
        max_sequence_length=schema.max_sequence_length,
        max_predictions=schema.max_predictions,
        ignored_columns=ignored,
    )
    if len(complete) == len(targets):
        content = ImportedExamples(**dict(content))
        content.write(output.final)
    return content


def _record_names(files: Sequence[Path]) -> list[str]:
    """The names of the TFRecord files: the stems of the tables, which must differ."""
    names = [f"{path.name.removesuffix('.gz').rpartition('.')[0]}.tfrecord" for path in files]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{files[0].parent}: several tables would become {twice[0]}; give them different names")
    return names


def _import_file(
    table: Path,
    target: Path,
    schema: UnpackedSchema,
    read_before: Sequence[CachedBatch] | None,
    output: GroupedOutput[Path, ImportedTable],
    input_column: str,
) -> None:
    """Convert one table, unless it is done already; the count next to it is written after it."""
    if target.exists() and output.whole([target]):
        return
    count, encoder = 0, UnpackedEncoder(schema)
    longest, most_masked = schema.max_sequence_length, schema.max_predictions
    batches: Iterable[CachedBatch] = read_before or ()
    if read_before is None:
        batches = _checked_batches(table, _columns(table, input_column)[0], input_column)
    cut = "raise --max-sequence-length, or cut the sequences before"
    with atomic_file(target) as handle:
        for part, sequences in batches:
            _refuse_more(part, sequences.lengths, f"tokens, allowed are 1 to {longest}; {cut}", longest)
            allowed = f"masked positions, allowed are 0 to {most_masked}; raise --max-predictions"
            _refuse_more(part, sequences.masked, allowed, most_masked)
            following = 0
            while following < sequences.lengths.size:
                data, following = encoder.encode(sequences, following)
                handle.write(data)
            count += sequences.lengths.size
    ImportedTable(sequences=count).write(output.summary_path(target))


# --- tables of sequences (Parquet, Arrow, JSON lines, Hugging Face datasets) read as unpacked examples.
#
# A row is a sequence. Only `input_ids` is needed; the other columns may go by the names of the contract or by
# Hugging Face's:
#
#     input_ids                                   token ids, padded or not
#     attention_mask | input_mask                 1..1 0..0; without it every id of the row is real
#     token_type_ids | segment_ids                without it all 0
#     labels                                      the id that was masked, -100 elsewhere
#     masked_lm_positions, masked_lm_ids (, masked_lm_weights)
#                                                 the contract's form of the same, padded or not; without either: none
#     next_sentence_label | next_sentence_labels  0 or 1, a number or a list of one; without it 0
#
# Tables are read batch by batch, so memory does not grow with the file; nothing is cut or dropped. Batches that were read to
# measure tables are cached while there is room for them, so that only the others are read again.

_MASK_COLUMNS = ("attention_mask", "input_mask")
_SEGMENT_COLUMNS = ("token_type_ids", "segment_ids")
_LABEL_COLUMNS = ("next_sentence_label", "next_sentence_labels")
_MASKED_COLUMNS = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
_TRUTHS = (*_MASK_COLUMNS, *_LABEL_COLUMNS, "masked_lm_weights")
"""Columns of 0 and 1, which may also hold truth values."""
_NO_EXAMPLES = "for other rows use `gaudi-bert pack TABLE`"
_ENOUGH_LABELS = 10
"""Of masked tokens, one of ten keeps its own id; so many that all do are not masked."""
_ROWS_PER_BATCH = 2048
"""So few that the arrays of a batch, about 3 MB a column, use the memory of the previous batch: larger arrays are new memory
each time, and zeroing its pages took as long as everything else."""

_BYTES_PER_BATCH = 64 << 20
_MOST_CACHED_BYTES = 256 << 20
_LARGEST_EXACT = 2**53

CachedBatch = tuple[TablePart, SequenceArrays]
"""A batch of rows that was read and checked, and its part of the table."""


def _sizes(
    files: Sequence[Path], max_sequence_length: int | None, max_predictions: int | None, tokens_column: str
) -> tuple[UnpackedSchema, dict[Path, list[CachedBatch]], tuple[str, ...]]:
    """The sizes of the examples, measured where they are not given; the columns that are not used.

    Of the files that were read for that, the first ones, as many as fit into memory, with their batches.
    """
    if max_sequence_length is not None and max_predictions is not None:
        return UnpackedSchema(max_sequence_length, max_predictions), {}, ()
    longest = most_masked = 0
    ignored: set[str] = set()
    cached: dict[Path, list[CachedBatch]] = {}
    room = _MOST_CACHED_BYTES
    for path in files:
        used, unused = _columns(path, tokens_column)
        ignored |= set(unused)
        of_file: list[CachedBatch] = []
        for part, sequences in _checked_batches(path, used, tokens_column):
            longest = max(longest, int(sequences.lengths.max()))
            most_masked = max(most_masked, int(sequences.masked.max()))
            room -= sum(array.nbytes for array in sequences)
            if room >= 0:
                of_file.append((part, sequences))
        if room >= 0:
            cached[path] = of_file
    if longest == 0:
        raise InputError(f"{files[0].parent}: the tables hold no row; there is nothing to pack")
    schema = UnpackedSchema(max_sequence_length or longest, max_predictions or max(1, most_masked))
    return schema, cached, tuple(sorted(ignored))


def _checked_batches(path: Path, used: Sequence[str], tokens_column: str) -> Iterator[CachedBatch]:
    """Batches of rows with these columns, each checked to be sequences."""
    stored = [tokens_column if name == TOKENS_COLUMN else name for name in used]
    parts = list_parts(path, stored, _ROWS_PER_BATCH, _BYTES_PER_BATCH)
    predicted = visible = 0
    tables = read_parts(parts, stored, table_schema(path), threads=False)
    for part, table in zip(parts, (table.rename_columns(list(used)) for table in tables), strict=True):
        for start in range(0, part.rows, _ROWS_PER_BATCH):
            rows = table.slice(start, _ROWS_PER_BATCH)
            batch = part._replace(first_row=part.first_row + start, rows=rows.num_rows)
            sequences = _sequences(batch, {name: _row_lists(batch, name, rows.column(name)) for name in used})
            predicted, visible = predicted + int(sequences.masked.sum()), visible + _count_visible(batch, sequences)
            if visible == predicted >= _ENOUGH_LABELS:
                raise InputError(
                    f"{path}: row {part.first_row}: labels are the input_ids, so no token is masked; {_NO_EXAMPLES}"
                )
            yield batch, sequences


def _columns(path: Path, tokens_column: str) -> tuple[list[str], list[str]]:
    """The columns of a table that are read, by our names, and those that are not."""
    schema = table_schema(path)
    names = list(schema.names)
    if tokens_column not in names:
        raise InputError(
            f"{path}: has no column {tokens_column} (it has {', '.join(names)}); name the token ids with --input-column"
        )
    known = (tokens_column, "labels", *_MASK_COLUMNS, *_SEGMENT_COLUMNS, *_LABEL_COLUMNS, *_MASKED_COLUMNS)
    used = [name for name in names if name in known]
    if "masked_lm_positions" in used and "masked_lm_ids" not in used and "labels" not in used:
        raise InputError(f"{path}: has a column masked_lm_positions, but no column masked_lm_ids; add it, or leave both out")
    for name in used:
        _check_type(path, name, schema.field(name).type)
    ours = [TOKENS_COLUMN if name == tokens_column else name for name in used]
    return ours, [name for name in names if name not in known]


def _check_type(path: Path, name: str, kind: Any) -> None:
    types = require_pyarrow().types
    value = kind.value_type if is_list(kind) else kind
    numbers = types.is_integer(value) or types.is_floating(value) or (types.is_boolean(value) and name in _TRUTHS)
    if not numbers or not (is_list(kind) or name in _LABEL_COLUMNS):
        raise InputError(f"{path}: column {name} holds {kind}; it must hold lists of integers; {_NO_EXAMPLES}")


def _row_lists(part: TablePart, name: str, column: Any) -> ListValues:
    """A column as int64; plain numbers as lists of one."""
    pyarrow = require_pyarrow()
    if not is_list(column.type):
        offsets = pyarrow.array(np.arange(part.rows + 1, dtype=np.int32))
        column = pyarrow.ListArray.from_arrays(offsets, column.combine_chunks())
    values, offsets = list_values(part.path, part.first_row, name, column)
    values = values[offsets[0] : offsets[-1]]
    offsets = offsets.astype(np.int64) - offsets[0]
    wrong = first_not_whole(values, -_LARGEST_EXACT, _LARGEST_EXACT)
    if wrong >= 0:
        row = part.first_row + int(np.searchsorted(offsets, wrong, side="right")) - 1
        raise InputError(f"{part.path}: row {row}: {name} holds {values[wrong]}; it must hold integers")
    return ListValues(values.astype(np.int64), offsets)


def _sequences(part: TablePart, columns: Mapping[str, ListValues]) -> SequenceArrays:
    """The sequences of a batch of rows; the first row that breaks a rule is refused."""
    ids, labels = columns["input_ids"], _first(columns, _LABEL_COLUMNS)
    mask, segments = _first(columns, _MASK_COLUMNS), _first(columns, _SEGMENT_COLUMNS)
    sizes = np.diff(ids.offsets)
    for name in ("labels", *_MASK_COLUMNS, *_SEGMENT_COLUMNS):
        if name in columns:
            refuse_unequal(part, name, np.diff(columns[name].offsets), sizes, "give as many")
    lengths = sizes if mask is None else _prefix_lengths(mask)
    refuse_rows(part, lengths < 0, "its mask is not 1..1 0..0; pad on the right, with a mask of zeros and ones")
    refuse_rows(part, lengths == 0, "has no token; leave empty rows out")
    too_long = f"tokens, at most {MAX_SEQUENCE_LENGTH} are allowed; split it, or leave it out"
    refuse_rows(part, lengths > MAX_SEQUENCE_LENGTH, lambda row: f"has {lengths[row]} {too_long}")
    _check_values(part, "input_ids", ids, lengths, np.full_like(lengths, MAX_TOKEN_ID))
    if segments is not None:
        _check_values(part, "segment ids", segments, lengths, np.full_like(lengths, MAX_SEGMENT_ID))
    positions, masked_ids, masked = _masked(part, columns, lengths)
    _check_values(part, "masked positions", positions, masked, lengths - 1)
    _check_values(part, "ids of masked positions", masked_ids, masked, np.full_like(lengths, MAX_TOKEN_ID))
    if labels is not None:
        refuse_rows(part, np.diff(labels.offsets) != 1, "next_sentence_label is not one number; it must be 0 or 1")
        _check_values(part, "next_sentence_label", labels, np.ones_like(lengths), np.ones_like(lengths))
    nowhere = np.zeros_like(lengths)
    return SequenceArrays(
        lengths,
        ids.values,
        ids.offsets[:-1],
        nowhere[:0] if segments is None else segments.values,
        nowhere if segments is None else segments.offsets[:-1],
        masked,
        positions.values,
        masked_ids.values,
        positions.offsets[:-1],
        nowhere if labels is None else labels.values,
    )


def _masked(
    part: TablePart, columns: Mapping[str, ListValues], lengths: IntArray
) -> tuple[ListValues, ListValues, IntArray]:
    """Masked positions, the ids that belong there, and how many of them each row uses."""
    if "labels" in columns:
        values, offsets = columns["labels"]
        predicted = np.empty(values.size + 1, np.int64)
        predicted = predicted[: _find_predicted(values, predicted)]
        ends = np.searchsorted(predicted, offsets)
        masked = np.diff(ends)
        positions = ListValues(predicted - np.repeat(offsets[:-1], masked), ends)
        last = positions.values[ends[1:] - 1] if predicted.size else np.zeros_like(masked)
        in_padding = (masked > 0) & (last >= lengths)
        refuse_rows(part, in_padding, f"labels predict a token in the padding; they must be {NOT_PREDICTED} there")
        return positions, ListValues(values[predicted], ends), masked
    if "masked_lm_positions" not in columns:
        nothing = ListValues(np.zeros(0, np.int64), np.zeros(part.rows + 1, np.int64))
        return nothing, nothing, np.zeros_like(lengths)
    positions, masked_ids = columns["masked_lm_positions"], columns["masked_lm_ids"]
    masked = slots = np.diff(positions.offsets)
    unequal = "masked_lm_positions, masked_lm_ids and masked_lm_weights differ in number"
    refuse_rows(part, np.diff(masked_ids.offsets) != slots, unequal)
    if "masked_lm_weights" in columns:
        weights = columns["masked_lm_weights"]
        refuse_rows(part, np.diff(weights.offsets) != slots, unequal)
        masked = _prefix_lengths(weights)
        refuse_rows(part, masked < 0, "masked_lm_weights are not 1..1 0..0; put unused slots at the end")
    return positions, masked_ids, masked


def _count_visible(part: TablePart, sequences: SequenceArrays) -> int:
    """How many tokens that are to be predicted stand in the input as they are; a row of nothing else is refused."""
    whole = (sequences.masked == sequences.lengths) & (sequences.lengths > 1)
    refuse_rows(part, whole, f"every token is to be predicted, as by a causal model; {_NO_EXAMPLES}")
    rows = np.repeat(np.arange(sequences.masked.size), sequences.masked)
    slots = np.arange(rows.size) - np.repeat(np.cumsum(sequences.masked) - sequences.masked, sequences.masked)
    slots += sequences.masked_starts[rows]
    given = sequences.ids[sequences.id_starts[rows] + sequences.positions[slots]]
    return int(np.count_nonzero(given == sequences.masked_ids[slots]))


def _first(columns: Mapping[str, ListValues], names: tuple[str, ...]) -> ListValues | None:
    return next((columns[name] for name in names if name in columns), None)


def _prefix_lengths(lists: ListValues) -> IntArray:
    lengths = np.empty(lists.offsets.size - 1, np.int64)
    _fill_prefix_lengths(lists.values, lists.offsets, lengths)
    return lengths


def _check_values(part: TablePart, name: str, lists: ListValues, counts: IntArray, most: IntArray) -> None:
    """The first `counts` values of each row must lie in 0 .. `most`."""
    row, position = _first_outside(lists.values, lists.offsets, counts, most)
    if row >= 0:
        value = lists.values[lists.offsets[row] + position]
        reason = f"{name}: holds {value} at {position}, 0 to {most[row]} is allowed"
        refuse_rows(part, np.arange(part.rows) == row, reason)


@borrowing_kernel
def _fill_prefix_lengths(values: IntArray, offsets: IntArray, lengths: IntArray) -> None:
    """Of each row, n of a list of n ones and then zeros; -1 for any other."""
    for row in range(lengths.size):
        start, end = offsets[row], offsets[row + 1]
        ones = 0
        for value in values[start:end]:
            ones += value == 1
        wrong = False
        for value in values[start : start + ones]:
            wrong |= value != 1
        for value in values[start + ones : end]:
            wrong |= value != 0
        lengths[row] = -1 if wrong else ones


@borrowing_kernel
def _find_predicted(labels: IntArray, predicted: IntArray) -> int:
    """Set `predicted` [labels + 1] to where labels predict a token; how many do."""
    count = 0
    for position in range(labels.size):
        predicted[count] = position
        count += labels[position] != NOT_PREDICTED
    return count


@borrowing_kernel
def _first_outside(values: IntArray, offsets: IntArray, counts: IntArray, most: IntArray) -> tuple[int, int]:
    """Row and position of the first value that is not in 0 .. `most`, among the first `counts` of each row; or -1, 0."""
    for row in range(counts.size):
        start, count, largest = offsets[row], counts[row], most[row]
        outside = False
        for value in values[start : start + count]:
            outside |= (value < 0) | (value > largest)
        if outside:
            for position in range(count):
                if values[start + position] < 0 or values[start + position] > largest:
                    return row, position
    return -1, 0


def _refuse_more(part: TablePart, counted: IntArray, allowed: str, most: int) -> None:
    refuse_rows(part, counted > most, lambda row: f"has {counted[row]} {allowed}")
