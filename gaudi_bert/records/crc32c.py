"""CRC-32C (Castagnoli), as TFRecord uses it: with the processor's instruction where it has one, with tables
elsewhere.

The instruction has a latency of three cycles and can start every cycle, so three runs of a block are computed
side by side and joined: the CRC is linear, and "append n zero bytes" is one linear map of its 32 bits, kept
as four tables of 256 entries (the method of M. Adler's crc32c.c and of V. Gopal et al., "Fast CRC Computation
for iSCSI Polynomial Using CRC32 Instruction", Intel 2011). Without the instruction: slicing by eight (M.
Kounavis and F. Berry, 2005).

A TFRecord stores a *masked* CRC: rotated right by 15 bits, plus 0xA282EAD8.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from gaudi_bert.records.memory import KERNEL_OPTIONS, address_of, load_u8, load_word

__all__ = ["HARDWARE", "crc32c", "crc32c_kernel", "crc32c_table_kernel", "crc_of_word", "mask_crc", "masked"]

_POLYNOMIAL_REVERSED = 0x82F63B78
_ALL_ONES = 0xFFFFFFFF
_LONG_BLOCK = 1024
_SHORT_BLOCK = 128


def _instruction_set() -> str | None:
    """Which CRC-32C instruction the compiled code may use: "x86", "aarch64" or None."""
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        return None  # numba is told to compile for another processor
    features, machine = binding.get_host_cpu_features(), platform.machine().lower()
    if machine in ("x86_64", "amd64") and features.get("sse4.2"):
        return "x86"
    if machine in ("aarch64", "arm64") and features.get("crc"):
        return "aarch64"
    return None


HARDWARE = _instruction_set()
_INTRINSICS = {
    "x86": ("llvm.x86.sse42.crc32.64.64", ir.IntType(64), "llvm.x86.sse42.crc32.32.8", ir.IntType(8)),
    "aarch64": ("llvm.aarch64.crc32cx", ir.IntType(32), "llvm.aarch64.crc32cb", ir.IntType(32)),
}


def call_crc_instruction(builder: Any, instruction_set: str, crc: Any, data: Any, whole_word: bool) -> Any:
    """Emit one CRC step over eight bytes (`whole_word`) or one; `crc`, `data` and the result are 64-bit values."""
    word_name, word_crc, byte_name, byte_data = _INTRINSICS[instruction_set]
    crc_kind = word_crc if whole_word else ir.IntType(32)
    data_kind = ir.IntType(64) if whole_word else byte_data
    kind = ir.FunctionType(crc_kind, [crc_kind, data_kind])
    function = cgutils.get_or_insert_function(builder.module, kind, word_name if whole_word else byte_name)
    if crc_kind.width < 64:
        crc = builder.trunc(crc, crc_kind)
    if data_kind.width < 64:
        data = builder.trunc(data, data_kind)
    result = builder.call(function, [crc, data])
    return result if crc_kind.width == 64 else builder.zext(result, ir.IntType(64))


def _make_step(whole_word: bool) -> Any:
    @intrinsic
    def step(typing_context: Any, crc: Any, data: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return call_crc_instruction(builder, HARDWARE or "x86", arguments[0], arguments[1], whole_word)

        return types.int64(types.int64, types.int64), generate

    return step


_word_step = _make_step(True)
_byte_step = _make_step(False)


def _byte_tables() -> np.ndarray:
    """[8, 256] int64: entry [k, b] is the CRC register after byte b and k zero bytes (slicing by eight)."""
    first = np.arange(256, dtype=np.int64)
    for _ in range(8):
        first = (first >> 1) ^ np.where(first & 1, _POLYNOMIAL_REVERSED, 0)
    tables = [first]
    for _ in range(7):
        tables.append((tables[-1] >> 8) ^ first[tables[-1] & 255])
    return np.stack(tables)


def _append_zeros_tables(count: int) -> np.ndarray:
    """[4, 256] int64: what `count` zero bytes make of each value of each byte of the CRC register (the map is linear)."""
    values = np.arange(256, dtype=np.int64)[None, :] << (8 * np.arange(4, dtype=np.int64)[:, None])
    for _ in range(count):
        values = (values >> 8) ^ _BYTES[0][values & 255]
    return values


_BYTES = _byte_tables()
_AFTER_LONG = _append_zeros_tables(_LONG_BLOCK)
_AFTER_SHORT = _append_zeros_tables(_SHORT_BLOCK)


@njit(inline="always")
def _append_zeros(tables: np.ndarray, crc: int) -> int:
    return tables[0, crc & 255] ^ tables[1, (crc >> 8) & 255] ^ tables[2, (crc >> 16) & 255] ^ tables[3, (crc >> 24) & 255]


@njit(**KERNEL_OPTIONS)
def crc32c_table_kernel(address: int, count: int, crc: int) -> int:
    """CRC-32C of `count` bytes at `address`, continuing from `crc` (0 to begin), by tables."""
    crc ^= _ALL_ONES
    while count >= 8:
        word = load_word(address)
        low = (word & _ALL_ONES) ^ crc
        crc = _BYTES[7, low & 255] ^ _BYTES[6, (low >> 8) & 255] ^ _BYTES[5, (low >> 16) & 255] ^ _BYTES[4, low >> 24]
        crc ^= _BYTES[3, (word >> 32) & 255] ^ _BYTES[2, (word >> 40) & 255]
        crc ^= _BYTES[1, (word >> 48) & 255] ^ _BYTES[0, (word >> 56) & 255]
        address += 8
        count -= 8
    while count > 0:
        crc = (crc >> 8) ^ _BYTES[0, (crc ^ load_u8(address)) & 255]
        address += 1
        count -= 1
    return crc ^ _ALL_ONES


@njit(**KERNEL_OPTIONS)
def _hardware_kernel(address: int, count: int, crc: int) -> int:
    crc ^= _ALL_ONES
    while count >= 3 * _LONG_BLOCK:
        second, third = np.int64(0), np.int64(0)
        for at in range(address, address + _LONG_BLOCK, 8):
            crc = _word_step(crc, load_word(at))
            second = _word_step(second, load_word(at + _LONG_BLOCK))
            third = _word_step(third, load_word(at + 2 * _LONG_BLOCK))
        crc = _append_zeros(_AFTER_LONG, _append_zeros(_AFTER_LONG, crc) ^ second) ^ third
        address += 3 * _LONG_BLOCK
        count -= 3 * _LONG_BLOCK
    while count >= 3 * _SHORT_BLOCK:
        second, third = np.int64(0), np.int64(0)
        for at in range(address, address + _SHORT_BLOCK, 8):
            crc = _word_step(crc, load_word(at))
            second = _word_step(second, load_word(at + _SHORT_BLOCK))
            third = _word_step(third, load_word(at + 2 * _SHORT_BLOCK))
        crc = _append_zeros(_AFTER_SHORT, _append_zeros(_AFTER_SHORT, crc) ^ second) ^ third
        address += 3 * _SHORT_BLOCK
        count -= 3 * _SHORT_BLOCK
    while count >= 8:
        crc = _word_step(crc, load_word(address))
        address += 8
        count -= 8
    while count > 0:
        crc = _byte_step(crc, load_u8(address))
        address += 1
        count -= 1
    return crc ^ _ALL_ONES


@njit(**KERNEL_OPTIONS)
def _hardware_word(word: int) -> int:
    return _word_step(_ALL_ONES, word) ^ _ALL_ONES


@njit(**KERNEL_OPTIONS)
def _table_word(word: int) -> int:
    low = (word & _ALL_ONES) ^ _ALL_ONES
    crc = _BYTES[7, low & 255] ^ _BYTES[6, (low >> 8) & 255] ^ _BYTES[5, (low >> 16) & 255] ^ _BYTES[4, low >> 24]
    crc ^= _BYTES[3, (word >> 32) & 255] ^ _BYTES[2, (word >> 40) & 255]
    return (crc ^ _BYTES[1, (word >> 48) & 255] ^ _BYTES[0, (word >> 56) & 255]) ^ _ALL_ONES


crc32c_kernel = _hardware_kernel if HARDWARE else crc32c_table_kernel
"""CRC-32C of (address, count, crc so far) for use inside other kernels."""

crc_of_word = _hardware_word if HARDWARE else _table_word
"""CRC-32C of the eight bytes of one word: a record's length."""


@njit(inline="always")
def mask_crc(crc: int) -> int:
    """The masked form of a CRC, for use inside kernels."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(buffer: bytes | bytearray | memoryview | np.ndarray, crc: int = 0) -> int:
    """CRC-32C of a contiguous buffer, continuing from the CRC `crc` of what came before."""
    data = buffer.view(np.uint8).reshape(-1) if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    return int(crc32c_kernel(address_of(data), data.size, crc)) if data.size else crc


def masked(crc: int) -> int:
    """The masked form in which TFRecord stores a CRC."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _ALL_ONES
