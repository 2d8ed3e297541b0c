"""From slots to sequences: a slot of the linear program may hold a shorter sequence, or none.

The lengths are walked from longest to shortest; a sequence takes a slot of its own length, or else the shortest
of the longer slots that are free. What no sequence needs is given up, and a pack left empty is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.mixture import Mixture, Strategy, add_packs, coverage, sorted_mixture

__all__ = ["fill_slots"]

Share = list[int]  # [length of the sequence (0: none), slots]


def fill_slots(mixture: Mapping[Strategy, int], counts: IntArray) -> Mixture:
    """The mixture whose slots are exactly the sequences of `counts`.

    Args:
        mixture: at every length, at least as many slots of this length or more as there are sequences of this
            length or more.
        counts: int64 [L], sequences of length 1 .. L.

    Raises:
        InputError: too few slots.
    """
    shares = _share_slots(coverage(mixture, len(counts)), counts)
    result: Mixture = {}
    for strategy, count in sorted_mixture(mixture).items():
        left = count
        while left:
            part = min(left, *(_available(shares[length], strategy.count(length)) for length in set(strategy)))
            if part:
                sequences = [shares[length][-1][0] for length in strategy]
                _take(shares, strategy, part)
            else:
                part, sequences = 1, _take_mixed(shares, strategy)
            add_packs(result, tuple(sequence for sequence in sequences if sequence), part)
            left -= part
    result.pop((), None)
    return sorted_mixture(result)


def _share_slots(slots: IntArray, counts: IntArray) -> dict[int, list[Share]]:
    """For each slot length, which sequences its slots hold; the last share is handed out first."""
    shares: dict[int, list[Share]] = {}
    free: list[Share] = []  # [slot length, slots], the shortest last
    for length in (np.flatnonzero((slots > 0) | (counts > 0))[::-1] + 1).tolist():
        own, waiting = int(slots[length - 1]), int(counts[length - 1])
        shares[length] = [[length, min(own, waiting)]] if min(own, waiting) else []
        if own > waiting:
            free.append([length, own - waiting])
        waiting -= min(own, waiting)
        while waiting:
            if not free:
                raise InputError(f"the mixture has {waiting} slots too few for sequences of length {length} and more")
            moved = min(waiting, free[-1][1])
            shares[free[-1][0]].append([length, moved])
            waiting -= moved
            free[-1][1] -= moved
            if not free[-1][1]:
                free.pop()
    for length, number in free:
        shares[length].append([0, number])
    return shares


def _available(shares: list[Share], copies: int) -> int:
    return shares[-1][1] // copies


def _take(shares: dict[int, list[Share]], strategy: Strategy, count: int) -> None:
    for length in strategy:
        shares[length][-1][1] -= count
    for length in set(strategy):
        if not shares[length][-1][1]:
            shares[length].pop()


def _take_mixed(shares: dict[int, list[Share]], strategy: Strategy) -> list[int]:
    """One pack whose equal slots hold different sequences, because a share ends within it."""
    sequences = []
    for length in strategy:
        sequences.append(shares[length][-1][0])
        shares[length][-1][1] -= 1
        if not shares[length][-1][1]:
            shares[length].pop()
    return sequences
