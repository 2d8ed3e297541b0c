"""What packing would give, without writing anything: every algorithm at every depth, and other lengths of a pack.

`scan_lengths` is the paper's appendix Q: a pack may be longer than the longest sequence, which costs attention (quadratic
in the length of a pack, if the whole square is computed) and saves padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gaudi_bert.packing.algorithms import ALGORITHMS, depth_of, solve
from gaudi_bert.packing.heuristics.sorted_batches import sort_into_batches
from gaudi_bert.packing.histogram import Histogram, rescaled
from gaudi_bert.packing.work import Work

__all__ = ["ESTIMATE_ALGORITHMS", "Estimate", "LengthEstimate", "estimate_packing", "scan_lengths"]

SEPARATORS = {"greedy+1": 1, "greedy+2": 2}
ESTIMATE_ALGORITHMS = (*ALGORITHMS, *SEPARATORS, "sort")
SORTED_BATCH_SEQUENCES = 256
LENGTH_FACTORS = (1.0, 1.125, 1.25, 4 / 3, 1.5, 2.0)


@dataclass(frozen=True)
class Estimate:
    """Quality of one algorithm at one depth.

    Attributes:
        algorithm: a key of `ALGORITHMS`, `greedy+1` and `greedy+2` (separator tokens), or `sort`.
        algorithm_used: what made it, where `algorithm` chooses.
        depth: as asked for, a number or "max".
        packs: number of packs; for `sort`, the padded tokens in units of a pack, rounded up.
        efficiency: real tokens / slots, 0..1.
        packing_factor: sequences / packs.
        lower_bound: proven at this depth; None for `sort`, which has no packs.
        depth_used: sequences of the fullest pack; None where nothing is packed or no mixture is made.
        strategies_used: different strategies; None likewise.
        gap: packs above the proven bound; None for `sort`.
    """

    algorithm: str
    algorithm_used: str
    depth: int | str
    packs: int
    efficiency: float
    packing_factor: float
    lower_bound: int | None
    depth_used: int | None
    strategies_used: int | None
    gap: int | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gap", None if self.lower_bound is None else self.packs - self.lower_bound)


@dataclass(frozen=True)
class LengthEstimate:
    """Packs of another length.

    Attributes:
        max_sequence_length: length of a pack.
        packs: number of packs.
        efficiency: real tokens / slots, 0..1.
        fewer_slots: slots of unpacked rows of the data's own length / slots here: the speed-up of all that is linear.
        attention_cost: the same for the squares of the lengths, inverted: cost of full attention here relative to unpacked.
    """

    max_sequence_length: int
    packs: int
    efficiency: float
    fewer_slots: float
    attention_cost: float


def estimate_packing(
    histogram: Histogram,
    algorithm: str,
    depth: int | str,
    lower_bound: int | None,
    seed: int = 0,
    work: Work | None = None,
) -> Estimate:
    """Pack by one algorithm and say how good it is.

    Args:
        histogram: the sequences, at least one.
        algorithm: one of `ESTIMATE_ALGORITHMS`.
        depth: most sequences per pack, or "max".
        lower_bound: what is proven at this depth; an algorithm that proves more itself says so.
        seed: of `greedy`.
        work: what it may do; None for the limit of the algorithm.

    Raises:
        InputError: unknown algorithm or depth.
    """
    most = depth_of(depth, histogram.max_sequence_length)
    used, depth_used, strategies_used = algorithm, None, None
    if algorithm == "sort":
        batches = sort_into_batches(histogram.counts, SORTED_BATCH_SEQUENCES)
        packs, slots, lower_bound = -(-batches.padded_tokens // histogram.max_sequence_length), batches.padded_tokens, None
    else:
        if algorithm == "greedy" or algorithm in SEPARATORS:
            from gaudi_bert.packing.heuristics.greedy import count_greedy_packs

            packs = count_greedy_packs(histogram.counts, most, seed=seed, separators=SEPARATORS.get(algorithm, 0))
        else:
            solved = solve(histogram.counts, algorithm, most, seed=seed, work=work)
            packs, used = sum(solved.mixture.values()), solved.algorithm_used
            depth_used, strategies_used = max(map(len, solved.mixture)), len(solved.mixture)
            if lower_bound is not None and solved.certificate is not None:
                lower_bound = max(lower_bound, solved.certificate.bound)
        slots = packs * histogram.max_sequence_length
    return Estimate(
        algorithm,
        used,
        depth,
        packs,
        histogram.tokens / slots,
        histogram.sequences / packs,
        lower_bound,
        depth_used,
        strategies_used,
    )


def scan_lengths(
    histogram: Histogram, depth: int | str, algorithm: str = "lpfhp", lengths: Iterable[int] | None = None
) -> list[LengthEstimate]:
    """Pack the same sequences into packs of other lengths (paper Q).

    Args:
        histogram: the sequences, at least one.
        depth: most sequences per pack, or "max".
        algorithm: a key of `ALGORITHMS`.
        lengths: lengths of a pack; by default the data's own, up to twice that.

    Raises:
        InputError: a length is less than the longest sequence.
    """
    own = histogram.max_sequence_length
    if lengths is None:
        lengths = sorted({round(own * factor) for factor in LENGTH_FACTORS})
    rows = []
    for length in lengths:
        longer = rescaled(histogram, length)
        packs = sum(solve(longer.counts, algorithm, depth_of(depth, length)).mixture.values())
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
