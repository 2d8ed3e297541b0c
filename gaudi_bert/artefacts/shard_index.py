"""group-GGGGG.index: the size of every record of a group's shards, so that nobody has to walk a shard to find its records.

The file holds uint32 values, little-endian, one for each record in the order of the shards: the bytes of its frame.
A reader takes the part of one shard. It is a hint that every record confirms: a shard whose sizes do not add up to its bytes
is walked, and a frame that does not begin at the indexed position is an error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.files import atomic_file, open_file

SizeArray = NDArray[np.uint32]
_SIZE = np.dtype("<u4")


def index_path(folder: Path, group: int) -> Path:
    """The path of the index of `group` in a packed folder."""
    return folder / f"group-{group:05d}.index"


def index_bytes(packs: int) -> int:
    """The size of the index of so many records."""
    return packs * _SIZE.itemsize


def write_index(path: Path, sizes: Sequence[SizeArray]) -> int:
    """Write the sizes of the records of each shard of a group, uint32 [packs] each; the CRC-32C of the file."""
    crc = 0
    with atomic_file(path) as handle:
        for of_shard in sizes:
            data = np.ascontiguousarray(of_shard, _SIZE).view(np.uint8)
            handle.write(data.data)
            crc = crc32c(data, crc)
    return crc


def read_starts(path: Path, first: int, packs: int, shard_bytes: int) -> IntArray | None:
    """Where the records of one shard begin, int64 [packs + 1], the last is its end; None where no index tells it.

    Args:
        first: packs of the group's earlier shards.
        packs, shard_bytes: of the shard.
    """
    try:
        with open_file(path) as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # only this part is read from the disk
            data = os.pread(handle.fileno(), packs * _SIZE.itemsize, first * _SIZE.itemsize)
    except FileNotFoundError:
        return None
    starts = np.zeros(packs + 1, np.int64)
    if len(data) == packs * _SIZE.itemsize:
        np.cumsum(np.frombuffer(data, _SIZE), dtype=np.int64, out=starts[1:])
    return starts if starts[-1] == shard_bytes else None
