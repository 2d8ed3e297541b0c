"""Rows of HDF5 files, the unpacked pretraining data of NVIDIA's and Habana's PyTorch BERT, as the bytes of TFRecords.

A file holds a dataset for each feature, one row for each sequence, and no weights: a masked slot is used where its id is not
0. Rows become the TFRecords of the same examples as `unpacked_encoder` writes them, so all that reads records reads them. A
row whose values break the contract is encoded as it is, for the reader to refuse with its reason.

HDF5 decompresses one chunk at a time in a process, whatever the threads. So chunks that are compressed by gzip alone are
read as they are stored and decompressed here, outside Python's lock; all others are read by the library.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, IntArray
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.errors import InputError, install_command, shortened
from gaudi_bert.tfrecords.wire.example import encode_example
from gaudi_bert.tfrecords.wire.schema import MAX_SEGMENT_ID, MAX_TOKEN_ID, UnpackedSchema
from gaudi_bert.tfrecords.wire.unpacked_encoder import UnpackedEncoder, largest_record, sequences_of_rows

HDF5 = "HDF5"
HDF5_ENDINGS = (".hdf5", ".h5")
HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_OF_PACKS = "next_sentence_positions"
_BLOCK_BYTES = 1 << 20
_MOST_BLOCK_BYTES = 1 << 30
_PIECE_BYTES = 1 << 20


def require_h5py() -> Any:
    """The module h5py."""
    try:
        import h5py
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"HDF5 files need h5py ({reason}); run: {install_command('hdf5')}") from error
    return h5py


@contextmanager
def _explained_hdf5_errors(path: Path) -> Iterator[None]:
    """Turn the errors of h5py for a file that it cannot read into one line."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, MemoryError, zlib.error) as error:
        reason = shortened(" ".join(str(error).split()), 200)
        raise InputError(f"{path}: cannot be read as HDF5 ({reason}); copy or make the file again") from error


class _Rows(NamedTuple):
    """Some rows by the names of the datasets, int64: [N, L], [N, P] and, of the labels, [N] or [N, 1]."""

    input_ids: IntArray
    input_mask: IntArray
    segment_ids: IntArray
    masked_lm_positions: IntArray
    masked_lm_ids: IntArray
    next_sentence_labels: IntArray


