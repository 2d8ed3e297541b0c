"""First fit and best fit over sequences in the order in which they come, as data loaders pack them.

Unlike the algorithms on histograms these look at sequence after sequence, may keep only so many packs open, and may start
afresh after so many sequences: what a loader that streams, or works batch by batch, can do. Only the number of packs is
counted; every sequence costs the logarithm of the packs or of the slots.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import BoolArray, Int32Array
from gaudi_bert.common.compiled import kernel

__all__ = ["count_best_fit", "count_first_fit", "sorted_in_batches"]


def count_first_fit(
    lengths: Int32Array, capacity: int, depth: int, *, batch: int | None = None, open_packs: int | None = None
) -> int:
    """Packs of first fit: each sequence goes to the first open pack, in order of opening, that has room.

    Args:
        lengths: int32 [sequences], 1 .. capacity, in order.
        capacity: slots of a pack.
        depth: most sequences per pack.
        batch: all packs are closed after so many sequences; None: never.
        open_packs: where a sequence fits none of so many packs, all of them are closed; None: any number may be open.
    """
    batch, most = _limits(lengths.size, batch, open_packs)
    leaves = 1 << (most - 1).bit_length()
    room, places = np.zeros(2 * leaves, np.int32), np.zeros(leaves, np.int32)
    return int(_first_fit(lengths, capacity, depth, batch, most, room, places))


def count_best_fit(
    lengths: Int32Array, capacity: int, depth: int, *, batch: int | None = None, open_packs: int | None = None
) -> int:
    """Packs of best fit: each sequence goes to the open pack that it fits most tightly; arguments as `count_first_fit`."""
    batch, most = _limits(lengths.size, batch, open_packs)
    leaves = 1 << capacity.bit_length()
    return int(_best_fit(lengths, capacity, depth, batch, most, np.zeros(2 * leaves, np.bool_)))


def sorted_in_batches(lengths: Int32Array, batch: int) -> Int32Array:
    """The same lengths, longest first within each batch of so many: int32 [sequences]."""
    whole = lengths.size - lengths.size % batch
    full = np.sort(lengths[:whole].reshape(-1, batch), axis=1)[:, ::-1].ravel()
    return np.concatenate([full, np.sort(lengths[whole:])[::-1]])


def _limits(sequences: int, batch: int | None, open_packs: int | None) -> tuple[int, int]:
    batch = min(batch or sequences, max(sequences, 1))
    return batch, min(open_packs or batch, batch)


@kernel
def _first_fit(
    lengths: Int32Array, capacity: int, depth: int, batch: int, most: int, room: Int32Array, places: Int32Array
) -> int:
    """`room` is a tree of maxima over the packs: node n has the children 2 n and 2 n + 1, the packs are its leaves."""
    leaves = places.size
    packs, opened = 0, 0
    for index in range(lengths.size):
        length = lengths[index]
        if index % batch == 0 or room[1] < length:
            packs += opened
            opened = 0
            room[leaves : leaves + most] = capacity
            places[:] = depth
            for node in range(leaves - 1, 0, -1):
                room[node] = max(room[2 * node], room[2 * node + 1])
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        pack = node - leaves
        opened = max(opened, pack + 1)
        places[pack] -= 1
        room[node] = room[node] - length if places[pack] else 0
        node //= 2
        while node > 0:
            room[node] = max(room[2 * node], room[2 * node + 1])
            node //= 2
    return packs + opened


@kernel
def _mark(tree: BoolArray, leaf: int, present: bool) -> None:
    """Say whether there are packs with this room, in a tree of `any`."""
    tree[leaf] = present
    node = leaf // 2
    while node > 0:
        tree[node] = tree[2 * node] or tree[2 * node + 1]
        node //= 2


@kernel
def _least_room(tree: BoolArray, length: int) -> int:
    """The smallest room of at least `length` that some pack has; 0 if there is none."""
    leaves = tree.size // 2
    node = leaves + length
    if tree[node]:
        return length
    while node > 1:
        if node % 2 == 0 and tree[node + 1]:
            node += 1
            while node < leaves:
                node = 2 * node if tree[2 * node] else 2 * node + 1
            return node - leaves
        node //= 2
    return 0


@kernel
def _best_fit(lengths: Int32Array, capacity: int, depth: int, batch: int, most: int, tree: BoolArray) -> int:
    """Packs with the same room are a stack, linked from the one put last; `tree` says which rooms there are."""
    leaves = tree.size // 2
    last = np.full(capacity + 1, -1, np.int64)
    below = np.zeros(most, np.int64)
    places = np.zeros(most, np.int64)
    packs, opened = 0, 0
    for index in range(lengths.size):
        length = lengths[index]
        room = _least_room(tree, length)
        if index % batch == 0 or (room == 0 and opened == most):
            packs += opened
            opened, room = 0, 0
            last[:] = -1
            tree[:] = False
        if room == 0:
            pack, room = opened, capacity
            places[pack] = depth
            opened += 1
        else:
            pack = last[room]
            last[room] = below[pack]
            if below[pack] < 0:
                _mark(tree, leaves + room, False)
        room -= length
        places[pack] -= 1
        if room > 0 and places[pack] > 0:
            if last[room] < 0:
                _mark(tree, leaves + room, True)
            below[pack] = last[room]
            last[room] = pack
    return packs + opened
