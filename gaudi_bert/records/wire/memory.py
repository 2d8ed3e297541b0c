"""Loads, stores and copies on raw addresses, as numba intrinsics.

The record kernels work on addresses (int64) into buffers that their callers own, because eight bytes of any
alignment are then one instruction. Nothing here checks bounds: a kernel proves, before it calls one of these,
that the bytes lie in its buffer.

Trap: `array.ctypes.data` inside compiled code is uint64, and uint64 with int64 becomes float64. Addresses are
therefore taken outside, with `address_of`, and passed in as Python integers, which numba takes as int64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "KERNEL_OPTIONS",
    "add_words",
    "address_of",
    "byte_at",
    "copy_bytes",
    "count_bits",
    "fill_bytes",
    "load_u8",
    "load_u32",
    "load_word",
    "multiply_mix",
    "prefetch",
    "store_u8",
    "store_u16",
    "store_u32",
    "store_word",
    "subtract_words",
    "word_at",
]

KERNEL_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "boundscheck": False, "error_model": "numpy"}

_BYTE, _HALF, _INT, _WORD, _DOUBLE_WORD = (ir.IntType(bits) for bits in (8, 16, 32, 64, 128))


def address_of(array: np.ndarray, offset: int = 0) -> int:
    """The address of byte `offset` of a contiguous array; the caller keeps the array alive."""
    return int(array.ctypes.data) + offset


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


byte_at = _make_indexed_load(_BYTE)
word_at = _make_indexed_load(_WORD)
load_u8 = _make_load(_BYTE)
load_u32 = _make_load(_INT)
load_word = _make_load(_WORD)
store_u8 = _make_store(_BYTE)
store_u16 = _make_store(_HALF)
store_u32 = _make_store(_INT)
store_word = _make_store(_WORD)


@intrinsic
def copy_bytes(typing_context: Any, destination: Any, source: Any, count: Any) -> Any:
    """memcpy: the two ranges do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, of = (_pointer(builder, argument, _BYTE) for argument in arguments[:2])
        cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def fill_bytes(typing_context: Any, destination: Any, value: Any, count: Any) -> Any:
    """memset."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to = _pointer(builder, arguments[0], _BYTE)
        cgutils.memset(builder, to, arguments[2], builder.trunc(arguments[1], _BYTE))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address (any address is harmless)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [_pointer(builder, arguments[0], _BYTE), _INT(0), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def count_bits(typing_context: Any, word: Any) -> Any:
    """How many bits of a word are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), generate


def _make_wrapping(operation: str) -> Any:
    """Arithmetic modulo 2**64. Numba's own + and - on int64 let LLVM assume that nothing overflows."""

    @intrinsic
    def compute(typing_context: Any, left: Any, right: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, operation)(*arguments)

        return types.int64(types.int64, types.int64), generate

    return compute


add_words = _make_wrapping("add")
subtract_words = _make_wrapping("sub")


@intrinsic
def multiply_mix(typing_context: Any, left: Any, right: Any) -> Any:
    """Both halves of the 128-bit product of two unsigned words, exclusive-or'ed: the mixing step of wyhash."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = [builder.zext(argument, _DOUBLE_WORD) for argument in arguments]
        product = builder.mul(*wide)
        high = builder.trunc(builder.lshr(product, _DOUBLE_WORD(64)), _WORD)
        return builder.xor(high, builder.trunc(product, _WORD))

    return types.int64(types.int64, types.int64), generate
