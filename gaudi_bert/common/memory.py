"""Functions for kernels that read, write and copy bytes at raw memory addresses. They are numba intrinsics.

The kernels that process records use addresses (int64) into buffers that their callers own, because a single instruction can
then read eight bytes at any alignment. These functions do not check bounds. Before a kernel calls one of them, it must make
sure that the bytes are inside the buffer.

In compiled code, `array.ctypes.data` is uint64, and combining uint64 with int64 gives float64. Therefore, kernels take
arrays and get their addresses only from `address_of`.
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


# Numba may infer another integer type for a number in a kernel. This function converts it to a signed 64-bit word.
as_word: Callable[[Any], int] = np.int64  # type: ignore[assignment]


@inlined_kernel
def address_of(array: AnyArray) -> int:
    """Return the address of the first byte of a contiguous array. Only kernels can call this function.

    The caller of the kernel must keep the array alive.
    """
    return as_word(array.ctypes.data)


def make_intrinsic(result_type: Any, argument_count: int, emit: Callable[..., Any]) -> Any:
    """Create a function that kernels can call, from a function that emits its LLVM instructions.

    Args:
        result_type: The numba type of the result.
        argument_count: The number of arguments, from 1 to 3. All of them are int64.
        emit: A function that emits the instructions and returns the result: `emit(context, builder, *arguments)`.
    """
    signature = result_type(*[types.int64] * argument_count)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        result = emit(context, builder, *arguments)
        return context.get_dummy_value() if result_type is types.void else result

    # numba reads the number of arguments from the Python signature, so there is a definition for each number.
    definitions: tuple[Callable[..., Any], ...] = (
        lambda types_, first: (signature, generate),
        lambda types_, first, second: (signature, generate),
        lambda types_, first, second, third: (signature, generate),
    )
    return numba_intrinsic(definitions[argument_count - 1])


def _emit_pointer(builder: Any, address: Any, kind: Any) -> Any:
    """Emit the conversion of an address to an LLVM pointer, and return the pointer."""
    return builder.inttoptr(address, kind.as_pointer())


def _make_load(kind: Any) -> Any:
    """Create a kernel function that reads one value of an LLVM type at an address of any alignment."""

    def load(_: Any, builder: Any, address: Any) -> Any:
        value = builder.load(_emit_pointer(builder, address, kind))
        value.align = 1
        return value if kind is _WORD else builder.zext(value, _WORD)

    return make_intrinsic(types.int64, 1, load)


def _make_store(kind: Any) -> Any:
    """Create a kernel function that writes one value of an LLVM type to an address of any alignment."""

    def store(_: Any, builder: Any, address: Any, value: Any) -> None:
        narrow = value if kind is _WORD else builder.trunc(value, kind)
        builder.store(narrow, _emit_pointer(builder, address, kind)).align = 1

    return make_intrinsic(types.void, 2, store)


def _make_indexed_load(kind: Any) -> Any:
    """Create a kernel function that reads the value with a given index in an array at an address.

    If the address is constant in a loop, LLVM can vectorise the loop.
    """

    def load(_: Any, builder: Any, address: Any, number: Any) -> Any:
        value = builder.load(builder.gep(_emit_pointer(builder, address, kind), [number]))
        value.align = 1
        return value if kind is _WORD else builder.zext(value, _WORD)

    return make_intrinsic(types.int64, 2, load)


byte_at: Callable[[int, int], int] = _make_indexed_load(_BYTE)
word_at: Callable[[int, int], int] = _make_indexed_load(_WORD)
load_u8: Callable[[int], int] = _make_load(_BYTE)
load_u32: Callable[[int], int] = _make_load(_INT)
load_word: Callable[[int], int] = _make_load(_WORD)
store_u8: Callable[[int, int], None] = _make_store(_BYTE)
store_u16: Callable[[int, int], None] = _make_store(_HALF)
store_u32: Callable[[int, int], None] = _make_store(_INT)
store_word: Callable[[int, int], None] = _make_store(_WORD)


def _emit_copy(_: Any, builder: Any, destination: Any, source: Any, count: Any) -> None:
    """Emit a call of memcpy. The source and the destination must not overlap."""
    cgutils.raw_memcpy(builder, _emit_pointer(builder, destination, _BYTE), _emit_pointer(builder, source, _BYTE), count, 1)


def _emit_fill(_: Any, builder: Any, destination: Any, value: Any, count: Any) -> None:
    """Emit a call of memset."""
    cgutils.memset(builder, _emit_pointer(builder, destination, _BYTE), count, builder.trunc(value, _BYTE))


def _emit_prefetch(_: Any, builder: Any, address: Any) -> None:
    """Emit an instruction that prefetches the cache line at an address. The address need not be valid."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [_emit_pointer(builder, address, _BYTE), _INT(0), _INT(3), _INT(1)])


def _emit_multiply_mix(_: Any, builder: Any, first: Any, second: Any) -> Any:
    """Emit the mixing step of wyhash, which combines both halves of the 128-bit product of two words by exclusive or."""
    product = builder.mul(builder.zext(first, _DOUBLE_WORD), builder.zext(second, _DOUBLE_WORD))
    high = builder.trunc(builder.lshr(product, _DOUBLE_WORD(64)), _WORD)
    return builder.xor(high, builder.trunc(product, _WORD))


copy_bytes: Callable[[int, int, int], None] = make_intrinsic(types.void, 3, _emit_copy)
fill_bytes: Callable[[int, int, int], None] = make_intrinsic(types.void, 3, _emit_fill)
prefetch: Callable[[int], None] = make_intrinsic(types.void, 1, _emit_prefetch)
count_bits: Callable[[int], int] = make_intrinsic(types.int64, 1, lambda _, builder, word: builder.ctpop(word))
multiply_mix: Callable[[int, int], int] = make_intrinsic(types.int64, 2, _emit_multiply_mix)
# With numba's own + and - on int64, LLVM assumes that nothing overflows. These functions compute modulo 2**64 instead.
add_words: Callable[[int, int], int] = make_intrinsic(types.int64, 2, lambda _, builder, one, other: builder.add(one, other))
subtract_words: Callable[[int, int], int] = make_intrinsic(
    types.int64, 2, lambda _, builder, one, other: builder.sub(one, other)
)
