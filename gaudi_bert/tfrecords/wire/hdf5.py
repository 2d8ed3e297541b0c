"""Reading HDF5 files of unpacked pretraining data, from NVIDIA's and Habana's PyTorch BERT, as the bytes of TFRecords.

A file contains a dataset for each feature and a row for each sequence, but no weights. A masked slot is used if its id is
not zero. The rows are encoded as TFRecords (`encode_unpacked_rows`), so that all code that reads TFRecords can also read
HDF5 files. A row with an invalid value is encoded unchanged, so that the reader of TFRecords rejects it with a reason.

The HDF5 library decompresses only one chunk at a time in a process. Therefore chunks that are compressed by gzip, with or
without the shuffle filter, are read in their stored form and decompressed here, without Python's global lock.

A damaged or malicious file must not use unlimited memory. Values in other files are rejected, no chunk is decompressed
beyond its size, and a file that claims more values than gzip could store in it is rejected.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, IntArray
from gaudi_bert.common.compiled import kernel_without_refcounts
from gaudi_bert.common.errors import InputError, install_command, shorten
from gaudi_bert.common.files import open_file
from gaudi_bert.tfrecords.wire.example import UnpackedRows, encode_example, encode_unpacked_rows, max_unpacked_record_size
from gaudi_bert.tfrecords.wire.schema import MAX_SEGMENT_ID, MAX_TOKEN_ID, UnpackedSchema

HDF5 = "HDF5"
HDF5_ENDINGS = (".hdf5", ".h5")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_FEATURE_OF_PACKS = "next_sentence_positions"
_BLOCK_BYTES = 1 << 20
_MAX_BLOCK_BYTES = 1 << 28
# The largest factor by which gzip can compress data.
_MAX_COMPRESSION_RATIO = 1032
_PIECE_BYTES = 1 << 20
# The numbers of HDF5 filters.
_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3
_CHECKSUM_BYTES = 4


def is_hdf5(path: Path, first_bytes: bytes) -> bool:
    """Return whether the content of a file is HDF5.

    An HDF5 file may begin with a user block of 512, 1,024, 2,048, ... bytes, followed by the signature. A user block is
    considered only if the file has a suffix of HDF5.

    Args:
        path: The file.
        first_bytes: The first bytes of the file, at least eight if it has so many.
    """
    if first_bytes.startswith(_SIGNATURE) or path.suffix not in HDF5_ENDINGS:
        return first_bytes.startswith(_SIGNATURE)
    block = 512
    with open_file(path) as handle:
        while handle.seek(block) < os.fstat(handle.fileno()).st_size:
            if handle.read(len(_SIGNATURE)) == _SIGNATURE:
                return True
            block *= 2
    return False


def require_h5py() -> Any:
    """Import and return the module h5py.

    Raises:
        InputError: The library is not installed. The message contains the command that installs it.
    """
    try:
        import h5py
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"HDF5 files require h5py, which cannot be imported ({reason}); run: {install_command('hdf5')}"
        ) from error
    return h5py


@contextmanager
def _explain_hdf5_errors(path: Path) -> Iterator[None]:
    """Turn errors from h5py inside the `with` block into a one-line InputError that names the file `path`."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, MemoryError, zlib.error) as error:
        reason = shorten(" ".join(str(error).split()), 200)
        raise InputError(
            f"{path}: the file is not readable as HDF5 ({reason}); copy the file again, or create it again"
        ) from error


class EncodedRows(NamedTuple):
    """Rows of an HDF5 file that were encoded as TFRecords.

    Attributes:
        records: The framed records. They end before the first row that violates the contract.
        invalid_payload: The row that violates the contract, as an example without a frame, or b"" if all rows are valid.
    """

    records: memoryview
    invalid_payload: bytes


class _Rows(NamedTuple):
    """Consecutive rows of an HDF5 file, as one int64 array per dataset. N is the number of rows.

    Attributes:
        input_ids: [N, L].
        input_mask: [N, L].
        segment_ids: [N, L].
        masked_lm_positions: [N, P].
        masked_lm_ids: [N, P].
        next_sentence_labels: [N] or [N, 1].
    """

    input_ids: IntArray
    input_mask: IntArray
    segment_ids: IntArray
    masked_lm_positions: IntArray
    masked_lm_ids: IntArray
    next_sentence_labels: IntArray


