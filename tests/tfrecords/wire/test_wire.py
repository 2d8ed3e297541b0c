"""Records as bytes: tf.train.Example against protobuf, TFRecord framing against TensorFlow, values against one at a time."""

from __future__ import annotations

import gzip
import io
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.oracles.wire as naive
from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.wire import values as kernels
from gaudi_bert.tfrecords.wire.example import decode_example, encode_example
from gaudi_bert.tfrecords.wire.framing import RecordStream, frame, read_records
from gaudi_bert.tfrecords.wire.schema import MAX_TOKEN_ID, RecordError
from gaudi_bert.tfrecords.wire.unpacked_encoder import encode_rows
from tests.builders.machines import GuardedBuffer
from tests.builders.properties import examples
from tests.oracles.wire import field, varint


@examples(60)
@given(
    features=st.dictionaries(
        st.text(alphabet="abcxyz_é漢", min_size=3, max_size=3),  # of one length: protobuf's runtimes differ on prefixes
        st.one_of(
            st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30),
            st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30),
        ),
        max_size=6,
    )
)
def test_encoding_is_protobufs_and_decodes_to_itself(features: dict) -> None:
    protobuf_example = pytest.importorskip("tests.oracles.protobuf_example", exc_type=ImportError)
    payload = encode_example(features)
    assert payload == protobuf_example.serialize(features)
    decoded = decode_example(payload)
    assert sorted(decoded) == sorted(features)
    for name, values in features.items():
        assert decoded[name].tolist() == np.asarray(values, decoded[name].dtype).tolist()


def test_numpy_arrays_of_any_integer_type_and_booleans() -> None:
    for dtype in (np.int64, np.int32, np.uint8, bool):
        values = np.array([0, 1, 1, 0], dtype=dtype)
        assert encode_example({"mask": values}) == encode_example({"mask": [0, 1, 1, 0]})
    assert encode_example({"w": np.array([1, 0.5])}) == encode_example({"w": np.array([1, 0.5], np.float32)})
    with pytest.raises(TypeError, match="`text`"):
        encode_example({"text": np.array(["a"])})


def test_bytes_and_empty_features() -> None:
    entry = field(1, field(1, b"text") + field(2, field(1, field(1, b"one") + field(1, b"two"))))
    nothing = field(1, field(1, b"nothing") + field(2, b""))
    decoded = decode_example(field(1, entry + nothing))
    assert decoded["text"].tolist() == [b"one", b"two"]
    assert decoded["nothing"].size == 0
    assert decode_example(b"") == {}


@pytest.mark.parametrize(
    "payload",
    [
        b"\x0a",
        b"\x0a\x05abc",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x07abc",
        b"\x00\x01",
        field(1, field(1, field(1, b"\xff\xfe") + field(2, b""))),
        field(1, field(1, field(1, b"w") + field(2, field(2, field(1, b"\x00\x00\x00"))))),
        field(1, field(1, field(1, b"i") + field(2, field(3, field(1, b"\x80"))))),
    ],
)
def test_malformed_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(RecordError, match=r"not a tf\.train\.Example"):
        decode_example(payload)


# --- rows of matrices encoded at once, against the encoder of single examples


def matrices(rows: int, length: int, predictions: int, bits: int, seed: int) -> dict[str, np.ndarray]:
    """The features of random sequences; all behind their tokens and masked positions is 0."""
    generator = np.random.default_rng(seed)
    mask = np.arange(length) < generator.integers(1, length + 1, (rows, 1))
    used = np.arange(predictions) < generator.integers(0, predictions + 1, (rows, 1))
    return {
        "input_ids": mask * generator.integers(0, 2**bits, mask.shape),
        "input_mask": mask,
        "segment_ids": mask * generator.integers(0, 128, mask.shape),
        "masked_lm_positions": used * generator.integers(0, mask.sum(axis=1, keepdims=True), used.shape),
        "masked_lm_ids": used * generator.integers(0, 2**bits, used.shape),
        "masked_lm_weights": used.astype(np.float32),
        "next_sentence_labels": generator.integers(0, 2, (rows, 1)),
    }


