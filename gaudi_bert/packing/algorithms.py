"""Every algorithm by name, and the one function that turns a histogram into a checked packing with its proven bound.

A new algorithm is a function `(counts, depth) -> Mixture` and a line in `ALGORITHMS`; its name in `config/values.py` lets
pipelines use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.packing.certificate import simple_certificate
from gaudi_bert.packing.exact.bounds import prove_bound
from gaudi_bert.packing.exact.optimal import solve_optimally
from gaudi_bert.packing.heuristics import pack_first_fit, pack_greedily, pack_longest_first, pack_none, pack_shortest_first
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import (
    Leftovers,
    Mixture,
    Packing,
    Solved,
    Strategy,
    Work,
    add_packs,
    coverage,
    packs_of,
    sorted_mixture,
)
from gaudi_bert.packing.nnls import pack_by_nnls, pack_ennlshp, pack_nnlshp

# --- the masked-LM budget: a pack has Q slots for masked positions, and no pack may hold more than Q of them
#
# What a pack holds is bounded by the most masked positions that the data show at each length, not by an assumed masking
# rate. So a strategy is feasible or not whichever sequences of its lengths it is given, and the writer never has to search.
# By default Q is what the predecessor used, `max_predictions + depth`, or more where the data need it. A smaller Q saves a
# little work in the masked-LM head and can cost packs: strategies over the budget are dissolved, and their sequences are
# packed again by best fit in both dimensions, tokens and masked positions.


def needed_masked_slots(mixture: Mapping[Strategy, int], histogram: Histogram) -> int | None:
    """Slots that the fullest strategy needs; None where the data did not say how many positions are masked."""
    if histogram.max_masked is None:
        return None
    return max((sum(map(histogram.masked_of, strategy)) for strategy in mixture), default=0)


def least_masked_slots(histogram: Histogram) -> int | None:
    """The smallest budget for which there is any packing at all: what one sequence alone may hold."""
    if histogram.max_masked is None:
        return None
    return int(np.max(histogram.max_masked, where=histogram.counts > 0, initial=0))


def choose_masked_slots(max_predictions: int | None, depth: int, needed: int | None) -> int | None:
    """Q where the settings leave it open: `max_predictions + depth`, or more where the data need it; None if unknown."""
    if max_predictions is None:
        return needed
    return max(max_predictions + depth, needed or 0)


def fit_to_budget(mixture: Mapping[Strategy, int], histogram: Histogram, depth: int, masked_slots: int) -> Mixture:
    """Dissolve the strategies over the budget and pack their sequences again within it.

    Without `max_masked` there is nothing to hold the budget against, and `mixture` is returned.
    """
    least = least_masked_slots(histogram)
    if least is None:
        return dict(mixture)
    if masked_slots < least:
        raise InputError(
            f"packing.masked_slots is {masked_slots}, but one sequence alone has up to {least} masked positions;"
            f" give at least {least}, or leave packing.masked_slots out"
        )
    within: Mixture = {}
    dissolved: Mixture = {}
    for strategy, count in mixture.items():
        over = sum(map(histogram.masked_of, strategy)) > masked_slots
        (dissolved if over else within)[strategy] = count
    counts = coverage(dissolved, histogram.max_sequence_length)
    for strategy, count in _best_fit_in_both(counts, histogram, depth, masked_slots).items():
        add_packs(within, strategy, count)
    return within


def _best_fit_in_both(counts: IntArray, histogram: Histogram, depth: int, masked_slots: int) -> Mixture:
    """Best fit decreasing on counts, as LPFHP, where a pack has room for tokens and room for masked positions."""
    capacity = histogram.max_sequence_length
    result: Mixture = {}
    open_packs: dict[Strategy, int] = {}
    for length in (np.flatnonzero(counts)[::-1] + 1).tolist():
        masked = histogram.masked_of(length)
        waiting = int(counts[length - 1])
        tightest_first = sorted(open_packs, key=lambda pack: (capacity - sum(pack), pack))
        for pack in [*tightest_first, ()]:
            masked_room = masked_slots - sum(map(histogram.masked_of, pack))
            by_masked = masked_room // masked if masked else depth
            copies = min((capacity - sum(pack)) // length, depth - len(pack), by_masked)
            if copies > 0 and waiting:
                waiting = _add_copies(open_packs, pack, length, copies, waiting)
        open_packs = _close_full(open_packs, result, depth, capacity)
    for pack, count in open_packs.items():
        add_packs(result, pack, count)
    return result


def _add_copies(open_packs: dict[Strategy, int], pack: Strategy, length: int, copies: int, waiting: int) -> int:
    """Put `copies` sequences of `length` on each open pack like `pack`, or on new ones for (); returns how many remain."""
    available = open_packs[pack] if pack else waiting
    while waiting and available:
        copies = min(copies, waiting)
        moved = min(available, waiting // copies)
        if pack:
            open_packs[pack] -= moved
            available -= moved
        target = pack + (length,) * copies
        open_packs[target] = open_packs.get(target, 0) + moved
        waiting -= moved * copies
    return waiting


def _close_full(open_packs: dict[Strategy, int], result: Mixture, depth: int, capacity: int) -> dict[Strategy, int]:
    """Move the packs that can take nothing more into `result`; returns those still open."""
    still_open = {}
    for pack, count in open_packs.items():
        if len(pack) == depth or sum(pack) == capacity:
            add_packs(result, pack, count)
        elif count:
            still_open[pack] = count
    return still_open


# --- every algorithm by name


class _Algorithm(NamedTuple):
    """An algorithm, and what it takes besides the counts, int64 [L], and the depth.

    Attributes:
        pack: returns a mixture or a `Solved`.
        needs: of `leftovers` (what `nnls` does with the last sequences), `seed` and `work` (a limit of effort).
    """

    pack: Callable[..., Mixture | Solved]
    needs: tuple[str, ...] = ()


MOST_DIFFERENT = 2**20
"""Different lengths: a plan lists them all, at worst each in a separate strategy, which then takes two gigabytes."""

ALGORITHMS = {
    "nnls": _Algorithm(pack_by_nnls, needs=("leftovers", "work")),
    "optimal": _Algorithm(solve_optimally, needs=("work",)),
    "nnlshp": _Algorithm(pack_nnlshp),
    "ennlshp": _Algorithm(pack_ennlshp),
    "spfhp": _Algorithm(pack_shortest_first),
    "lpfhp": _Algorithm(pack_longest_first),
    "greedy": _Algorithm(pack_greedily, needs=("seed",)),
    "ffd": _Algorithm(pack_first_fit),
    "none": _Algorithm(pack_none),
}


def depth_of(depth: int | str, max_sequence_length: int) -> int:
    """The depth as a number; "max" is the maximum sequence length, which limits nothing."""
    if depth == "max":
        return max_sequence_length
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise InputError(f"depth is {depth!r}; it must be an integer from 1, or `max`")
    return min(depth, max_sequence_length)


def check_known(algorithm: str, known: Collection[str]) -> None:
    """Refuse the name of no algorithm."""
    if algorithm not in known:
        near = difflib.get_close_matches(algorithm, known, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}"
        raise InputError(f"algorithm `{shortened(algorithm)}` is unknown; {hint}")


def solve(
    counts: IntArray,
    algorithm: str,
    depth: int,
    *,
    leftovers: Leftovers = "best-fit",
    seed: int = 0,
    work: Work | None = None,
) -> Solved:
    """Run one algorithm; arguments as `pack_histogram`, and the limit of effort, None for the algorithm's own."""
    check_known(algorithm, ALGORITHMS)
    different = np.count_nonzero(counts)
    if different > MOST_DIFFERENT:
        raise InputError(
            f"there are {different:,} different lengths; at most {MOST_DIFFERENT:,} can be planned: give a"
            f" max_sequence_length of at most {MOST_DIFFERENT:,}, or round the lengths up"
        )
    known = ALGORITHMS[algorithm]
    offered: dict[str, Any] = {"leftovers": leftovers, "seed": seed, "work": work}
    result = known.pack(counts, depth, **{name: offered[name] for name in known.needs})
    return result if isinstance(result, Solved) else Solved(result, algorithm)


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
) -> Packing:
    """Pack a histogram, check the packing, and prove how good it is.

    Args:
        histogram: the sequences; an empty one gives an empty packing.
        depth: most sequences per pack, or "max".
        leftovers: `nnls` only: what the loop leaves over is packed by best fit, or padded as published ("complement").
        max_predictions: most masked positions of one sequence (P), for the default budget.
        masked_slots: the budget of masked positions per pack (Q); None for `max_predictions + depth`, or more if needed.
        seed: of `greedy`, the only algorithm that draws.
        quick_bound: where the algorithm proves no bound itself, only the one of tokens and sequences.
    """
    most = depth_of(depth, histogram.max_sequence_length)
    solved = solve(histogram.counts, algorithm, most, leftovers=leftovers, seed=seed)
    mixture = solved.mixture
    if masked_slots is not None:
        mixture = fit_to_budget(mixture, histogram, most, masked_slots)
    mixture = sorted_mixture(mixture)
    needed = needed_masked_slots(mixture, histogram)
    deepest = max(map(len, mixture), default=1) if depth == "max" else most
    if masked_slots is None:
        masked_slots = choose_masked_slots(max_predictions, deepest, needed)
    packs = packs_of(mixture)
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
        mixture=mixture,
        certificate=certificate,
        masked_slots=masked_slots,
        masked_slots_needed=needed,
    )
