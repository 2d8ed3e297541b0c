"""Random damage to the bytes of a file: flip bits, remove, insert or truncate bytes, and overwrite numbers or tokens."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

_WORDS = [0, 1, -1, 2, 7, 127, 128, 255, 2**15, 2**16, 2**30, 2**31 - 1, -(2**31), 395]


def _flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def _lose(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice([1, 4, 8, 64])]


def _insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at:at] = rng.choice([rng.randbytes(rng.randint(1, 16)), bytes(8), data[at : at + rng.randint(1, 64)]])


def _word(rng: random.Random, data: bytearray) -> None:
    """Overwrite an offset, a length or a value with a wrong number, at a position that is a multiple of four."""
    for _ in range(rng.choice([1, 1, 3])):
        at = 4 * rng.randrange(max(1, len(data) // 4))
        wide = rng.random() < 0.3
        data[at : at + (8 if wide else 4)] = struct.pack("<q" if wide else "<i", rng.choice(_WORDS))


def _token(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    tokens = [
        *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\n", b"null", b"true", b"1e999", b"-"),
        *(b"9" * 30, b"[" * 99, b"\\ud800", b"\xff", b"\0"),
    ]
    data[at : at + rng.randint(0, 3)] = rng.choice(tokens)


MUTATIONS: tuple[Callable[[random.Random, bytearray], None], ...] = (_flip, _cut, _lose, _insert, _word, _word, _token)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one or two kinds of damage."""
    damaged = bytearray(data)
    for _ in range(rng.choice([1, 1, 2])):
        if damaged:
            rng.choice(MUTATIONS)(rng, damaged)
    return bytes(damaged)
