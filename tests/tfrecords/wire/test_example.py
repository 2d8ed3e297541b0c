"""tf.train.Example against protobuf, in both directions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.tfrecords.wire.example import UnpackedRows, decode_example, encode_example, encode_unpacked_rows
from gaudi_bert.tfrecords.wire.framing import frame
from gaudi_bert.tfrecords.wire.schema import MAX_TOKEN_ID, RecordError
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


# --- rows of matrices encoded at once


def random_rows(count: int, length: int, predictions: int, bits: int, seed: int) -> UnpackedRows:
    """Random sequences; behind their tokens and masked positions is what must not be read."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, length + 1, count)
    return UnpackedRows(
        lengths=lengths,
        masked=generator.integers(0, predictions + 1, count),
        input_ids=generator.integers(0, 2**bits, (count, length)),
        segment_ids=generator.integers(0, 128, (count, length)),
        masked_lm_positions=generator.integers(0, lengths[:, None], (count, predictions)),
        masked_lm_ids=generator.integers(0, 2**bits, (count, predictions)),
        next_sentence_labels=generator.integers(0, 2, count),
    )


def features_of(rows: UnpackedRows, row: int) -> dict[str, np.ndarray]:
    """The example of a row; all behind its tokens and masked positions is 0."""
    mask = np.arange(rows.input_ids.shape[1]) < rows.lengths[row]
    used = np.arange(rows.masked_lm_ids.shape[1]) < rows.masked[row]
    along = {name: mask * getattr(rows, name)[row] for name in ("input_ids", "segment_ids")}
    masked = {name: used * getattr(rows, name)[row] for name in ("masked_lm_positions", "masked_lm_ids")}
    others = {"masked_lm_weights": used.astype(np.float32), "next_sentence_labels": rows.next_sentence_labels[[row]]}
    return {**along, **masked, **others, "input_mask": mask}


@examples(60)
@given(st.integers(0, 7), st.integers(1, 300), st.integers(1, 40), st.integers(0, 21), st.integers(0, 2**31))
def test_rows_are_what_the_single_encoder_writes(count: int, length: int, predictions: int, bits: int, seed: int) -> None:
    rows = random_rows(count, length, predictions, bits, seed)
    records, lengths = encode_unpacked_rows(rows)
    expected = [frame(encode_example(features_of(rows, row))) for row in range(count)]
    assert records.tobytes() == b"".join(expected)
    assert lengths.tolist() == [len(record) for record in expected]


@pytest.mark.parametrize("value", [-1, MAX_TOKEN_ID + 1])
def test_values_out_of_range_are_refused(value: int) -> None:
    rows = random_rows(2, 9, 3, 12, seed=1)
    rows.input_ids[1, 0] = value
    with pytest.raises(ValueError, match=f"feature `input_ids`: ids must be from 0 to {MAX_TOKEN_ID}, found .*{value}"):
        encode_unpacked_rows(rows)
