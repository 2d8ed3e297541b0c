"""Packers of other tools, which are compared with gaudi-bert's algorithms on the same lengths.

If the package of a tool is installed and accepts lengths (TRL), the package is called. For all other tools, a stand-in
implements the heuristic that the tool's documentation and source code describe for its default settings:

- TRL, `pack_dataset(strategy="bfd")`: best-fit decreasing within each batch of 1,000 rows, as `Dataset.map` passes them.

- seqpacker, `obfd`, its default and its best algorithm: best-fit decreasing over all sequences. Without a depth limit,
best-fit decreasing yields the same packs as LPFHP, because a pack that was just filled is the tightest fit for the next
sequence of the same length.

- NeMo, `first_fit_decreasing` and `first_fit_shuffle`: first fit over all sequences, with the longest first or shuffled.

- axolotl, `sample_packing`: first fit in groups of 100,000 sequences in input order, with at most 200 sequences in a pack.

- grain, `FirstFitPackIterDataset` and `BestFitPackIterDataset`: a fixed number of open packs (here 1,024, as in MaxText's
own comparison), all of which are closed when a sequence does not fit into any of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import BoolArray, Int32Array
from gaudi_bert.common.compiled import kernel
from gaudi_bert.packing.heuristics import pack_first_fit, pack_longest_first
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.strategies import count_packs

TRL_BATCH = 1000
AXOLOTL_GROUP, AXOLOTL_DEPTH = 100_000, 200
GRAIN_PACKS = 1024
MOST_TRL_TOKENS = 2**28
"""The largest number of tokens for which TRL is called. TRL requires tokens, not lengths, and each token takes a byte."""


@dataclass(frozen=True, eq=False)
class ListedLengths:
    """The lengths of all sequences in two orders, and their histogram.

    Attributes:
        in_order: int32 [sequences], the lengths in input order.
        shuffled: The same lengths in random order.
        histogram: The number of sequences of each length.
        depth: The largest number of sequences in a pack.
    """

    in_order: Int32Array
    shuffled: Int32Array
    histogram: Histogram
    depth: int

    @property
    def slots(self) -> int:
        """The number of slots in a pack."""
        return self.histogram.max_sequence_length


@dataclass(frozen=True)
class _Peer:
    """A packer of another tool.

    Attributes:
        tool: The package of the tool.
        algorithm: The tool's name for the algorithm.
        count: Return the number of packs of our stand-in for the heuristic.
        installed: Return the number of packs of the package itself. None if the package cannot be called with lengths.
    """

    tool: str
    algorithm: str
    count: Callable[[ListedLengths], int]
    installed: Callable[[ListedLengths], int] | None = None

    def callable_for(self, lengths: ListedLengths) -> bool:
        """Return whether the package is installed and can pack these lengths. The package supports no depth limit."""
        if self.installed is None or lengths.depth < lengths.slots or lengths.histogram.tokens > MOST_TRL_TOKENS:
            return False
        return importlib.util.find_spec(self.tool) is not None


def _count_trl_packs(lengths: ListedLengths) -> int:
    """Return the number of packs that TRL's own `pack_dataset` builds with the strategy `bfd` and default settings."""
    import pyarrow
    from datasets import Dataset, disable_progress_bars
    from datasets.table import InMemoryTable
    from trl import pack_dataset

    disable_progress_bars()
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths.in_order, dtype=np.int32)])
    rows = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(np.zeros(offsets[-1], np.int8)))
    table = InMemoryTable(pyarrow.table({"input_ids": rows}))
    return len(pack_dataset(Dataset(table), lengths.slots, "bfd"))


PEERS = (
    _Peer("seqpacker", "obfd", lambda given: count_packs(pack_longest_first(given.histogram.counts, given.depth))),
    _Peer("nemo", "first_fit_decreasing", lambda given: count_packs(pack_first_fit(given.histogram.counts, given.depth))),
    _Peer(
        "trl",
        "bfd",
        lambda given: count_best_fit(
            sorted_in_batches(given.in_order, TRL_BATCH), given.slots, given.depth, batch=TRL_BATCH
        ),
        _count_trl_packs,
    ),
    _Peer("nemo", "first_fit_shuffle", lambda given: count_first_fit(given.shuffled, given.slots, given.depth)),
    _Peer(
        "axolotl",
        "multipack",
        lambda given: count_first_fit(given.in_order, given.slots, min(given.depth, AXOLOTL_DEPTH), batch=AXOLOTL_GROUP),
    ),
    _Peer(
        "grain",
        "best_fit",
        lambda given: count_best_fit(given.in_order, given.slots, given.depth, open_packs=GRAIN_PACKS),
    ),
    _Peer(
        "grain",
        "first_fit",
        lambda given: count_first_fit(given.in_order, given.slots, given.depth, open_packs=GRAIN_PACKS),
    ),
)


