"""Estimates of how well a data set can be packed. Nothing is written.

`estimate_packing` packs the histogram by one algorithm at one depth. `estimate_longer_packs` tries longer packs for the same
sequences. `compare_with_unpadding` predicts how packing and un-padding scale with the number of accelerators.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import FloatArray
from gaudi_bert.packing.algorithms import ALGORITHMS, resolve_depth, run_algorithm
from gaudi_bert.packing.heuristics import count_greedy_packs, count_tokens_of_sorted_batches
from gaudi_bert.packing.histogram import Histogram, resize_histogram
from gaudi_bert.packing.strategies import OperationBudget, count_packs

# The number of separator tokens that these variants of `greedy` insert between two sequences in a pack.
SEPARATORS = {"greedy+1": 1, "greedy+2": 2}
# An estimate can compare these algorithms. "sort" is sorted batching, which does not pack.
ESTIMATE_ALGORITHMS = (*ALGORITHMS, *SEPARATORS, "sort")
# The number of sequences per batch if the sequences are sorted by length before batching.
SORTED_BATCH_SEQUENCES = 256
# The pack lengths to try, as multiples of the current `max_sequence_length`.
LENGTH_FACTORS = (1.0, 1.125, 1.25, 4 / 3, 1.5, 2.0)


@dataclass(frozen=True)
class Estimate:
    """The result of packing a histogram with one algorithm at one depth, including the number of packs, the efficiency and
    the time.
    """

    algorithm: str  # a key of `ALGORITHMS`, `greedy+1` or `greedy+2` (with separator tokens), or `sort`
    algorithm_used: str  # the algorithm that produced the packs, if `algorithm` chooses between several
    depth: int | str
    packs: int  # for `sort`: padded tokens / pack length, rounded up
    efficiency: float  # non-padding tokens / slots, from 0 to 1
    packing_factor: float
    lower_bound: int | None  # None for `sort`, which has no packs
    depth_used: int | None  # the maximum number of sequences in any pack; None if there are no strategies
    strategies_used: int | None  # number of distinct strategies; None if there are none
    gap: int | None = field(init=False)  # packs above the lower bound; None for `sort`
    seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "gap", None if self.lower_bound is None else self.packs - self.lower_bound)


@dataclass(frozen=True)
class LengthEstimate:
    """The result of packing a data set into packs of one particular length, including the number of packs and the cost of
    attention.
    """

    max_sequence_length: int
    packs: int
    efficiency: float
    # The slots of unpacked rows divided by the slots of these packs. This ratio is the speed-up if the cost is proportional
    # to the slots.
    fewer_slots: float
    attention_cost: float  # cost of full attention relative to unpacked rows: packs times squared length


def estimate_packing(
    histogram: Histogram, algorithm: str, depth: int | str, lower_bound: int | None, budget: OperationBudget | None = None
) -> Estimate:
    """Pack the histogram with one algorithm at one depth, and return the quality metrics and the time.

    Args:
        histogram: the sequences, at least one.
        algorithm: one of `ESTIMATE_ALGORITHMS`.
        depth: the maximum number of sequences per pack, or "max".
        lower_bound: a bound already proven for this depth, or None. If the algorithm proves a higher bound, the higher one
            is used.
        budget: an operation budget shared by several estimates, or None for the algorithm's own budget.
    """
    length, max_depth = histogram.max_sequence_length, resolve_depth(depth, histogram.max_sequence_length)
    started = time.perf_counter()
    result = None
    if algorithm == "sort":
        slots = count_tokens_of_sorted_batches(histogram.counts, SORTED_BATCH_SEQUENCES)
        lower_bound = None
    elif algorithm == "greedy" or algorithm in SEPARATORS:
        slots = length * count_greedy_packs(histogram.counts, max_depth, seed=0, separators=SEPARATORS.get(algorithm, 0))
    else:
        result = run_algorithm(histogram.counts, algorithm, max_depth, budget=budget)
        slots = length * count_packs(result.strategy_counts)
        if lower_bound is not None and result.certificate is not None:
            lower_bound = max(lower_bound, result.certificate.bound)
    seconds = time.perf_counter() - started
    packs = -(-slots // length)
    return Estimate(
        algorithm=algorithm,
        algorithm_used=algorithm if result is None else result.algorithm_used,
        depth=depth,
        packs=packs,
        efficiency=histogram.tokens / slots,
        packing_factor=histogram.sequences / packs,
        lower_bound=lower_bound,
        depth_used=None if result is None else max(map(len, result.strategy_counts)),
        strategies_used=None if result is None else len(result.strategy_counts),
        seconds=round(seconds, 4),
    )


def estimate_longer_packs(histogram: Histogram, depth: int | str) -> list[LengthEstimate]:
    """Pack the sequences into packs of up to twice the current length with the LPFHP heuristic, and return one estimate per
    pack length.

    See appendix Q of the paper.

    A pack that is longer than the longest sequence wastes less padding. However, attention costs more, because its cost
    grows with the square of the pack length if the full attention matrix is computed.
    """
    own = histogram.max_sequence_length
    rows = []
    for length in sorted({round(own * factor) for factor in LENGTH_FACTORS}):
        counts = resize_histogram(histogram, length).counts
        packs = count_packs(run_algorithm(counts, "lpfhp", resolve_depth(depth, length)).strategy_counts)
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
# Un-padding processes only non-padding tokens, so the time of a batch depends on its number of tokens, and all accelerators
# wait for the slowest one. The paper finds that the speed-ups measured on 8 GPUs follow a Gumbel distribution. It derives
# the distribution of a single device from 1 - P_8(s) = (1 - P_1(s))^8 at the median and at the mode. Both are linear in
# location and scale: the location is 1.94 as printed, and the scale is 0.318. (The paper prints 0.108, which satisfies
# neither equation; its results of 50 % at 32 accelerators and 30 % at 2048 follow from 0.318.) The expected speed-up of n
# accelerators is that of the slowest of n draws, which is integrated numerically.

ACCELERATORS = tuple(2**exponent for exponent in range(12))
DEVICE_SEQUENCES = 32
QUANTILES = 200_000


@dataclass(frozen=True)
class UnpaddingEstimate:
    """The expected speed-ups over padding for a given number of accelerators, from packing and from un-padding. Un-padding
    processes only non-padding tokens.

    Attributes:
        accelerators: The number of accelerators.
        unpadding: The speed-up of un-padding as the paper measured it.
        ideal_unpadding: The speed-up of un-padding this data set if the time were proportional to the tokens.
        packing: The speed-up of packing.
    """

    accelerators: int
    unpadding: float
    ideal_unpadding: float
    packing: float


class _Gumbel(NamedTuple):
    """The parameters of the Gumbel distribution P(s) = exp(-exp(-(s - location) / scale))."""

    location: float
    scale: float


# The paper measured this distribution of the speed-up of un-padding over padding on 8 GPUs, for BERT pretraining on
# Wikipedia with 32 sequences per GPU (appendix E).
MEASURED_ON_8 = _Gumbel(1.6038, 0.1288)


def _compute_gumbel_quantiles(distribution: _Gumbel, probabilities: FloatArray) -> FloatArray:
    """Return the quantiles of a Gumbel distribution at the given probabilities, which must lie between 0 and 1."""
    value: FloatArray = distribution.location - distribution.scale * np.log(-np.log(probabilities))
    return value


def compare_with_unpadding(histogram: Histogram, packing_factor: float) -> list[UnpaddingEstimate]:
    """Return the expected speed-ups of packing and of un-padding for 1 to 2,048 accelerators. Un-padding processes only
    non-padding tokens, so all accelerators wait for the one with the most tokens.

    The speed-up of packing is its packing factor on any number of accelerators.
    """
    # Fit the speed-up distribution of a single device so that the slowest of 8 devices has the measured median and mode
    # (equations 13 and 14).
    probabilities = np.array([0.5, np.exp(-1.0)])
    median, mode = _compute_gumbel_quantiles(MEASURED_ON_8, probabilities)
    scores = _compute_gumbel_quantiles(_Gumbel(0.0, 1.0), 1 - (1 - probabilities) ** (1 / 8))
    scale = float((median - mode) / (scores[0] - scores[1]))
    one_device = _Gumbel(float(mode - scale * scores[1]), scale)
    # The slowest of n devices has a speed-up below s with probability 1 - (1 - P(s))^n. Computing this directly would round
    # small probabilities to 0, so use expm1 and log1p.
    draws = np.log1p(-(np.arange(QUANTILES) + 0.5) / QUANTILES)
    return [
        UnpaddingEstimate(
            accelerators=count,
            unpadding=float(_compute_gumbel_quantiles(one_device, -np.expm1(draws / count)).mean()),
            ideal_unpadding=_estimate_ideal_unpadding_speedup(histogram, count),
            packing=packing_factor,
        )
        for count in ACCELERATORS
    ]


def _estimate_ideal_unpadding_speedup(histogram: Histogram, accelerators: int) -> float:
    """Return the expected speed-up of ideal un-padding, where the time of a batch is exactly proportional to its non-padding
    tokens.

    The tokens of a device's batch are assumed to be normally distributed. All `accelerators` devices wait for the largest
    batch.
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
