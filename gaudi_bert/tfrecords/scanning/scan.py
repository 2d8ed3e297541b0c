"""Reading record files at full speed: pieces into a buffer, kernels over the buffer, files in threads.

`RecordScan` joins a stream, a buffer and a *format* (what to do with records: index unpacked ones here, check and hash
packed ones in `file_contents`). It reads a piece that fits the processor's cache, runs the format's kernel over it,
and moves the rest of the last record to the front of the buffer. A record that the kernel calls unusual goes to
the general reader and put back in canonical encoding, so that it ends where it ended. Where a writer leaves lists of one
value unpacked, that is up to four bytes longer than what it replaces; they overwrite the CRC before it, which has
been checked (or of the bytes that are free at the front).
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from gaudi_bert.common.arrays import AnyArray, ByteArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.scanning.unpacked_index import IndexedSequences, compact_rows, empty_index, scan_unpacked
from gaudi_bert.tfrecords.wire.example import decode_example, encode_example
from gaudi_bert.tfrecords.wire.features import feature_table
from gaudi_bert.tfrecords.wire.framing import (
    NO_RECORD,
    PROBLEMS,
    RecordStream,
    ScanStatus,
    append_frames,
    frame,
    read_records,
    record_location,
)
from gaudi_bert.tfrecords.wire.schema import (
    FRAME_BYTES,
    MAX_RECORD_BYTES,
    MAX_SEGMENT_ID,
    MAX_TOKEN_ID,
    PackedSchema,
    RecordError,
    UnpackedSchema,
    check_features,
    unpacked_schema_of,
)

PIECE_BYTES = 1 << 20
FRONT_BYTES = 16
_MOST_GROWTH = 4


class _RecordFormat(Protocol):
    """What a scan does with the records of one file, of which `records` were taken so far."""

    records: int

    @property
    def schema(self) -> UnpackedSchema | PackedSchema:
        """The sizes that every record must have."""
        ...

    def start_piece(self) -> None:
        """Another piece of the file is about to be read."""
        ...

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """Run the kernel over the buffer from `position`; (why it stopped, position of the record at which it stopped)."""
        ...


def scan_buffer() -> ByteArray:
    """A buffer for scans in constant memory: one per thread."""
    return np.zeros(FRONT_BYTES + MAX_RECORD_BYTES + FRAME_BYTES + PIECE_BYTES, np.uint8)


class UnpackedFormat:
    """Indexes unpacked records, in constant memory: the rows are those of the last piece, and point into its buffer."""

    def __init__(self, schema: UnpackedSchema, index: IndexedSequences) -> None:
        self.schema, self.index = schema, index
        self.records = 0
        self.rows = 0
        self._table = feature_table(schema.features)

    @classmethod
    def for_pieces(cls, schema: UnpackedSchema, buffer: ByteArray) -> UnpackedFormat:
        """With room for the records of one piece in `buffer`."""
        rows = (PIECE_BYTES + MAX_RECORD_BYTES) // (3 * schema.max_sequence_length + 16) + 1
        return cls(schema, empty_index(buffer, rows))

    def start_piece(self) -> None:
        """As `_RecordFormat.start_piece`: forget the rows of the last piece."""
        self.rows = 0

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """As `_RecordFormat.take`."""
        first = self.rows
        length, predictions = self.schema.max_sequence_length, self.schema.max_predictions
        status, position, self.rows = scan_unpacked(self.index, first, position, filled, length, predictions, self._table)
        self.records += self.rows - first
        return ScanStatus(status), position


class CompactedFormat(UnpackedFormat):
    """Indexes a complete file, and copies the real values of its sequences to an arena, where they stay (a group).

    The arena, uint8, does not overlap the buffer; offsets are positions in it. This file may fill `start` to `end`.
    """

    def __init__(self, schema: UnpackedSchema, index: IndexedSequences, arena: ByteArray, start: int, end: int) -> None:
        super().__init__(schema, index)
        self._arena, self._position, self._end = arena, start, end

    def start_piece(self) -> None:
        """As `_RecordFormat.start_piece`; the rows stay."""

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """As `_RecordFormat.take`."""
        first = self.rows
        status, position = super().take(position, filled)
        rows = self.index.rows[first : self.rows]
        sizes = (rows[name].sum(dtype=np.int64) for name in ("ids_bytes", "length", "masked_ids_bytes", "positions_bytes"))
        needed = int(sum(sizes))
        if self._position + needed > self._end:
            raise ValueError(f"an arena of {self._end} bytes is too small for {needed} more")
        self._position = compact_rows(self.index, first, self.rows, self._arena, self._position)
        return status, position


class RecordScan:
    """One pass over one file; the buffer, uint8, is the one that `records` reads (see `scan_buffer`)."""

    def __init__(
        self, path: Path, records: _RecordFormat, buffer: ByteArray, progress: Callable[[int], None] | None = None
    ) -> None:
        self.path, self.records, self.buffer = path, records, buffer
        self._progress = progress
        self.file_bytes = 0
        self.file_crc32c = 0
        self._records_crc32c = 0

    def pieces(self) -> Iterator[None]:
        """Read and take piece after piece; the format holds the result when control comes back."""
        start = position = filled = FRONT_BYTES
        before = -start  # position in the stream = position in the buffer + before
        view = self.buffer.data
        with RecordStream(self.path) as stream:
            while True:
                self.records.start_piece()
                if filled > start:
                    rest = filled - position
                    self.buffer[start : start + rest] = self.buffer[position:filled].copy()
                    before += position - start
                    position, filled = start, start + rest
                count = stream.read_into(view[filled : filled + PIECE_BYTES])
                if self._progress is not None:
                    self._progress(stream.file_bytes - self.file_bytes)
                self.file_bytes = stream.file_bytes
                if count == 0:
                    break
                filled += count
                position = self._take(position, filled, before)
                self.file_crc32c = stream.file_crc32c if stream.compression else self._records_crc32c
                yield
        if position < filled:
            raise InputError(f"{self._location(position + before)}: {PROBLEMS[ScanStatus.INCOMPLETE]}")

    def _take(self, position: int, filled: int, before: int) -> int:
        """Take all complete records up to `filled`; the position of the first incomplete one."""
        rewritten, counted = -1, position
        while True:
            status, position = self.records.take(position, filled)
            counted = self._count_bytes(counted, position)
            if status == ScanStatus.INCOMPLETE:
                return position
            if status != ScanStatus.UNUSUAL or position == rewritten:
                raise InputError(f"{self._location(position + before)}: {PROBLEMS[status]}")
            counted = self._count_bytes(position, position + self._frame_bytes(position))
            position = rewritten = self._make_usual(position, before)

    def _count_bytes(self, start: int, end: int) -> int:
        """Add the good records in buffer[start:end], as they lie on the disk, to the file's CRC; the later of the two."""
        if start < end:
            self._records_crc32c = append_frames(self._records_crc32c, self.buffer, start, end)
        return max(start, end)

    def _frame_bytes(self, position: int) -> int:
        return int(struct.unpack_from("<Q", self.buffer.data, position)[0]) + FRAME_BYTES

    def _make_usual(self, position: int, before: int) -> int:
        """Put the record at `position` into canonical encoding, so that it ends where it ended; its new position."""
        end = position + self._frame_bytes(position)
        try:
            canonical = frame(canonical_example(self.buffer[position + 12 : end - 4].tobytes(), self.records.schema))
        except RecordError as error:
            raise InputError(f"{self._location(position + before)}: {error}") from error
        if len(canonical) > end - position + _MOST_GROWTH:
            raise InputError(f"{self._location(position + before)}: {PROBLEMS[ScanStatus.UNUSUAL]}")
        self.buffer[end - len(canonical) : end] = np.frombuffer(canonical, np.uint8)
        return end - len(canonical)

    def _location(self, offset: int) -> str:
        return record_location(self.path, self.records.records, offset)


