"""LPFHP, longest-pack-first histogram-packing (paper R): best fit on the histogram, with counts split.

As in SPFHP the lengths are walked from longest to shortest, but the sequences of a length go to the open packs with the
least room that still fits, and a pack takes as many copies of the length at once as it can hold: two sequences of 256 make
the full pack (256, 256) instead of two packs that wait for others. At depth 2 this is optimal on all of the published
histograms; with no limit of depth it comes within 0.03 % of the bound.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.heuristics.open_packs import OpenPacks
from gaudi_bert.packing.mixture import Mixture

__all__ = ["fill_open_packs", "pack_longest_first"]


def pack_longest_first(counts: IntArray, depth: int, packs: OpenPacks | None = None) -> Mixture:
    """Pack by LPFHP.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        depth: most sequences per pack, from 1.
        packs: packs with room that are filled first (`best_fit`); None: start with none.
    """
    packs = OpenPacks(depth) if packs is None else packs
    for length in (np.flatnonzero(counts)[::-1] + 1).tolist():
        waiting = fill_open_packs(packs, length, int(counts[length - 1]))
        while waiting:
            copies = min(len(counts) // length, depth, waiting)
            opened = waiting // copies
            packs.put((length,) * copies, opened, len(counts) - copies * length)
            waiting -= opened * copies
    return packs.close()


def fill_open_packs(packs: OpenPacks, length: int, waiting: int) -> int:
    """Put sequences of `length` into open packs, tightest first; returns how many are left."""
    while waiting:
        room = packs.least_room(length)
        if room is None:
            break
        available, pack = packs.top(room)
        copies = min(room // length, packs.depth - len(pack), waiting)
        moved = min(available, waiting // copies)
        packs.take(room, moved)
        packs.put(pack + (length,) * copies, moved, room - copies * length)
        waiting -= moved * copies
    return waiting
