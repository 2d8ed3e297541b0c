"""Writing shards: packs of a group, encoded into a buffer and appended to a file that appears whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.metadata import Shard
from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file
from gaudi_bert.records.assign import Assignment, count_shards
from gaudi_bert.records.read.unpacked_index import IndexedSequences
from gaudi_bert.records.schema import PackedSchema
from gaudi_bert.records.wire.crc32c import crc32c
from gaudi_bert.records.write.encoder import EncodeStatus, PackEncoder, largest_record

__all__ = ["WRITERS_PER_CORE", "count_group_shards", "output_buffer", "shard_name", "write_shard"]

WRITERS_PER_CORE = 4
_BUFFER_BYTES = 256 << 10  # larger writes make the kernel look for large pages, which can cost more than the copy
_REFUSALS = {
    EncodeStatus.TOO_MANY_TOKENS: "its sequences are longer than a row",
    EncodeStatus.TOO_MANY_MASKED: "its sequences have more masked positions than masked_slots",
    EncodeStatus.TOO_DEEP: "it has more sequences than the depth",
}


def shard_name(group: int, shard: int) -> str:
    """`packed-GGGGG-SSSSS.tfrecord`."""
    return f"packed-{group:05d}-{shard:05d}.tfrecord"


def output_buffer(schema: PackedSchema) -> ByteArray:
    """A buffer for encoded packs: one per thread."""
    return np.zeros(max(_BUFFER_BYTES, 2 * largest_record(schema)), np.uint8)


def count_group_shards(
    schema: PackedSchema, group: IndexedSequences, assignment: Assignment, shard_multiple: int, shard_bytes: int
) -> int:
    """How many shards a group gets: a bound on its packed bytes decides (masked positions count as two bytes each).

    Args:
        schema: of the packed records.
        group: its sequences.
        assignment: its packs.
        shard_multiple, shard_bytes: as in `count_shards`.
    """
    lengths, masked, ids, masked_ids = (
        int(group.rows[name].sum(dtype=np.int64)) for name in ("length", "masked", "ids_bytes", "masked_ids_bytes")
    )
    more_than_one_byte = (ids - lengths) + (masked_ids - masked) + masked + lengths + 2 * group.rows.size
    plain = 4 * schema.max_sequence_length + 6 * schema.masked_slots + 6 * schema.depth + 512
    more_than_one_byte += lengths if schema.depth > 127 else 0
    return count_shards(assignment.packs, assignment.packs * plain + more_than_one_byte, shard_multiple, shard_bytes)


def write_shard(
    path: Path,
    encoder: PackEncoder,
    first: int,
    last: int,
    out: ByteArray,
    slots: threading.Semaphore,
    progress: Callable[[int], None],
) -> Shard:
    """Write packs `first` .. `last` - 1 to `path`.

    Args:
        path: the shard.
        encoder: of the group.
        first, last: which packs.
        out: from `output_buffer`.
        slots: held while there is something to compute, and not while the disk is waited for: so a few more threads than
            cores keep both busy.
        progress: called with the number of packs that were written.

    Raises:
        InputError: a pack is not feasible: the plan is not for these records.
        FailedError: the file cannot be written.
    """
    pack, size, crc = first, 0, 0
    with atomic_file(path) as handle, slots:
        while pack < last:
            status, following, count = encoder.encode(pack, last, out)
            if status in _REFUSALS:
                raise InputError(f"{path.name}: pack {following - first}: {_REFUSALS[status]}; plan again")
            handle.write(out[:count].data)
            crc, size = crc32c(out[:count], crc), size + count
            progress(following - pack)
            pack = following
        handle.flush()
    return Shard(name=path.name, packs=last - first, bytes=size, crc32c=crc)