@examples(60)
@given(st.integers(0, 7), st.integers(1, 300), st.integers(1, 40), st.integers(0, 21), st.integers(0, 2**31))
def test_rows_are_what_the_single_encoder_writes(rows: int, length: int, predictions: int, bits: int, seed: int) -> None:
    features = matrices(rows, length, predictions, bits, seed)
    records, lengths = encode_rows(features)
    expected = [frame(encode_example({name: values[row] for name, values in features.items()})) for row in range(rows)]
    assert records.tobytes() == b"".join(expected)
    assert lengths.tolist() == [len(record) for record in expected]


@pytest.mark.parametrize("value", [-1, MAX_TOKEN_ID + 1])
def test_values_out_of_range_are_refused(value: int) -> None:
    features = matrices(2, 9, 3, 12, seed=1)
    features["input_ids"][1, 0] = value
    with pytest.raises(ValueError, match="feature `input_ids` holds"):
        encode_rows(features)


# --- framing


PAYLOADS = [b"", b"a", bytes(range(256)) * 30, b"last"]


def test_frames_are_those_of_the_twin() -> None:
    for payload in PAYLOADS:
        assert frame(payload) == naive.frame(payload)
    handle = io.BytesIO()
    for payload in PAYLOADS:
        handle.write(frame(payload))
    assert naive.unframe(handle.getvalue()) == (PAYLOADS, None)


def test_tensorflow_reads_ours_and_we_read_tensorflows(tmp_path: Path) -> None:
    tensorflow = pytest.importorskip("tensorflow")
    (tmp_path / "ours").write_bytes(b"".join(frame(payload) for payload in PAYLOADS))
    read = [record.numpy() for record in tensorflow.data.TFRecordDataset(str(tmp_path / "ours"))]
    assert read == PAYLOADS
    for compression in ("", "GZIP", "ZLIB"):
        path = tmp_path / f"theirs-{compression}"
        with tensorflow.io.TFRecordWriter(str(path), compression) as writer:
            for payload in PAYLOADS:
                writer.write(payload)
        assert list(read_records(path)) == PAYLOADS


