"""Fewer packs by cutting all of them in two and matching the parts anew.

Every pack is cut, at random, into two parts of at most half the depth each. Then the parts are matched, the largest first,
each with the largest part that still fits. Where a pack holds at most two parts, that gives as few packs as these parts
allow: if a best matching gives the largest part x another partner w than the largest one that fits, y, then x and y may
change partners, because whoever fits y fits w. So no round needs more packs than the one before it. And it packs tightly:
what room there is gathers with the smallest parts, until two of them that stood alone share a pack.

This ends where swaps do not (`slot_swaps`): with thousands of packs that have to be exactly full, such as those of two
sequences of just over and just under half a pack.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.compiled import kernel
from gaudi_bert.common.permutation import random_words
from gaudi_bert.packing.flat_packs import flatten_packs, mixture_of_packs
from gaudi_bert.packing.mixture import Mixture
from gaudi_bert.packing.work import Work

__all__ = ["rematch_halves"]

STALLED_SEQUENCES, LEAST_STALLED = 10_000_000, 25
"""It is given up when rounds over so many sequences together saved no pack, but not before so many rounds."""

OPERATIONS_PER_SEQUENCE = 100
"""Of a round."""


def rematch_halves(mixture: Mixture, max_length: int, depth: int, enough: int, work: Work) -> Mixture:
    """Pack the sequences of `mixture` in fewer packs, if that succeeds.

    Args:
        mixture: packs of at most `depth` sequences.
        max_length: tokens of a pack.
        depth: most sequences in a pack.
        enough: packs at which to stop, such as a proven bound.
        work: what may be done.

    Returns:
        As many packs or fewer, of the same sequences.
    """
    half = depth // 2
    if not mixture or half == 0:
        return dict(mixture)
    lengths, starts = flatten_packs(mixture)
    patience = max(LEAST_STALLED, STALLED_SEQUENCES // len(lengths))
    stalled = rounds = 0
    while len(starts) - 1 > enough and stalled < patience and not work.exhausted:
        before = len(starts)
        words = (random_words(len(lengths), 0, "halves", rounds) >> np.uint64(1)).astype(np.int64)
        lengths, starts = _rematch(lengths, starts, words, max_length, half)
        work.spend(OPERATIONS_PER_SEQUENCE * len(lengths))
        stalled = 0 if len(starts) < before else stalled + 1
        rounds += 1
    return mixture_of_packs(lengths, starts)


@kernel
def _rematch(lengths: IntArray, starts: IntArray, words: IntArray, max_length: int, half: int) -> tuple[IntArray, IntArray]:
    """One round: the packs as `flatten_packs` has them, from those before; the order in `lengths` is lost.

    Args:
        words: int64 [sequences], random and not negative.
        half: most sequences of a part.
    """
    made_lengths, made_starts = np.empty_like(lengths), np.zeros(2 * starts.size, dtype=np.int64)
    bounds, tokens = np.empty((2 * starts.size, 2), dtype=np.int64), np.zeros(2 * starts.size, dtype=np.int64)
    made = filled = parts = 0
    for pack in range(starts.size - 1):
        first, end = starts[pack], starts[pack + 1]
        if end - first > 2 * half:  # of an odd depth, and full: it stays
            for place in range(first, end):
                made_lengths[filled] = lengths[place]
                filled += 1
            made += 1
            made_starts[made] = filled
            continue
        for place in range(end - 1, first, -1):
            other = first + words[place] % (place - first + 1)
            lengths[place], lengths[other] = lengths[other], lengths[place]
        least, most = max(0, end - first - half), min(half, end - first)
        choice = words[first] // 2
        cut = first + ((end - first + 1) // 2 if words[first] % 2 else least + choice % (most - least + 1))
        for one, two in ((first, cut), (cut, end)):
            if two > one:
                bounds[parts] = one, two
                for place in range(one, two):
                    tokens[parts] += lengths[place]
                parts += 1
    order = _rising(tokens[:parts], max_length)
    is_used = np.zeros(parts, dtype=np.bool_)
    fitting, found, following = np.empty(parts, dtype=np.int64), 0, 0  # smaller parts that fit, the largest at the end
    for place in range(parts - 1, -1, -1):
        if is_used[place]:
            continue
        room = max_length - tokens[order[place]]
        while following < place and tokens[order[following]] <= room:
            fitting[found] = following
            found += 1
            following += 1
        while found > 0 and (is_used[fitting[found - 1]] or fitting[found - 1] >= place):
            found -= 1
        mate = place
        if found > 0:
            found -= 1
            mate = fitting[found]
        is_used[place] = is_used[mate] = True
        for chosen in (place, mate) if mate != place else (place, place):
            one, two = bounds[order[chosen]]
            for held in range(one, two):
                made_lengths[filled] = lengths[held]
                filled += 1
            if mate == place:
                break
        made += 1
        made_starts[made] = filled
    return made_lengths, made_starts[: made + 1]


@kernel
def _rising(values: IntArray, most: int) -> IntArray:
    """The order that sorts `values` of 0 .. `most`, equal ones as they come, by counting them."""
    places = np.zeros(most + 2, dtype=np.int64)
    for value in values:
        places[value + 1] += 1
    places = np.cumsum(places)
    order = np.empty(values.size, dtype=np.int64)
    for number, value in enumerate(values):
        order[places[value]] = number
        places[value] += 1
    return order
