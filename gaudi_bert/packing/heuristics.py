"""Packing heuristics on histograms: SPFHP, LPFHP, best fit, FFD, GREEDY, sorted batching, and no packing.

SPFHP, LPFHP and FFD move all equal packs at once instead of single sequences, so their cost depends on the maximum length
and not on the number of sequences. In all functions, `length_counts` is int64 [L], the number of sequences of length 1 .. L,
and `depth` is the maximum number of sequences per pack, from 1. A depth of L or more limits nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from gaudi_bert.common.arrays import Int32Array, IntArray, permutation
from gaudi_bert.common.compiled import kernel
from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.strategies import Strategy, StrategyCounts, add_packs, count_strategies, sort_strategies


def pack_one_per_pack(length_counts: IntArray, depth: int = 1) -> StrategyCounts:
    """Put every sequence into its own pack, as a baseline for comparisons. The depth is ignored."""
    return {(length,): int(length_counts[length - 1]) for length in (np.flatnonzero(length_counts) + 1).tolist()}


# --- SPFHP, LPFHP, best fit

# The maximum number of sequences in all strategies of a plan together. A strategy is the tuple of lengths in a pack. A plan
# of this size takes 0.5 GB. Only packs with millions of sequences reach the limit.
MAX_LISTED = 2**26


class OpenPacks:
    """The packs that a packing heuristic is filling. Open packs, which can take more sequences, are grouped by their number
    of free tokens. Full packs are only counted.

    For every amount of room there is a stack of (count, pack) entries, used last in, first out. This order is part of the
    published algorithms; another order would give other results. The amounts of room are kept sorted, so that the largest
    room and the smallest sufficient room are found by bisection. A pack is closed once it is full or contains `depth`
    sequences.

    Args:
        depth: the maximum number of sequences per pack.
        max_listed: the maximum number of sequences that all strategies may contain in total, or None for `MAX_LISTED`.
    """

    def __init__(self, depth: int, max_listed: float | None = None) -> None:
        self.depth = depth
        self._most_listed = MAX_LISTED if max_listed is None else max_listed
        self._listed = 0
        self._closed: StrategyCounts = {}
        self._stacks: dict[int, list[tuple[int, Strategy]]] = {}
        self._rooms: list[int] = []

    @classmethod
    def from_strategy_counts(cls, strategy_counts: StrategyCounts, length: int, depth: int) -> OpenPacks:
        """Create open packs from `strategy_counts`, the number of packs for each tuple of lengths. Each pack may hold at
        most `length` tokens and `depth` sequences.
        """
        packs = cls(depth)
        for strategy, count in sort_strategies(strategy_counts).items():
            packs.add_packs(strategy, count, length - sum(strategy))
        return packs

    def add_packs(self, pack: Strategy, count: int, room: int) -> None:
        """Add `count` identical packs that have `room` free tokens. Packs that cannot take another sequence are closed
        immediately.

        Raises:
            InputError: the strategies would list more sequences than allowed.
        """
        self._listed += len(pack)
        if self._listed > self._most_listed:
            raise InputError(
                f"the strategies would contain more than {self._most_listed:,} sequences in total; use a smaller depth, "
                "such as 8"
            )
        if room == 0 or len(pack) == self.depth:
            add_packs(self._closed, pack, count)
            return
        if room not in self._stacks:
            self._stacks[room] = []
            insort(self._rooms, room)
        self._stacks[room].append((count, pack))

    def find_largest_room(self) -> int | None:
        """Return the largest number of free tokens in an open pack, or None if no pack is open."""
        return self._rooms[-1] if self._rooms else None

    def find_smallest_room_for(self, length: int) -> int | None:
        """Among the open packs with room for `length` tokens, find the fullest, and return its number of free tokens. Return
        None if no pack has enough room.
        """
        position = bisect_left(self._rooms, length)
        return self._rooms[position] if position < len(self._rooms) else None

    def get_newest_entry(self, room: int) -> tuple[int, Strategy]:
        """Among the open packs with `room` free tokens, return the newest entry (number of equal packs, pack) without
        removing it.
        """
        return self._stacks[room][-1]

    def remove_newest(self, room: int, count: int) -> None:
        """Remove `count` of the open packs that have `room` free tokens. Remove them from the newest entry, which is what
        `get_newest_entry` returns. It must contain at least `count` packs.
        """
        stack = self._stacks[room]
        available, pack = stack.pop()
        if count < available:
            stack.append((available - count, pack))
            return
        self._listed -= len(pack)
        if not stack:
            del self._stacks[room]
            del self._rooms[bisect_left(self._rooms, room)]

    def close_all_packs(self) -> StrategyCounts:
        """Close all open packs, and return how many packs there are of each strategy. A strategy is the tuple of lengths in
        a pack.
        """
        for room in list(self._stacks):
            for count, pack in self._stacks.pop(room):  # A pack may list millions of sequences, so free each stack at once.
                add_packs(self._closed, pack, count)
        self._rooms = []
        return self._closed


def pack_shortest_first(length_counts: IntArray, depth: int) -> StrategyCounts:
    """Pack a histogram with SPFHP (shortest-pack-first histogram-packing), which puts each sequence into the pack with the
    most free tokens.

    SPFHP is worst fit on a histogram (paper 3.1.1, F.2 and G.2). From the longest length to the shortest, put sequences into
    the open packs with the most room, as many as the stack of equal packs can take. If no pack has enough room, open new
    packs for the rest. SPFHP is almost instant, but it uses up the room of the emptiest packs first. It is also not
    monotone: a larger depth may need more packs.
    """
    open_packs = OpenPacks(depth)
    for length in (np.flatnonzero(length_counts)[::-1] + 1).tolist():
        waiting = int(length_counts[length - 1])
        while waiting:
            room = open_packs.find_largest_room()
            if room is None or room < length:
                open_packs.add_packs((length,), waiting, len(length_counts) - length)
                break
            available, pack = open_packs.get_newest_entry(room)
            moved = min(available, waiting)
            open_packs.remove_newest(room, moved)
            open_packs.add_packs((*pack, length), moved, room - length)
            waiting -= moved
    return open_packs.close_all_packs()


def pack_longest_first(length_counts: IntArray, depth: int, open_packs: OpenPacks | None = None) -> StrategyCounts:
    """Pack a histogram with LPFHP (longest-pack-first histogram-packing), which puts each sequence into the fullest pack
    that can still hold it.

    LPFHP is best fit on a histogram, with split counts (paper R). It works like SPFHP, but sequences go to the open packs
    with the least sufficient room, and a pack takes as many copies of a length at once as fit. For example, two sequences of
    256 fill a pack of 512 instead of waiting in two packs for other sequences. LPFHP is optimal at depth 2 on all published
    histograms. Without a depth limit it is within 0.03 % of the lower bound.

    Args:
        length_counts: int64 [L], the sequences to pack.
        depth: the maximum number of sequences per pack.
        open_packs: open packs to fill first; None for no packs.
    """
    open_packs = OpenPacks(depth) if open_packs is None else open_packs
    for length in (np.flatnonzero(length_counts)[::-1] + 1).tolist():
        waiting = fill_open_packs(open_packs, length, int(length_counts[length - 1]))
        while waiting:
            copies = min(len(length_counts) // length, depth, waiting)
            opened = waiting // copies
            open_packs.add_packs((length,) * copies, opened, len(length_counts) - copies * length)
            waiting -= opened * copies
    return open_packs.close_all_packs()


def fill_open_packs(open_packs: OpenPacks, length: int, sequence_count: int) -> int:
    """Put sequences of one length into open packs, fullest packs first, and return how many sequences did not fit.

    Args:
        open_packs: the open packs, which are changed.
        length: tokens of each sequence.
        sequence_count: the number of sequences to place.
    """
    while sequence_count:
        room = open_packs.find_smallest_room_for(length)
        if room is None:
            break
        available, pack = open_packs.get_newest_entry(room)
        copies = min(room // length, open_packs.depth - len(pack), sequence_count)
        moved = min(available, sequence_count // copies)
        open_packs.remove_newest(room, moved)
        open_packs.add_packs(pack + (length,) * copies, moved, room - copies * length)
        sequence_count -= moved * copies
    return sequence_count


def add_by_best_fit(strategy_counts: StrategyCounts, length_counts: IntArray, depth: int) -> StrategyCounts:
    """Put sequences into existing packs, longest sequences first, each into the fullest pack that can hold it. Return how
    many packs there are of each strategy. A strategy is the tuple of lengths in a pack.

    A new pack is opened if no existing pack can hold a sequence. The function runs LPFHP on the existing packs, so its cost
    does not depend on the number of sequences.
    """
    open_packs = OpenPacks.from_strategy_counts(strategy_counts, len(length_counts), depth)
    return sort_strategies(pack_longest_first(length_counts, depth, open_packs))


# --- FFD, first-fit decreasing: the classical heuristic with which the paper compares its algorithms (4.1, F.2)


def pack_first_fit(length_counts: IntArray, depth: int) -> StrategyCounts:
    """Pack a histogram with FFD (first-fit decreasing), which puts each sequence into the first pack with enough room,
    longest sequences first.

    Each sequence, from longest to shortest, goes into the first opened pack that has room. Consecutive packs that are equal
    so far form a run. Each length fills complete runs and splits at most one of them, at most twice. The result is the same
    as that of the algorithm that handles one sequence at a time, for which the paper reports 87 to 120 s.
    """
    # The array has a column for each run, which consists of consecutive packs that are equal so far. Its rows are the number
    # of packs in the run, and the tokens and sequences that each pack can still take. The last run contains the packs that
    # are not opened yet.
    runs = np.array([[int(length_counts.sum())], [len(length_counts)], [depth]])
    held: list[Strategy] = [()]
    for length in (np.flatnonzero(length_counts)[::-1] + 1).tolist():
        waiting = int(length_counts[length - 1])
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
# The packing depends on the order of the shuffled data, so the histogram is expanded into a list of lengths that is shuffled
# by a seed. If attention is not masked between sequences, separator tokens are inserted between two sequences; they use
# slots without carrying information.

# GREEDY lists all sequences in memory, so their number is limited.
MOST_SEQUENCES = 200_000_000


def count_greedy_packs(length_counts: IntArray, depth: int, *, seed: int, separators: int = 0) -> int:
    """Return the number of packs that the algorithm `greedy` needs, without listing which lengths share a pack.

    Listing them would be slow, because nearly every pack has a strategy of its own.

    Args:
        length_counts: int64 [L], the sequences to pack.
        depth: the maximum number of sequences per pack; T5 has no such limit.
        seed: the seed of the order of the sequences.
        separators: separator tokens between two sequences of a pack.

    Raises:
        InputError: there are more than `MOST_SEQUENCES` sequences.
    """
    no_starts = np.zeros(0, dtype=np.int64)
    return int(_pack_by_next_fit(_shuffle_lengths(length_counts, seed), len(length_counts), depth, separators, no_starts))


def pack_greedily(length_counts: IntArray, depth: int, *, seed: int) -> StrategyCounts:
    """Pack sequences with GREEDY: in shuffled order, put each sequence into the current pack, or into a new pack if it does
    not fit.

    "Just concatenate" works in this way. It leaves about a fifth of the slots empty. For the arguments, see
    `count_greedy_packs`.
    """
    lengths = _shuffle_lengths(length_counts, seed)
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    packs = int(_pack_by_next_fit(lengths, len(length_counts), depth, 0, starts))
    starts[packs] = len(lengths)
    return sort_strategies(count_strategies(lengths, starts[: packs + 1]))


def _shuffle_lengths(length_counts: IntArray, seed: int) -> Int32Array:
    """Return the length of every sequence in a histogram, in an order shuffled by the seed, int32 [sequences]."""
    sequences = int(length_counts.sum())
    if sequences > MOST_SEQUENCES:
        raise InputError(
            f"algorithm `greedy` supports at most {MOST_SEQUENCES:,} sequences, but there are {sequences:,}; use another "
            "algorithm, such as nnls"
        )
    lengths = np.repeat(np.arange(1, len(length_counts) + 1, dtype=np.int32), length_counts)
    return lengths[permutation(sequences, seed, "greedy")]


@kernel
def _pack_by_next_fit(lengths: Int32Array, pack_tokens: int, depth: int, separators: int, pack_starts: IntArray) -> int:
    """Pack the sequences in the given order by next fit, which fills one pack at a time, and return the number of packs.

    The index of the first sequence of each pack is written to `pack_starts`, unless `pack_starts` is empty.
    """
    packs = 0
    held = depth
    room = 0
    for index in range(len(lengths)):
        needed = lengths[index] + separators
        if held == depth or needed > room:
            if len(pack_starts):
                pack_starts[packs] = index
            packs += 1
            held = 0
            room = pack_tokens
            needed = lengths[index]
        room -= needed
        held += 1
    return packs


# --- SORT, sorted batching (paper 1 and table 1)


def count_tokens_of_sorted_batches(length_counts: IntArray, batch_sequences: int) -> int:
    """Return the number of tokens in all batches, including padding, if the sequences are sorted by length before batching.

    Sequences are sorted by length, cut into batches, and padded to the longest sequence of their batch. There is almost no
    padding, but nearly every batch has another shape, for which Gaudi compiles another graph, and batches are no longer
    random samples. This count is for estimates only, because there is nothing to write.

    Args:
        length_counts: int64 [L], the sequences to batch.
        batch_sequences: sequences per batch; the last batch may contain fewer.
    """
    lengths = np.arange(len(length_counts), 0, -1)
    ends = np.cumsum(length_counts[::-1])
    starts = ends - length_counts[::-1]
    # Sequences are sorted from long to short, so batch k begins at position k * batch_sequences with its longest sequence.
    # Count how many batches begin at each length.
    batches_started = -(-ends // batch_sequences) - -(-starts // batch_sequences)
    sequences = int(ends[-1]) if len(ends) else 0
    padded_tokens = int(batches_started @ lengths) * batch_sequences
    if sequences % batch_sequences:
        last_length = int(lengths[np.flatnonzero(batches_started)[-1]])
        padded_tokens -= (batch_sequences - sequences % batch_sequences) * last_length
    return padded_tokens
