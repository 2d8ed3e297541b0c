"""Other tools' packers, to be compared with our algorithms on the same lengths.

Each is called where its package is installed and takes lengths (TRL); otherwise the same heuristic, written anew, stands in
for it: what the tool's documentation and source say that it does with its default settings.

- TRL, `pack_dataset(strategy="bfd")`: best-fit decreasing within each batch of 1,000 rows, as `Dataset.map` hands them over.
- seqpacker, `obfd`, its default and best: best-fit decreasing over all sequences. Any best fit of decreasing lengths has the
  packs of LPFHP without a limit of depth: a pack just filled is the tightest for the next sequence of the same length.
- NeMo, `first_fit_decreasing` and `first_fit_shuffle`: first fit over all sequences, longest first or shuffled.
- axolotl, `sample_packing`: first fit in groups of 100,000 sequences as they come, at most 200 in a pack.
- grain, `FirstFitPackIterDataset`, `BestFitPackIterDataset`: a number of open packs (here 1,024, as in MaxText's own
  comparison), all of which are closed when a sequence fits none of them.
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
"""TRL takes tokens, not lengths: each token is made up as a byte, up to this many."""


@dataclass(frozen=True, eq=False)
class ListedLengths:
    """The sequences one by one, and counted.

    Attributes:
        in_order: int32 [sequences], as they come.
        shuffled: the same in a random order.
        histogram: how many there are of each length.
    """

    in_order: Int32Array
    shuffled: Int32Array
    histogram: Histogram
    depth: int

    @property
    def slots(self) -> int:
        """Slots of a pack."""
        return self.histogram.max_sequence_length


@dataclass(frozen=True)
class _Peer:
    """A packer of another tool.

    Attributes:
        tool: its package.
        algorithm: what the tool calls the algorithm.
        count: the packs of the same heuristic, written anew.
        installed: the packs that the package itself makes, where it can be called with lengths.
    """

    tool: str
    algorithm: str
    count: Callable[[ListedLengths], int]
    installed: Callable[[ListedLengths], int] | None = None

    def callable_for(self, lengths: ListedLengths) -> bool:
        """Whether the package itself is installed and can pack these lengths: it has no limit of depth."""
        if self.installed is None or lengths.depth < lengths.slots or lengths.histogram.tokens > MOST_TRL_TOKENS:
            return False
        return importlib.util.find_spec(self.tool) is not None


def _count_trl_packs(lengths: ListedLengths) -> int:
    """Packs that TRL's own `pack_dataset` makes by its strategy `bfd`, default settings, of rows with these lengths."""
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


# --- first fit and best fit over sequences in the order in which they come, as data loaders pack them
#
# A loader that streams or works batch by batch may keep only so many packs open, and may start afresh after so many
# sequences. Only the packs are counted; every sequence costs the logarithm of the packs or of the slots.


def count_first_fit(
    lengths: Int32Array, capacity: int, depth: int, *, batch: int | None = None, open_packs: int | None = None
) -> int:
    """Packs of first fit: each sequence goes to the first open pack, in order of opening, that has room.

    Args:
        lengths: int32 [sequences], 1 .. capacity, in order.
        capacity: slots of a pack.
        batch: all packs are closed after so many sequences; None: never.
        open_packs: where a sequence fits none of so many packs, all of them are closed; None: any number may be open.
    """
    batch, most = _limits(lengths.size, batch, open_packs)
    leaves = 1 << (most - 1).bit_length()
    room, depth_left = np.zeros(2 * leaves, np.int32), np.zeros(leaves, np.int32)
    return int(_first_fit(lengths, capacity, depth, batch, most, room, depth_left))


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
    lengths: Int32Array, capacity: int, depth: int, batch: int, most: int, room: Int32Array, depth_left: Int32Array
) -> int:
    """`room` is a tree of maxima over the packs: node n has the children 2 n and 2 n + 1, the packs are its leaves."""
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