def first_record(path: Path) -> dict[str, AnyArray]:
    """The features of the first record of a file."""
    try:
        payload = next(read_records(path), None)
        if payload is None:
            raise InputError(f"{path}: {NO_RECORD}")
        return decode_example(payload)
    except RecordError as error:
        raise InputError(f"{record_location(path, 0, 0)}: {error}") from error


def unpacked_schema(path: Path) -> tuple[UnpackedSchema, list[str]]:
    """The sizes of the first record of a file, and its features that packs do not carry."""
    features = first_record(path)
    try:
        schema = unpacked_schema_of(features)
        check_features(features, schema)
    except (RecordError, InputError) as error:
        raise InputError(f"{record_location(path, 0, 0)}: {error}") from error
    known = {spec.name for spec in schema.features}
    return schema, sorted(set(features) - known)


# --- the contract, value by value: the slow but general reader of records that the kernels do not take, which gives reasons
#
# Writers differ: lists may be unpacked (a tag for each value) or split, map entries repeated (the last wins), messages
# merged, further features present, varints longer than need be. `decode_example` resolves all that by protobuf's rules;
# here the values are held to the contract, and the record is encoded again in the one form that the kernels read: exactly
# the features of the schema, keys sorted, lists packed. So there is one engine, and its result does not depend on the
# writer.
#
# What is ambiguous is refused with its reason, never guessed: a mask with holes or other values than 0 and 1, padding that
# is not 0, weights that are not 0 or 1, a masked position outside its sequence, lists of unequal length.


