"""What a file holds, as fingerprints: the Python side of `fingerprint`, for one input file or one shard at a
time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gaudi_bert.records.proof.fingerprint import CLASSES, add_hashes, hash_unpacked
from gaudi_bert.records.proof.packed_contract import canonical_packed
from gaudi_bert.records.proof.packed_scan import scan_packed
from gaudi_bert.records.read.scan import PIECE_BYTES, RecordScan, UnpackedFormat
from gaudi_bert.records.read.unpacked_index import LENGTH
from gaudi_bert.records.schema import MAX_RECORD_BYTES, PackedSchema, UnpackedSchema
from gaudi_bert.records.wire.encode import position_table
from gaudi_bert.records.wire.features import feature_keys, work_space
from gaudi_bert.records.wire.memory import address_of

__all__ = ["Census", "Piece", "packed_pieces", "take_census", "unpacked_pieces"]


@dataclass(frozen=True)
class Piece:
    """The sequences of one piece of a file, in order.

    Attributes:
        hashes: int64 [sequences].
        tokens: their number of tokens in all.
        pack_sizes: int32 [packs], how many of them each pack holds; None for unpacked records.
    """

    hashes: np.ndarray
    tokens: int
    pack_sizes: np.ndarray | None


@dataclass
class Census:
    """Sums over a file, or over many: constant memory.

    Attributes:
        sums: int64 [CLASSES, 2], see `fingerprint.add_hashes`.
        pack_sizes: int32, the number of sequences of each pack of one shard, in order (empty for unpacked
            records).
    """

    sums: np.ndarray = field(default_factory=lambda: np.zeros((CLASSES, 2), np.int64))
    sequences: int = 0
    tokens: int = 0
    file_bytes: int = 0
    file_crc32c: int = 0
    pack_sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def add(self, other: Census) -> None:
        """Add the sequences of another census (not its file's size, CRC and packs)."""
        self.sums += other.sums
        self.sequences += other.sequences
        self.tokens += other.tokens

    @property
    def fingerprint(self) -> str:
        """Of all sequences: 16 hexadecimal digits."""
        return f"{int(self.sums[:, 1].astype(np.uint64).sum(dtype=np.uint64)):016x}"


class PackedFormat:
    """Checks and hashes packed records; see `scan.RecordFormat`."""

    def __init__(self, schema: PackedSchema) -> None:
        self.schema = schema
        self.records = 0
        smallest = 4 * schema.max_sequence_length + 6 * schema.masked_slots + 6 * schema.depth
        packs = (PIECE_BYTES + MAX_RECORD_BYTES) // smallest + 1
        self.hashes = np.empty((packs + 1) * min(schema.depth, schema.max_sequence_length), np.int64)
        self.pack_sizes = np.empty(packs, np.int32)
        self.done = np.zeros(3, np.int64)
        self._sizes = np.array(
            [schema.max_sequence_length, schema.masked_slots, schema.depth, schema.max_predictions], np.int64
        )
        self._keys = feature_keys(schema.features)
        self._spans = work_space(schema.features).reshape(-1, 2)
        self._table = position_table()

    def start_piece(self) -> None:
        """Forget the packs of the last piece."""
        self.done[:] = 0

    def take(self, buffer: np.ndarray, position: int, filled: int) -> tuple[int, int]:
        """As `RecordFormat.take`."""
        before = int(self.done[0])
        status, position = scan_packed(
            address_of(buffer),
            position,
            filled,
            self._sizes,
            address_of(self._keys),
            self._spans,
            address_of(self._table),
            self.hashes,
            self.pack_sizes,
            self.done,
        )
        self.records += int(self.done[0]) - before
        return status, position

    def canonical(self, payload: bytes) -> bytes:
        """As `RecordFormat.canonical`."""
        return canonical_packed(payload, self.schema)


def unpacked_pieces(
    path: Path, schema: UnpackedSchema, buffer: np.ndarray, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[RecordScan, Piece]]:
    """The sequences of an input file, piece by piece; the scan knows the file's size and CRC at the end."""
    form = UnpackedFormat.for_pieces(schema)
    hashes = np.empty(form.offsets.size, np.int64)
    scan = RecordScan(path, form, buffer, progress=progress)
    for _ in scan.pieces():
        hash_unpacked(address_of(buffer), form.offsets, form.index, form.rows, hashes)
        tokens = int(form.index[: form.rows, LENGTH].sum(dtype=np.int64))
        yield scan, Piece(hashes[: form.rows], tokens, None)


def packed_pieces(
    path: Path, schema: PackedSchema, buffer: np.ndarray, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[RecordScan, Piece]]:
    """The sequences of a shard, piece by piece."""
    form = PackedFormat(schema)
    scan = RecordScan(path, form, buffer, progress=progress)
    for _ in scan.pieces():
        packs, sequences, tokens = (int(count) for count in form.done)
        yield scan, Piece(form.hashes[:sequences], tokens, form.pack_sizes[:packs])


def take_census(pieces: Iterator[tuple[RecordScan, Piece]]) -> Census:
    """Add up the pieces of one file."""
    census, sizes = Census(), []
    for scan, piece in pieces:
        add_hashes(piece.hashes, piece.hashes.size, census.sums)
        census.sequences += piece.hashes.size
        census.tokens += piece.tokens
        census.file_bytes, census.file_crc32c = scan.file_bytes, scan.file_crc32c
        if piece.pack_sizes is not None:
            sizes.append(piece.pack_sizes.copy())
    census.pack_sizes = np.concatenate(sizes) if sizes else np.zeros(0, np.int32)
    return census
