"""What a file holds: the fingerprints of its sequences, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.shards import SizeArray
from gaudi_bert.common.arrays import ByteArray, Int32Array, IntArray
from gaudi_bert.tfrecords.scanning.fingerprint import (
    CLASSES,
    PackSizes,
    ScannedPacks,
    add_hashes,
    hash_unpacked,
    scan_packed,
)
from gaudi_bert.tfrecords.scanning.scan import PIECE_BYTES, RecordScan, UnpackedFormat
from gaudi_bert.tfrecords.wire.example import position_table
from gaudi_bert.tfrecords.wire.features import feature_table
from gaudi_bert.tfrecords.wire.framing import ScanStatus
from gaudi_bert.tfrecords.wire.schema import MAX_RECORD_BYTES, MAX_SEQUENCE_LENGTH, PackedSchema, UnpackedSchema


@dataclass(frozen=True)
class _Piece:
    """The sequences of one piece of a file, in order.

    Attributes:
        hashes: int64 [sequences].
        lengths: int32 [sequences], tokens of each.
        pack_sizes: int32 [packs], how many of them each pack holds; None for unpacked records.
        record_sizes: uint32 [packs], the bytes of each record, frame and all; None for unpacked records.
    """

    hashes: IntArray
    lengths: Int32Array
    pack_sizes: Int32Array | None = None
    record_sizes: SizeArray | None = None


@dataclass
class SequenceSums:
    """Sums over a file, or over many: constant memory.

    Attributes:
        sums: int64 [CLASSES, 2], see `fingerprint.add_hashes`.
        record_sizes: uint32, the bytes of each record of one shard, in order (empty for unpacked records).
        lengths: int64 [most tokens + 1], sequences of each number of tokens.
    """

    sums: IntArray = field(default_factory=lambda: np.zeros((CLASSES, 2), np.int64))
    sequences: int = 0
    tokens: int = 0
    file_bytes: int = 0
    file_crc32c: int = 0
    record_sizes: SizeArray = field(default_factory=lambda: np.zeros(0, np.uint32))
    lengths: IntArray = field(default_factory=lambda: np.zeros(MAX_SEQUENCE_LENGTH + 1, np.int64))

    def add(self, other: SequenceSums) -> None:
        """Add the sequences of other sums (not its file's size, CRC and packs)."""
        self.sums += other.sums
        self.sequences += other.sequences
        self.tokens += other.tokens
        self.lengths += other.lengths

    @property
    def fingerprint(self) -> str:
        """Of all sequences: 16 hexadecimal digits."""
        return f"{int(self.sums[:, 1].astype(np.uint64).sum(dtype=np.uint64)):016x}"


class _PackedFormat:
    """Checks and hashes packed records; a `RecordFormat`."""

    def __init__(self, schema: PackedSchema, buffer: ByteArray) -> None:
        self.schema = schema
        self.records = 0
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
        """As `RecordFormat.take`."""
        before = int(self.scanned.done[0])
        status, position = scan_packed(
            self._buffer, position, filled, self._sizes, self._table, self._position_varints, self.scanned
        )
        self.records += int(self.scanned.done[0]) - before
        return ScanStatus(status), position


def unpacked_pieces(
    path: Path, schema: UnpackedSchema, buffer: ByteArray, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[RecordScan, _Piece]]:
    """The sequences of an input file, piece by piece; the scan knows the file's size and CRC at the end."""
    records = UnpackedFormat.for_pieces(schema, buffer)
    hashes = np.empty(records.index.offsets.size, np.int64)
    scan = RecordScan(path, records, buffer, progress=progress)
    for _ in scan.pieces():
        hash_unpacked(records.index, records.rows, hashes)
        yield scan, _Piece(hashes[: records.rows], records.index.lengths[: records.rows])


def packed_pieces(
    path: Path, schema: PackedSchema, buffer: ByteArray, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[RecordScan, _Piece]]:
    """The sequences of a shard, piece by piece."""
    records = _PackedFormat(schema, buffer)
    scan = RecordScan(path, records, buffer, progress=progress)
    for _ in scan.pieces():
        scanned, (packs, sequences) = records.scanned, records.scanned.done.tolist()
        of_packs = scanned.sequences[:packs], scanned.record_sizes[:packs]
        yield scan, _Piece(scanned.hashes[:sequences], scanned.lengths[:sequences], *of_packs)


def sum_pieces(pieces: Iterator[tuple[RecordScan, _Piece]]) -> SequenceSums:
    """Add up the pieces of one file."""
    sums, sizes = SequenceSums(), []
    for scan, piece in pieces:
        add_hashes(piece.hashes, piece.hashes.size, sums.sums)
        sums.sequences += piece.hashes.size
        sums.tokens += int(piece.lengths.sum(dtype=np.int64))
        sums.file_bytes, sums.file_crc32c = scan.file_bytes, scan.file_crc32c
        sums.lengths += np.bincount(piece.lengths, minlength=sums.lengths.size)
        if piece.record_sizes is not None:
            sizes.append(piece.record_sizes.copy())
    if sizes:
        sums.record_sizes = np.concatenate(sizes)
    return sums