def canonical_example(payload: bytes | memoryview, schema: UnpackedSchema | PackedSchema) -> bytes:
    """`payload` encoded again: the features of `schema`, keys sorted, lists packed.

    Raises:
        RecordError: it is not an example of these sizes, or the first value that breaks the contract.
    """
    features = decode_example(payload)
    check_features(features, schema)
    if isinstance(schema, PackedSchema):
        _check_packed(features, schema)
    else:
        _check_unpacked(features)
        features["masked_lm_weights"] = features["masked_lm_weights"] + np.float32(0)  # -0.0 becomes 0.0
    return encode_example({spec.name: features[spec.name] for spec in schema.features})


def _check_unpacked(features: Mapping[str, AnyArray]) -> None:
    length = _prefix(features["input_mask"], "input_mask")
    if length == 0:
        raise RecordError("`input_mask` is all 0, so the sequence is empty; leave it out")
    masked = _prefix(features["masked_lm_weights"], "masked_lm_weights")
    _check_range("input_ids", features["input_ids"], length, MAX_TOKEN_ID)
    _check_range("segment_ids", features["segment_ids"], length, MAX_SEGMENT_ID)
    _check_range("masked_lm_ids", features["masked_lm_ids"], masked, MAX_TOKEN_ID)
    _check_range("masked_lm_positions", features["masked_lm_positions"], masked, length - 1)
    label = int(features["next_sentence_labels"][0])
    if label not in (0, 1):
        raise RecordError(f"`next_sentence_labels` is {label}, 0 (really next) or 1 (random) is allowed")


def _prefix(values: AnyArray, name: str) -> int:
    """n of n ones followed by zeros."""
    ones = int(np.count_nonzero(values == 1))
    odd = np.flatnonzero((values != 0) & (values != 1))
    if odd.size:
        raise RecordError(f"`{name}` holds {values[odd[0]]} at {odd[0]}, only 0 and 1 are allowed")
    if np.any(values[:ones] == 0):
        hole = int(np.flatnonzero(values[:ones] == 0)[0])
        raise RecordError(f"`{name}` is not 1..1 0..0: it holds 0 at {hole} and 1 after it; move the padding to the end")
    return ones


def _check_packed(features: Mapping[str, AnyArray], schema: PackedSchema) -> None:
    tokens = int(np.count_nonzero(features["input_mask"]))
    count = int(np.count_nonzero(features["next_sentence_weights"]))
    if tokens == 0 or count == 0:
        raise RecordError("the pack is empty")
    starts = features["next_sentence_positions"][:count]
    ends = np.append(starts[1:], tokens)
    if starts[0] != 0 or np.any(ends <= starts):
        raise RecordError(f"`next_sentence_positions` {starts.tolist()} do not ascend from 0 within {tokens} tokens")
    lengths = ends - starts
    expected = {
        "input_mask": np.repeat(np.arange(1, count + 1), lengths),
        "positions": np.concatenate([np.arange(length) for length in lengths]),
        "next_sentence_positions": starts,
        "next_sentence_weights": np.ones(count),
    }
    for name, values in expected.items():
        _check_equal(name, features[name], values)
    _check_range("input_ids", features["input_ids"], tokens, MAX_TOKEN_ID)
    _check_range("segment_ids", features["segment_ids"], tokens, MAX_SEGMENT_ID)
    _check_range("next_sentence_labels", features["next_sentence_labels"], count, 1)
    _check_masked(features, starts, ends, schema)


