"""Packs by their numbers, for tools that want a map-style data set: a sampler decides the order, `shuffle=True` too.

Pack i is the i-th of the folder, shard after shard. A few shards are open at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from gaudi_bert.pytorch.rows import Row

_MOST_OPEN = 256


class MappedPacks(Dataset[Row]):
    """The packs of a folder by their numbers.

    `shards` are `ShardFiles` (`reading/streams.py`) with their `sizes`; `rows_of` makes rows of what they `read`.
    """

    def __init__(self, shards: Any, rows_of: Callable[[Any], Sequence[Row]]) -> None:
        self._shards, self._rows_of = shards, rows_of
        self._ends = np.cumsum(shards.sizes)
        self._open: dict[int, None] = {}
        self._process = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which opens the shards itself."""
        return MappedPacks, (self._shards, self._rows_of)

    def __len__(self) -> int:
        """All packs, whatever the number of processes: a sampler deals them."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> Row:
        """One pack; a negative number counts from the end."""
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Row]:
        """Several packs at once, which is how a `DataLoader` asks for a batch."""
        packs = np.asarray(numbers, np.int64)
        packs = np.where(packs < 0, packs + len(self), packs)
        if packs.size and not 0 <= packs.min() <= packs.max() < len(self):
            raise IndexError(f"pack {list(numbers)}: there are {len(self):,} packs")
        shards = np.searchsorted(self._ends, packs, side="right")
        records = packs - (self._ends - self._shards.sizes)[shards]
        self._open_these(np.unique(shards).tolist())
        return list(self._rows_of(self._shards.read(shards, records)))

    def _open_these(self, shards: list[int]) -> None:
        """Open these shards, and close those that were used longest ago."""
        if self._process != os.getpid():  # forked: what is open belongs to the parent
            self._process, self._open = os.getpid(), {}
        for shard in shards:
            if shard in self._open:
                del self._open[shard]
            else:
                self._shards.open(shard, self._shards.prepare(shard))
            self._open[shard] = None
        for shard in list(self._open)[: max(0, len(self._open) - max(_MOST_OPEN, len(shards)))]:
            del self._open[shard]
            self._shards.close(shard)