class Hdf5Rows:
    """Reads the rows of one HDF5 file in order, and encodes them as TFRecords.

    Attributes:
        path: The file.
        schema: The sizes L and P of the rows.
        count: The number of rows.
        done: The number of rows that were returned so far.

    Raises:
        InputError: The file cannot be read as HDF5, or does not contain unpacked pretraining data.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.done = path, 0
        with _explain_hdf5_errors(path):
            self._file = require_h5py().File(path, "r")
            self._columns = [_ColumnReader(self._open_dataset(name)) for name in _Rows._fields]
            self.schema = self._read_schema()
            self._check_claimed_rows_fit_file()
        self.count = int(self._columns[0].dataset.shape[0])
        self._max_rows = max(1, _PIECE_BYTES // max_unpacked_record_size(self.schema))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def max_encoded_bytes(self) -> int:
        """An upper bound on the total size in bytes of all rows when they are encoded as TFRecords."""
        return self.count * max_unpacked_record_size(self.schema)

    def encode_next_rows(self) -> EncodedRows:
        """Read about 1 MiB of rows, and return them encoded as TFRecords.

        Raises:
            InputError: The file is damaged.
        """
        with _explain_hdf5_errors(self.path):
            parts = [column.read_rows_from(self.done) for column in self._columns]
        count = min(self._max_rows, *map(len, parts))
        rows = _Rows(*(np.ascontiguousarray(part[:count], np.int64) for part in parts))
        lengths, masked = np.empty(count, np.int64), np.empty(count, np.int64)
        valid_rows = _count_valid_rows(rows, lengths, masked)
        columns = (rows.input_ids, rows.segment_ids, rows.masked_lm_positions, rows.masked_lm_ids)
        labels = rows.next_sentence_labels.reshape(-1)
        records, _ = encode_unpacked_rows(
            UnpackedRows(*(values[:valid_rows] for values in (lengths, masked, *columns, labels)))
        )
        payload = b""
        if valid_rows < count:
            features = {name: values[valid_rows] for name, values in zip(_Rows._fields, rows, strict=True)}
            payload = encode_example({**features, "masked_lm_weights": (features["masked_lm_ids"] != 0).astype(np.float32)})
        self.done += min(valid_rows + 1, count)
        return EncodedRows(records.data, payload)

    def _open_dataset(self, name: str) -> Any:
        """Return the h5py dataset `name` after checking that it contains rows of integers that are stored in this file.

        Raises:
            InputError: The dataset does not exist, its values are in another file, or they are not rows of integers.
        """
        h5py = require_h5py()
        link = self._file.get(name, getlink=True)  # without following it
        if link is not None and not isinstance(link, h5py.HardLink):
            kind = "an external link" if isinstance(link, h5py.ExternalLink) else "a link"
            raise InputError(
                f"{self.path}: {name} is {kind}, but must be a dataset; replace the link with a copy of the dataset"
            )
        dataset = self._file.get(name)
        if not isinstance(dataset, h5py.Dataset):
            names = shorten(", ".join(sorted(self._file)), 120) or "none"
            raise InputError(f"{self.path}: expected a dataset {name}, found {names}; pass a file of BERT pretraining data")
        if dataset.external or dataset.is_virtual:
            problem = "in external storage" if dataset.external else "in a virtual dataset"
            raise InputError(
                f"{self.path}: the values of {name} are {problem}, which is not supported; store them in this file"
            )
        if dataset.dtype.kind not in "iu" or not dataset.shape:
            raise InputError(
                f"{self.path}: dataset {name} must contain rows of integers, found {dataset.dtype}"
                f" {dataset.shape}; create the file again"
            )
        return dataset

    def _check_claimed_rows_fit_file(self) -> None:
        """Check that the file is large enough for the number of rows that it claims to contain.

        HDF5 uses no space for values that were never written, so a small file could claim any number of rows, and reading
        them would use any amount of memory.

        Raises:
            InputError: The file claims more values than gzip could compress to the size of the file.
        """
        claimed_bytes, file_bytes = sum(column.dataset.nbytes for column in self._columns), self.path.stat().st_size
        if claimed_bytes > _MAX_COMPRESSION_RATIO * file_bytes:
            rows = self._columns[0].dataset.shape[0]
            raise InputError(
                f"{self.path}: a file of {file_bytes:,} bytes cannot contain the claimed {rows:,} rows; create it again"
            )

    def _read_schema(self) -> UnpackedSchema:
        """Check that the shapes of all datasets agree, and return the number of tokens L and the number of masked slots P
        per row.

        Raises:
            InputError: The file contains packs, the shapes do not agree, or a size is out of range.
        """
        if _FEATURE_OF_PACKS in self._file:
            raise InputError(f"{self.path}: expected unpacked records, found packs; pass the file of unpacked records")
        shapes = {name: column.dataset.shape for name, column in zip(_Rows._fields, self._columns, strict=True)}
        for name in ("input_ids", "masked_lm_ids"):
            if len(shapes[name]) != 2:
                raise InputError(
                    f"{self.path}: dataset {name} must have two dimensions, found {shapes[name]}; create the file again"
                )
        (count, length), predictions = shapes["input_ids"], shapes["masked_lm_ids"][1]
        labels = (count, 1) if shapes["next_sentence_labels"] == (count, 1) else (count,)
        expected_shapes = [(count, length)] * 3 + [(count, predictions)] * 2 + [labels]
        for (name, shape), expected_shape in zip(shapes.items(), expected_shapes, strict=True):
            if shape != expected_shape:
                raise InputError(
                    f"{self.path}: dataset {name} has the shape {shape}, but the other datasets require {expected_shape};"
                    " create the file again"
                )
        try:
            return UnpackedSchema(length, predictions)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from error


class _ColumnReader:
    """Reads the rows of one dataset in order. It reads blocks of complete chunks, so that each chunk is read only once.

    Attributes:
        dataset: The h5py dataset.

    Raises:
        ValueError: The chunks are so large that a block would exceed 256 MiB.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._chunk: tuple[int, ...] = dataset.chunks or (1, *dataset.shape[1:])
        self._chunk_bytes = dataset.dtype.itemsize * math.prod(self._chunk)
        rows_bytes = dataset.dtype.itemsize * math.prod((self._chunk[0], *dataset.shape[1:]))
        largest = max(self._chunk_bytes, rows_bytes)
        if largest > _MAX_BLOCK_BYTES:
            raise ValueError(
                f"a chunk must have at most {_MAX_BLOCK_BYTES >> 20} MiB, but its {self._chunk[0]:,} rows have"
                f" {largest:,} bytes"
            )
        rows = self._chunk[0] * max(1, _BLOCK_BYTES // max(1, rows_bytes))
        self._memory = np.empty((min(rows, dataset.shape[0]), *dataset.shape[1:]), dataset.dtype)
        self._first = self._last = 0
        pipeline = dataset.id.get_create_plist()
        self._filters = [pipeline.get_filter(number)[0] for number in range(pipeline.get_nfilters())]

    def read_rows_from(self, row: int) -> AnyArray:
        """Return the rows in memory, starting with row number `row`. If this row is not in memory, read the block that
        begins with it.

        At least one row is returned, unless the dataset ends before `row`. The array is valid until the next call.

        Raises:
            ValueError: A chunk is damaged.
        """
        if row >= self._last:
            self._first, self._last = row, min(row + len(self._memory), self.dataset.shape[0])
            if self._first < self._last and not (self._filters and self._decompress_current_block()):
                self.dataset.read_direct(self._memory, np.s_[row : self._last], np.s_[: self._last - row])
        return self._memory[row - self._first : self._last - self._first]

    def _decompress_current_block(self) -> bool:
        """Read the chunks of the current block as they are stored, and decompress them into memory.

        Returns:
            True if the whole block was read, or False if it contains a chunk that only the HDF5 library can read.

        Raises:
            ValueError: A chunk is damaged.
        """
        others = (range(0, width, step) for width, step in zip(self.dataset.shape[1:], self._chunk[1:], strict=True))
        all_read = True
        for corner in itertools.product(range(self._first, self._last, self._chunk[0]), *others):
            # h5py would return uninitialized memory for a chunk that was never written, so do not read such a chunk here.
            if self.dataset.id.get_chunk_info_by_coord(corner).byte_offset is None:
                all_read = False
                continue
            skipped_filters, stored = self.dataset.id.read_direct_chunk(corner)
            applied_filters = [code for number, code in enumerate(self._filters) if not skipped_filters >> number & 1]
            values = self._decompress_chunk(stored, applied_filters)
            if values is None:
                all_read = False
                continue
            begin = (corner[0] - self._first, *corner[1:])
            target = self._memory[tuple(slice(at, at + step) for at, step in zip(begin, self._chunk, strict=True))]
            target[...] = values.reshape(self._chunk)[tuple(map(slice, target.shape))]
        return all_read

    def _decompress_chunk(self, stored: bytes, applied_filters: list[int]) -> AnyArray | None:
        """Decompress one chunk of the dataset, and return its values.

        Even if the HDF5 library must read the chunk, its size is checked here, so that the library does not use more memory
        than the values need.

        Args:
            stored: The bytes of the chunk as they are stored.
            applied_filters: The numbers of the filters that were applied to the chunk, in order.

        Returns:
            The values, or None if the chunk has filters that only the HDF5 library supports.

        Raises:
            ValueError: The chunk has more or fewer bytes than its values need.
        """
        if len(stored) > 1.01 * self._chunk_bytes + 100:
            raise ValueError(f"a stored chunk has {len(stored):,} bytes, but its values have only {self._chunk_bytes:,}")
        if _DEFLATE not in applied_filters:
            return None
        before, after = (
            applied_filters[: applied_filters.index(_DEFLATE)],
            applied_filters[applied_filters.index(_DEFLATE) + 1 :],
        )
        if after not in ([], [_FLETCHER32]):
            raise ValueError("a filter after gzip is not supported")
        inflater = zlib.decompressobj()
        data = inflater.decompress(stored[:-_CHECKSUM_BYTES] if after else stored, self._chunk_bytes + 1)
        if len(data) != self._chunk_bytes or not inflater.eof:
            raise ValueError(f"a decompressed chunk does not have the expected {self._chunk_bytes:,} bytes")
        if after or before not in ([], [_SHUFFLE]):
            return None
        kind = self._memory.dtype
        if before:  # the shuffle filter stores the first bytes of all values, then the second bytes, and so on
            data = np.frombuffer(data, np.uint8).reshape(kind.itemsize, -1).T.tobytes()
        return np.frombuffer(data, kind)


@kernel_without_refcounts
def _count_valid_rows(rows: _Rows, token_counts: IntArray, masked_counts: IntArray) -> int:
    """Count the tokens and masked positions of each row, up to the first row with an invalid value.

    Args:
        rows: N rows.
        token_counts: int64 [N], set to the number of tokens of each row.
        masked_counts: int64 [N], set to the number of masked positions of each row.

    Returns:
        The number of valid rows before the first invalid row.
    """
    labels = rows.next_sentence_labels.reshape(-1)
    for row in range(token_counts.size):
        ids, mask, segments = rows.input_ids[row], rows.input_mask[row], rows.segment_ids[row]
        positions, masked_ids = rows.masked_lm_positions[row], rows.masked_lm_ids[row]
        tokens = 0
        while tokens < ids.size and mask[tokens] == 1:
            tokens += 1
        used = 0
        while used < masked_ids.size and masked_ids[used] != 0:
            used += 1
        # `wrong` becomes nonzero if any value is wrong. Every maximum has the form 2**n - 1, so `value & ~maximum` is zero
        # if and only if the value is in range. Values in the padding must be zero.
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
        token_counts[row], masked_counts[row] = tokens, used
    return token_counts.size