def _check_masked(features: Mapping[str, AnyArray], starts: AnyArray, ends: AnyArray, schema: PackedSchema) -> None:
    weights, positions = features["masked_lm_weights"], features["masked_lm_positions"]
    used = int(np.count_nonzero(weights))
    owners = weights[:used].astype(np.int64)
    if np.any(owners != weights[:used]) or np.any(np.diff(owners) < 0) or np.any((owners < 1) | (owners > starts.size)):
        raise RecordError("`masked_lm_weights` are not the numbers of the pack's sequences in ascending order, then 0")
    _check_range("masked_lm_ids", features["masked_lm_ids"], used, MAX_TOKEN_ID)
    outside = np.flatnonzero((positions[:used] < starts[owners - 1]) | (positions[:used] >= ends[owners - 1]))
    if outside.size:
        slot = int(outside[0])
        raise RecordError(
            f"`masked_lm_positions` holds {positions[slot]} at {slot}, outside of sequence {owners[slot]},"
            f" which is {starts[owners[slot] - 1]} to {ends[owners[slot] - 1] - 1}"
        )
    _check_range("masked_lm_positions", positions, used, int(ends[-1]) - 1)
    most = int(np.bincount(owners).max(initial=0))
    if most > schema.max_predictions:
        raise RecordError(f"a sequence has {most} masked positions, at most {schema.max_predictions} is allowed")


def _check_equal(name: str, values: AnyArray, begin: AnyArray) -> None:
    """`values` are `begin`, and then 0."""
    expected = np.zeros(values.size)
    expected[: begin.size] = begin
    wrong = np.flatnonzero(values != expected)
    if wrong.size:
        position = int(wrong[0])
        raise RecordError(f"`{name}` holds {values[position]:g} at {position}, {expected[position]:g} is right there")


def _check_range(name: str, values: AnyArray, used: int, most: int) -> None:
    """The first `used` values lie in 0 .. most, and the rest is 0."""
    allowed = np.where(np.arange(values.size) < used, most, 0)
    wrong = np.flatnonzero((values < 0) | (values > allowed))
    if wrong.size:
        position = int(wrong[0])
        raise RecordError(f"`{name}` holds {values[position]} at {position}, 0 to {allowed[position]} is allowed there")


# --- work on files and shards in threads
#
# The kernels run outside Python's lock, so threads scale like processes and share memory. Results come in the order of
# the items, whatever order they are done in. The first error in that order is the one that is raised, so the message
# does not depend on timing; work not yet begun is then dropped.

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def worker_count(workers: int | None, items: int) -> int:
    """How many threads to use for so many items; `workers` None means all cores that this process may use."""
    if workers is not None and workers < 1:
        raise InputError(f"workers = {workers}: at least 1 is needed; leave it out for all cores")
    return max(1, min(items, workers if workers is not None else len(os.sched_getaffinity(0))))


def map_in_threads(
    function: Callable[[_Item, ByteArray], _Result],
    items: Sequence[_Item],
    workers: int | None,
    make_buffer: Callable[[], ByteArray],
) -> list[_Result]:
    """`function(item, buffer)` for every item; each thread has one buffer from `make_buffer`."""
    count = worker_count(workers, len(items))
    if count == 1:
        buffer = make_buffer()
        return [function(item, buffer) for item in items]
    local = threading.local()
    failed = threading.Event()

    def run(item: _Item) -> _Result | None:
        if failed.is_set():
            return None
        if not hasattr(local, "buffer"):
            local.buffer = make_buffer()
        try:
            return function(item, local.buffer)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, item) for item in items]
        try:
            return [future.result() for future in futures]  # type: ignore[misc]
        except BaseException:
            failed.set()  # also where this thread was interrupted: the others end after what they are at
            raise


def map_files(function: Callable[[_Item, ByteArray], _Result], files: Sequence[_Item], workers: int | None) -> list[_Result]:
    """`function(file, buffer)` for every file, with a buffer for scans in constant memory."""
    return map_in_threads(function, files, workers, scan_buffer)