def test_compression_is_seen_and_members_follow_each_other(tmp_path: Path) -> None:
    data = b"".join(frame(payload) for payload in PAYLOADS)
    variants = {"": data, "GZIP": gzip.compress(data[:1000]) + gzip.compress(data[1000:]), "ZLIB": zlib.compress(data)}
    for compression, content in variants.items():
        path = tmp_path / f"file{compression}"
        path.write_bytes(content)
        with RecordStream(path, checksum=True) as stream:
            assert stream.compression == compression
            view, total = memoryview(bytearray(977)), 0
            while count := stream.read_into(view):
                total += count
            assert total == len(data)
            assert (stream.file_bytes, stream.file_crc32c) == (len(content), naive.crc32c(content))
        assert list(read_records(path)) == PAYLOADS


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_damaged_compression_is_refused(tmp_path: Path, compress) -> None:
    data = compress(b"".join(frame(payload) for payload in PAYLOADS * 50))
    path = tmp_path / "file"
    for damaged in (data[:-5], data[: len(data) // 2], data[:40] + bytes([data[40] ^ 255]) + data[41:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=str(path)):
            list(read_records(path))


def test_damage_names_record_and_offset(tmp_path: Path) -> None:
    data = b"".join(frame(payload) for payload in PAYLOADS)
    third = len(frame(PAYLOADS[0])) + len(frame(PAYLOADS[1]))
    path = tmp_path / "file"
    for place, reason in ((third + 2, "its length is damaged"), (third + 50, "its bytes are damaged")):
        path.write_bytes(data[:place] + bytes([data[place] ^ 8]) + data[place + 1 :])
        with pytest.raises(InputError, match=f"record 2 at byte {third}: {reason}"):
            list(read_records(path))
    for end in (third + 5, third + 12, len(data) - len(frame(b"last")) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(InputError, match=f"record 2 at byte {third}: the file is cut short"):
            list(read_records(path))
    path.write_bytes(data[:third] + naive.frame(b"", claimed_length=2**50))
    with pytest.raises(InputError, match=f"record 2 at byte {third}: longer than any legal record"):
        list(read_records(path))


# --- values checked and decoded eight bytes at a time, against one value at a time


BEFORE = b"\x0a\x7fheader..\x7f"  # a field is preceded by its head, whose last byte is below 128


def on_bytes(kernel, data: bytes, *arguments: int) -> int:
    memory = np.frombuffer(BEFORE + data, np.uint8).copy()
    return int(kernel(memory.ctypes.data + len(BEFORE), len(data), *arguments))


def decoded(data: bytes) -> list[tuple[int, int]] | None:
    """(value, bytes) of the varints in `data`; None where the last is cut short."""
    numbers, at = [], 0
    while at < len(data):
        value = size = 0
        while True:
            if at + size >= len(data):
                return None
            byte = data[at + size]
            value |= (byte & 127) << (7 * size)
            size += 1
            if byte < 128:
                break
        numbers.append((value, size))
        at += size
    return numbers


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
        assert on_bytes(kernels.real_bytes, data, values, count) == expected_prefix(data, values, count, 2**21 - 1)


@examples(300)
@given(length=st.one_of(st.integers(1, 300), st.integers(8000, 8192)), data=st.data(), padding=st.integers(0, 20))
def test_scan_positions(length: int, data: st.DataObject, padding: int) -> None:
    near = st.one_of(st.integers(0, length), st.integers(max(0, length - 2), length + 2), st.integers(0, 20_000))
    inside = st.integers(0, length - 1)
    real = data.draw(st.lists(data.draw(st.sampled_from([inside, inside, near])), max_size=40))
    overlong = data.draw(st.integers(0, 8)) == 0
    parts = [varint(value, extra_bytes=overlong and place == 1) for place, value in enumerate(real)]
    encoded = b"".join(parts) + bytes(padding)
    found = on_bytes(kernels.scan_positions, encoded, len(real) + padding, len(real), length)
    assert found == expected_prefix(encoded, len(real) + padding, len(real), length - 1)


@pytest.mark.parametrize("size", [*range(1, 40), 512, 8191])
def test_masks_and_zeros(size: int) -> None:
    rng = np.random.default_rng(size)
    for ones in {0, 1, size // 2, size - 1, size}:
        mask = bytes([1] * ones + [0] * (size - ones))
        assert on_bytes(kernels.count_leading_ones, mask) == ones
        assert on_bytes(kernels.is_zero, mask) == (ones == 0)
        assert on_bytes(kernels.all_bytes_are, mask, 1) == (ones == size)
        floats = np.frombuffer(mask, np.uint8).astype("<f4").tobytes()
        assert on_bytes(kernels.count_unit_floats, floats) == ones
        for _ in range(5):
            place = int(rng.integers(size))
            wrong = bytearray(mask)
            wrong[place] ^= int(rng.choice([1, 2, 3, 128]))
            leading = size - len(wrong.lstrip(b"\1"))
            still = -1 if any(wrong[leading:]) else leading
            assert on_bytes(kernels.count_leading_ones, bytes(wrong)) == still
            wrong_floats = bytearray(floats)
            wrong_floats[4 * place + int(rng.integers(4))] ^= 1 << int(rng.integers(8))
            assert on_bytes(kernels.count_unit_floats, bytes(wrong_floats)) == -1


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
        good = kernels.decode_varints(start, start + len(data), values[:count])
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
