"""What packing would give, without writing anything: every algorithm at every depth, other lengths of a pack, un-padding."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from gaudi_bert.common.arrays import FloatArray
from gaudi_bert.packing.algorithms import ALGORITHMS, resolve_depth, run_algorithm
from gaudi_bert.packing.heuristics import count_greedy_packs, count_sorted_tokens
from gaudi_bert.packing.histogram import Histogram, resize_histogram
from gaudi_bert.packing.strategies import AlgorithmResult, WorkBudget, count_packs

SEPARATORS = {"greedy+1": 1, "greedy+2": 2}
ESTIMATE_ALGORITHMS = (*ALGORITHMS, *SEPARATORS, "sort")
SORTED_BATCH_SEQUENCES = 256
LENGTH_FACTORS = (1.0, 1.125, 1.25, 4 / 3, 1.5, 2.0)


@dataclass(frozen=True)
class Estimate:
    """Quality of one algorithm at one depth, and what it took."""

    algorithm: str  # a key of `ALGORITHMS`, `greedy+1` and `greedy+2` (separator tokens), or `sort`
    algorithm_used: str  # what packed, where `algorithm` chooses
    depth: int | str
    packs: int  # for `sort`, the padded tokens in units of a pack, rounded up
    efficiency: float  # real tokens / slots, 0..1
    packing_factor: float
    lower_bound: int | None  # None for `sort`, which has no packs
    depth_used: int | None  # sequences of the fullest pack; None without a mixture
    strategies_used: int | None  # different strategies; None likewise
    gap: int | None = field(init=False)  # packs above the bound; None for `sort`
    seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "gap", None if self.lower_bound is None else self.packs - self.lower_bound)


@dataclass(frozen=True)
class LengthEstimate:
    """Packs of another length."""

    max_sequence_length: int
    packs: int
    efficiency: float
    fewer_slots: float  # slots of unpacked rows of the data's own length / slots here: the speed-up of all that is linear
    attention_cost: float  # cost of full attention here / unpacked: packs times the squares of their lengths


def estimate_packing(
    histogram: Histogram, algorithm: str, depth: int | str, lower_bound: int | None, work: WorkBudget | None = None
) -> Estimate:
    """Pack by one algorithm and say how good it is; the bound proven at this depth is raised where it proves more."""
    length, most = histogram.max_sequence_length, resolve_depth(depth, histogram.max_sequence_length)
    started = time.perf_counter()
    slots, solved = _count_slots_used(histogram, algorithm, most, work)
    seconds = time.perf_counter() - started
    packs = -(-slots // length)
    if algorithm == "sort":
        lower_bound = None
    elif lower_bound is not None and solved is not None and solved.certificate is not None:
        lower_bound = max(lower_bound, solved.certificate.bound)
    return Estimate(
        algorithm=algorithm,
        algorithm_used=algorithm if solved is None else solved.algorithm_used,
        depth=depth,
        packs=packs,
        efficiency=histogram.tokens / slots,
        packing_factor=histogram.sequences / packs,
        lower_bound=lower_bound,
        depth_used=None if solved is None else max(map(len, solved.strategy_counts)),
        strategies_used=None if solved is None else len(solved.strategy_counts),
        seconds=round(seconds, 4),
    )


def _count_slots_used(
    histogram: Histogram, algorithm: str, depth: int, work: WorkBudget | None
) -> tuple[int, AlgorithmResult | None]:
    """The slots that are used, and the mixture, if there is one."""
    if algorithm == "sort":
        return count_sorted_tokens(histogram.counts, SORTED_BATCH_SEQUENCES), None
    solved = None
    if algorithm == "greedy" or algorithm in SEPARATORS:
        packs = count_greedy_packs(histogram.counts, depth, seed=0, separators=SEPARATORS.get(algorithm, 0))
    else:
        solved = run_algorithm(histogram.counts, algorithm, depth, work=work)
        packs = count_packs(solved.strategy_counts)
    return packs * histogram.max_sequence_length, solved


def estimate_row_lengths(histogram: Histogram, depth: int | str) -> list[LengthEstimate]:
    """Pack the same sequences by LPFHP into packs of the data's own length and of others, up to twice that (paper Q).

    A pack may be longer than the longest sequence: that costs attention (quadratic in the length of a pack, if the complete
    square is computed) and saves padding.
    """
    own = histogram.max_sequence_length
    rows = []
    for length in sorted({round(own * factor) for factor in LENGTH_FACTORS}):
        longer = resize_histogram(histogram, length)
        packs = sum(run_algorithm(longer.counts, "lpfhp", resolve_depth(depth, length)).strategy_counts.values())
        rows.append(
            LengthEstimate(
                length,
                packs,
                histogram.tokens / (packs * length),
                histogram.sequences * own / (packs * length),
                packs * length**2 / (histogram.sequences * own**2),
            )
        )
    return rows


# --- why packing scales and un-padding does not (paper 4.4 and appendix E)
#
# Un-padding processes only real tokens, so a batch takes as long as it has tokens, and all accelerators wait for the
# slowest. The paper finds the speed-ups measured on 8 GPUs Gumbel distributed, and derives one device's distribution from
# 1 - P_8(s) = (1 - P_1(s))^8 at the median and at the mode; both are linear in location and scale: location 1.94 as
# printed, scale 0.318 (printed: 0.108, which fits neither equation; the paper's 50 % at 32 accelerators and 30 % at 2048
# follow from 0.318). The expected speed-up of n accelerators is that of the slowest of n draws, by integration.

ACCELERATORS = tuple(2**exponent for exponent in range(12))
DEVICE_SEQUENCES = 32
QUANTILES = 200_000


@dataclass(frozen=True)
class UnpaddingEstimate:
    """Expected speed-up on some accelerators: un-padding as the paper measured it, an ideal one of these data, packing."""

    accelerators: int
    unpadding: float
    ideal_unpadding: float
    packing: float


_Gumbel = tuple[float, float]
"""Location and scale of the Gumbel distribution P(s) = exp(-exp(-(s - location) / scale))."""

MEASURED_ON_8: _Gumbel = (1.6038, 0.1288)
"""Speed-up of un-padding over padding on 8 GPUs, BERT pretraining on Wikipedia, 32 sequences each (paper E)."""


def _gumbel_quantile(distribution: _Gumbel, share: FloatArray) -> FloatArray:
    """The value that `share` (0 < share < 1) of all draws stay below."""
    location, scale = distribution
    value: FloatArray = location - scale * np.log(-np.log(share))
    return value


def compare_with_unpadding(histogram: Histogram, packing_factor: float) -> list[UnpaddingEstimate]:
    """Compare packing, whose speed-up is its factor on any number of accelerators, with un-padding."""
    # One device: the slowest of 8 has the measured median and mode (equations 13, 14).
    shares = np.array([0.5, np.exp(-1.0)])
    median, mode = _gumbel_quantile(MEASURED_ON_8, shares)
    scores = _gumbel_quantile((0.0, 1.0), 1 - (1 - shares) ** (1 / 8))
    scale = float((median - mode) / (scores[0] - scores[1]))
    one_device = float(mode - scale * scores[1]), scale
    # The slowest of n is below s with probability 1 - (1 - P(s))^n; expm1 and log1p keep the small tail exact.
    draws = np.log1p(-(np.arange(QUANTILES) + 0.5) / QUANTILES)
    return [
        UnpaddingEstimate(
            accelerators=count,
            unpadding=float(_gumbel_quantile(one_device, -np.expm1(draws / count)).mean()),
            ideal_unpadding=_ideal_unpadding_speedup(histogram, count),
            packing=packing_factor,
        )
        for count in ACCELERATORS
    ]


def _ideal_unpadding_speedup(histogram: Histogram, accelerators: int) -> float:
    """Expected speed-up of an ideal un-padding on these data, whose time is exactly the tokens of the largest batch.

    The tokens of a device's batch are taken as normally distributed; `accelerators` devices wait for each other.
    """
    lengths = np.arange(1, histogram.max_sequence_length + 1)
    shares = histogram.counts / histogram.sequences
    mean = float(shares @ lengths)
    variance = float(shares @ (lengths - mean) ** 2)
    quantiles = (np.arange(QUANTILES // 100) + 0.5) / (QUANTILES // 100)
    largest = np.array([NormalDist().inv_cdf(share) for share in quantiles ** (1 / accelerators)])
    tokens = mean * DEVICE_SEQUENCES + float(largest.mean()) * np.sqrt(variance * DEVICE_SEQUENCES)
    padded_tokens = histogram.max_sequence_length * DEVICE_SEQUENCES
    return float(padded_tokens / min(tokens, padded_tokens))
