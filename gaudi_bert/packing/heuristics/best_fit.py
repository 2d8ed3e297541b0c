"""Best fit decreasing for what another algorithm has left over: into its packs that have room, then into new ones.

Each sequence, longest first, goes to the pack with the least room that still holds it and that has fewer
sequences than the depth allows. That is LPFHP (`longest_pack_first`) with packs that are there already, so it
costs the same for one sequence as for a million.
"""

from __future__ import annotations

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.heuristics.longest_pack_first import pack_longest_first
from gaudi_bert.packing.heuristics.open_packs import OpenPacks
from gaudi_bert.packing.mixture import Mixture, sorted_mixture

__all__ = ["best_fit_into"]


def best_fit_into(mixture: Mixture, counts: IntArray, depth: int) -> Mixture:
    """Add the sequences of `counts` to the packs of `mixture`.

    Args:
        mixture: packs that are there, of at most `depth` sequences and L tokens each; not changed.
        counts: int64 [L], the sequences to add, of length 1 .. L.
        depth: most sequences in a pack, from 1.

    Returns:
        A mixture that covers what `mixture` covers and `counts`.
    """
    packs = OpenPacks(depth)
    for strategy, count in sorted_mixture(mixture).items():
        packs.put(strategy, count, len(counts) - sum(strategy))
    return sorted_mixture(pack_longest_first(counts, depth, packs))