# --- first fit and best fit over sequences in input order, as in data loaders
#
# A data loader may limit the number of open packs, and may close all packs after a fixed number of sequences. These
# functions only count packs. The time per sequence is logarithmic in the number of packs or slots.


def count_first_fit(
    lengths: Int32Array, capacity: int, depth: int, *, batch: int | None = None, open_packs: int | None = None
) -> int:
    """Return the number of packs that first fit needs. Each sequence goes to the first open pack, in order of opening, that
    has enough room.

    Args:
        lengths: int32 [sequences], lengths from 1 to `capacity`, in order.
        capacity: The number of slots in a pack.
        depth: The largest number of sequences in a pack.
        batch: Close all packs after this number of sequences. None: never.
        open_packs: The largest number of open packs. If a sequence fits into none of them, close all of them. None: no
            limit.
    """
    batch, most = _limits(lengths.size, batch, open_packs)
    leaves = 1 << (most - 1).bit_length()
    room, depth_left = np.zeros(2 * leaves, np.int32), np.zeros(leaves, np.int32)
    return int(_first_fit(lengths, capacity, depth, batch, most, room, depth_left))


def count_best_fit(
    lengths: Int32Array, capacity: int, depth: int, *, batch: int | None = None, open_packs: int | None = None
) -> int:
    """Return the number of packs that best fit needs. Each sequence goes to the open pack in which it leaves the least room.
    The arguments are the same as for `count_first_fit`.
    """
    batch, most = _limits(lengths.size, batch, open_packs)
    leaves = 1 << capacity.bit_length()
    return int(_best_fit(lengths, capacity, depth, batch, most, np.zeros(2 * leaves, np.bool_)))


def sorted_in_batches(lengths: Int32Array, batch: int) -> Int32Array:
    """Return the lengths sorted in descending order within each batch of `batch` sequences: int32 [sequences]."""
    whole = lengths.size - lengths.size % batch
    full = np.sort(lengths[:whole].reshape(-1, batch), axis=1)[:, ::-1].ravel()
    return np.concatenate([full, np.sort(lengths[whole:])[::-1]])


def _limits(sequences: int, batch: int | None, open_packs: int | None) -> tuple[int, int]:
    """Return the number of sequences after which all packs are closed, and the largest number of open packs."""
    batch = min(batch or sequences, max(sequences, 1))
    return batch, min(open_packs or batch, batch)


@kernel
def _first_fit(
    lengths: Int32Array, capacity: int, depth: int, batch: int, most: int, room: Int32Array, depth_left: Int32Array
) -> int:
    """Count the packs of first fit. `room` is a binary tree of maxima: the children of node n are 2 n and 2 n + 1, and the
    leaves are the packs.
    """
    leaves = depth_left.size
    packs, opened = 0, 0
    for index in range(lengths.size):
        length = lengths[index]
        if index % batch == 0 or room[1] < length:
            packs += opened
            opened = 0
            room[leaves : leaves + most] = capacity
            depth_left[:] = depth
            for node in range(leaves - 1, 0, -1):
                room[node] = max(room[2 * node], room[2 * node + 1])
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        pack = node - leaves
        opened = max(opened, pack + 1)
        depth_left[pack] -= 1
        room[node] = room[node] - length if depth_left[pack] else 0
        node //= 2
        while node > 0:
            room[node] = max(room[2 * node], room[2 * node + 1])
            node //= 2
    return packs + opened


@kernel
def _mark(tree: BoolArray, leaf: int, present: bool) -> None:
    """Store in a tree of "any" values whether there are packs with this amount of room."""
    tree[leaf] = present
    node = leaf // 2
    while node > 0:
        tree[node] = tree[2 * node] or tree[2 * node + 1]
        node //= 2


@kernel
def _least_room(tree: BoolArray, length: int) -> int:
    """Return the smallest amount of room of at least `length` that some pack has, or 0 if there is no such pack."""
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
    """Count the packs of best fit. Packs with the same room form a linked stack, and `tree` marks which amounts of room
    exist.
    """
    leaves = tree.size // 2
    last = np.full(capacity + 1, -1, np.int64)
    below = np.zeros(most, np.int64)
    depth_left = np.zeros(most, np.int64)
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
            depth_left[pack] = depth
            opened += 1
        else:
            pack = last[room]
            last[room] = below[pack]
            if below[pack] < 0:
                _mark(tree, leaves + room, False)
        room -= length
        depth_left[pack] -= 1
        if room > 0 and depth_left[pack] > 0:
            if last[room] < 0:
                _mark(tree, leaves + room, True)
            below[pack] = last[room]
            last[room] = pack
    return packs + opened
