from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.heuristics.sorted_batches import sort_into_batches
from gaudi_bert.packing.histogram import Histogram
from tests.builders.histograms import published, small_histograms
from tests.builders.properties import examples
from tests.oracles.packing import sorted_batches


@given(histogram=small_histograms(), batch=st.integers(1, 9))
@examples(120)
def test_equals_sorting_and_cutting(histogram: Histogram, batch: int) -> None:
    result = sort_into_batches(histogram.counts, batch)
    assert (result.batches, result.padded_tokens) == sorted_batches(histogram.counts, batch)
    assert result.shapes <= result.batches


def test_published_histogram_wastes_next_to_nothing() -> None:
    histogram = published("wikipedia-512")
    result = sort_into_batches(histogram.counts, 256)
    assert 0.9999 < histogram.tokens / result.padded_tokens <= 1
    assert result.shapes == 508


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(InputError, match="batch_sequences is 0"):
        sort_into_batches(published("squad-384").counts, 0)
