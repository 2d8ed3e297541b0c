"""SPFHP, shortest-pack-first histogram-packing (paper 3.1.1, F.2 and G.2): worst fit on the histogram.

The lengths are walked from longest to shortest. The sequences of a length go to the open packs with the most room, as many
at once as that stack of equal packs can take; where nothing fits, the rest opens new packs. A pack is closed at `depth`
sequences. Near-instant, but it spends the room of the emptiest packs first, and it is not monotone in depth: more depth can
mean more packs.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.heuristics.open_packs import OpenPacks
from gaudi_bert.packing.mixture import Mixture

__all__ = ["pack_shortest_first"]


def pack_shortest_first(counts: IntArray, depth: int) -> Mixture:
    """Pack by SPFHP.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        depth: most sequences per pack, from 1.
    """
    packs = OpenPacks(depth)
    for length in (np.flatnonzero(counts)[::-1] + 1).tolist():
        waiting = int(counts[length - 1])
        while waiting:
            room = packs.most_room()
            if room is None or room < length:
                packs.put((length,), waiting, len(counts) - length)
                break
            available, pack = packs.top(room)
            moved = min(available, waiting)
            packs.take(room, moved)
            packs.put((*pack, length), moved, room - length)
            waiting -= moved
    return packs.close()
