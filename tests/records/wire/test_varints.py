"""Lists of numbers, eight bytes at a time, against one number at a time."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.records.wire.varints import decode_varints
from tests.builders.guarded_memory import GuardedBuffer
from tests.builders.properties import examples
from tests.oracles.wire import varint

GUARDED = GuardedBuffer()
MOST = 2**31 - 1


def decode(data: bytes, count: int) -> list[int] | None:
    """The numbers; None where they are refused. Right before, then right after a page that may not be read."""
    found = []
    for at_the_end in (False, True):
        memory, values = GUARDED.of(len(data), at_the_end), np.full(count + 1, -7, np.int32)
        memory[:] = np.frombuffer(data, np.uint8)
        start = memory.ctypes.data
        good = decode_varints(start, start + len(data), values[:count])
        assert values[count] == -7
        found.append(values[:count].tolist() if good else None)
    assert found[0] == found[1]
    return found[0]


RUNS = st.lists(
    st.tuples(st.sampled_from([0, 127, 128, 16383, 16384, 2**21 - 1, 2**21, 2**28, MOST]), st.integers(1, 20)), max_size=6
)


@examples(200)
@given(runs=RUNS, mixed=st.lists(st.integers(0, MOST) | st.integers(0, 40_000), max_size=40), shuffled=st.booleans())
def test_runs_of_equal_size_and_any_mixture(runs, mixed, shuffled: bool) -> None:
    numbers = [value for value, times in runs for _ in range(times)] + mixed
    if shuffled:
        random.Random(len(numbers)).shuffle(numbers)
    data = b"".join(map(varint, numbers))
    assert decode(data, len(numbers)) == numbers
    assert decode(data, len(numbers) + 1) is None
    assert decode(data + b"\x05", len(numbers)) is None
    if numbers:
        assert decode(data, len(numbers) - 1) is None
        assert decode(data[:-1], len(numbers)) is None


@examples(100)
@given(numbers=st.lists(st.integers(0, 20_000), min_size=1, max_size=30), data=st.data())
def test_longer_than_needed_is_read_up_to_five_bytes_and_then_refused(numbers, data) -> None:
    chosen = data.draw(st.integers(0, len(numbers) - 1))
    for extra in range(1, 8):
        parts = [varint(number, extra if place == chosen else 0) for place, number in enumerate(numbers)]
        readable = len(parts[chosen]) <= 5
        assert decode(b"".join(parts), len(numbers)) == (numbers if readable else None)


@examples(50)
@given(before=st.integers(0, 17), after=st.integers(0, 17), value=st.sampled_from([MOST + 1, 2**35, 2**63, 2**64 - 1]))
def test_beyond_31_bits_is_refused_wherever_it_stands(before: int, after: int, value: int) -> None:
    data = varint(300) * before + varint(value) + varint(300) * after
    assert decode(data, before + 1 + after) is None
