"""List the record files of a command, and read and check them fast: a kernel processes a file chunk by chunk, and several
threads read several files.

A `RecordScan` reads one file in chunks that fit into the processor's cache, and passes each chunk to a *record format*,
which runs a kernel over it. The formats in this module index unpacked records. `verify` has a format that checks and hashes
packed records.

If the kernel does not support the encoding of a record (`ScanStatus.UNUSUAL`), the scan encodes the record again in
canonical form, and writes it back so that it ends at the same position in the buffer. If the writer did not pack lists of
one value, the canonical record is up to four bytes longer, and overwrites the CRC of the previous record, which was already
checked.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from gaudi_bert.artefacts.base import InputFile
from gaudi_bert.artefacts.mirrored_folder import download_missing_files, list_files, mirror_folder
from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.artefacts.packed import check_no_row_tables
from gaudi_bert.artefacts.shards import compute_file_identity
from gaudi_bert.common.arrays import ByteArray, Int32Array, IntArray, RowArray
from gaudi_bert.common.compiled import address_of, as_word, copy_bytes, inlined_kernel, kernel_without_refcounts, load_u8
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import UnpackedFeature
from gaudi_bert.common.files import explain_os_errors, format_location, get_store_url, is_in_store, resolve_links
from gaudi_bert.common.processor import map_in_threads
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.tfrecords.wire.example import decode_example, encode_example
from gaudi_bert.tfrecords.wire.features import FeatureTable, locate_features, make_feature_table
from gaudi_bert.tfrecords.wire.framing import (
    NO_RECORD,
    PROBLEMS,
    RecordStream,
    ScanStatus,
    check_frame,
    extend_crc_by_frames,
    format_record_location,
    frame,
    read_records,
)
from gaudi_bert.tfrecords.wire.hdf5 import HDF5_ENDINGS
from gaudi_bert.tfrecords.wire.schema import (
    FRAME_BYTES,
    MAX_RECORD_BYTES,
    PackedSchema,
    RecordError,
    UnpackedSchema,
    check_features,
    check_values,
    infer_unpacked_schema,
)
from gaudi_bert.tfrecords.wire.values import (
    compute_unpadded_positions_size,
    compute_unpadded_size,
    count_leading_one_floats,
    count_leading_ones,
)

# --- the input files of a command
#
# The argument RECORDS of a command is a folder, a file or a glob pattern of TFRecord or HDF5 files, or the URL of one of
# these. A folder stands for all files directly in it, with any suffix. Sub-folders, `*.json`, `README*` and, as in Spark and
# pyarrow, names that begin with `_` or `.` are ignored. Any other entry that cannot be read as a file, such as a dangling
# symbolic link, is an error, because otherwise a part of the data would be missing without notice. A file is identified by
# its name without its folder, so that the same data in another place produce the same artefacts. The suffix decides whether
# a file is HDF5. Local files are read in place, and objects of a store are downloaded while they are read.


def list_record_files(records: str | Path) -> dict[Path, int]:
    """Return the record files that match a local path or glob pattern, sorted by name, with their sizes in bytes.

    Args:
        records: A folder, a file or a glob pattern on this machine.

    Raises:
        InputError: There are no record files, an entry is not a regular file, the formats are mixed, two files have the same
            name, or a name is not UTF-8.
    """
    location = Path(records)
    with explain_os_errors(location, "read"):
        if location.is_dir():
            paths = [child for child in location.iterdir() if not _is_ignored(child.name) and not child.is_dir()]
            missing = "the folder contains no record files (names that begin with _ or . are ignored); check the path"
        elif os.path.lexists(location):
            paths, missing = [location], ""
        else:
            paths = [
                path for path in map(Path, glob.glob(os.fspath(records))) if not _is_ignored(path.name) and not path.is_dir()
            ]
            missing = "the path does not exist, and no file matches it as a pattern; check the path"
        paths.sort(key=lambda path: path.name)
        for path in paths:
            if path.is_symlink() and not path.is_file():
                problem = f"the file is a symbolic link to {os.readlink(path)}, which does not exist; fix or remove the link"
                raise InputError(f"{path}: {problem}")
            if not path.is_file():
                problem = "expected a file, found a pipe, socket or device; remove it, or select the files with a pattern"
                raise InputError(f"{path}: {problem}")
        sizes = {path: path.stat().st_size for path in paths}
    if not sizes:
        check_no_row_tables(location)
        raise InputError(f"{records}: {missing}")
    _check_one_format(records, sizes)
    for path, following in itertools.pairwise(sizes):
        if path.name == following.name:
            raise InputError(f"{following}: the file must not have the same name as {path}; rename one of the two files")
    for path in sizes:
        if not path.name.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in path.name):
            raise InputError(f"{path}: the file name must be UTF-8; rename the file")
    return sizes


def compute_bad_file_identity(path: Path) -> InputFile:
    """Return the name, size and CRC-32C of an input file that is not a valid record file.

    If this process has no permission to read the file, the CRC-32C is 0.
    """
    if not os.access(path, os.R_OK, effective_ids=True):
        return InputFile(name=path.name, bytes=path.stat().st_size, crc32c=0)
    return compute_file_identity(path)


def get_records_folder(records: str | Path) -> Path:
    """Return the folder that contains the record files. `records` is this folder itself, a file in it, or a glob pattern."""
    location = Path(records)
    return location if location.is_dir() else location.parent


def find_vocabulary(records: str | Path) -> Path | None:
    """Return the path of the `vocab.txt` next to the folder of the record files, or None if there is no such file.

    The `prepare` stage writes the vocabulary there.
    """
    candidate = resolve_links(get_records_folder(records)).parent / "vocab.txt"
    return candidate if candidate.is_file() else None


def _is_ignored(name: str) -> bool:
    """Return whether a file is ignored because of its name. This applies to dot files, JSON files, READMEs and names such as
    `_SUCCESS`.
    """
    return name.startswith((".", "_", "README")) or name.endswith(".json")


def _check_one_format(records: str | Path, paths: Iterable[Path]) -> None:
    """Check that the suffixes of the files do not mix HDF5 with another format.

    Raises:
        InputError: The formats are mixed. The message names one file of each.
    """
    first = {path.suffix in HDF5_ENDINGS: path.name for path in paths}
    if len(first) > 1:
        raise InputError(
            f"{format_location(records)}: the folder contains both HDF5 files ({first[True]}) and other files"
            f" ({first[False]}); select one format with a pattern"
        )


@dataclass(frozen=True)
class RecordInputs:
    """The record files that a command reads, together with their vocabulary file.

    Attributes:
        shown: RECORDS as messages name them.
        folder: The folder of the files, or the local folder to which they are downloaded.
        sizes: The size of each file in bytes, sorted by name. A file of a store exists only inside a batch of
            `prefetch_batches`.
        vocabulary: The local path of the `vocab.txt` next to the folder of the files, or None if there is none.
    """

    shown: str
    folder: Path
    sizes: Mapping[Path, int]
    vocabulary: Path | None


@contextmanager
def open_inputs(records: str | Path, store: StoreSettings | None = None) -> Iterator[RecordInputs]:
    """List the record files that a command reads. If they are in an object store, mirror their folder locally until the
    `with` block ends.

    Args:
        records: A folder, a file or a glob, on this machine or as a URL.
        store: The settings of the object store, or None for the defaults.

    Yields:
        The files and the vocabulary.

    Raises:
        InputError: There are no record files, or they are not valid (see `list_record_files`).
    """
    if not is_in_store(records):
        yield RecordInputs(str(records), get_records_folder(records), list_record_files(records), find_vocabulary(records))
        return
    url, pattern = get_store_url(records), "*"
    parent, _, name = url.rpartition("/")
    # If the URL names a single object or contains wildcards, list the parent folder, and select the objects whose names
    # match.
    if not parent.endswith(":/") and (any(letter in name for letter in "*?[") or ObjectStore(store).info(url) is not None):
        url, pattern, parent = parent, name, parent.rpartition("/")[0]
    # The vocabulary is next to the folder of the records, so mirror the parent of this folder. The root of a bucket has no
    # parent, so mirror only the bucket.
    is_bucket = parent.endswith(":/")
    with mirror_folder(Path(url if is_bucket else parent), store) as root:
        folder = root if is_bucket else root / Path(url).name
        sizes = {
            folder / name: info.bytes
            for name, info in list_files(folder).items()
            if fnmatch.fnmatchcase(name, pattern) and not _is_ignored(name)
        }
        if not sizes:
            raise InputError(
                f"{get_store_url(records)}: the URL contains no record files, or the bucket does not exist; check the URL"
            )
        _check_one_format(records, sizes)
        vocabulary = root / "vocab.txt"
        if not is_bucket:
            download_missing_files(vocabulary)
        yield RecordInputs(format_location(records), folder, sizes, vocabulary if vocabulary.exists() else None)


# --- the index of unpacked records (numba kernels): framing, both CRCs and every value are checked
#
# A row of the index contains everything that packing and verifying need, so that no record is parsed twice. Offsets are
# relative to the payload of the record. Sizes are in bytes and do not include padding.

_INDEX_FIELDS = (
    *("length", "masked", "label", "ids", "ids_bytes", "segments"),
    *("positions", "positions_bytes", "masked_ids", "masked_ids_bytes"),
)
_INDEX_DTYPE = np.dtype([(name, np.int32) for name in _INDEX_FIELDS])


class IndexedSequences(NamedTuple):
    """An index of the sequences in a buffer, with the location and size of each sequence's values.

    Attributes:
        buffer: uint8, the bytes of the records.
        offsets: int64 [sequences], the position of each sequence's payload in the buffer.
        rows: A structured array [sequences] with int32 fields. `length` is the number of tokens, `masked` the number of
            masked positions, and `label` the next-sentence label. `ids`, `segments`, `positions` (the masked positions) and
            `masked_ids` are offsets from the start of the payload. `ids_bytes`, `positions_bytes` and `masked_ids_bytes` are
            the sizes of the values without padding. Segment ids take one byte for each token.
    """

    buffer: ByteArray
    offsets: IntArray
    rows: RowArray

    @classmethod
    def empty(cls, buffer: ByteArray, sequences: int) -> IndexedSequences:
        """Return an index with room for `sequences` sequences. The caller fills its offsets and rows."""
        return cls(buffer, np.empty(sequences, np.int64), np.empty(sequences, _INDEX_DTYPE))

    @property
    def lengths(self) -> Int32Array:
        """The number of tokens of each sequence, int32 [sequences]."""
        return self.rows["length"]


@inlined_kernel
def _check_and_index_record(
    payload_start: int,
    payload_end: int,
    row_length: int,
    predictions: int,
    table: FeatureTable,
    rows: RowArray,
    row_number: int,
) -> bool:
    """Check every value of an unpacked example, and fill one row of the index with the sizes and offsets of its values.

    Args:
        payload_start: The address of the payload.
        payload_end: The address after the payload.
        row_length: L, the number of tokens in a row.
        predictions: P, the number of masked slots.
        table: The feature table of unpacked records.
        rows: The rows of the index.
        row_number: The row to fill.

    Returns:
        False if the kernel does not support the encoding of the record or a value is invalid. The general reader finds out
        which of these is the case.
    """
    if not locate_features(payload_start, payload_end, table):
        return False
    ids, mask = table.spans[UnpackedFeature.INPUT_IDS], table.spans[UnpackedFeature.INPUT_MASK]
    masked_ids, positions = table.spans[UnpackedFeature.MASKED_LM_IDS], table.spans[UnpackedFeature.MASKED_LM_POSITIONS]
    weights, label = table.spans[UnpackedFeature.MASKED_LM_WEIGHTS], table.spans[UnpackedFeature.NEXT_SENTENCE_LABELS]
    segments = table.spans[UnpackedFeature.SEGMENT_IDS]
    if mask.bytes != row_length or segments.bytes != row_length or weights.bytes != 4 * predictions:
        return False
    token_count = count_leading_ones(mask.start, row_length)
    masked = count_leading_one_floats(weights.start, 4 * predictions)
    if token_count <= 0 or masked < 0 or label.bytes != 1 or load_u8(label.start) > 1:
        return False
    ids_bytes = compute_unpadded_size(ids.start, ids.bytes, row_length, token_count)
    masked_ids_bytes = compute_unpadded_size(masked_ids.start, masked_ids.bytes, predictions, masked)
    segments_bytes = compute_unpadded_size(segments.start, row_length, row_length, token_count)
    positions_bytes = compute_unpadded_positions_size(positions.start, positions.bytes, predictions, masked, token_count)
    if ids_bytes < 0 or masked_ids_bytes < 0 or segments_bytes < 0 or positions_bytes < 0:
        return False
    row = rows[row_number]
    row.length = token_count
    row.masked = masked
    row.label = load_u8(label.start)
    row.ids = ids.start - payload_start
    row.ids_bytes = ids_bytes
    row.segments = segments.start - payload_start
    row.positions = positions.start - payload_start
    row.positions_bytes = positions_bytes
    row.masked_ids = masked_ids.start - payload_start
    row.masked_ids_bytes = masked_ids_bytes
    return True


@kernel_without_refcounts
def _index_unpacked_records(
    index: IndexedSequences,
    first_row: int,
    position: int,
    buffer_end: int,
    row_length: int,
    predictions: int,
    table: FeatureTable,
) -> tuple[int, int, int]:
    """Check the frames, CRCs and values of the records in `index.buffer[position:buffer_end]`, and add one index row per
    record.

    Args:
        index: The index, whose rows from `first_row` on are filled.
        first_row: The first free row.
        position: The position in the buffer at which a record begins.
        buffer_end: The end of the bytes in the buffer.
        row_length: L, the number of tokens in a row, which every record must have.
        predictions: P, the number of masked slots, which every record must have.
        table: The feature table of unpacked records.

    Returns:
        (why the scan stopped, the position of the record at which it stopped, the next free row).
    """
    base = address_of(index.buffer)
    row_number = first_row
    while True:
        status, size = check_frame(base + position, base + buffer_end)
        if status != ScanStatus.GOOD:
            return status, position, row_number
        if row_number == index.offsets.size:
            return ScanStatus.INDEX_FULL, position, row_number
        payload = base + position + 12
        if not _check_and_index_record(payload, payload + size, row_length, predictions, table, index.rows, row_number):
            return ScanStatus.UNUSUAL, position, row_number
        index.offsets[row_number] = position + 12
        position += size + 16
        row_number += 1


@kernel_without_refcounts
def _move_sequences_to_arena(
    index: IndexedSequences, first_row: int, end_row: int, arena: ByteArray, arena_position: int
) -> int:
    """Copy sequences without padding to the arena, which is one buffer for a whole group. Update their index rows to refer
    to the copies.

    A sequence in the arena consists of its token ids, segment ids, masked ids and masked positions, in this order and
    without gaps.

    Args:
        index: The index, whose rows and offsets are changed.
        first_row: The first row.
        end_row: The row after the last one.
        arena: uint8, must not overlap the buffer of the index.
        arena_position: The position in the arena of the first sequence.

    Returns:
        The next free position in the arena.
    """
    base = address_of(index.buffer)
    for number in range(first_row, end_row):
        row = index.rows[number]
        payload = base + index.offsets[number]
        target = address_of(arena) + arena_position
        segments = as_word(row.ids_bytes)
        masked_ids = segments + row.length
        positions = masked_ids + row.masked_ids_bytes
        copy_bytes(target, payload + row.ids, segments)
        copy_bytes(target + segments, payload + row.segments, as_word(row.length))
        copy_bytes(target + masked_ids, payload + row.masked_ids, as_word(row.masked_ids_bytes))
        copy_bytes(target + positions, payload + row.positions, as_word(row.positions_bytes))
        row.ids = 0
        row.segments = segments
        row.masked_ids = masked_ids
        row.positions = positions
        index.offsets[number] = arena_position
        arena_position += positions + row.positions_bytes
    return arena_position


@kernel_without_refcounts
def find_largest_token_id(index: IndexedSequences, end_row: int, step: int) -> int:
    """Search every `step`-th indexed sequence before row `end_row`, and return the largest token id or masked id."""
    base, largest = address_of(index.buffer), as_word(0)
    for number in range(0, end_row, step):
        row = index.rows[number]
        for start, size in ((row.ids, row.ids_bytes), (row.masked_ids, row.masked_ids_bytes)):
            address = base + index.offsets[number] + start
            end = address + size
            while address < end:
                value, shift, byte = as_word(0), as_word(0), as_word(128)
                while byte >= 128:
                    byte = load_u8(address)
                    value |= (byte & 127) << shift
                    shift += 7
                    address += 1
                largest = max(largest, value)
    return largest


# --- one pass over a file

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

CHUNK_BYTES = 1 << 20
FRONT_BYTES = 16
_MAX_GROWTH_BYTES = 4


# Why the scan stopped, and the position in the buffer of the record at which it stopped.
StatusAndPosition = tuple[ScanStatus, int]


class _RecordFormat(Protocol):
    """The interface that a `RecordScan` uses to process the records of one file.

    Attributes:
        count: The number of records that were processed so far.
    """

    count: int

    @property
    def schema(self) -> UnpackedSchema | PackedSchema:
        """The sizes of the features that every record must have."""
        ...

    def prepare_for_next_chunk(self) -> None:
        """Prepare for the next chunk of the file. `RecordScan` calls this method before it reads each chunk."""
        ...

    def validate_and_collect_records(self, position: int, buffer_end: int) -> StatusAndPosition:
        """Check the records in `buffer[position:buffer_end]`, and collect what is known about them, such as hashes.

        Returns:
            (why the scan stopped, the position of the record at which it stopped).
        """
        ...


def allocate_scan_buffer() -> ByteArray:
    """Return a new buffer that is large enough for a `RecordScan` of any file. Each thread needs its own buffer."""
    return np.zeros(FRONT_BYTES + MAX_RECORD_BYTES + FRAME_BYTES + CHUNK_BYTES, np.uint8)


class UnpackedFormat:
    """Checks unpacked records and indexes their sequences. The index covers only the chunk of the file that was read last.

    Attributes:
        schema: The sizes that every record must have.
        index: The index. Its rows refer to the scan buffer.
        count: The number of records that were indexed so far.
        rows: The number of rows of the index that are in use.
    """

    def __init__(self, schema: UnpackedSchema, index: IndexedSequences) -> None:
        self.schema, self.index = schema, index
        self.count = 0
        self.rows = 0
        self._table = make_feature_table(schema.features)

    @classmethod
    def for_scan_in_chunks(cls, schema: UnpackedSchema, buffer: ByteArray) -> UnpackedFormat:
        """Return a record format for files that are read in chunks into `buffer`. Its index has room for all records of one
        chunk.
        """
        rows = (CHUNK_BYTES + MAX_RECORD_BYTES) // (3 * schema.max_sequence_length + 16) + 1
        return cls(schema, IndexedSequences.empty(buffer, rows))

    def prepare_for_next_chunk(self) -> None:
        """Empty the index before the next chunk of the file is read."""
        self.rows = 0

    def validate_and_collect_records(self, position: int, buffer_end: int) -> StatusAndPosition:
        """Check and index the records in `buffer[position:buffer_end]`.

        Returns:
            (why the scan stopped, the position of the record at which it stopped).
        """
        first = self.rows
        length, predictions = self.schema.max_sequence_length, self.schema.max_predictions
        status, position, self.rows = _index_unpacked_records(
            self.index, first, position, buffer_end, length, predictions, self._table
        )
        self.count += self.rows - first
        return ScanStatus(status), position


class CompactedFormat(UnpackedFormat):
    """Checks and indexes all unpacked records of a file. Their values are copied without padding to a buffer, called the
    arena.

    The index contains the records of the whole file, and its offsets are positions in the arena. The files of a group share
    an arena.

    Args:
        schema: The sizes that every record must have.
        index: The index, with room for all records of the file.
        arena: uint8, must not overlap the scan buffer.
        start: The position in the arena of the first sequence.
        end: The end of the part of the arena that this file may fill.
    """

    def __init__(self, schema: UnpackedSchema, index: IndexedSequences, arena: ByteArray, start: int, end: int) -> None:
        super().__init__(schema, index)
        self._arena, self._position, self._end = arena, start, end

    def prepare_for_next_chunk(self) -> None:
        """Do nothing, because the index must contain the records of the whole file."""

    def validate_and_collect_records(self, position: int, buffer_end: int) -> StatusAndPosition:
        """Check and index the records in `buffer[position:buffer_end]`, and copy their values to the arena.

        Returns:
            (why the scan stopped, the position of the record at which it stopped).

        Raises:
            ValueError: The arena is too small, which is an error of the caller.
        """
        first = self.rows
        status, position = super().validate_and_collect_records(position, buffer_end)
        rows = self.index.rows[first : self.rows]
        sizes = (rows[name].sum(dtype=np.int64) for name in ("ids_bytes", "length", "masked_ids_bytes", "positions_bytes"))
        needed = int(sum(sizes))
        if self._position + needed > self._end:
            raise ValueError(f"the arena ends at byte {self._end}, but {needed} bytes at {self._position} are needed")
        self._position = _move_sequences_to_arena(self.index, first, self.rows, self._arena, self._position)
        return status, position


class RecordScan:
    """Reads one record file chunk by chunk, and passes the records to an object that checks and processes them.

    Args:
        path: The file.
        record_format: Processes the records.
        buffer: uint8, the buffer that `record_format` reads (see `allocate_scan_buffer`).
        progress: Called with the number of bytes that were read from the disk.

    Attributes:
        file_bytes: The number of bytes that were read from the disk so far.
        file_crc32c: The CRC-32C of these bytes. It is complete after the last chunk.
    """

    def __init__(
        self, path: Path, record_format: _RecordFormat, buffer: ByteArray, progress: Callable[[int], None] | None = None
    ) -> None:
        self.path, self.format, self.buffer = path, record_format, buffer
        self._progress = progress
        self.file_bytes = 0
        self.file_crc32c = 0
        self._records_crc32c = 0

    def process_chunk_by_chunk(self) -> Iterator[None]:
        """Read and process the file chunk by chunk. Yield after each chunk, so that the caller can use its results.

        Raises:
            InputError: The file cannot be read, is truncated, or contains a record that is damaged or violates the contract.
        """
        start = position = buffer_end = FRONT_BYTES
        stream_offset = -start  # position in the stream = position in the buffer + stream_offset
        view = self.buffer.data
        with RecordStream(self.path) as stream:
            while True:
                self.format.prepare_for_next_chunk()
                if buffer_end > start:
                    rest = buffer_end - position
                    self.buffer[start : start + rest] = self.buffer[position:buffer_end].copy()
                    stream_offset += position - start
                    position, buffer_end = start, start + rest
                count = stream.read_into(view[buffer_end : buffer_end + CHUNK_BYTES])
                if self._progress is not None:
                    self._progress(stream.file_bytes - self.file_bytes)
                self.file_bytes = stream.file_bytes
                if count == 0:
                    break
                buffer_end += count
                position = self._scan_until_incomplete_record(position, buffer_end, stream_offset)
                self.file_crc32c = stream.file_crc32c if stream.compression else self._records_crc32c
                yield
        if position < buffer_end:
            raise InputError(f"{self._format_location(position + stream_offset)}: {PROBLEMS[ScanStatus.INCOMPLETE]}")

    def _scan_until_incomplete_record(self, position: int, buffer_end: int, stream_offset: int) -> int:
        """Process the complete records in `buffer[position:buffer_end]`, and return the position of the first incomplete
        record.

        Args:
            position: The position in the buffer at which a record begins.
            buffer_end: The end of the bytes in the buffer.
            stream_offset: The difference between a position in the stream and a position in the buffer, for error messages.

        Raises:
            InputError: A record is damaged or violates the contract.
        """
        rewritten_record, counted_until = -1, position
        while True:
            status, position = self.format.validate_and_collect_records(position, buffer_end)
            counted_until = self._extend_file_crc(counted_until, position)
            if status == ScanStatus.INCOMPLETE:
                return position
            if status != ScanStatus.UNUSUAL or position == rewritten_record:
                raise InputError(f"{self._format_location(position + stream_offset)}: {PROBLEMS[status]}")
            # This record has an encoding that the compiled kernel does not support. Encode the record again in canonical
            # form, and write it back so that it ends at the same position.
            end = position + int(struct.unpack_from("<Q", self.buffer.data, position)[0]) + FRAME_BYTES
            counted_until = self._extend_file_crc(position, end)
            try:
                canonical = frame(
                    _encode_canonical_example(self.buffer[position + 12 : end - 4].tobytes(), self.format.schema)
                )
            except RecordError as error:
                raise InputError(f"{self._format_location(position + stream_offset)}: {error}") from error
            if len(canonical) > end - position + _MAX_GROWTH_BYTES:
                raise InputError(f"{self._format_location(position + stream_offset)}: {PROBLEMS[ScanStatus.UNUSUAL]}")
            self.buffer[end - len(canonical) : end] = np.frombuffer(canonical, np.uint8)
            position = rewritten_record = end - len(canonical)

    def _extend_file_crc(self, start: int, end: int) -> int:
        """Update the CRC-32C of the file with the records in `buffer[start:end]`, and return the position that the CRC has
        reached.

        This is the larger of `start` and `end`. The records must be in their original form, because the CRC is that of the
        file on the disk. If `start` is not before `end`, the CRC does not change.
        """
        if start < end:
            self._records_crc32c = extend_crc_by_frames(self._records_crc32c, self.buffer, start, end)
        return max(start, end)

    def _format_location(self, offset: int) -> str:
        """Return the file and number of the current record as text for error messages. `offset` is its position in the
        uncompressed file.
        """
        return format_record_location(self.path, self.format.count, offset)


class RecordSchema(NamedTuple):
    """The feature sizes of unpacked records, and the names of features that packing does not use.

    Attributes:
        schema: The sizes of the features that an unpacked example must have.
        other_features: The names of the other features, which packed records do not contain.
    """

    schema: UnpackedSchema
    other_features: list[str]


def read_record_schema(path: Path) -> RecordSchema:
    """Read the first record of a file of unpacked records, and return its feature sizes and the names of features that
    packing does not use.

    Raises:
        InputError: The file cannot be read or contains no record, or its first record is not an unpacked example.
    """
    payload = next(read_records(path), None)
    if payload is None:
        raise InputError(f"{path}: {NO_RECORD}")
    try:
        features = decode_example(payload)
        schema = infer_unpacked_schema(features)
        check_features(features, schema)
    except (RecordError, InputError) as error:
        raise InputError(f"{format_record_location(path, 0, 0)}: {error}") from error
    return RecordSchema(schema, sorted(set(features) - {spec.name for spec in schema.features}))


# --- the slow but general reader for records that the kernels do not support
#
# Writers encode the same example differently. Lists may be unpacked (with a tag for each value) or split, map entries may be
# repeated (the last one counts), messages may be merged, other features may be present, and varints may be longer than
# necessary. `decode_example` resolves all of this by the rules of protobuf. Then the values are checked against the
# contract, and the record is encoded in the form that the kernels support: exactly the features of the schema, with sorted
# keys and packed lists. The kernels therefore process every record, and the result does not depend on the writer.


def _encode_canonical_example(payload: bytes | memoryview, schema: UnpackedSchema | PackedSchema) -> bytes:
    """Check an example, and encode it again with sorted keys, packed lists and only the features of `schema`.

    Raises:
        RecordError: `payload` is not an example, has other sizes than `schema`, or has a value that violates the contract.
            The message names the first such value.
    """
    features = decode_example(payload)
    check_features(features, schema)
    check_values(features, schema)
    if isinstance(schema, UnpackedSchema):
        features["masked_lm_weights"] = features["masked_lm_weights"] + np.float32(0)  # -0.0 becomes 0.0
    return encode_example({spec.name: features[spec.name] for spec in schema.features})


def map_files_in_threads(
    function: Callable[[_Item, ByteArray], _Result], files: Sequence[_Item], workers: int | None
) -> list[_Result]:
    """Call `function(file, buffer)` for every file in several threads, and return the results in the order of the files.

    Args:
        function: The function. Its second argument is the scan buffer of its thread.
        files: The files, or other values that describe them.
        workers: The number of threads, or None for the default.
    """
    return list(map_in_threads(function, files, workers, allocate_scan_buffer))
