"""Packs that are stored in shards, in the one order: which every reader of a packed folder uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.reading.global_order import WINDOW_PACKS, GlobalOrder, check_rank
from gaudi_bert.reading.streams import StreamReader


@dataclass(frozen=True, eq=False)
class StoredPacks:
    """Packs of a folder.

    Attributes:
        files: `ShardFiles` with the `sizes` of all shards, which `read` packs by shard and number.
        streams: how many shards are read at once; `sets` of so many take turns.
        regions: from which part of the input each shard comes, int64 [shards]; None for the sequence of the shards.
        window_rows: of a shard, how many packs it takes no more to read than one; None for any number.
    """

    files: Any
    streams: int
    sets: int = 1
    regions: IntArray | None = None
    window_rows: Callable[[int], int] | None = None

    def order(self, seed: int, shuffle_packs: int | None = None) -> GlobalOrder:
        """The one order; packs of a shard move within `shuffle_packs`, by default as far as costs no more."""
        window: int | Callable[[int], int] = shuffle_packs or WINDOW_PACKS
        rows = self.window_rows
        if rows is not None:
            window = rows if shuffle_packs is None else lambda shard: min(shuffle_packs, rows(shard))
        return GlobalOrder(self.files.sizes, seed, window, self.streams, self.sets, self.regions)

    def reader(self, order: GlobalOrder, rank: int = 0, world_size: int = 1) -> StreamReader[Any]:
        """Locates the packs of one process, and has their shards open."""
        check_rank(rank, world_size)
        return StreamReader(self.files, order, rank, world_size)
