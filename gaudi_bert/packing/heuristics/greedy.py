"""GREEDY, the packing of T5 (paper H): sequences as they come, each into the pack at hand or, if it does not fit, a new one.

The order is what the data set's shuffle happens to be, so the histogram is turned back into a shuffled list (seeded). Where
attention is not masked between sequences, separator tokens are put between two of them; they take room and carry nothing.
Next-fit in the terms of bin packing, and the reason why "just concatenate" leaves a fifth of the slots empty.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import Int32Array, IntArray
from gaudi_bert.common.compiled import kernel
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.permutation import permutation
from gaudi_bert.packing.mixture import Mixture, sorted_mixture

__all__ = ["count_greedy_packs", "pack_greedily", "shuffled_lengths"]

MOST_SEQUENCES = 200_000_000  # a list of sequences is needed, so this one algorithm is bounded by memory


def count_greedy_packs(counts: IntArray, depth: int, *, seed: int, separators: int = 0) -> int:
    """Number of packs, without the mixture: nearly every pack is a strategy of its own.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        depth: most sequences per pack; L for no limit, as in T5.
        seed: of the shuffle.
        separators: tokens between two sequences of a pack.

    Raises:
        InputError: too many sequences to list.
    """
    lengths = shuffled_lengths(counts, seed)
    return int(_next_fit(lengths, len(counts), depth, separators, np.zeros(0, dtype=np.int64)))


def pack_greedily(counts: IntArray, depth: int, *, seed: int, separators: int = 0) -> Mixture:
    """Pack by GREEDY; arguments and errors as `count_greedy_packs`."""
    lengths = shuffled_lengths(counts, seed)
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    packs = int(_next_fit(lengths, len(counts), depth, separators, starts))
    starts[packs] = len(lengths)
    return _strategies(lengths, starts[: packs + 1])


def shuffled_lengths(counts: IntArray, seed: int) -> Int32Array:
    """int32 [sequences], the length of each sequence in shuffled order."""
    sequences = int(counts.sum())
    if sequences > MOST_SEQUENCES:
        raise InputError(
            f"greedy packs sequence by sequence and takes at most {MOST_SEQUENCES:,} of them, not {sequences:,};"
            " choose an algorithm that works on the histogram, such as nnls"
        )
    lengths = np.repeat(np.arange(1, len(counts) + 1, dtype=np.int32), counts)
    return lengths[permutation(sequences, seed, "greedy")]


@kernel
def _next_fit(lengths: Int32Array, capacity: int, depth: int, separators: int, starts: IntArray) -> int:
    """Number of packs; the index of each pack's first sequence goes to `starts`, unless that is empty."""
    packs = 0
    held = depth
    room = 0
    for index in range(len(lengths)):
        needed = lengths[index] + separators
        if held == depth or needed > room:
            if len(starts):
                starts[packs] = index
            packs += 1
            held = 0
            room = capacity
            needed = lengths[index]
        room -= needed
        held += 1
    return packs


def _strategies(lengths: Int32Array, starts: IntArray) -> Mixture:
    """Count equal packs, one number of sequences at a time."""
    sizes = np.diff(starts)
    mixture: Mixture = {}
    for size in np.unique(sizes).tolist():
        first = starts[:-1][sizes == size]
        members = np.sort(lengths[first[:, None] + np.arange(size)], axis=1)
        strategies, counts = np.unique(members, axis=0, return_counts=True)
        mixture.update(zip(map(tuple, strategies.tolist()), counts.tolist(), strict=True))
    return sorted_mixture(mixture)
