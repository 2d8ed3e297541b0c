from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.packing import algorithms, heuristics
from gaudi_bert.packing.algorithms import ALGORITHMS, pack_histogram, solve
from gaudi_bert.packing.certificate import check_certificate, simple_certificate
from gaudi_bert.packing.heuristics import pack_longest_first
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import Packing, packs_of
from gaudi_bert.packing.nnls import loop_weights
from gaudi_bert.packing.nnls_solver import solve_nnls
from tests.builders.agree import agree
from tests.builders.command_line import run_python
from tests.builders.effort import sampled
from tests.builders.histograms import ADVERSARIAL, expected, published, small_histograms
from tests.builders.properties import examples
from tests.oracles.packing import fewest_packs


def plans(seed: int) -> str:
    """What the solvers return for some histograms, to the last bit."""
    random, lines = np.random.default_rng(seed), []
    for size in (1, 2, 3, 5, 7, 13, 29, 41):
        counts = random.integers(1, 99, size) * random.integers(0, 2, size)
        for depth in {1, 2, 3, 5, size}:
            solution = solve_nnls(counts, loop_weights(size), depth)
            lines.append(repr((solution.strategies, solution.usage.tolist(), solution.residual.tolist(), solution.rounds)))
            if counts.any():
                found = [solve(counts, algorithm, min(depth, size)) for algorithm in ("nnls", "optimal", "ffd")]
                lines += [repr((each.mixture, each.certificate and each.certificate.prices.tolist())) for each in found]
    return "\n".join(lines)


@pytest.mark.parametrize("seed", sampled([1, 2], 2))
def test_compiled_and_interpreted_kernels_agree_to_the_last_bit(seed: int) -> None:
    code = f"from tests.packing.test_algorithms import plans; print(plans({seed}))"
    done = run_python(code, NUMBA_DISABLE_JIT="1", PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == plans(seed)


@given(histogram=small_histograms(16, 9), depth=st.integers(1, 6))
@examples(60)
def test_the_default_is_never_worse_on_any_histogram(histogram: Histogram, depth: int) -> None:
    heuristic = packs_of(pack_longest_first(histogram.counts, depth))
    assert packs_of(solve(histogram.counts, "nnls", depth).mixture) <= heuristic


@pytest.mark.parametrize(
    ("name", "depth", "above"),
    [("wikipedia-512", 3, 6000), ("wikipedia-512", 4, 5), ("wikipedia-384", 3, 5), ("squad-384", 3, 200)],
)
def test_the_default_comes_near_the_bound(name: str, depth: int, above: int) -> None:
    assert pack_histogram(published(name), "nnls", depth).gap <= above


def test_a_packing_says_what_it_used() -> None:
    assert pack_histogram(published("wikipedia-128"), "nnls", 3).algorithm_used == "lpfhp"
    assert pack_histogram(published("wikipedia-384"), "nnls", 3).algorithm_used == "iterative-nnls"
    packing = pack_histogram(published("squad-384"), "nnls", 3, leftovers="complement")
    assert abs(packing.packs - 40_798) <= 50
    assert packing.algorithm_used == "iterative-nnls-complement"


def test_every_number_of_a_packing() -> None:
    histogram = published("squad-384")
    packing = pack_histogram(histogram, "lpfhp", 3)
    row = expected()["lpfhp"]["squad-384"]["3"]
    limits = expected()["proven_limits"]["values"]["squad-384"]["3+"]
    assert (packing.packs, packing.padding_tokens) == (row["packs"], row["padding"])
    agree(100 * packing.efficiency, row["efficiency"], 1e-6, scale=1.0)
    agree(packing.packing_factor, row["packing_factor"], 1e-6, scale=1.0)
    assert packing.lower_bound == limits["lower_bound"]
    assert packing.gap == row["packs"] - limits["lower_bound"]
    assert (packing.depth_used, len(packing.mixture)) == (3, row["n_strategies"])
    assert packing.token_bound == 39_713


@given(histogram=small_histograms(9, 2), depth=st.integers(1, 4))
@examples(25)
def test_every_algorithm_against_trying_everything(histogram: Histogram, depth: int) -> None:
    best = fewest_packs(tuple(histogram.counts.tolist()), depth)
    for algorithm in ALGORITHMS:
        packing = pack_histogram(histogram, algorithm, depth)
        assert packing.lower_bound <= best <= packing.packs
        assert check_certificate(packing.certificate, histogram.counts) == packing.lower_bound


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


def test_results_are_deterministic() -> None:
    histogram = published("squad-384")
    for algorithm in ("nnls", "optimal", "nnlshp", "ennlshp", "greedy", "ffd"):
        once, again = (pack_histogram(histogram, algorithm, 3, seed=4) for _ in range(2))
        assert list(once.mixture.items()) == list(again.mixture.items())


def test_masked_slots() -> None:
    lengths = np.arange(1, 129)
    masked = np.maximum(1, np.rint(0.15 * lengths)).astype(np.int64)
    histogram = Histogram(128, published("wikipedia-128").counts, masked)
    usual = pack_histogram(histogram, "lpfhp", 3, max_predictions=20)
    assert usual.masked_slots == 23
    assert usual.masked_slots_needed is not None
    assert usual.masked_slots_needed <= 21
    with pytest.raises(InputError, match="masked_slots is 22, these packs need 23"):
        pack_histogram(histogram, "lpfhp", 3, max_predictions=20, masked_slots=22)
    # The depth `max` promises no more than it uses.
    histogram = Histogram(8, [0, 4, 0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0, 2])
    assert pack_histogram(histogram, "lpfhp", "max", max_predictions=2).masked_slots == 2 + 4


def test_bad_depths_and_algorithms_are_refused() -> None:
    with pytest.raises(InputError, match="it must be an integer from 1, or `max`"):
        pack_histogram(published("squad-384"), "lpfhp", 0)
    with pytest.raises(InputError, match="algorithm `nnsl` is unknown; did you mean `nnls"):
        pack_histogram(published("squad-384"), "nnsl")


@pytest.mark.parametrize(
    ("packs", "bound", "mixture", "message"),
    [
        (1, 1, {(2,): 1}, "length 2 has 1 slots for 2 sequences"),
        (2, 1, {(2, 2): 1}, "2 packs, but the mixture has 1"),
        (1, 2, {(2, 2): 1}, "fewer than the bound 2"),
    ],
)
def test_a_wrong_result_is_never_returned(packs: int, bound: int, mixture: dict, message: str) -> None:
    histogram = Histogram(4, [0, 2, 0, 0])
    certificate = simple_certificate(histogram.counts, 2)
    with pytest.raises(FailedError, match=message):
        Packing(2, packs, 4, 4 * packs, bound, histogram, 2, "x", "x", mixture, certificate)


# --- plans that would not fit in memory


@pytest.mark.parametrize("algorithm", ["lpfhp", "nnls", "optimal"])
def test_strategies_that_list_too_many_sequences_are_refused(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heuristics, "MOST_LISTED", 30)
    histogram = Histogram(31, [100] + [0] * 29 + [1])
    with pytest.raises(InputError, match="list more than 30 sequences; give a smaller depth"):
        pack_histogram(histogram, algorithm, "max")
    assert pack_histogram(histogram, algorithm, 8).packs == 14


def test_too_many_different_lengths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "MOST_DIFFERENT", 30)
    with pytest.raises(InputError, match="31 different lengths; at most 30 can be planned: give a max_sequence_length"):
        pack_histogram(Histogram(31, [1] * 31), "optimal", "max")
    assert pack_histogram(Histogram(31, [1] * 30 + [0]), "optimal", "max").gap == 0
