"""The heuristics on a histogram: SPFHP, LPFHP and best fit, FFD, GREEDY, SORT, and no packing at all.

SPFHP, LPFHP and FFD never look at single sequences: they move all equal packs at once, so their cost depends on the
maximum length and not on the size of the data. Counts are int64 [L], the sequences of length 1 .. L; a depth is the most
sequences per pack, from 1, and L or more means no limit.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from gaudi_bert.common.arrays import Int32Array, IntArray, permutation
from gaudi_bert.common.compiled import kernel
from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.strategies import Strategy, StrategyCounts, add_packs, count_strategies, sort_strategies


def pack_singly(counts: IntArray, depth: int = 1) -> StrategyCounts:
    """No packing: one pack per sequence, whatever the depth. The baseline of every comparison."""
    return {(length,): int(counts[length - 1]) for length in (np.flatnonzero(counts) + 1).tolist()}


# --- SPFHP, LPFHP, best fit

MAX_LISTED = 2**26
"""Sequences that the strategies of a plan may list: half a gigabyte. Only packs of millions of sequences need more."""


class OpenPacks:
    """Packs that still have room, by how much room they have, and the mixture of those that are closed.

    For every remaining room there is a stack of (count, pack), used last in, first out: that order is part of the published
    algorithms, and any other gives other numbers. The rooms in use are sorted, so that the largest room, or the smallest
    that fits, comes from a bisection.

    A full pack is closed, and one of `depth` sequences. All strategies may list `max_listed` (`MAX_LISTED`) sequences.
    """

    def __init__(self, depth: int, max_listed: float | None = None) -> None:
        self.depth = depth
        self._most_listed = MAX_LISTED if max_listed is None else max_listed
        self._listed = 0
        self._closed: StrategyCounts = {}
        self._stacks: dict[int, list[tuple[int, Strategy]]] = {}
        self._rooms: list[int] = []

    def add(self, pack: Strategy, count: int, room: int) -> None:
        """Add `count` packs with room for `room` more tokens."""
        self._listed += len(pack)
        if self._listed > self._most_listed:
            raise InputError(
                f"the strategies would list more than {self._most_listed:,} sequences; give a smaller depth, 8 say"
            )
        if room == 0 or len(pack) == self.depth:
            add_packs(self._closed, pack, count)
            return
        stack = self._stacks.get(room)
        if stack is None:
            self._stacks[room] = [(count, pack)]
            insort(self._rooms, room)
        else:
            stack.append((count, pack))

    def largest_room(self) -> int | None:
        """The largest room of any open pack."""
        return self._rooms[-1] if self._rooms else None

    def smallest_room_for(self, length: int) -> int | None:
        """The smallest room that holds `length` tokens."""
        position = bisect_left(self._rooms, length)
        return self._rooms[position] if position < len(self._rooms) else None

    def peek(self, room: int) -> tuple[int, Strategy]:
        """The (count, pack) put last among those with this room."""
        return self._stacks[room][-1]

    def remove_from_top(self, room: int, count: int) -> None:
        """Remove `count` of the packs at the top of the stack of this room."""
        stack = self._stacks[room]
        available, pack = stack.pop()
        if count < available:
            stack.append((available - count, pack))
            return
        self._listed -= len(pack)
        if not stack:
            del self._stacks[room]
            del self._rooms[bisect_left(self._rooms, room)]

    def close_all(self) -> StrategyCounts:
        """The mixture of all packs, open or closed."""
        for room in list(self._stacks):
            for count, pack in self._stacks.pop(room):  # freed at once: a pack may hold millions of sequences
                add_packs(self._closed, pack, count)
        self._rooms = []
        return self._closed


def pack_shortest_first(counts: IntArray, depth: int) -> StrategyCounts:
    """SPFHP, shortest-pack-first histogram-packing (paper 3.1.1, F.2 and G.2): worst fit on the histogram.

    From the longest length to the shortest, sequences go to the open packs with the most room, as many at once as that stack
    of equal packs can take; where nothing fits, the rest opens new packs. Near-instant, but it uses up the room of the
    emptiest packs first, and it is not monotone in depth: more depth can mean more packs.
    """
    packs = OpenPacks(depth)
    for length in (np.flatnonzero(counts)[::-1] + 1).tolist():
        waiting = int(counts[length - 1])
        while waiting:
            room = packs.largest_room()
            if room is None or room < length:
                packs.add((length,), waiting, len(counts) - length)
                break
            available, pack = packs.peek(room)
            moved = min(available, waiting)
            packs.remove_from_top(room, moved)
            packs.add((*pack, length), moved, room - length)
            waiting -= moved
    return packs.close_all()


def pack_longest_first(counts: IntArray, depth: int, packs: OpenPacks | None = None) -> StrategyCounts:
    """LPFHP, longest-pack-first histogram-packing (paper R): best fit on the histogram, with counts split.

    As SPFHP, but sequences go to the open packs with the least room that still fits, and a pack takes as many copies of the
    length at once as it can hold: two sequences of 256 make the full pack (256, 256) instead of two packs that wait for
    others. At depth 2 this is optimal on all published histograms; without a limit of depth it comes within 0.03 % of the
    bound. `packs` with room are filled first.
    """
    packs = OpenPacks(depth) if packs is None else packs
    for length in (np.flatnonzero(counts)[::-1] + 1).tolist():
        waiting = fill_open_packs(packs, length, int(counts[length - 1]))
        while waiting:
            copies = min(len(counts) // length, depth, waiting)
            opened = waiting // copies
            packs.add((length,) * copies, opened, len(counts) - copies * length)
            waiting -= opened * copies
    return packs.close_all()


def fill_open_packs(packs: OpenPacks, length: int, waiting: int) -> int:
    """Put sequences of `length` into open packs, tightest first; returns how many remain."""
    while waiting:
        room = packs.smallest_room_for(length)
        if room is None:
            break
        available, pack = packs.peek(room)
        copies = min(room // length, packs.depth - len(pack), waiting)
        moved = min(available, waiting // copies)
        packs.remove_from_top(room, moved)
        packs.add(pack + (length,) * copies, moved, room - copies * length)
        waiting -= moved * copies
    return waiting


def best_fit_into(strategy_counts: StrategyCounts, counts: IntArray, depth: int) -> StrategyCounts:
    """Add sequences to packs that already exist, by best fit decreasing.

    Each sequence, longest first, goes to the pack with the least room that still holds it, or into a new pack. This is LPFHP
    started from existing packs, so it costs the same for one sequence as for a million.
    """
    packs = OpenPacks(depth)
    for strategy, count in sort_strategies(strategy_counts).items():
        packs.add(strategy, count, len(counts) - sum(strategy))
    return sort_strategies(pack_longest_first(counts, depth, packs))


# --- FFD, first-fit decreasing: the classical heuristic that the paper compares its own with (4.1, F.2)


def pack_first_fit(counts: IntArray, depth: int) -> StrategyCounts:
    """FFD: from longest to shortest, each sequence goes into the first pack, in order of opening, that has room.

    Packs that were treated alike so far are one run; a length changes complete runs, and splits at most one, twice. So the
    result is that of the sequence-by-sequence algorithm, which took the paper 87 to 120 s.
    """
    # Packs, and the tokens and sequences that each still takes: int64 [3, runs]. The last run are packs to be opened.
    runs = np.array([[int(counts.sum())], [len(counts)], [depth]])
    held: list[Strategy] = [()]
    for length in (np.flatnonzero(counts)[::-1] + 1).tolist():
        waiting = int(counts[length - 1])
        for first in np.flatnonzero((runs[1] >= length) & (runs[2] > 0)).tolist():
            for run in range(first, first + 3):
                packs, room, slots = runs[:, run].tolist()
                copies = min(room // length, slots, waiting)
                filled = min(waiting // copies, packs)
                if filled < packs:
                    runs = np.insert(runs, run + 1, (packs - filled, room, slots), axis=1)
                    held.insert(run + 1, held[run])
                runs[:, run] = filled, room - copies * length, slots - copies
                held[run] += (length,) * copies
                waiting -= filled * copies
                if filled == packs or not waiting:
                    break
            if not waiting:
                break
    strategy_counts: StrategyCounts = {}
    for strategy, count in zip(held, runs[0].tolist(), strict=True):
        if strategy:
            add_packs(strategy_counts, strategy, count)
    return strategy_counts


# --- GREEDY, the packing of T5 (paper H): next fit
#
# The order is that of the data set's shuffle, so the histogram is turned back into a shuffled list (seeded). Where attention
# is not masked between sequences, separator tokens are put between two of them; they take room and carry nothing.

MOST_SEQUENCES = 200_000_000  # a list of sequences is needed, so this one algorithm is bounded by memory


def count_greedy_packs(counts: IntArray, depth: int, *, seed: int, separators: int = 0) -> int:
    """Number of packs of GREEDY, without the mixture: nearly every pack is a separate strategy.

    `separators` are tokens between two sequences of a pack; T5 has no limit of depth.
    """
    lengths = _shuffled_lengths(counts, seed)
    return int(_next_fit(lengths, len(counts), depth, separators, np.zeros(0, dtype=np.int64)))


def pack_greedily(counts: IntArray, depth: int, *, seed: int) -> StrategyCounts:
    """GREEDY: sequences as they come, each into the present pack or, if it does not fit, into a new one: "just concatenate".

    This leaves a fifth of the slots empty. Arguments as `count_greedy_packs`.
    """
    lengths = _shuffled_lengths(counts, seed)
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    packs = int(_next_fit(lengths, len(counts), depth, 0, starts))
    starts[packs] = len(lengths)
    return sort_strategies(count_strategies(lengths, starts[: packs + 1]))


def _shuffled_lengths(counts: IntArray, seed: int) -> Int32Array:
    """int32 [sequences], the length of each sequence in shuffled order."""
    sequences = int(counts.sum())
    if sequences > MOST_SEQUENCES:
        raise InputError(f"greedy takes at most {MOST_SEQUENCES:,} sequences, not {sequences:,}; choose nnls, for example")
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


# --- SORT, sorted batching (paper 1 and table 1)


def count_sorted_tokens(counts: IntArray, batch_sequences: int) -> int:
    """Tokens, padding included, of sorted batching: sequences sorted by length, cut into batches, padded to the longest.

    Almost no padding, but every batch has another shape, so a compiler for static shapes (Gaudi) meets a new graph at every
    length, and batches are not random samples any more. For estimates only: there is nothing to write. The last batch may be
    smaller than `batch_sequences`.
    """
    lengths = np.arange(len(counts), 0, -1)
    ends = np.cumsum(counts[::-1])
    starts = ends - counts[::-1]
    # Batch k begins at sorted position k * batch_sequences, and its first sequence is its longest.
    begun = -(-ends // batch_sequences) - -(-starts // batch_sequences)
    sequences = int(ends[-1]) if len(ends) else 0
    padded_tokens = int(begun @ lengths) * batch_sequences
    if sequences % batch_sequences:
        last_length = int(lengths[np.flatnonzero(begun)[-1]])
        padded_tokens -= (batch_sequences - sequences % batch_sequences) * last_length
    return padded_tokens
