"""The masked-LM budget: a pack has Q slots for masked positions, and no pack may hold more than Q of them.

What a pack holds is bounded by the most masked positions that the data show at each length, not by an assumed masking rate.
So a strategy is feasible or not whichever sequences of its lengths it is given, and the writer never has to search. By
default Q is what the predecessor used, `max_predictions + depth`, or more where the data need it. A smaller Q saves a little
work in the masked-LM head and can cost packs: strategies over the budget are dissolved, and their sequences are packed again
by best fit in both dimensions, tokens and masked positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import Mixture, Strategy, add_packs, coverage


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
