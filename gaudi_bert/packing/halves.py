"""Fewer packs by cutting all of them in two and matching the parts again.

Every pack is cut, at random, into two parts of at most half the depth each. Then the parts are matched, the largest first,
each with the largest part that still fits. Where a pack holds at most two parts, that gives as few packs as these parts
allow: if a best matching gives the largest part x another partner w than the largest one that fits, y, then x and y may
change partners, because what fits y fits w. So no round needs more packs than the one before it. And it packs tightly:
what room there is gathers with the smallest parts, until two of them that stood alone share a pack.

This ends where swaps do not (`long_packs`): with thousands of packs that have to be exactly full, such as those of two
sequences of just over and just under half a pack.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import IntArray, random_words
from gaudi_bert.common.compiled import kernel
from gaudi_bert.packing.mixture import Mixture, Work, flatten_packs, mixture_of_packs

STALLED_SEQUENCES, LEAST_STALLED = 10_000_000, 25
"""It is given up when rounds over so many sequences together saved no pack, but not before so many rounds."""

FEWEST_SEQUENCES = 1000
"""A round over fewer takes as long."""

OPERATIONS_PER_SEQUENCE, OPERATIONS_PER_TOKEN = 100, 5
"""Of a round, for each sequence and for each token of a pack, by which parts are sorted."""


def rematch_halves(mixture: Mixture, max_length: int, depth: int, enough: int, work: Work) -> Mixture:
    """Pack the sequences of `mixture` in fewer packs, if that succeeds; it stops at `enough` packs, such as a bound."""
    half = depth // 2
    if not mixture or half == 0:
        return dict(mixture)
    lengths, starts = flatten_packs(mixture)
    patience = max(LEAST_STALLED, STALLED_SEQUENCES // max(len(lengths), FEWEST_SEQUENCES))
    stalled = rounds = 0
    while len(starts) - 1 > enough and stalled < patience and not work.exhausted:
        before = len(starts)
        words = (random_words(len(lengths), 0, "halves", rounds) >> np.uint64(1)).astype(np.int64)
        lengths, starts = _rematch(lengths, starts, words, max_length, half)
        work.spend(OPERATIONS_PER_SEQUENCE * len(lengths) + OPERATIONS_PER_TOKEN * max_length)
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
    result_lengths, result_starts = np.empty_like(lengths), np.zeros(2 * starts.size, dtype=np.int64)
    bounds, tokens = np.empty((2 * starts.size, 2), dtype=np.int64), np.zeros(2 * starts.size, dtype=np.int64)
    packs = filled = parts = 0
    for pack in range(starts.size - 1):
        first, end = starts[pack], starts[pack + 1]
        if end - first > 2 * half:  # of an odd depth, and full: it stays
            for index in range(first, end):
                result_lengths[filled] = lengths[index]
                filled += 1
            packs += 1
            result_starts[packs] = filled
            continue
        for index in range(end - 1, first, -1):
            other = first + words[index] % (index - first + 1)
            lengths[index], lengths[other] = lengths[other], lengths[index]
        least, most = max(0, end - first - half), min(half, end - first)
        choice = words[first] // 2
        cut = first + ((end - first + 1) // 2 if words[first] % 2 else least + choice % (most - least + 1))
        for one, two in ((first, cut), (cut, end)):
            if two > one:
                bounds[parts, 0], bounds[parts, 1] = one, two
                for index in range(one, two):
                    tokens[parts] += lengths[index]
                parts += 1
    order = _rising(tokens[:parts], max_length)
    is_used = np.zeros(parts, dtype=np.bool_)
    fitting, fit_count, following = np.empty(parts, dtype=np.int64), 0, 0  # smaller parts that fit, the largest at the end
    for index in range(parts - 1, -1, -1):
        if is_used[index]:
            continue
        room = max_length - tokens[order[index]]
        while following < index and tokens[order[following]] <= room:
            fitting[fit_count] = following
            fit_count += 1
            following += 1
        while fit_count > 0 and (is_used[fitting[fit_count - 1]] or fitting[fit_count - 1] >= index):
            fit_count -= 1
        mate = index
        if fit_count > 0:
            fit_count -= 1
            mate = fitting[fit_count]
        is_used[index] = is_used[mate] = True
        for chosen in (index, mate) if mate != index else (index, index):
            one, two = bounds[order[chosen]]
            for held in range(one, two):
                result_lengths[filled] = lengths[held]
                filled += 1
            if mate == index:
                break
        packs += 1
        result_starts[packs] = filled
    return result_lengths, result_starts[: packs + 1]


@kernel
def _rising(values: IntArray, most: int) -> IntArray:
    """The order that sorts `values` of 0 .. `most`, equal ones as they come, by counting them."""
    positions = np.zeros(most + 2, dtype=np.int64)
    for value in values:
        positions[value + 1] += 1
    positions = np.cumsum(positions)
    order = np.empty(values.size, dtype=np.int64)
    for number, value in enumerate(values):
        order[positions[value]] = number
        positions[value] += 1
    return order
