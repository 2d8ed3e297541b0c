"""Records as bytes: tf.train.Example against protobuf, TFRecord framing against TensorFlow; damage is refused and named."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.oracles.wire as naive
from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.wire.example import decode_example, encode_example
from gaudi_bert.tfrecords.wire.framing import RecordStream, frame, read_records, write_record
from gaudi_bert.tfrecords.wire.schema import MAX_TOKEN_ID, RecordError
from gaudi_bert.tfrecords.wire.unpacked_encoder import encode_rows
from tests.builders.properties import examples
from tests.oracles.wire import field


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
        write_record(handle, payload)
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