class Hdf5Rows:
    """The rows of one file, from the first to the last: L and P, how many there are, and how many were returned."""

    def __init__(self, path: Path) -> None:
        self.path, self.done = path, 0
        with _explained_hdf5_errors(path):
            self._file = require_h5py().File(path, "r")
            self._columns = [self._column(name) for name in _Rows._fields]
            self.schema = self._checked_schema()
        self.count = int(self._columns[0].dataset.shape[0])
        self._encoder = UnpackedEncoder(self.schema)
        self._most_rows = max(1, _PIECE_BYTES // largest_record(self.schema))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def most_bytes(self) -> int:
        """A bound on the bytes of all rows as TFRecords."""
        return self.count * largest_record(self.schema)

    def next_records(self) -> tuple[memoryview, bytes]:
        """The next rows: TFRecords up to a row that breaks the contract, and the payload of that row (b"" without one)."""
        with _explained_hdf5_errors(self.path):
            parts = [column.rows_from(self.done) for column in self._columns]
        count = min(self._most_rows, *map(len, parts))
        rows = _Rows(*(np.ascontiguousarray(part[:count], np.int64) for part in parts))
        lengths, masked = np.empty(count, np.int64), np.empty(count, np.int64)
        usual = _measure_rows(rows, lengths, masked)
        flat = {name: values[:usual].reshape(-1) for name, values in zip(_Rows._fields, rows, strict=True)}
        # The records are valid until the next call.
        records, _ = self._encoder.encode(sequences_of_rows(self.schema, flat, lengths[:usual], masked[:usual]), 0)
        payload = b""
        if usual < count:
            features = {name: values[usual] for name, values in zip(_Rows._fields, rows, strict=True)}
            payload = encode_example({**features, "masked_lm_weights": (features["masked_lm_ids"] != 0).astype(np.float32)})
        self.done += min(usual + 1, count)
        return records, payload

    def _column(self, name: str) -> _Column:
        if name not in self._file or not hasattr(self._file[name], "dtype"):
            names = shortened(", ".join(sorted(self._file)), 120) or "none"
            raise InputError(
                f"{self.path}: has no dataset {name} (it has {names}); BERT's pretraining data of NVIDIA and Habana are read"
            )
        dataset = self._file[name]
        if dataset.dtype.kind not in "iu" or not dataset.shape:
            raise InputError(
                f"{self.path}: dataset {name} is {dataset.dtype} {dataset.shape}; it must hold rows of integers"
            )
        return _Column(dataset)

    def _checked_schema(self) -> UnpackedSchema:
        """L and P, to which all datasets must agree."""
        if _OF_PACKS in self._file:
            raise InputError(f"{self.path}: holds packs; give the unpacked records")
        shapes = {name: column.dataset.shape for name, column in zip(_Rows._fields, self._columns, strict=True)}
        for name in ("input_ids", "masked_lm_ids"):
            if len(shapes[name]) != 2:
                raise InputError(f"{self.path}: dataset {name} has the shape {shapes[name]}; rows of values are needed")
        (count, length), predictions = shapes["input_ids"], shapes["masked_lm_ids"][1]
        labels = (count, 1) if shapes["next_sentence_labels"] == (count, 1) else (count,)
        needed = [(count, length)] * 3 + [(count, predictions)] * 2 + [labels]
        for (name, shape), right in zip(shapes.items(), needed, strict=True):
            if shape != right:
                raise InputError(
                    f"{self.path}: dataset {name} has the shape {shape}, {right} goes with the others; make the file again"
                )
        try:
            return UnpackedSchema(length, predictions)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from error


class _Column:
    """A dataset that is read from its first row to its last, in blocks of complete chunks, each of them once."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._chunk: tuple[int, ...] = dataset.chunks or (1, *dataset.shape[1:])
        row_bytes = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:], dtype=np.int64))
        chunk_bytes = max(1, row_bytes * self._chunk[0])
        if chunk_bytes > _MOST_BLOCK_BYTES:
            raise ValueError(f"chunks of {self._chunk[0]:,} rows, {chunk_bytes:,} bytes; at most 1 GiB is read at once")
        rows = self._chunk[0] * max(1, _BLOCK_BYTES // chunk_bytes)
        self._memory = np.empty((min(rows, dataset.shape[0]), *dataset.shape[1:]), dataset.dtype)
        self._first = self._last = 0
        # Whether gzip is all that was done to the chunks.
        self._is_deflated = dataset.compression == "gzip" and dataset.id.get_create_plist().get_nfilters() == 1

    def rows_from(self, row: int) -> AnyArray:
        """The rows in memory from `row` on, until the next call: at least one, unless the dataset ends there."""
        if row >= self._last:
            self._first, self._last = row, min(row + len(self._memory), self.dataset.shape[0])
            if self._first < self._last and not (self._is_deflated and self._inflate()):
                self.dataset.read_direct(self._memory, np.s_[row : self._last], np.s_[: self._last - row])
        return self._memory[row - self._first : self._last - self._first]

    def _inflate(self) -> bool:
        """Fill the memory from complete chunks; False where one of them is stored in another way, or not at all."""
        kind, chunk_bytes = self._memory.dtype, self._memory.itemsize * int(np.prod(self._chunk))
        others = (range(0, width, step) for width, step in zip(self.dataset.shape[1:], self._chunk[1:], strict=True))
        for corner in itertools.product(range(self._first, self._last, self._chunk[0]), *others):
            try:
                skipped_filters, stored = self.dataset.id.read_direct_chunk(corner)
            except (RuntimeError, MemoryError):  # as h5py has it where a chunk, or any, was never written
                return False
            if skipped_filters:
                return False
            values = np.frombuffer(zlib.decompress(stored, bufsize=chunk_bytes), kind).reshape(self._chunk)
            begin = (corner[0] - self._first, *corner[1:])
            target = self._memory[tuple(slice(at, at + step) for at, step in zip(begin, self._chunk, strict=True))]
            target[...] = values[tuple(map(slice, target.shape))]
        return True


@borrowing_kernel
def _measure_rows(rows: _Rows, lengths: IntArray, masked: IntArray) -> int:
    """Set `lengths` and `masked` of each row, int64 [N], as far as rows keep the contract; how many do from the first on."""
    labels = rows.next_sentence_labels.reshape(-1)
    for row in range(lengths.size):
        ids, mask, segments = rows.input_ids[row], rows.input_mask[row], rows.segment_ids[row]
        positions, masked_ids = rows.masked_lm_positions[row], rows.masked_lm_ids[row]
        tokens = 0
        while tokens < ids.size and mask[tokens] == 1:
            tokens += 1
        used = 0
        while used < masked_ids.size and masked_ids[used] != 0:
            used += 1
        # What is out of its range has a bit that the largest value lacks; behind the real values, that is any bit.
        wrong = labels[row] & ~1
        for slot in range(tokens):
            wrong |= (ids[slot] & ~MAX_TOKEN_ID) | (segments[slot] & ~MAX_SEGMENT_ID)
        for slot in range(tokens, ids.size):
            wrong |= ids[slot] | segments[slot] | mask[slot]
        for slot in range(used):
            wrong |= masked_ids[slot] & ~MAX_TOKEN_ID
            wrong |= positions[slot] < 0 or positions[slot] >= tokens
        for slot in range(used, masked_ids.size):
            wrong |= masked_ids[slot] | positions[slot]
        if tokens == 0 or wrong != 0:
            return row
        lengths[row], masked[row] = tokens, used
    return lengths.size
