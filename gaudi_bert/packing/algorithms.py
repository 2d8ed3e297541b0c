"""The table of packing algorithms, and `pack_histogram`, which runs one of them, checks the result and proves a lower bound.

To add an algorithm, write a function `(counts, depth) -> StrategyCounts`, add it to `ALGORITHMS`, and add its name to
`config/values.py` so that pipelines can use it. The algorithms themselves are in the other files of this folder.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray, check_integer
from gaudi_bert.common.errors import ArgumentError, InputError, short_repr, shorten
from gaudi_bert.packing.bounds import prove_lower_bound
from gaudi_bert.packing.certificate import prove_bound_by_totals
from gaudi_bert.packing.heuristics import (
    pack_first_fit,
    pack_greedily,
    pack_longest_first,
    pack_one_per_pack,
    pack_shortest_first,
)
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.nnls import pack_by_extended_nnls, pack_by_nnls, pack_by_single_nnls
from gaudi_bert.packing.optimal import pack_optimally
from gaudi_bert.packing.strategies import (
    AlgorithmResult,
    Effort,
    Leftovers,
    OperationBudget,
    Packing,
    Strategy,
    StrategyCounts,
    count_packs,
    sort_strategies,
)

# --- masked-LM slots: each pack has Q slots for masked positions, and no pack may contain more masked positions than that
#
# If Q came from an assumed masking rate, some packs could overflow and the writer would have to search for sequences that
# fit. Therefore Q is derived from the most masked positions that occur in the data at each length: a strategy is either
# feasible for all sequences of its lengths or for none. By default Q is `max_predictions + depth`, as in the published
# implementation. Q is larger if the data need more or if the settings ask for more.


class _MaskedLmSlots(NamedTuple):
    """Numbers of masked-LM slots.

    Attributes:
        needed: The slots that the fullest strategy needs, or None if the histogram contains no masked positions.
        per_pack: The slots Q that each pack gets, or None if neither the histogram nor the arguments determine it.
    """

    needed: int | None
    per_pack: int | None


def _determine_masked_lm_slots(
    strategy_counts: Mapping[Strategy, int],
    histogram: Histogram,
    max_predictions: int | None,
    depth: int,
    requested_slots: int | None,
) -> _MaskedLmSlots:
    """Return two numbers for masked-language-model training. The first is the largest number of masked positions that any
    pack may contain. The second is the number of slots for them that every pack gets.

    Args:
        strategy_counts: how many packs use each strategy.
        histogram: the histogram that was packed.
        max_predictions: the maximum number of masked positions in a single sequence (P), or None if P is not limited.
        depth: the maximum number of sequences per pack, which is added to P for the default Q.
        requested_slots: Q as requested by the user, or None for the default.

    Raises:
        InputError: `requested_slots` is less than these packs need.
    """
    needed = (
        max((sum(map(histogram.max_masked_positions, strategy)) for strategy in strategy_counts), default=0)
        if histogram.max_masked is not None
        else None
    )
    min_slots = needed if max_predictions is None else max(max_predictions + depth, needed or 0)
    if requested_slots is not None and min_slots is not None and requested_slots < min_slots:
        raise InputError(
            f"packing.masked_slots is {requested_slots}, but these packs need {min_slots}; increase or omit the setting"
        )
    return _MaskedLmSlots(needed, requested_slots or min_slots)


# --- the algorithms by name


# The maximum number of distinct lengths in a histogram. In the worst case, a plan lists a different pack for each of them,
# which takes 2 GB.
MAX_DISTINCT_LENGTHS = 2**20

# The packing functions by algorithm name. Every function takes the number of sequences of each length (int64 [L]) and the
# maximum number of sequences per pack. It may also take any keyword argument of `run_algorithm`.
ALGORITHMS: dict[str, Callable[..., StrategyCounts | AlgorithmResult]] = {
    "nnls": pack_by_nnls,
    "optimal": pack_optimally,
    "nnlshp": pack_by_single_nnls,
    "ennlshp": pack_by_extended_nnls,
    "spfhp": pack_shortest_first,
    "lpfhp": pack_longest_first,
    "greedy": pack_greedily,
    "ffd": pack_first_fit,
    "none": pack_one_per_pack,
}


def resolve_depth(depth: int | str, max_sequence_length: int) -> int:
    """Convert a depth, which is the maximum number of sequences per pack or "max", to an integer of at most
    `max_sequence_length`.

    The depth "max" becomes `max_sequence_length`. It limits nothing, because every sequence has at least one token.

    Raises:
        ArgumentError: `depth` is neither "max" nor an integer from 1.
    """
    if isinstance(depth, str) and depth == "max":
        return max_sequence_length
    try:
        return min(check_integer("depth", depth, 1), max_sequence_length)
    except ArgumentError as error:
        raise ArgumentError(f'{error}, or "max" for no limit') from None


def check_algorithm_name(algorithm: str, known_algorithms: Collection[str]) -> None:
    """Raise InputError if `algorithm` is not one of `known_algorithms`. The message suggests the most similar name."""
    if not isinstance(algorithm, str) or algorithm not in known_algorithms:
        algorithm = algorithm if isinstance(algorithm, str) else short_repr(algorithm)
        near = difflib.get_close_matches(algorithm, known_algorithms, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"choose one of {', '.join(known_algorithms)}"
        raise InputError(f"algorithm `{shorten(algorithm)}` is unknown; {hint}")


def run_algorithm(
    length_counts: IntArray,
    algorithm: str,
    depth: int,
    *,
    leftovers: Leftovers = "best-fit",
    seed: int = 0,
    budget: OperationBudget | None = None,
    effort: Effort = "bounded",
) -> AlgorithmResult:
    """Pack a histogram with the given algorithm, and return its result without checking it.

    Args:
        length_counts: int64 [L], the number of sequences of length 1 .. L.
        algorithm: a key of `ALGORITHMS`.
        depth: the maximum number of sequences per pack.
        leftovers: how `nnls` packs the sequences that remain after its last round. Other algorithms ignore it.
        seed: the seed of `greedy`. Other algorithms ignore it.
        budget: the operation budget, or None for the algorithm's default budget.
        effort: how long `optimal` searches. Other algorithms ignore it.

    Returns:
        The strategy counts, the algorithm that was actually used, and a certificate if the algorithm proved a bound.

    Raises:
        InputError: the algorithm is unknown, or the histogram contains too many distinct lengths.
    """
    check_algorithm_name(algorithm, ALGORITHMS)
    distinct = np.count_nonzero(length_counts)
    if distinct > MAX_DISTINCT_LENGTHS:
        raise InputError(
            f"the histogram has {distinct:,} distinct lengths, but at most {MAX_DISTINCT_LENGTHS:,} are supported; round "
            "the lengths up"
        )
    pack = ALGORITHMS[algorithm]
    options: dict[str, Any] = {"leftovers": leftovers, "seed": seed, "budget": budget, "effort": effort}
    result = pack(
        length_counts, depth, **{name: options[name] for name in options.keys() & signature(pack).parameters.keys()}
    )
    return result if isinstance(result, AlgorithmResult) else AlgorithmResult(result, algorithm)


def pack_histogram(
    histogram: Histogram,
    algorithm: str = "optimal",
    depth: int | str = 3,
    *,
    leftovers: Leftovers = "best-fit",
    max_predictions: int | None = None,
    masked_slots: int | None = None,
    seed: int = 0,
    quick_bound: bool = False,
    effort: Effort = "bounded",
    budget: OperationBudget | None = None,
) -> Packing:
    """Pack a histogram, check the packing, and prove a lower bound on the number of packs.

    Args:
        histogram: the sequences to pack. An empty histogram gives an empty packing.
        algorithm: a key of `ALGORITHMS`.
        depth: the maximum number of sequences per pack, or "max" for no limit.
        leftovers: how `nnls` packs the sequences that remain after its last round, by best fit or padded as published
            ("complement").
        max_predictions: the maximum number of masked positions in a sequence (P), for the default number of masked-LM slots.
        masked_slots: masked-LM slots per pack (Q), or None for the smallest number that is sufficient.
        seed: the seed of `greedy`, which is the only randomized algorithm.
        quick_bound: use only the token and count bounds if the algorithm does not prove a bound itself.
        effort: "unlimited" lets `optimal` continue its search even if hardly any packs can be saved.
        budget: an operation budget, which also counts the operations done; None for the algorithm's default budget.

    Returns:
        The checked packing with its certificate.

    Raises:
        InputError: an argument is out of range, or `masked_slots` is too small for these packs.
        FailedError: the algorithm returned something that is not a packing, which is a defect.
    """
    max_depth = resolve_depth(depth, histogram.max_sequence_length)
    result = run_algorithm(
        histogram.counts, algorithm, max_depth, leftovers=leftovers, seed=seed, budget=budget, effort=effort
    )
    strategy_counts = sort_strategies(result.strategy_counts)
    masked_depth = max(map(len, strategy_counts), default=1) if depth == "max" else max_depth
    needed, slots = _determine_masked_lm_slots(strategy_counts, histogram, max_predictions, masked_depth, masked_slots)
    packs = count_packs(strategy_counts)
    certificate = result.certificate or prove_bound_by_totals(histogram.counts, max_depth)
    if result.certificate is None and not quick_bound and certificate.bound < packs:
        certificate = prove_lower_bound(histogram.counts, max_depth)
    return Packing(
        sequences=histogram.sequences,
        packs=packs,
        tokens=histogram.tokens,
        slots=packs * histogram.max_sequence_length,
        lower_bound=certificate.bound,
        histogram=histogram,
        depth=max_depth,
        algorithm=algorithm,
        algorithm_used=result.algorithm_used,
        strategy_counts=strategy_counts,
        certificate=certificate,
        masked_slots=slots,
        masked_slots_needed=needed,
    )
