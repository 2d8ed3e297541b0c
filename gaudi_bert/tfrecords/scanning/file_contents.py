"""What files hold: the fingerprints of their sequences, piece by piece, and in what two sets of files differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from gaudi_bert.artefacts.packed import Metadata
from gaudi_bert.artefacts.shards import SizeArray
from gaudi_bert.artefacts.store.mirrored_folder import read_ahead
from gaudi_bert.common.arrays import BoolArray, ByteArray, Int32Array, IntArray
from gaudi_bert.tfrecords.scanning.fingerprint import (
    CLASSES,
    PackSizes,
    ScannedPacks,
    add_hashes,
    hash_unpacked,
    scan_packed,
)
from gaudi_bert.tfrecords.scanning.scan import PIECE_BYTES, RecordScan, UnpackedFormat, map_files
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


Pieces: TypeAlias = Iterator[tuple[RecordScan, _Piece]]
"""The pieces of one file, in order."""


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

    def is_same(self, other: SequenceSums) -> bool:
        """Whether these are the same sequences, in any order."""
        return bool((self.sums == other.sums).all()) and self.tokens == other.tokens

    @property
    def fingerprint(self) -> str:
        """Sum of the hashes of all sequences: 16 hexadecimal digits."""
        return f"{int(self.sums[:, 1].astype(np.uint64).sum(dtype=np.uint64)):016x}"


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


def unpacked_pieces(
    path: Path, schema: UnpackedSchema, buffer: ByteArray, progress: Callable[[int], None] | None = None
) -> Pieces:
    """The sequences of an input file, piece by piece; the scan knows the file's size and CRC at the end."""
    indexed = UnpackedFormat.for_pieces(schema, buffer)
    hashes = np.empty(indexed.index.offsets.size, np.int64)
    scan = RecordScan(path, indexed, buffer, progress=progress)
    for _ in scan.pieces():
        hash_unpacked(indexed.index, indexed.rows, hashes)
        yield scan, _Piece(hashes[: indexed.rows], indexed.index.lengths[: indexed.rows])


def packed_pieces(
    path: Path, schema: PackedSchema, buffer: ByteArray, progress: Callable[[int], None] | None = None
) -> Pieces:
    """The sequences of a shard, piece by piece."""
    checked = _PackedFormat(schema, buffer)
    scan = RecordScan(path, checked, buffer, progress=progress)
    for _ in scan.pieces():
        scanned, (packs, sequences) = checked.scanned, checked.scanned.done.tolist()
        of_packs = scanned.sequences[:packs], scanned.record_sizes[:packs]
        yield scan, _Piece(scanned.hashes[:sequences], scanned.lengths[:sequences], *of_packs)


def sum_pieces(pieces: Pieces) -> SequenceSums:
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


# --- which sequences are missing, doubled or changed, where the sums of two sets of sequences differ
#
# Only sequences whose hash falls into a class that differs are collected, and only as many classes as fit into a bounded
# table, so memory stays constant however much is wrong. Counts are then of those classes: "at least".

_MOST_SEARCHED = 1_000_000
_NAMED = 3


def describe_difference(
    files: Sequence[Path],
    shards: Sequence[Path],
    metadata: Metadata,
    unpacked: SequenceSums,
    repacked: SequenceSums,
    workers: int | None,
) -> str:
    """One line: how many sequences of the records are missing, how many are too many, and the first of them."""
    schema = PackedSchema.of(metadata)
    differing = np.flatnonzero((unpacked.sums != repacked.sums).any(axis=1))
    sizes = np.cumsum(unpacked.sums[differing, 0] + repacked.sums[differing, 0])
    searched = differing[: max(1, int(np.searchsorted(sizes, _MOST_SEARCHED, side="right")))]
    classes = np.isin(np.arange(len(unpacked.sums)), searched)
    with read_ahead([files]) as one, one.batch(0), read_ahead([shards]) as other, other.batch(0):
        expected = _collect(files, lambda path, buffer: unpacked_pieces(path, schema.unpacked, buffer), classes, workers)
        shards = [path for path in shards if path.stat().st_size]
        stored = _collect(shards, lambda path, buffer: packed_pieces(path, schema, buffer), classes, workers)
    missing, extra = _surplus(expected, stored), _surplus(stored, expected)
    least = "" if searched.size == differing.size else "at least "
    parts = []
    if missing.size:
        names = [f"{files[row[1]].name} record {row[2]}" for row in missing[:_NAMED].tolist()]
        parts.append(f"{least}{missing.shape[0]} sequences of the records are missing: {_listed(names, missing.shape[0])}")
    if extra.size:
        names = [f"{shards[row[1]].name} record {row[2]} sequence {row[3]}" for row in extra[:_NAMED].tolist()]
        parts.append(f"{least}{extra.shape[0]} are doubled, changed or foreign: {_listed(names, extra.shape[0])}")
    return "; ".join([*parts, "write the folder again"])


def _listed(names: Sequence[str], count: int) -> str:
    return ", ".join(names) + (", ..." if count > len(names) else "")


def _collect(
    files: Sequence[Path], open_pieces: Callable[[Path, ByteArray], Pieces], classes: BoolArray, workers: int | None
) -> IntArray:
    """int64 [sequences, 4]: hash, number of the file, number of the record, number of the sequence in it (from 1)."""

    def search(number: int, buffer: ByteArray) -> IntArray:
        rows, record = [], 0
        for _, piece in open_pieces(files[number], buffer):
            sizes = np.ones(piece.hashes.size, np.int64) if piece.pack_sizes is None else piece.pack_sizes.astype(np.int64)
            chosen = np.flatnonzero(classes[(piece.hashes >> 20) & (classes.size - 1)])
            owners = np.repeat(np.arange(sizes.size), sizes)
            numbers = np.arange(piece.hashes.size) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
            columns = (piece.hashes[chosen], np.full(chosen.size, number), record + owners[chosen], numbers[chosen])
            rows.append(np.stack(columns, axis=1))
            record += sizes.size
        return np.concatenate(rows) if rows else np.zeros((0, 4), np.int64)

    parts = map_files(search, range(len(files)), workers)
    return np.concatenate(parts) if parts else np.zeros((0, 4), np.int64)


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
