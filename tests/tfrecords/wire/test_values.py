"""Values checked and decoded eight bytes at a time, against one value at a time."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.wire import values as kernels
from gaudi_bert.tfrecords.wire.schema import UnpackedSchema
from gaudi_bert.tfrecords.wire.values import _decode_varints, decode_examples_to_arrays
from tests.builders.machines import GuardedBuffer
from tests.builders.properties import examples
from tests.oracles.wire import FLOAT_KEYS, UNPACKED_KEYS, example, map_entry, random_sequence, varint

BEFORE = b"\x0a\x7fheader..\x7f"  # a field is preceded by its head, whose last byte is below 128


def on_bytes(kernel, data: bytes, *arguments: int) -> int:
    memory = np.frombuffer(BEFORE + data, np.uint8).copy()
    return int(kernel(memory.ctypes.data + len(BEFORE), len(data), *arguments))


def decoded(data: bytes) -> list[tuple[int, int]] | None:
    """(value, bytes) of the varints in `data`; None where the last is cut short."""
    if data and data[-1] >= 128:
        return None
    ends = [at + 1 for at, byte in enumerate(data) if byte < 128]
    varints = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [(sum((byte & 127) << (7 * place) for place, byte in enumerate(each)), len(each)) for each in varints]


def expected_prefix(data: bytes, values: int, real: int, most: int) -> int:
    numbers = decoded(data)
    if numbers is None or len(numbers) != values:
        return -1
    canonical = all(len(varint(value)) == size for value, size in numbers[:real])
    in_range = all(value <= most for value, _ in numbers[:real])
    zeros = all((value, size) == (0, 1) for value, size in numbers[real:])
    return sum(size for _, size in numbers[:real]) if canonical and in_range and zeros else -1


numbers_of_any_size = st.one_of(
    st.integers(0, 3), st.integers(120, 136), st.integers(16380, 16390), st.integers(2**21 - 3, 2**21 + 3)
)


@examples(300)
@given(
    real=st.lists(numbers_of_any_size, max_size=40),
    padding=st.integers(0, 20),
    extra=st.integers(0, 2),
    wrong_count=st.integers(-1, 1),
)
def test_real_bytes(real: list[int], padding: int, extra: int, wrong_count: int) -> None:
    parts = [varint(value) for value in real]
    if parts and extra:
        parts[len(parts) // 2] = varint(real[len(parts) // 2], extra_bytes=extra)
    data = b"".join(parts) + bytes(padding)
    values, count = len(real) + padding, max(0, len(real) + wrong_count)
    if count <= values:
        assert on_bytes(kernels.compute_unpadded_size, data, values, count) == expected_prefix(
            data, values, count, 2**21 - 1
        )


@examples(300)
@given(length=st.one_of(st.integers(1, 300), st.integers(8000, 8192)), data=st.data(), padding=st.integers(0, 20))
def test_scan_positions(length: int, data: st.DataObject, padding: int) -> None:
    near = st.one_of(st.integers(0, length), st.integers(max(0, length - 2), length + 2), st.integers(0, 20_000))
    inside = st.integers(0, length - 1)
    real = data.draw(st.lists(data.draw(st.sampled_from([inside, inside, near])), max_size=40))
    overlong = data.draw(st.integers(0, 8)) == 0
    parts = [varint(value, extra_bytes=overlong and place == 1) for place, value in enumerate(real)]
    encoded = b"".join(parts) + bytes(padding)
    found = on_bytes(kernels.compute_unpadded_positions_size, encoded, len(real) + padding, len(real), length)
    assert found == expected_prefix(encoded, len(real) + padding, len(real), length - 1)


@pytest.mark.parametrize("size", [*range(1, 40), 512, 8191])
def test_masks_and_zeros(size: int) -> None:
    rng = np.random.default_rng(size)
    for ones in {0, 1, size // 2, size - 1, size}:
        mask = bytes([1] * ones + [0] * (size - ones))
        assert on_bytes(kernels.count_leading_ones, mask) == ones
        assert on_bytes(kernels.is_all_zero, mask) == (ones == 0)
        assert on_bytes(kernels.is_repeated_byte, mask, 1) == (ones == size)
        floats = np.frombuffer(mask, np.uint8).astype("<f4").tobytes()
        assert on_bytes(kernels.count_leading_one_floats, floats) == ones
        for _ in range(5):
            place = int(rng.integers(size))
            wrong = bytearray(mask)
            wrong[place] ^= int(rng.choice([1, 2, 3, 128]))
            leading = size - len(wrong.lstrip(b"\1"))
            still = -1 if any(wrong[leading:]) else leading
            assert on_bytes(kernels.count_leading_ones, bytes(wrong)) == still
            wrong_floats = bytearray(floats)
            wrong_floats[4 * place + int(rng.integers(4))] ^= 1 << int(rng.integers(8))
            assert on_bytes(kernels.count_leading_one_floats, bytes(wrong_floats)) == -1


# --- packed varints to int32

GUARDED = GuardedBuffer()
MOST = 2**31 - 1


def decode(data: bytes, count: int) -> list[int] | None:
    """The numbers; None where they are refused. Right before, then right after a page that may not be read."""
    found = []
    for at_the_end in (False, True):
        memory, values = GUARDED.of(len(data), at_the_end), np.full(count + 1, -7, np.int32)
        memory[:] = np.frombuffer(data, np.uint8)
        start = memory.ctypes.data
        good = _decode_varints(start, start + len(data), values[:count])
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
def test_longer_than_needed_is_read_up_to_five_bytes_and_beyond_31_bits_never(numbers, data) -> None:
    chosen = data.draw(st.integers(0, len(numbers) - 1))
    before, after = (b"".join(map(varint, part)) for part in (numbers[:chosen], numbers[chosen + 1 :]))
    for extra in range(1, 8):
        longer = varint(numbers[chosen], extra)
        assert decode(before + longer + after, len(numbers)) == (numbers if len(longer) <= 5 else None)
    for value in (MOST + 1, 2**35, 2**63, 2**64 - 1):
        assert decode(before + varint(value) + after, len(numbers)) is None


# --- dense arrays from serialised examples


LENGTH, PREDICTIONS = 13, 5


def decode_examples(payloads: list[bytes], gap: int = 0, memory: np.ndarray | None = None) -> dict[str, np.ndarray]:
    buffer = np.frombuffer(bytes(gap).join([b"", *payloads]), np.uint8)
    if memory is not None:
        memory[:] = buffer
        buffer = memory
    lengths = np.array([len(payload) for payload in payloads])
    offsets = np.cumsum(lengths + gap) - lengths
    return decode_examples_to_arrays(buffer, offsets, lengths, UnpackedSchema(LENGTH, PREDICTIONS).features, "here")


@pytest.mark.parametrize("gap", [0, 5])
def test_columns_are_the_features(gap: int) -> None:
    rng = random.Random(1)
    sequences = [random_sequence(rng, LENGTH, PREDICTIONS, 2_000_000) for _ in range(37)]
    order = list(UNPACKED_KEYS)
    payloads = []
    for features in sequences:
        rng.shuffle(order)
        payloads.append(example(features, order, extra=map_entry("further", [1, 2])))
    columns = decode_examples(payloads, gap)
    for key in UNPACKED_KEYS:
        assert columns[key].dtype == (np.float32 if key in FLOAT_KEYS else np.int32)
        assert columns[key].tolist() == [features[key] for features in sequences]


@pytest.mark.parametrize("damage", ["cut", "missing", "twice", "size", "large"])
def test_what_does_not_fit_is_refused_by_its_number(damage: str) -> None:
    features = random_sequence(random.Random(2), LENGTH, PREDICTIONS)
    good = example(features)
    bad = {
        "cut": good[:-1],
        "missing": example({key: values for key, values in features.items() if key != "segment_ids"}),
        "twice": example(features, extra=map_entry("input_ids", features["input_ids"])),
        "size": example({**features, "input_ids": features["input_ids"][1:]}),
        "large": example({**features, "input_ids": [2**31] * LENGTH}),
    }[damage]
    with pytest.raises(InputError, match=r"here: record 2: expected the features .*; write the records again"):
        decode_examples([good, good, bad, good])


def test_no_damage_makes_the_kernel_read_outside() -> None:
    """Every byte of a record overwritten in turn, the record right before, then right after a page that may not be read."""
    payload = example(random_sequence(random.Random(3), LENGTH, PREDICTIONS))
    guarded, kinds = GuardedBuffer(), set()
    for place in range(len(payload)):
        for value in (0x00, 0x7F, 0x80, 0xFF):
            broken = payload[:place] + bytes([value]) + payload[place + 1 :]
            outcomes = {outcome(broken, guarded.of(len(broken), at_the_end)) for at_the_end in (True, False)}
            assert len(outcomes) == 1
            kinds |= outcomes
    assert kinds == {"refused", "read"}


def outcome(payload: bytes, memory: np.ndarray) -> str:
    try:
        decode_examples([payload], memory=memory)
    except InputError:
        return "refused"
    return "read"
