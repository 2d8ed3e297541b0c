"""What files hold: the fingerprints of their sequences, piece by piece, and in what two sets of files differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from gaudi_bert.artefacts.mirrored_folder import read_ahead
from gaudi_bert.artefacts.shards import SizeArray
from gaudi_bert.common.arrays import ByteArray, Int32Array, IntArray
from gaudi_bert.tfrecords.fingerprint import (
    PackSizes,
    ScannedPacks,
    hash_unpacked,
    scan_packed,
    sum_hashes,
)
from gaudi_bert.tfrecords.scan import PIECE_BYTES, RecordScan, UnpackedFormat, map_files
from gaudi_bert.tfrecords.wire.example import position_table
from gaudi_bert.tfrecords.wire.features import feature_table
from gaudi_bert.tfrecords.wire.framing import ScanStatus
from gaudi_bert.tfrecords.wire.schema import MAX_RECORD_BYTES, MAX_SEQUENCE_LENGTH, PackedSchema, UnpackedSchema


@dataclass(frozen=True)
class _Piece:
    """The sequences of one piece of a file, in order; the last two are None for unpacked records."""

    hashes: IntArray  # int64 [sequences]
    lengths: Int32Array  # int32 [sequences], tokens of each
    pack_sizes: Int32Array | None = None  # int32 [packs], how many sequences each pack holds
    record_sizes: SizeArray | None = None  # uint32 [packs], the bytes of each record, frame and all


Pieces: TypeAlias = Iterator[tuple[RecordScan, _Piece]]
"""The pieces of one file, in order."""


@dataclass
class SequenceSums:
    """Sums over a file, or over many, in constant memory.

    `record_sizes`, uint32, are the bytes of each record of one shard, in order (none of unpacked records); `lengths`, int64
    [most tokens + 1], counts the sequences of each number of tokens.
    """

    fingerprint: int = 0  # the sum of the hashes of all sequences, modulo 2**64
    sequences: int = 0
    tokens: int = 0
    file_bytes: int = 0
    file_crc32c: int = 0
    record_sizes: SizeArray = field(default_factory=lambda: np.zeros(0, np.uint32))
    lengths: IntArray = field(default_factory=lambda: np.zeros(MAX_SEQUENCE_LENGTH + 1, np.int64))

    def add(self, other: SequenceSums) -> None:
        """Add the sequences of other sums (not its file's size, CRC and packs)."""
        self.fingerprint = (self.fingerprint + other.fingerprint) % 2**64
        self.sequences += other.sequences
        self.tokens += other.tokens
        self.lengths += other.lengths

    def is_same(self, other: SequenceSums) -> bool:
        """Whether these are the same sequences, in any order."""
        known = (self.fingerprint, self.sequences, self.tokens)
        return known == (other.fingerprint, other.sequences, other.tokens)


class _PackedFormat:
    """Checks and hashes packed records; a `_RecordFormat`."""

    def __init__(self, schema: PackedSchema, buffer: ByteArray) -> None:
        self.schema = schema
        self.count = 0
        smallest = 4 * schema.max_sequence_length + 6 * schema.masked_slots + 6 * schema.depth
        packs = (PIECE_BYTES + MAX_RECORD_BYTES) // smallest + 1
        sequences = (packs + 1) * min(schema.depth, schema.max_sequence_length)
        self.scanned = ScannedPacks(
            hashes=np.empty(sequences, np.int64),
            lengths=np.empty(sequences, np.int32),
            sequences=np.empty(packs, np.int32),
            record_sizes=np.empty(packs, np.uint32),
            done=np.zeros(2, np.int64),
            starts=np.empty(schema.depth + 1, np.int64),
        )
        self._buffer = buffer
        self._sizes = PackSizes(schema.max_sequence_length, schema.masked_slots, schema.depth, schema.max_predictions)
        self._table = feature_table(schema.features)
        self._position_varints = position_table()

    def start_piece(self) -> None:
        """Forget the packs of the last piece."""
        self.scanned.done[:] = 0

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        before = int(self.scanned.done[0])
        status, position = scan_packed(
            self._buffer, position, filled, self._sizes, self._table, self._position_varints, self.scanned
        )
        self.count += int(self.scanned.done[0]) - before
        return ScanStatus(status), position


def pieces_of(
    path: Path, schema: UnpackedSchema | PackedSchema, buffer: ByteArray, progress: Callable[[int], None] | None = None
) -> Pieces:
    """The sequences of an input file, or of a shard, piece by piece; the scan knows the file's size and CRC at the end."""
    if isinstance(schema, UnpackedSchema):
        indexed = UnpackedFormat.for_pieces(schema, buffer)
        hashes = np.empty(indexed.index.offsets.size, np.int64)
        scan = RecordScan(path, indexed, buffer, progress)
        for _ in scan.pieces():
            hash_unpacked(indexed.index, indexed.rows, hashes)
            yield scan, _Piece(hashes[: indexed.rows], indexed.index.lengths[: indexed.rows])
    elif path.stat().st_size:  # a shard may be empty
        checked = _PackedFormat(schema, buffer)
        scan = RecordScan(path, checked, buffer, progress)
        for _ in scan.pieces():
            scanned, (packs, sequences) = checked.scanned, checked.scanned.done.tolist()
            of_packs = scanned.sequences[:packs], scanned.record_sizes[:packs]
            yield scan, _Piece(scanned.hashes[:sequences], scanned.lengths[:sequences], *of_packs)


def sum_pieces(pieces: Pieces) -> SequenceSums:
    """Add up the pieces of one file."""
    sums, sizes = SequenceSums(), []
    for scan, piece in pieces:
        sums.fingerprint = (sums.fingerprint + int(sum_hashes(piece.hashes))) % 2**64
        sums.sequences += piece.hashes.size
        sums.tokens += int(piece.lengths.sum(dtype=np.int64))
        sums.file_bytes, sums.file_crc32c = scan.file_bytes, scan.file_crc32c
        sums.lengths += np.bincount(piece.lengths, minlength=sums.lengths.size)
        if piece.record_sizes is not None:
            sizes.append(piece.record_sizes.copy())
    if sizes:
        sums.record_sizes = np.concatenate(sizes)
    return sums


# --- which sequences of a group are missing, doubled or changed, where the sums of its two sides differ

_NAMED = 3


def describe_difference(files: Sequence[Path], shards: Sequence[Path], schema: PackedSchema, workers: int | None) -> str:
    """One line: how many sequences of the files are missing from the shards, how many are too many, and the first of them.

    In memory are 32 bytes for each sequence, half of what it takes to pack it.
    """
    with read_ahead([[*files, *shards]]) as batches, batches.batch(0):
        expected, stored = _collect(files, schema.unpacked, workers), _collect(shards, schema, workers)
    parts = []
    for what, surplus, paths in (
        ("sequences of the records are missing", _surplus(expected, stored), files),
        ("are doubled, changed or foreign", _surplus(stored, expected), shards),
    ):
        if surplus.size:
            named = [f"{paths[row[1]].name} record {row[2]}" for row in surplus[:_NAMED].tolist()]
            if paths is shards:
                named = [f"{name} sequence {row[3]}" for name, row in zip(named, surplus.tolist(), strict=False)]
            more = ", ..." if len(surplus) > len(named) else ""
            parts.append(f"{len(surplus)} {what}: {', '.join(named)}{more}")
    return "; ".join([*parts, "write the folder again"])


def _collect(files: Sequence[Path], schema: UnpackedSchema | PackedSchema, workers: int | None) -> IntArray:
    """int64 [sequences, 4]: hash, number of the file, number of the record, number of the sequence in it (from 1)."""

    def read(number: int, buffer: ByteArray) -> IntArray:
        rows, record = [np.zeros((0, 4), np.int64)], 0
        for _, piece in pieces_of(files[number], schema, buffer):
            sizes = np.ones(piece.hashes.size, np.int64) if piece.pack_sizes is None else piece.pack_sizes.astype(np.int64)
            owners = np.repeat(np.arange(sizes.size), sizes)
            numbers = np.arange(piece.hashes.size) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
            rows.append(np.stack([piece.hashes, np.full(owners.size, number), record + owners, numbers], axis=1))
            record += sizes.size
        return np.concatenate(rows)

    return np.concatenate([np.zeros((0, 4), np.int64), *map_files(read, range(len(files)), workers)])


def _surplus(rows: IntArray, others: IntArray) -> IntArray:
    """Return those of `rows` whose hash occurs more often there than in `others` (the later ones of each hash)."""
    allowed = Counter(others[:, 0].tolist())
    surplus = []
    for number, value in enumerate(rows[:, 0].tolist()):
        if not allowed[value]:
            surplus.append(number)
        else:
            allowed[value] -= 1
    return rows[surplus]
