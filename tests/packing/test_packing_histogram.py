from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.histogram import Histogram, merge_histograms, rescaled


def test_counts_tokens_and_bound() -> None:
    histogram = Histogram(5, [3, 0, 2, 0, 1])
    assert (histogram.sequences, histogram.tokens, histogram.token_bound) == (6, 14, 3)
    assert histogram.counts.dtype == np.int64
    assert histogram.masked_of(3) == 0


def test_the_counts_cannot_be_changed() -> None:
    given = np.array([1, 2, 3])
    histogram = Histogram(3, given)
    given[0] = 9
    assert histogram.counts.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        histogram.counts[0] = 5


@pytest.mark.parametrize(
    ("length", "counts", "message"),
    [
        (3, [1, 2], "counts has 2 entries; it must have one for each length 1 .. 3"),
        (3, [1, -2, 0], "counts holds -2 at length 2; it must be 0 or more"),
        (3, [1, 2.5, 0], "counts holds 2.5 at length 2; it must be a whole number"),
        (3, [1, "2", 0], "counts holds '2' at length 2"),
        (3, [True, 2, 0], "counts holds True at length 1"),
        (3, [1, 2**63, 0], "at length 2; it must be a whole number"),
        (2, [2**61, 2**61], "tokens; split the data"),
        (2, {"a": 1}, "counts must be a list"),
        (2, None, "counts must be a list"),
        (2, [[1], [2]], "counts must be a list"),
        (0, [], "max_sequence_length is 0; it must be at least 1"),
        ("8", [1] * 8, "max_sequence_length is '8'"),
        (True, [1], "max_sequence_length is True"),
    ],
)
def test_bad_values_are_named(length: object, counts: object, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        Histogram(length, counts)  # type: ignore[arg-type]


def test_merging_adds_counts_and_keeps_the_largest_masked_count() -> None:
    merged = merge_histograms([Histogram(3, [1, 0, 2], [1, 0, 2]), Histogram(3, [0, 4, 1], [0, 1, 3])])
    assert merged.counts.tolist() == [1, 4, 3]
    assert merged.max_masked is not None
    assert merged.max_masked.tolist() == [1, 1, 3]
    assert merge_histograms([Histogram(2, [1, 1], [0, 0]), Histogram(2, [1, 1])]).max_masked is None


def test_merging_refuses_other_lengths_and_nothing() -> None:
    with pytest.raises(InputError, match="different max_sequence_length cannot be merged: 2, 3"):
        merge_histograms([Histogram(2, [1, 1]), Histogram(3, [1, 1, 1])])
    with pytest.raises(InputError, match="give at least one"):
        merge_histograms([])


def test_other_capacity_keeps_the_sequences() -> None:
    histogram = Histogram(4, [1, 2, 3, 0], [0, 1, 1, 0])
    assert rescaled(histogram, 6).counts.tolist() == [1, 2, 3, 0, 0, 0]
    assert rescaled(histogram, 3).tokens == histogram.tokens
    with pytest.raises(InputError, match="less than the longest sequence, 3 tokens"):
        rescaled(histogram, 2)
    assert rescaled(Histogram(4, [0] * 4), 2).sequences == 0
