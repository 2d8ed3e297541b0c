"""Compute the CRC-32C (Castagnoli) checksums of TFRecord files, with processor instructions if available or with tables.

The CRC instruction has a latency of three cycles, but a new one can start in every cycle. Therefore, a block of bytes is
split into three parts, whose CRCs are computed in parallel and then combined. To combine them, the CRC register is
multiplied by x**(8n) modulo the polynomial, which corresponds to appending n zero bytes. This takes one carry-less
multiplication (PCLMULQDQ) by a constant and one CRC instruction that reduces the product (V. Gopal et al., Intel 2011). Bits
are reflected, so bit 31 of a register is x**0. Reducing the product as eight bytes of data adds a factor of x**33, so the
constant for n bytes is x**(8n - 33).

On processors without these instructions, slicing by eight is used (M. Kounavis and F. Berry, 2005). A TFRecord stores a
*masked* CRC, which is the CRC rotated right by 15 bits plus 0xA282EAD8.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils

from gaudi_bert.common.arrays import ByteArray, IntArray
from gaudi_bert.common.compiled import (
    address_of,
    as_word,
    inlined_kernel,
    kernel_without_refcounts,
    load_u8,
    load_word,
    make_intrinsic,
    word_at,
)

_POLYNOMIAL_REVERSED = 0x82F63B78
_ALL_ONES = 0xFFFFFFFF
_MOST_WORDS = 512  # the most words in each of the three parts of a block


# CRC-32Cs are computed with x86 instructions if the processor has both CRC-32C (part of SSE4.2) and carry-less
# multiplication. Otherwise, they are computed with tables.
if platform.machine().lower() not in ("x86_64", "amd64"):
    HAS_CRC_INSTRUCTIONS = False
elif config.CPU_NAME is not None or config.CPU_FEATURES is not None:  # numba compiles for another processor
    HAS_CRC_INSTRUCTIONS = {"+sse4.2", "+pclmul"} <= set((config.CPU_FEATURES or "").split(","))
else:
    HAS_CRC_INSTRUCTIONS = all(map(binding.get_host_cpu_features().get, ("sse4.2", "pclmul")))


def _emit_call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Emit a call to an LLVM intrinsic."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _emit_crc_of_word(_: Any, builder: Any, crc: Any, word: Any) -> Any:
    """Emit the instruction that updates a CRC register with eight bytes of data."""
    return _emit_call(builder, "llvm.x86.sse42.crc32.64.64", ir.IntType(64), [crc, word])


def _emit_crc_of_byte(_: Any, builder: Any, crc: Any, byte: Any) -> Any:
    """Emit the instruction that updates a CRC register with one byte of data."""
    narrow = [builder.trunc(crc, ir.IntType(32)), builder.trunc(byte, ir.IntType(8))]
    return builder.zext(_emit_call(builder, "llvm.x86.sse42.crc32.32.8", ir.IntType(32), narrow), ir.IntType(64))


def _emit_carryless_product(_: Any, builder: Any, first: Any, second: Any) -> Any:
    """Emit the instruction that computes the carry-less product of two 32-bit registers."""
    pair, zero = ir.VectorType(ir.IntType(64), 2), ir.IntType(32)(0)
    vectors = [builder.insert_element(ir.Constant(pair, [0, 0]), each, zero) for each in (first, second)]
    product = _emit_call(builder, "llvm.x86.pclmulqdq", pair, [*vectors, ir.IntType(8)(0)])
    return builder.extract_element(product, zero)


_word_step: Callable[[int, int], int] = make_intrinsic(types.int64, 2, _emit_crc_of_word)
_byte_step: Callable[[int, int], int] = make_intrinsic(types.int64, 2, _emit_crc_of_byte)
_carryless_product: Callable[[int, int], int] = make_intrinsic(types.int64, 2, _emit_carryless_product)


def _make_byte_tables() -> IntArray:
    """Return the tables for slicing by eight, int64 [8, 256]. Entry [k, b] is the CRC after byte b and k zero bytes."""
    first = np.arange(256, dtype=np.int64)
    for _ in range(8):
        first = (first >> 1) ^ np.where(first & 1, _POLYNOMIAL_REVERSED, 0)
    tables = [first]
    for _ in range(7):
        tables.append((tables[-1] >> 8) ^ first[tables[-1] & 255])
    return np.stack(tables)


def _compute_polynomial_powers(count: int, step_bytes: int) -> IntArray:
    """Return the constants x**(8 * step_bytes * n - 33) for n from 0 to count - 1, with reflected bits, int64 [count]."""
    register = 0x80000000
    for _ in range(33):  # divide by x
        register = ((register ^ _POLYNOMIAL_REVERSED) << 1 | 1) if register >> 31 else register << 1
    powers = []
    for _ in range(count):
        powers.append(register)
        for _ in range(step_bytes):
            register = (register >> 8) ^ int(_BYTES[0, register & 255])
    return np.array(powers, dtype=np.int64)


_BYTES = _make_byte_tables()
_AFTER_BYTES = _compute_polynomial_powers(8, 1)
_AFTER_WORDS = _compute_polynomial_powers(2 * _MOST_WORDS + 1, 8)


@inlined_kernel
def _update_crc_with_tables(register: int, word: int) -> int:
    """Update a CRC register with the eight bytes of a word, using lookup tables."""
    low = (word & _ALL_ONES) ^ register
    crc: int = _BYTES[7, low & 255] ^ _BYTES[6, (low >> 8) & 255] ^ _BYTES[5, (low >> 16) & 255] ^ _BYTES[4, low >> 24]
    crc ^= _BYTES[3, (word >> 32) & 255] ^ _BYTES[2, (word >> 40) & 255]
    crc ^= _BYTES[1, (word >> 48) & 255] ^ _BYTES[0, (word >> 56) & 255]
    return crc


@kernel_without_refcounts
def _compute_crc_with_tables(address: int, count: int, crc: int) -> int:
    """Compute the CRC-32C of `count` bytes with lookup tables. `crc` is the CRC of the preceding bytes, or 0."""
    crc ^= _ALL_ONES
    while count >= 8:
        crc = _update_crc_with_tables(crc, load_word(address))
        address += 8
        count -= 8
    while count > 0:
        crc = (crc >> 8) ^ _BYTES[0, (crc ^ load_u8(address)) & 255]
        address += 1
        count -= 1
    return crc ^ _ALL_ONES


@inlined_kernel
def _multiply_modulo_crc_polynomial(crc: int, power_of_x: int) -> int:
    """Multiply a CRC register by a power of x modulo the CRC polynomial."""
    return _word_step(0, _carryless_product(crc, power_of_x))


@kernel_without_refcounts
def _compute_crc_in_hardware(address: int, count: int, crc: int) -> int:
    """Compute the CRC-32C of `count` bytes with CRC instructions. `crc` is the CRC of the preceding bytes, or 0."""
    crc ^= _ALL_ONES
    while count >= 48:
        words = min(count // 24, _MOST_WORDS)
        first, second, third = as_word(0), as_word(0), as_word(0)
        first ^= crc
        for number in range(words):
            first = _word_step(first, word_at(address, number))
            second = _word_step(second, word_at(address + 8 * words, number))
            third = _word_step(third, word_at(address + 16 * words, number))
        crc = (
            _multiply_modulo_crc_polynomial(first, _AFTER_WORDS[2 * words])
            ^ _multiply_modulo_crc_polynomial(second, _AFTER_WORDS[words])
            ^ third
        )
        address += 24 * words
        count -= 24 * words
    while count >= 8:
        crc = _word_step(crc, load_word(address))
        address += 8
        count -= 8
    while count > 0:
        crc = _byte_step(crc, load_u8(address))
        address += 1
        count -= 1
    return crc ^ _ALL_ONES


@kernel_without_refcounts
def _combine_crcs_in_hardware(crc: int, byte_count: int, next_crc: int) -> int:
    """Combine `crc` with `next_crc`, the CRC of the next `byte_count` bytes, using CRC instructions."""
    while byte_count >= 8 * _MOST_WORDS:
        crc = _multiply_modulo_crc_polynomial(crc, _AFTER_WORDS[_MOST_WORDS])
        byte_count -= 8 * _MOST_WORDS
    return (
        _multiply_modulo_crc_polynomial(
            _multiply_modulo_crc_polynomial(crc, _AFTER_WORDS[byte_count >> 3]), _AFTER_BYTES[byte_count & 7]
        )
        ^ next_crc
    )


@kernel_without_refcounts
def _combine_crcs_with_tables(crc: int, byte_count: int, next_crc: int) -> int:
    """Combine `crc` with `next_crc`, the CRC of the next `byte_count` bytes, using lookup tables."""
    for _ in range(byte_count):
        crc = (crc >> 8) ^ _BYTES[0, crc & 255]
    return crc ^ next_crc


@kernel_without_refcounts
def _compute_word_crc_in_hardware(word: int) -> int:
    """Compute the CRC-32C of a 64-bit word with a CRC instruction."""
    return _word_step(_ALL_ONES, word) ^ _ALL_ONES


@kernel_without_refcounts
def _compute_word_crc_with_tables(word: int) -> int:
    """Compute the CRC-32C of a 64-bit word with lookup tables."""
    return _update_crc_with_tables(_ALL_ONES, word) ^ _ALL_ONES


TABLE_CRC_FUNCTIONS = (_compute_crc_with_tables, _combine_crcs_with_tables, _compute_word_crc_with_tables)
HARDWARE_CRC_FUNCTIONS = (_compute_crc_in_hardware, _combine_crcs_in_hardware, _compute_word_crc_in_hardware)
# Other kernels call these three functions. They use the CRC-32C instructions if the processor has them, and tables
# otherwise.
crc32c_at, append_crc, crc_of_word = HARDWARE_CRC_FUNCTIONS if HAS_CRC_INSTRUCTIONS else TABLE_CRC_FUNCTIONS


def masked_crc32c(crc: int) -> int:
    """Return a CRC in the masked form that TFRecord files contain."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _ALL_ONES


mask_crc = inlined_kernel(masked_crc32c)  # the same function for use inside kernels


@kernel_without_refcounts
def _crc32c_of_array(data: ByteArray, crc: int) -> int:
    """Return the CRC-32C of a contiguous array. `crc` is the CRC of the preceding bytes, or 0."""
    return crc32c_at(address_of(data), data.size, crc)


def crc32c(buffer: bytes | bytearray | memoryview | ByteArray, crc: int = 0) -> int:
    """Return the CRC-32C of a contiguous buffer.

    Args:
        buffer: The bytes.
        crc: The CRC of the bytes before the buffer, or 0 if there are none.
    """
    data = buffer.view(np.uint8).reshape(-1) if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    return int(_crc32c_of_array(data, crc)) if data.size else crc
