"""Walking through the frames of TFRecords in a buffer, both CRCs checked (numba kernels)."""

from __future__ import annotations

from enum import IntEnum

from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.records.schema import MAX_RECORD_BYTES
from gaudi_bert.records.wire.crc32c import append_crc, crc32c_at, crc_of_word, mask_crc
from gaudi_bert.records.wire.memory import address_of, load_u32, load_word, prefetch

__all__ = ["ScanStatus", "append_frames", "next_record"]


class ScanStatus(IntEnum):
    """What a record is, or why a scan stopped at it."""

    INCOMPLETE = 0
    """More of the file must be read."""
    GOOD = 1
    INDEX_FULL = 2
    BAD_LENGTH = 3
    BAD_BYTES = 4
    TOO_LONG = 5
    UNUSUAL = 6
    """Not in the encoding that the kernel takes; the general reader decides."""


@borrowing_kernel
def next_record(start: int, end: int) -> tuple[int, int]:
    """The record whose frame begins at address `start`, in bytes up to address `end`.

    Returns:
        (status, size of the payload); INCOMPLETE: it is not wholly there; GOOD: it is, and its CRCs are right.
    """
    if end - start < 12:
        return ScanStatus.INCOMPLETE, 0
    size = load_word(start)
    if mask_crc(crc_of_word(size)) != load_u32(start + 8):
        return ScanStatus.BAD_LENGTH, 0
    if size < 0 or size > MAX_RECORD_BYTES:
        return ScanStatus.TOO_LONG, size
    if size + 16 > end - start:
        return ScanStatus.INCOMPLETE, size
    payload = start + 12
    for line in range(size, 2 * size, 64):  # the next record comes from memory while this one is looked at
        prefetch(payload + line)
    if mask_crc(crc32c_at(payload, size, 0)) != load_u32(payload + size):
        return ScanStatus.BAD_BYTES, size
    return ScanStatus.GOOD, size


@borrowing_kernel
def append_frames(crc: int, buffer: ByteArray, position: int, end: int) -> int:
    """The CRC-32C of all bytes so far, from `crc` and the good records in buffer[position:end].

    A payload's CRC is in its frame already and only joined to the others: its bytes are not read again.
    """
    base = address_of(buffer)
    while position < end:
        frame = base + position
        size = load_word(frame)
        crc = crc32c_at(frame, 12, crc)
        stored = (load_u32(frame + 12 + size) - 0xA282EAD8) & 0xFFFFFFFF
        crc = append_crc(crc, size, ((stored >> 17) | (stored << 15)) & 0xFFFFFFFF)
        crc = crc32c_at(frame + 12 + size, 4, crc)
        position += size + 16
    return crc
