"""Every algorithm by name, and the one function that turns a histogram into a checked packing with its proven bound.

A new algorithm is a function `(counts, depth) -> Mixture` and a line in `ALGORITHMS`; its name in `config/values.py` lets
pipelines use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from inspect import signature
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import IntArray, whole_number
from gaudi_bert.common.errors import ArgumentError, InputError, shortened, shown
from gaudi_bert.packing.certificate import simple_certificate
from gaudi_bert.packing.exact.bounds import prove_bound
from gaudi_bert.packing.exact.optimal import solve_optimally
from gaudi_bert.packing.heuristics import pack_first_fit, pack_greedily, pack_longest_first, pack_shortest_first, pack_singly
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.nnls import pack_by_nnls, pack_ennlshp, pack_nnlshp
from gaudi_bert.packing.strategies import (
    AlgorithmResult,
    Effort,
    Leftovers,
    Packing,
    Strategy,
    StrategyCounts,
    WorkBudget,
    count_packs,
    sort_strategies,
)

# --- the masked-LM budget: a pack has Q slots for masked positions, and no pack may hold more than Q of them
#
# What a pack holds is bounded by the most masked positions that the data show at each length, not by an assumed masking
# rate. So a strategy is feasible or not whichever sequences of its lengths it is given, and the writer never has to search.
# Q is what the predecessor used, `max_predictions + depth`, or more where the data need it or the settings ask for it.


def _count_masked_slots(
    strategy_counts: Mapping[Strategy, int],
    histogram: Histogram,
    max_predictions: int | None,
    depth: int,
    requested: int | None,
) -> tuple[int | None, int | None]:
    """Slots that the fullest strategy needs, and Q; None where the data did not say how many positions are masked."""
    needed = None
    if histogram.max_masked is not None:
        needed = max((sum(map(histogram.max_masked_at, strategy)) for strategy in strategy_counts), default=0)
    least = needed if max_predictions is None else max(max_predictions + depth, needed or 0)
    if requested is not None and least is not None and requested < least:
        raise InputError(f"packing.masked_slots is {requested}, these packs need {least}; give as many, or leave it out")
    return needed, requested or least


# --- every algorithm by name


MAX_DISTINCT_LENGTHS = 2**20
"""Different lengths: a plan lists them all, at worst each in a separate strategy, which then takes two gigabytes."""

ALGORITHMS: dict[str, Callable[..., StrategyCounts | AlgorithmResult]] = {
    "nnls": pack_by_nnls,
    "optimal": solve_optimally,
    "nnlshp": pack_nnlshp,
    "ennlshp": pack_ennlshp,
    "spfhp": pack_shortest_first,
    "lpfhp": pack_longest_first,
    "greedy": pack_greedily,
    "ffd": pack_first_fit,
    "none": pack_singly,
}
"""Functions of the counts, int64 [L], the depth, and what else of `run_algorithm` they name."""


def resolve_depth(depth: int | str, max_sequence_length: int) -> int:
    """The depth as a number; "max" is the maximum sequence length, which limits nothing."""
    if isinstance(depth, str) and depth == "max":
        return max_sequence_length
    try:
        return min(whole_number("depth", depth, 1), max_sequence_length)
    except ArgumentError as error:
        raise ArgumentError(f'{error}, or "max" for no limit') from None


def check_algorithm_name(algorithm: str, known: Collection[str]) -> None:
    """Refuse the name of no algorithm."""
    if not isinstance(algorithm, str) or algorithm not in known:
        algorithm = algorithm if isinstance(algorithm, str) else shown(algorithm)
        near = difflib.get_close_matches(algorithm, known, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}"
        raise InputError(f"algorithm `{shortened(algorithm)}` is unknown; {hint}")


def run_algorithm(
    counts: IntArray,
    algorithm: str,
    depth: int,
    *,
    leftovers: Leftovers = "best-fit",
    seed: int = 0,
    work: WorkBudget | None = None,
    effort: Effort = "bounded",
) -> AlgorithmResult:
    """Run one algorithm; arguments as `pack_histogram`."""
    check_algorithm_name(algorithm, ALGORITHMS)
    different = np.count_nonzero(counts)
    if different > MAX_DISTINCT_LENGTHS:
        raise InputError(
            f"{different:,} different lengths; at most {MAX_DISTINCT_LENGTHS:,} can be planned: round the lengths up"
        )
    pack = ALGORITHMS[algorithm]
    offered: dict[str, Any] = {"leftovers": leftovers, "seed": seed, "work": work, "effort": effort}
    result = pack(counts, depth, **{name: offered[name] for name in offered.keys() & signature(pack).parameters.keys()})
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
    work: WorkBudget | None = None,
) -> Packing:
    """Pack a histogram, check the packing, and prove how good it is.

    Args:
        histogram: the sequences; an empty one gives an empty packing.
        depth: most sequences per pack, or "max".
        leftovers: `nnls` only: what the loop leaves over is packed by best fit, or padded as published ("complement").
        max_predictions: most masked positions of one sequence (P), for the default budget.
        masked_slots: slots for masked positions per pack (Q); None for as few as there may be.
        seed: of `greedy`, the only algorithm that draws.
        quick_bound: where the algorithm proves no bound itself, only the one of tokens and sequences.
        effort: `optimal` only: "unlimited" searches on where next to nothing can be gained.
        work: a limit of effort that counts what was done; None for the algorithm's own.
    """
    most = resolve_depth(depth, histogram.max_sequence_length)
    solved = run_algorithm(histogram.counts, algorithm, most, leftovers=leftovers, seed=seed, work=work, effort=effort)
    strategy_counts = sort_strategies(solved.strategy_counts)
    deepest = max(map(len, strategy_counts), default=1) if depth == "max" else most
    needed, slots = _count_masked_slots(strategy_counts, histogram, max_predictions, deepest, masked_slots)
    packs = count_packs(strategy_counts)
    certificate = solved.certificate or simple_certificate(histogram.counts, most)
    if solved.certificate is None and not quick_bound and certificate.bound < packs:
        certificate = prove_bound(histogram.counts, most)
    return Packing(
        sequences=histogram.sequences,
        packs=packs,
        tokens=histogram.tokens,
        slots=packs * histogram.max_sequence_length,
        lower_bound=certificate.bound,
        histogram=histogram,
        depth=most,
        algorithm=algorithm,
        algorithm_used=solved.algorithm_used,
        strategy_counts=strategy_counts,
        certificate=certificate,
        masked_slots=slots,
        masked_slots_needed=needed,
    )
