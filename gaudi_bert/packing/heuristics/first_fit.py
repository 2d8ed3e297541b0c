"""FFD, first-fit decreasing: the classical heuristic that the paper measures its own against (4.1, F.2).

Sequences go from longest to shortest, each into the first pack, in order of opening, that has room. Packs that were treated
alike so far are kept as one run (count, room, places left), in order; a length changes a run as a whole, and splits at most
one. So the result is that of the sequence-by-sequence algorithm, which took the paper 87 to 120 s, at a cost that depends on
the maximum length only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.compiled import kernel
from gaudi_bert.packing.mixture import Mixture, Strategy, add_packs

__all__ = ["pack_first_fit"]

END = -1
HEAD = 0


class Runs(NamedTuple):
    """Runs of equal packs, a linked list in order of opening, in arrays int64 [R]; run 0 is the head and holds none."""

    packs: IntArray  # how many
    room: IntArray  # tokens left in each
    places: IntArray  # sequences that each may still take
    addition: IntArray  # what was added last; END for nothing
    following: IntArray  # the next run; END for none


class Additions(NamedTuple):
    """What packs hold: `copies` sequences of `length` on top of the addition `below`; arrays int64 [A]."""

    below: IntArray
    length: IntArray
    copies: IntArray


def pack_first_fit(counts: IntArray, depth: int) -> Mixture:
    """Pack by first-fit decreasing.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        depth: most sequences per pack, from 1.
    """
    # A length adds at most two runs by splitting and opens at most two.
    size = 4 * np.count_nonzero(counts) + 1
    runs = Runs(*(np.zeros(size, dtype=np.int64) for _ in Runs._fields))
    used_runs, additions = _first_fit(np.ascontiguousarray(counts), depth, runs)
    mixture: Mixture = {}
    for run in range(HEAD + 1, used_runs):
        add_packs(mixture, _lengths(additions, int(runs.addition[run])), int(runs.packs[run]))
    return mixture


def _lengths(additions: Additions, top: int) -> Strategy:
    lengths: list[int] = []
    while top != END:
        lengths += [int(additions.length[top])] * int(additions.copies[top])
        top = int(additions.below[top])
    return tuple(lengths)


@kernel
def _append(runs: Runs, used: IntArray, before: int, count: int, room: int, places: int, addition: int) -> int:
    """Insert a run after `before`; returns its index."""
    run: int = used[0]
    used[0] += 1
    runs.packs[run], runs.room[run], runs.places[run], runs.addition[run] = count, room, places, addition
    runs.following[run] = runs.following[before]
    runs.following[before] = run
    return run


@kernel
def _split(runs: Runs, used: IntArray, run: int, kept: int) -> None:
    """Leave `kept` packs in `run` and move the others to a run of their own behind it."""
    moved = runs.packs[run] - kept
    if moved > 0:
        _append(runs, used, run, moved, runs.room[run], runs.places[run], runs.addition[run])
        runs.packs[run] = kept


@kernel
def _put(runs: Runs, additions: Additions, used: IntArray, run: int, length: int, copies: int) -> None:
    """Add `copies` sequences of `length` to each pack of `run`."""
    top = used[1]
    used[1] += 1
    additions.below[top], additions.length[top], additions.copies[top] = runs.addition[run], length, copies
    runs.addition[run] = top
    runs.room[run] -= copies * length
    runs.places[run] -= copies


@kernel
def _with_space(additions: Additions, needed: int) -> Additions:
    """The same additions in arrays of at least `needed` entries."""
    size = len(additions.below)
    if needed <= size:
        return additions
    larger = Additions(np.zeros(2 * needed, np.int64), np.zeros(2 * needed, np.int64), np.zeros(2 * needed, np.int64))
    larger.below[:size] = additions.below
    larger.length[:size] = additions.length
    larger.copies[:size] = additions.copies
    return larger


@kernel
def _first_fit(counts: IntArray, depth: int, runs: Runs) -> tuple[int, Additions]:
    """Fill `runs`; returns how many are used, and the additions that say what they hold."""
    capacity = len(counts)
    additions = Additions(np.zeros(64, np.int64), np.zeros(64, np.int64), np.zeros(64, np.int64))
    used = np.array([1, 0])  # runs, additions
    runs.following[HEAD] = END
    for length in range(capacity, 0, -1):
        waiting = counts[length - 1]
        if waiting > 0:
            additions = _with_space(additions, used[1] + used[0] + 4)
        before = HEAD
        while waiting > 0 and runs.following[before] != END:
            before = runs.following[before]
            copies = min(runs.room[before] // length, runs.places[before], waiting)
            if copies > 0:
                filled = min(waiting // copies, runs.packs[before])
                _split(runs, used, before, filled)
                _put(runs, additions, used, before, length, copies)
                waiting -= filled * copies
        while waiting > 0:  # `before` is the last run
            copies = min(capacity // length, depth, waiting)
            opened = waiting // copies
            before = _append(runs, used, before, opened, capacity, depth, END)
            _put(runs, additions, used, before, length, copies)
            waiting -= opened * copies
    return used[0], additions
