"""The one order in which packs are read, whatever the number of processes that read them.

With n shards of equal size, pack i of an epoch is record i div n of shard i mod n, after a permutation of the shards, and
of the packs in each, both keyed by (seed, epoch). Shards of unequal size are dealt in the same way until the shortest is
used up, then the others among themselves, and so on: every pack has one number, 0 .. packs - 1. Process r of W takes the
packs whose number mod W is r, which are whole shards where W divides n.

A place in the data is one number, of packs that all processes have read; it means the same with any W. Packs of a shard
change places within windows of so many records only, and windows among themselves: to read a shard in its order is to read
a file nearly from front to back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import IntArray, permutation, random_words
from gaudi_bert.common.errors import InputError

WINDOW_PACKS = 4096


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a number that no process has."""
    if world_size < 1:
        raise InputError(f"world_size = {world_size}: at least 1 is needed")
    if not 0 <= rank < world_size:
        raise InputError(f"rank = {rank}: 0 to {world_size - 1} is allowed")


def numbers_of_rank(done: int, end: int, rank: int, world_size: int) -> IntArray:
    """The numbers mod `world_size` of `rank`, int64, ascending, from `done` on and below `end`."""
    return np.arange(done + (rank - done) % world_size, end, world_size, dtype=np.int64)


@dataclass(frozen=True)
class _Stretch:
    """Rows of the dealing in which the same shards have packs left."""

    first_pack: int
    first_record: int
    shards: IntArray


class GlobalOrder:
    """The order of every epoch.

    Args:
        sizes: packs of each shard.
        seed: decides, with the number of the epoch, all orders.
        window_packs: how far a pack may move within its window of a shard.

    Attributes:
        packs: of an epoch.
    """

    def __init__(self, sizes: Sequence[int], seed: int, window_packs: int = WINDOW_PACKS) -> None:
        self._sizes = np.asarray(sizes, np.int64)
        self.seed, self.window_packs = seed, window_packs
        self.packs = int(self._sizes.sum())
        self._firsts = np.cumsum(self._sizes) - self._sizes
        self._forget()

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which deals the shards itself."""
        return GlobalOrder, (self._sizes, self.seed, self.window_packs)

    def places(self, epoch: int, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Where packs lie.

        Args:
            epoch: its number, from 0.
            numbers: int64 [n], each 0 .. packs - 1.

        Returns:
            Their shards and their records in them, int64 [n] each.
        """
        self._enter(epoch)
        firsts = np.array([stretch.first_pack for stretch in self._stretches])
        stretches = np.searchsorted(firsts, numbers, side="right") - 1
        shards, records = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
        for number in np.unique(stretches):
            stretch, chosen = self._stretches[number], stretches == number
            rows, columns = np.divmod(numbers[chosen] - stretch.first_pack, len(stretch.shards))
            shards[chosen], records[chosen] = stretch.shards[columns], rows + stretch.first_record
        if not self._is_known[shards].all():
            for shard in np.unique(shards[~self._is_known[shards]]).tolist():
                self._learn_order_of(shard)
        return shards, self._records[self._firsts[shards] + records]

    def _forget(self) -> None:
        """Be in no epoch. The records of all shards, one after the other, take memory as they are filled in."""
        self._epoch = -1
        self._stretches: list[_Stretch] = []
        self._records = np.empty(self.packs, np.int64)
        self._is_known = np.zeros(len(self._sizes), np.bool_)

    def _enter(self, epoch: int) -> None:
        """Deal the shards of an epoch, unless that is done."""
        if epoch == self._epoch:
            return
        order = permutation(len(self._sizes), self.seed, "shard order", epoch)
        self._forget()
        self._epoch = epoch
        first_pack = first_record = 0
        for size in np.unique(self._sizes[self._sizes > 0]):
            shards = order[self._sizes[order] > first_record]
            self._stretches.append(_Stretch(first_pack, first_record, shards))
            first_pack += (int(size) - first_record) * len(shards)
            first_record = int(size)

    def _learn_order_of(self, shard: int) -> None:
        """Note the records of a shard in the order of this epoch."""
        first, size, key = int(self._firsts[shard]), int(self._sizes[shard]), (self._epoch, shard)
        windows = permutation(-(-size // self.window_packs), self.seed, "window order", *key)
        place_of_window = np.argsort(windows)
        words = random_words(size, self.seed, "pack order", *key)
        self._records[first : first + size] = np.lexsort((words, place_of_window[np.arange(size) // self.window_packs]))
        self._is_known[shard] = True
