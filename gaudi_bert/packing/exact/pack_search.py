"""The last few packs by exhaustive search: do these sequences fit into that many packs?

Diving loses its slack in the last handful of packs, where fractions of packs are no guide any more. There the
question is small enough to be searched. The prices of the linear program prune: every pack is worth at most
1, so what the packs fall short of 1 together may not exceed (packs - worth of all sequences). Each pack starts
with the longest sequence that is left and is filled in order of falling length; a branch dies when even the
best completion of the pack leaves too little worth. (Branch and bound on the dual prices, as Belov and
Scheithauer 2006 use them; equal sequences are one type, so no two branches are alike.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.common.compiled import kernel
from gaudi_bert.packing.mixture import Mixture, add_packs
from gaudi_bert.packing.work import Work

__all__ = ["search_packs"]

ROUNDING = 1e-9

MOST_TABLE_OPERATIONS = 1e9
"""A rest of more lengths than this allows is not searched: it is too large for it to succeed."""

OPERATIONS_PER_NODE = 100

MAX_LEVELS = 12
"""With more sequences to come than this their number is not counted when the best completion is looked up."""

ATTEMPTS = ((1.0, 1e9), (1.0, 8.0), (0.75, 8.0), (0.6, 4.0), (0.5, 8.0), (0.4, 4.0), (0.3, 4.0))
"""(longest second sequence as a share of the room, how freely the slack is spent); the first leaves nothing out."""


class Rest(NamedTuple):
    """What is to be packed; T types, the longest first."""

    lengths: IntArray  # int64 [T]
    counts: IntArray  # int64 [T], sequences of each
    prices: FloatArray  # float64 [T]
    best: FloatArray  # float64 [k, t], see `_completions`
    packs: int  # at most so many
    depth: int  # most sequences in a pack
    deepest: int  # most sequences that a pack can hold at these lengths
    slack: float  # what all packs may fall short of the worth 1 together


def search_packs(
    lengths: IntArray,
    counts: IntArray,
    prices: FloatArray,
    max_length: int,
    depth: int,
    packs: int,
    max_nodes: int,
    work: Work,
) -> Mixture | None:
    """Packs for all the sequences, or None if there are none or `max_nodes` branches did not find them.

    Args:
        lengths: int64 [types], ascending.
        counts: int64 [types], sequences of each.
        prices: float64 [types], such that no pack of at most `depth` sequences is worth more than 1.
        max_length: tokens in a pack.
        depth: most sequences in a pack.
        packs: packs to be used at most.
        max_nodes: branches of each attempt at most.
        work: what the search may do in all.
    """
    order = np.flatnonzero(counts)[::-1]
    lengths, counts, prices = (
        lengths[order].astype(np.int64),
        counts[order].astype(np.int64),
        prices[order].astype(np.float64),
    )
    sequences = int(counts.sum())
    slack = packs - float(prices @ counts)
    if sequences == 0:
        return {}
    if slack < -ROUNDING or sequences > packs * depth or int(lengths @ counts) > packs * max_length:
        return None
    deepest = min(depth, max_length // int(lengths[-1]), sequences)
    levels = min(deepest, MAX_LEVELS)
    table_operations = 2.0 * levels * max_length * len(lengths)
    if table_operations > min(work.left, MOST_TABLE_OPERATIONS):
        return None
    work.spend(table_operations)
    best = _completions(lengths, prices, max_length, levels, levels < deepest)
    ends = np.zeros(0, dtype=np.int64)
    rest = Rest(lengths, counts, prices, best, packs, depth, deepest, slack)
    for attempt in ATTEMPTS:
        if work.exhausted:
            break
        work.spend(OPERATIONS_PER_NODE * max_nodes)
        chosen, ends = _search(rest, attempt, max_nodes)
        if len(ends):
            break
    if not len(ends):
        return None
    mixture: Mixture = {}
    start = 0
    for end in ends.tolist():
        add_packs(mixture, tuple(sorted(lengths[chosen[start:end]].tolist())), 1)
        start = end
    return mixture


@kernel
def _completions(lengths: IntArray, prices: FloatArray, max_length: int, levels: int, without_limit: bool) -> FloatArray:
    """Best worth of at most k further sequences in a room of t tokens: float64 [k, t]; the last row may stand
    for any number.
    """
    best = np.zeros((levels + 1, max_length + 1))
    for slots in range(1, levels + 1):
        before = best[slots] if without_limit and slots == levels else best[slots - 1]
        for room in range(1, max_length + 1):
            value = best[slots - 1, room]
            for kind in range(lengths.size):
                if lengths[kind] <= room:
                    value = max(value, prices[kind] + before[room - lengths[kind]])
            best[slots, room] = value
    return best


@kernel
def _search(rest: Rest, attempt: tuple[float, float], max_nodes: int) -> tuple[IntArray, IntArray]:
    """Depth-first search. Returns the types in the order of packing and where each pack ends; both empty if
    nothing was found.

    The path is a stack of placed sequences; `opening[p]` is the stack height at which pack p starts. `kind` is
    the type to try next at the current height. `slack_left[p]` and `free_left[p]` are the worth and the
    sequences that packs p, p + 1, ... may fall short of 1 and of the depth. With many packs to go a pack may
    use only a share of them, the attempt's second number over the packs to go.
    """
    second_share, reserve = attempt
    lengths, prices, packs, depth = rest.lengths, rest.prices, rest.packs, rest.depth
    counts = rest.counts.copy()
    max_length, kinds, total = rest.best.shape[1] - 1, lengths.size, int(np.sum(counts))
    stack, opening = np.zeros(total + 1, dtype=np.int64), np.zeros(packs + 2, dtype=np.int64)
    slack_left, free_left = np.zeros(packs + 2), np.zeros(packs + 2, dtype=np.int64)
    slack_left[0], free_left[0] = rest.slack, packs * depth - total
    height, pack, room, worth, kind = 0, 0, max_length, 0.0, 0
    for _ in range(max_nodes):
        share = min(1.0, reserve / (packs - pack))
        enough = 1.0 - slack_left[pack] * share - ROUNDING
        used = height - opening[pack]
        kind, fits = _next_fitting(rest, counts, kind, used, room, enough - worth)
        if fits:
            stack[height] = kind
            height += 1
            counts[kind] -= 1
            room -= lengths[kind]
            worth += prices[kind]
            if height == total:
                return stack[:total], np.append(opening[1 : pack + 1], total)
            if used == 0:
                kind = _shorter_than(lengths, kind, second_share * room)
        elif used > 0 and pack + 1 < packs and worth >= enough and depth - used <= np.ceil(free_left[pack] * share):
            slack_left[pack + 1] = slack_left[pack] - max(0.0, 1.0 - worth)
            free_left[pack + 1] = free_left[pack] - (depth - used)
            pack += 1
            opening[pack] = height
            room, worth, kind = max_length, 0.0, 0
        else:
            if used == 0:  # nothing can open this pack: go back into the one before, whose first sequence is no choice
                if pack == 0:
                    break
                pack -= 1
                held = stack[opening[pack] : height]
                room, worth = max_length - np.sum(lengths[held]), np.sum(prices[held])
            height -= 1
            kind = stack[height]
            counts[kind] += 1
            room += lengths[kind]
            worth -= prices[kind]
            kind = kinds if height == opening[pack] else kind + 1
    return stack[:0], opening[:0]


@kernel
def _next_fitting(rest: Rest, counts: IntArray, kind: int, used: int, room: int, missing: float) -> tuple[int, bool]:
    """The first type from `kind` on that fits a pack of `used` sequences and leaves it able to be worth `missing` more,
    and whether there is one. The longest sequence that is left has to open a pack.
    """
    levels, slots = rest.best.shape[0] - 1, rest.deepest - used
    while slots > 0 and kind < rest.lengths.size:
        if counts[kind] > 0:
            left = room - rest.lengths[kind]
            if left >= 0 and rest.prices[kind] + rest.best[min(slots - 1, levels), left] >= missing:
                return kind, True
            if used == 0:
                break
        kind += 1
    return kind, False


@kernel
def _shorter_than(lengths: IntArray, kind: int, longest: float) -> int:
    """The first type from `kind` on of at most `longest` tokens, or the last type."""
    while kind < lengths.size - 1 and lengths[kind] > longest:
        kind += 1
    return kind
