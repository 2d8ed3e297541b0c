"""What a file holds, as fingerprints: the Python side of `fingerprint`, for one input file or one shard at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gaudi_bert.common.arrays import ByteArray, Int32Array, IntArray
from gaudi_bert.records.proof.fingerprint import CLASSES, add_hashes, hash_unpacked
from gaudi_bert.records.proof.packed_contract import canonical_packed
from gaudi_bert.records.proof.packed_scan import PackSizes, ScannedPacks, scan_packed
from gaudi_bert.records.read.scan import PIECE_BYTES, RecordScan, UnpackedFormat
from gaudi_bert.records.schema import MAX_RECORD_BYTES, MAX_SEQUENCE_LENGTH, PackedSchema, UnpackedSchema
from gaudi_bert.records.wire.encode import position_table
from gaudi_bert.records.wire.features import feature_table
from gaudi_bert.records.wire.frame_scan import ScanStatus

__all__ = ["Piece", "SequenceSums", "packed_pieces", "sum_pieces", "unpacked_pieces"]


@dataclass(frozen=True)
class Piece:
    """The sequences of one piece of a file, in order.

    Attributes:
        hashes: int64 [sequences].
        tokens: their number of tokens in all.
        pack_sizes: int32 [packs], how many of them each pack holds; None for unpacked records.
        lengths: int32 [sequences], tokens of each; None for packed records.
    """

    hashes: IntArray
    tokens: int
    pack_sizes: Int32Array | None
    lengths: Int32Array | None = None


@dataclass
class SequenceSums:
    """Sums over a file, or over many: constant memory.

    Attributes:
        sums: int64 [CLASSES, 2], see `fingerprint.add_hashes`.
        pack_sizes: int32, the number of sequences of each pack of one shard, in order (empty for unpacked
            records).
        lengths: int64 [most tokens + 1], unpacked sequences of each number of tokens.
    """

    sums: IntArray = field(default_factory=lambda: np.zeros((CLASSES, 2), np.int64))
    sequences: int = 0
    tokens: int = 0
    file_bytes: int = 0
    file_crc32c: int = 0
    pack_sizes: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
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


class PackedFormat:
    """Checks and hashes packed records; see `scan.RecordFormat`."""

    def __init__(self, schema: PackedSchema, buffer: ByteArray) -> None:
        self.schema = schema
        self.records = 0
        smallest = 4 * schema.max_sequence_length + 6 * schema.masked_slots + 6 * schema.depth
        packs = (PIECE_BYTES + MAX_RECORD_BYTES) // smallest + 1
        hashes = np.empty((packs + 1) * min(schema.depth, schema.max_sequence_length), np.int64)
        starts = np.empty(schema.depth + 1, np.int64)
        self.found = ScannedPacks(hashes, np.empty(packs, np.int32), np.zeros(3, np.int64), starts)
        self._buffer = buffer
        self._sizes = PackSizes(schema.max_sequence_length, schema.masked_slots, schema.depth, schema.max_predictions)
        self._table = feature_table(schema.features)
        self._position_varints = position_table()

    def start_piece(self) -> None:
        """Forget the packs of the last piece."""
        self.found.done[:] = 0

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """As `RecordFormat.take`."""
        before = int(self.found.done[0])
        status, position = scan_packed(
            self._buffer, position, filled, self._sizes, self._table, self._position_varints, self.found
        )
        self.records += int(self.found.done[0]) - before
        return ScanStatus(status), position

    def canonical(self, payload: bytes) -> bytes:
        """As `RecordFormat.canonical`."""
        return canonical_packed(payload, self.schema)


def unpacked_pieces(
    path: Path, schema: UnpackedSchema, buffer: ByteArray, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[RecordScan, Piece]]:
    """The sequences of an input file, piece by piece; the scan knows the file's size and CRC at the end."""
    records = UnpackedFormat.for_pieces(schema, buffer)
    hashes = np.empty(records.index.offsets.size, np.int64)
    scan = RecordScan(path, records, buffer, progress=progress)
    for _ in scan.pieces():
        hash_unpacked(records.index, records.rows, hashes)
        lengths = records.index.lengths[: records.rows]
        yield scan, Piece(hashes[: records.rows], int(lengths.sum(dtype=np.int64)), None, lengths)


def packed_pieces(
    path: Path, schema: PackedSchema, buffer: ByteArray, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[RecordScan, Piece]]:
    """The sequences of a shard, piece by piece."""
    records = PackedFormat(schema, buffer)
    scan = RecordScan(path, records, buffer, progress=progress)
    for _ in scan.pieces():
        packs, sequences, tokens = (int(count) for count in records.found.done)
        yield scan, Piece(records.found.hashes[:sequences], tokens, records.found.sequences[:packs])


def sum_pieces(pieces: Iterator[tuple[RecordScan, Piece]]) -> SequenceSums:
    """Add up the pieces of one file."""
    sums, sizes = SequenceSums(), []
    for scan, piece in pieces:
        add_hashes(piece.hashes, piece.hashes.size, sums.sums)
        sums.sequences += piece.hashes.size
        sums.tokens += piece.tokens
        sums.file_bytes, sums.file_crc32c = scan.file_bytes, scan.file_crc32c
        if piece.lengths is not None:
            sums.lengths += np.bincount(piece.lengths, minlength=sums.lengths.size)
        if piece.pack_sizes is not None:
            sizes.append(piece.pack_sizes.copy())
    sums.pack_sizes = np.concatenate(sizes) if sizes else np.zeros(0, np.int32)
    return sums
