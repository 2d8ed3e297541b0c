"""What a file holds: the fingerprints of its sequences, piece by piece; and how well the packs of a shard are mixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.verification import tells_mixing
from gaudi_bert.common.arrays import ByteArray, Int32Array, IntArray
from gaudi_bert.records.fingerprint import CLASSES, PackSizes, ScannedPacks, add_hashes, hash_unpacked, scan_packed
from gaudi_bert.records.read.scan import PIECE_BYTES, RecordScan, UnpackedFormat
from gaudi_bert.records.schema import MAX_RECORD_BYTES, MAX_SEQUENCE_LENGTH, PackedSchema, UnpackedSchema
from gaudi_bert.records.wire.example import position_table
from gaudi_bert.records.wire.features import feature_table
from gaudi_bert.records.wire.framing import ScanStatus
from gaudi_bert.records.wire.shard_index import SizeArray


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
        pack_sizes: int32, the number of sequences of each pack of one shard, in order (empty for unpacked records).
        record_sizes: uint32, the bytes of each of its records (empty for unpacked records).
        lengths: int64 [most tokens + 1], sequences of each number of tokens.
    """

    sums: IntArray = field(default_factory=lambda: np.zeros((CLASSES, 2), np.int64))
    sequences: int = 0
    tokens: int = 0
    file_bytes: int = 0
    file_crc32c: int = 0
    pack_sizes: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
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
    sums, sizes, bytes_of_records = SequenceSums(), [], []
    for scan, piece in pieces:
        add_hashes(piece.hashes, piece.hashes.size, sums.sums)
        sums.sequences += piece.hashes.size
        sums.tokens += int(piece.lengths.sum(dtype=np.int64))
        sums.file_bytes, sums.file_crc32c = scan.file_bytes, scan.file_crc32c
        sums.lengths += np.bincount(piece.lengths, minlength=sums.lengths.size)
        if piece.pack_sizes is not None and piece.record_sizes is not None:
            sizes.append(piece.pack_sizes.copy())
            bytes_of_records.append(piece.record_sizes.copy())
    if sizes:
        sums.pack_sizes, sums.record_sizes = np.concatenate(sizes), np.concatenate(bytes_of_records)
    return sums


# --- how well the packs of a shard are mixed (see `artefacts.packed`)


@dataclass
class Mixing:
    """Sums over packs, and over batches of `batch_packs` packs that follow each other in a shard."""

    batch_packs: int
    packs: int = 0
    pack_sum: int = 0
    pack_squares: int = 0
    batches: int = 0
    batch_sum: int = 0
    batch_squares: int = 0

    def add(self, pack_sizes: Int32Array) -> None:
        """Add a shard: int32 [packs], the number of sequences of each pack in order."""
        sizes = pack_sizes.astype(np.int64)
        batches = sizes[: sizes.size // self.batch_packs * self.batch_packs].reshape(-1, self.batch_packs).sum(axis=1)
        self.packs += sizes.size
        self.pack_sum += int(sizes.sum())
        self.pack_squares += int((sizes**2).sum())
        self.batches += batches.size
        self.batch_sum += int(batches.sum())
        self.batch_squares += int((batches**2).sum())

    @property
    def ratio(self) -> float | None:
        """Standard deviation of sequences per batch over that of independent draws; None where it cannot be told."""
        if not tells_mixing(self.batch_packs, self.batches):
            return None
        pack_variance = self.pack_squares / self.packs - (self.pack_sum / self.packs) ** 2
        batch_variance = self.batch_squares / self.batches - (self.batch_sum / self.batches) ** 2
        if pack_variance <= 0:
            return 0.0
        return math.sqrt(max(batch_variance, 0.0) / (self.batch_packs * pack_variance))
