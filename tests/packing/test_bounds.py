"""Bounds that come with every plan."""

from __future__ import annotations

import pytest

from gaudi_bert.packing.bounds import prove_lower_bound
from gaudi_bert.packing.certificate import verify_certified_lower_bound
from gaudi_bert.packing.heuristics import pack_longest_first
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.nnls import _pack_iteratively
from gaudi_bert.packing.strategies import OperationBudget, check_packing, count_packs
from tests.builders.histograms import FEWEST_PACKS, published, scattered


@pytest.mark.parametrize("depth", [2, 3, 4, 16, 512])
@pytest.mark.parametrize("name", ["squad-384", "wikipedia-512"])
def test_quick_bound(name: str, depth: int) -> None:
    counts = published(name).counts
    certificate = prove_lower_bound(counts, depth)
    assert verify_certified_lower_bound(certificate, counts) == certificate.bound
    for strategy_counts in (pack_longest_first(counts, depth), _pack_iteratively(counts, depth)):
        assert certificate.bound <= count_packs(strategy_counts)
    assert certificate.bound == FEWEST_PACKS[name][min(depth, max(FEWEST_PACKS[name]))]


@pytest.mark.parametrize("operations", [0.0, 1e5, 3e6, 1e9])
def test_a_bound_is_a_bound_however_little_was_done(operations: float) -> None:
    counts = scattered(301, 90, 40)
    certificate = prove_lower_bound(counts, 4, OperationBudget(operations))
    assert (
        certificate.bound <= verify_certified_lower_bound(certificate, counts) <= count_packs(pack_longest_first(counts, 4))
    )
    for leftovers in ("best-fit", "complement"):  # a loop that is cut off ends with a packing too
        check_packing(
            _pack_iteratively(counts, 4, leftovers, budget=OperationBudget(operations)), Histogram(len(counts), counts), 4
        )
