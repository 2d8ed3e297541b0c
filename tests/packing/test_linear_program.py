"""The linear program: strategies from a list, a silent solver, and what its iterations count as."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing import bounds, linear_program
from gaudi_bert.packing.certificate import verify_certified_lower_bound
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.optimal import _pack_by_linear_programs
from gaudi_bert.packing.strategies import count_packs
from tests.builders.histograms import small_histograms
from tests.builders.properties import examples
from tests.oracles import packing as naive


def test_the_solver_is_silent_from_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    highspy = pytest.importorskip("highspy")
    original, printing = highspy.Highs.enableCallbacks, []

    def enable_callbacks(solver: Any) -> None:
        printing.append(solver.getOptionValue("output_flag")[1])
        original(solver)

    monkeypatch.setattr(highspy.Highs, "enableCallbacks", enable_callbacks)
    linear_program.LinearProgram.from_heuristic(np.array([0, 5, 3, 7, 0, 2, 0, 1]), 8)
    assert printing == [False]


@given(small_histograms(9, 2), st.integers(1, 9))
@examples(60)
def test_plans_from_a_list_against_trying_everything(histogram: Histogram, depth: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_program, "LONGEST_TABLE", 3)
        patch.setattr(linear_program, "MAX_EXACT_LENGTH", 3)
        patch.setattr(bounds, "LONGEST_TABLE", 3)
        optimum = _pack_by_linear_programs(histogram.counts, depth)
    fewest = naive.fewest_packs(tuple(histogram.counts.tolist()), depth)
    assert count_packs(optimum.strategy_counts) == fewest
    assert verify_certified_lower_bound(optimum.certificate, histogram.counts) == optimum.certificate.bound <= fewest
