from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.packing import algorithms, heuristics
from gaudi_bert.packing.algorithms import ALGORITHMS, pack_histogram, run_algorithm
from gaudi_bert.packing.certificate import prove_bound_by_totals, verify_certified_lower_bound
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.nnls import compute_iterative_nnls_residual_weights
from gaudi_bert.packing.nnls_solver import solve_nnls
from gaudi_bert.packing.strategies import Packing
from tests.builders.command_line import run_python
from tests.builders.histograms import ADVERSARIAL, small_histograms
from tests.builders.properties import examples
from tests.oracles.packing import fewest_packs


def plans() -> str:
    """What the solvers return for some histograms, to the last bit."""
    random, lines = np.random.default_rng(1), []
    for size in (1, 2, 3, 5, 7, 13, 29):
        counts = random.integers(1, 99, size) * random.integers(0, 2, size)
        for depth in {1, 2, 3, 5, size}:
            solution = solve_nnls(counts, compute_iterative_nnls_residual_weights(size), depth)
            lines.append(repr((solution.strategies, solution.usage.tolist(), solution.residual.tolist())))
            if counts.any():
                found = [run_algorithm(counts, algorithm, min(depth, size)) for algorithm in ("nnls", "optimal", "ffd")]
                lines += [
                    repr((each.strategy_counts, each.certificate and each.certificate.prices.tolist())) for each in found
                ]
    return "\n".join(lines)


def test_compiled_and_interpreted_kernels_agree_to_the_last_bit() -> None:
    code = "from tests.packing.test_algorithms import plans; print(plans())"
    done = run_python(code, NUMBA_DISABLE_JIT="1", PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == plans()


@given(histogram=small_histograms(9, 2), depth=st.integers(1, 4))
@examples(40)
def test_every_algorithm_against_trying_everything(histogram: Histogram, depth: int) -> None:
    best = fewest_packs(tuple(histogram.counts.tolist()), depth)
    packings = {algorithm: pack_histogram(histogram, algorithm, depth) for algorithm in ALGORITHMS}
    for packing in packings.values():
        assert packing.lower_bound <= best <= packing.packs
        assert verify_certified_lower_bound(packing.certificate, histogram.counts) == packing.lower_bound
    assert packings["nnls"].packs <= packings["lpfhp"].packs, "the default is never worse than the heuristic"


@pytest.mark.parametrize("case", ADVERSARIAL)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_adversarial(algorithm: str, case: str) -> None:
    histogram = Histogram(len(ADVERSARIAL[case]), ADVERSARIAL[case])
    if algorithm == "greedy" and histogram.sequences > 10**9:
        pytest.skip("greedy lists every sequence, and refuses so many")
    for depth in (1, 2, 3, 13, "max"):
        packing = pack_histogram(histogram, algorithm, depth)
        assert 0 <= packing.efficiency <= 1
        assert packing.packing_factor >= 1
        assert packing.gap >= 0
        assert algorithm != "optimal" or packing.gap <= 1
        if algorithm == "nnls":
            pack_histogram(histogram, algorithm, depth, leftovers="complement")


def test_masked_slots() -> None:
    """As few as are usual or needed; more where they are requested, and never fewer."""
    # A sequence of 2 has up to 1 masked position, one of 4 or of 8 up to 3.
    counts, masked = [0, 4, 0, 4, 0, 0, 0, 1], [0, 1, 0, 3, 0, 0, 0, 3]

    def slots(histogram: Histogram, depth: int | str, **settings: int) -> int | None:
        return pack_histogram(histogram, "lpfhp", depth, **settings).masked_slots

    known, unknown = Histogram(8, counts, masked), Histogram(8, counts)
    assert pack_histogram(known, "lpfhp", 4).masked_slots_needed == 6
    assert [slots(known, 4, max_predictions=most) for most in (20, 1)] == [24, 6]
    assert slots(known, "max", max_predictions=2) == 2 + 4  # the depth `max` promises no more than it uses
    assert slots(known, 4, max_predictions=20, masked_slots=40) == 40
    assert (slots(unknown, 3), slots(unknown, 3, max_predictions=20), slots(unknown, 3, masked_slots=4)) == (None, 23, 4)
    for predictions, least in ((20, 24), (1, 6)):
        with pytest.raises(InputError, match=rf"\b{least}\b"):
            slots(known, 4, max_predictions=predictions, masked_slots=least - 1)


@pytest.mark.parametrize(
    ("packs", "bound", "strategy_counts", "message"),
    [
        (1, 1, {(2,): 1}, "length 2 has 1 slots for 2 sequences"),
        (1, 2, {(2, 2): 1}, "fewer than the lower bound, 2"),
    ],
)
def test_a_wrong_result_is_never_returned(packs: int, bound: int, strategy_counts: dict, message: str) -> None:
    histogram = Histogram(4, [0, 2, 0, 0])
    certificate = prove_bound_by_totals(histogram.counts, 2)
    with pytest.raises(FailedError, match=message):
        Packing(2, packs, 4, 4 * packs, bound, histogram, 2, "x", "x", strategy_counts, certificate)


# --- plans that would not fit in memory


@pytest.mark.parametrize("algorithm", ["lpfhp", "nnls", "optimal"])
def test_strategies_that_list_too_many_sequences_are_refused(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heuristics, "MAX_LISTED", 30)
    histogram = Histogram(31, [100] + [0] * 29 + [1])
    with pytest.raises(InputError, match=r"\b30\b"):
        pack_histogram(histogram, algorithm, "max")
    assert pack_histogram(histogram, algorithm, 8).packs == 14


def test_too_many_different_lengths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "MAX_DISTINCT_LENGTHS", 30)
    with pytest.raises(InputError, match=r"\b31\b.*\b30\b"):
        pack_histogram(Histogram(31, [1] * 31), "optimal", "max")
    assert pack_histogram(Histogram(31, [1] * 30 + [0]), "optimal", "max").gap == 0
