from __future__ import annotations

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.estimate import ESTIMATE_ALGORITHMS, estimate_packing, scan_lengths
from gaudi_bert.packing.histogram import Histogram
from tests.builders.histograms import expected, published


def test_a_row() -> None:
    row = expected()["lpfhp"]["squad-384"]["3"]
    estimate = estimate_packing(published("squad-384"), "lpfhp", 3, 40_195)
    assert (estimate.packs, estimate.gap, estimate.depth_used) == (row["packs"], row["packs"] - 40_195, 3)
    assert 100 * estimate.efficiency == pytest.approx(row["efficiency"], abs=1e-6)
    assert estimate.packing_factor == pytest.approx(row["packing_factor"], abs=1e-6)


def test_sorting_and_separators() -> None:
    histogram = published("squad-384")
    sort = estimate_packing(histogram, "sort", 1, 88_641)
    assert sort.lower_bound is None
    assert sort.gap is None
    assert sort.efficiency > 0.99
    plain, two = (estimate_packing(histogram, name, "max", 0, seed=5) for name in ("greedy", "greedy+2"))
    assert plain.efficiency > two.efficiency


def test_every_algorithm_packs_a_small_histogram() -> None:
    histogram = Histogram(7, [4, 0, 3, 5, 0, 1, 2])
    for name in ESTIMATE_ALGORITHMS:
        estimate = estimate_packing(histogram, name, "max", histogram.token_bound)
        assert estimate.packs >= histogram.token_bound or name == "sort"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="did you mean `lpfhp`"):
        estimate_packing(published("squad-384"), "lpfph", 3, None)


def test_longer_packs_for_the_same_sequences() -> None:
    # The paper's point in small: 2/3-full rows pack badly at their own length and perfectly at the right longer one.
    histogram = Histogram(27, [0] * 17 + [900] + [0] * 9)
    own, longer = scan_lengths(histogram, "max", lengths=[27, 36])
    assert (own.packs, longer.packs) == (900, 450)
    assert own.efficiency == pytest.approx(2 / 3)
    assert longer.efficiency == 1.0
    assert longer.fewer_slots == pytest.approx(1.5)
    assert longer.attention_cost == pytest.approx(450 * 36**2 / (900 * 27**2))
    with pytest.raises(InputError, match="less than the longest sequence"):
        scan_lengths(histogram, 3, lengths=[17])
