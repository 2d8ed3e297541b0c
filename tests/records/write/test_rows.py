"""Rows of matrices encoded at once, against the encoder of single examples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.records.wire.example import encode_example
from gaudi_bert.records.wire.framing import frame
from gaudi_bert.records.write.rows import encode_rows
from tests.builders.properties import examples


@examples(60)
@given(
    st.integers(0, 7),
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 31), st.booleans()), min_size=1, max_size=9),
    st.integers(0, 2**31),
)
def test_every_row_is_what_the_single_encoder_and_framing_write(
    rows: int, shapes: list[tuple[int, int, bool]], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    features: dict[str, np.ndarray] = {}
    for number, (width, bits, is_float) in enumerate(shapes):
        name = "abcdefghi"[(number * 7) % 9] * (1 + width % 24)
        if is_float:
            features[name] = generator.normal(size=(rows, width)).astype(np.float32)
        else:
            features[name] = generator.integers(0, 2**bits, (rows, width), dtype=np.int64)
    records, lengths = encode_rows(features)
    expected = [frame(encode_example({name: values[row] for name, values in features.items()})) for row in range(rows)]
    assert records.tobytes() == b"".join(expected)
    assert lengths.tolist() == [len(record) for record in expected]


@pytest.mark.parametrize("value", [-1, 2**31])
def test_values_out_of_range_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="feature `a` holds"):
        encode_rows({"a": np.array([[3, value]])})
