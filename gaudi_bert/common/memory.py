"""Loads, stores and copies on raw addresses, as numba intrinsics.

The record kernels work on addresses (int64) into buffers that their callers own, because eight bytes of any
alignment are then one instruction. Nothing here checks bounds: a kernel proves, before it calls one of these,
that the bytes lie in its buffer.

Trap: `array.ctypes.data` inside compiled code is uint64, and uint64 with int64 becomes float64. Kernels take arrays, and
addresses from them with `address_of` only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.common.compiled import inlined_kernel

_BYTE, _HALF, _INT, _WORD, _DOUBLE_WORD = (ir.IntType(bits) for bits in (8, 16, 32, 64, 128))


as_word: Callable[[Any], int] = np.int64  # type: ignore[assignment]
"""A number as a signed word: inside a kernel, numba's type of a number is that of the machine, and must not change."""


@inlined_kernel
def address_of(array: AnyArray) -> int:
    """The address of the first byte of a contiguous array, inside a kernel; the kernel's caller keeps the array alive."""
    return as_word(array.ctypes.data)


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's `intrinsic`: compiled code that LLVM instructions are written for."""
    return numba_intrinsic(function)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _make_load(kind: Any) -> Any:
    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(_pointer(builder, arguments[0], kind))
            value.align = 1
            return value if kind is _WORD else builder.zext(value, _WORD)

        return types.int64(types.int64), generate

    return load


def _make_store(kind: Any) -> Any:
    @intrinsic
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = arguments[1] if kind is _WORD else builder.trunc(arguments[1], kind)
            builder.store(value, _pointer(builder, arguments[0], kind)).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return store


def _make_indexed_load(kind: Any) -> Any:
    """A load of element `number` from an address: with the address constant in a loop, LLVM can use vectors."""

    @intrinsic
    def load(typing_context: Any, address: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(builder.gep(_pointer(builder, arguments[0], kind), [arguments[1]]))
            value.align = 1
            return value if kind is _WORD else builder.zext(value, _WORD)

        return types.int64(types.int64, types.int64), generate

    return load


byte_at: Callable[[int, int], int] = _make_indexed_load(_BYTE)
word_at: Callable[[int, int], int] = _make_indexed_load(_WORD)
load_u8: Callable[[int], int] = _make_load(_BYTE)
load_u32: Callable[[int], int] = _make_load(_INT)
load_word: Callable[[int], int] = _make_load(_WORD)
store_u8: Callable[[int, int], None] = _make_store(_BYTE)
store_u16: Callable[[int, int], None] = _make_store(_HALF)
store_u32: Callable[[int, int], None] = _make_store(_INT)
store_word: Callable[[int, int], None] = _make_store(_WORD)


def _copy_bytes(typing_context: Any, destination: Any, source: Any, count: Any) -> Any:
    """memcpy: the two ranges do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, of = (_pointer(builder, argument, _BYTE) for argument in arguments[:2])
        cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _fill_bytes(typing_context: Any, destination: Any, value: Any, count: Any) -> Any:
    """memset."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to = _pointer(builder, arguments[0], _BYTE)
        cgutils.memset(builder, to, arguments[2], builder.trunc(arguments[1], _BYTE))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address (any address is harmless)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [_pointer(builder, arguments[0], _BYTE), _INT(0), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _count_bits(typing_context: Any, word: Any) -> Any:
    """Count the bits of a word that are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), generate


def _make_wrapping(operation: str) -> Any:
    """Arithmetic modulo 2**64. Numba's own + and - on int64 let LLVM assume that nothing overflows."""

    @intrinsic
    def compute(typing_context: Any, first: Any, second: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, operation)(*arguments)

        return types.int64(types.int64, types.int64), generate

    return compute


add_words: Callable[[int, int], int] = _make_wrapping("add")
subtract_words: Callable[[int, int], int] = _make_wrapping("sub")


def _multiply_mix(typing_context: Any, first: Any, second: Any) -> Any:
    """Both halves of the 128-bit product of two unsigned words, exclusive-or'ed: the mixing step of wyhash."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = [builder.zext(argument, _DOUBLE_WORD) for argument in arguments]
        product = builder.mul(*wide)
        high = builder.trunc(builder.lshr(product, _DOUBLE_WORD(64)), _WORD)
        return builder.xor(high, builder.trunc(product, _WORD))

    return types.int64(types.int64, types.int64), generate


copy_bytes: Callable[[int, int, int], None] = intrinsic(_copy_bytes)
fill_bytes: Callable[[int, int, int], None] = intrinsic(_fill_bytes)
prefetch: Callable[[int], None] = intrinsic(_prefetch)
count_bits: Callable[[int], int] = intrinsic(_count_bits)
multiply_mix: Callable[[int, int], int] = intrinsic(_multiply_mix)
