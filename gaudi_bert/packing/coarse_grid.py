"""Packing at very large maximum lengths: plan on a coarse grid, fill with real lengths.

With thousands of lengths the linear program itself is the cost. So the lengths are rounded to the nearest
multiple of a grid, and that problem of some hundred lengths is solved. Rounding up would make every coarse pack
feasible, and waste half a grid step for every sequence; rounding to the nearest wastes nothing on average, and
within the bins of a coarse pack there are nearly always real lengths that fill the pack exactly: all bins but
two give the length of which most are left, the last two the pair that fills up. What is left over when bins run
dry goes into the next round, and at last into one that rounds up.

The prices of the coarse problem, interpolated to the real lengths, prove a bound that is nearly as good as its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.compiled import kernel
from gaudi_bert.packing.mixture import Mixture, add_packs

__all__ = ["Grid", "coarse_counts", "fill_strategies", "interpolated_prices", "pack_on_grids", "split_counts"]


MOST_PIECES = 10**6
"""A pack of real lengths takes a part of what is left of each, but not less than one sequence in so many, so that the number
of different packs depends on the lengths and not on how many sequences there are."""


@dataclass(frozen=True)
class Grid:
    """How lengths are rounded.

    Attributes:
        max_length: tokens in a pack (L).
        step: tokens in a bin.
        up: round up, so that every coarse pack can be filled; else to the nearest.
    """

    max_length: int
    step: int
    up: bool = False

    @property
    def number(self) -> int:
        """Number of bins; bin c (from 1) stands for c * step tokens."""
        return self.max_length // self.step

    @property
    def bins(self) -> IntArray:
        """The bin of each length 1 .. L: int64 [L]."""
        lengths = np.arange(1, self.max_length + 1)
        return np.clip((lengths + (self.step - 1 if self.up else self.step // 2)) // self.step, 1, self.number)


@dataclass(frozen=True)
class Round:
    """One round: number of bins, whether to round up, and the tokens that a pack may fall short of full."""

    bins: int
    waste: int
    up: bool = False


ROUNDS = (Round(512, 0), Round(1024, 0), Round(1024, 4), Round(1024, 8), Round(1024, 0, up=True))


def pack_on_grids(counts: IntArray, solve: Callable[[IntArray, Grid], Mixture]) -> tuple[Mixture, IntArray]:
    """Pack round by round on coarse grids.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        solve: packs a coarse problem, given as sequences per bin, int64 [bins], and its grid.

    Returns:
        The packs, and the sequences left over: int64 [L].
    """
    mixture: Mixture = {}
    left = counts
    for settings in ROUNDS:
        grid = Grid(len(counts), len(counts) // settings.bins, settings.up)
        packs, left = fill_strategies(solve(coarse_counts(left, grid), grid), left, grid, settings.waste)
        for strategy, count in packs.items():
            add_packs(mixture, strategy, count)
        if not left.any():
            break
    return mixture, left


def coarse_counts(counts: IntArray, grid: Grid) -> IntArray:
    """Sequences in each bin: int64 [bins]."""
    result = np.zeros(grid.number + 1, dtype=np.int64)
    np.add.at(result, grid.bins, counts)
    return result[1:]


def split_counts(counts: IntArray, bins: int, slack: float = 0.0) -> IntArray:
    """Sequences in each bin, int64 [bins], where a length between two bins is split among both.

    Bin c stands for c * L / bins tokens. Number and tokens of all sequences stay as they are, to within one bin, except that
    sequences shorter than one bin lie in the first. With `slack` each sequence counts as so many tokens more, which leaves
    room to whoever fills the bins with real lengths.
    """
    max_length = len(counts)
    result = [0] * (bins + 2)
    carried = 0.0
    for length in (np.flatnonzero(counts) + 1).tolist():
        count, (lower, above) = int(counts[length - 1]), divmod(length * bins, max_length)
        if lower == 0:
            result[1] += count
            continue
        wanted = count * (above + slack * bins) / max_length + carried
        raised = min(count, max(0, round(wanted)))
        carried = wanted - raised
        result[lower] += count - raised
        result[lower + 1] += raised
    result[bins] += result[bins + 1]  # what was carried may raise the longest sequences
    return np.array(result[1 : bins + 1], dtype=np.int64)


def interpolated_prices(prices: IntArray, max_length: int) -> IntArray:
    """Prices of the lengths 1 .. L from those of equal bins, int64 [bins] to int64 [L], never falling with length."""
    bins = len(prices)
    places = np.arange(1, max_length + 1) * bins / max_length
    fine = np.interp(places, np.arange(bins + 1), np.concatenate(([0.0], prices)))
    result: IntArray = np.maximum.accumulate(np.floor(fine)).astype(np.int64)
    return result


def fill_strategies(coarse: Mixture, counts: IntArray, grid: Grid, waste: int) -> tuple[Mixture, IntArray]:
    """Real packs for coarse ones.

    Args:
        coarse: strategies of bins.
        counts: int64 [L], sequences of length 1 .. L.
        grid: what the bins are.
        waste: tokens by which a pack whose bins fill it may fall short. A coarse pack with room may waste any number.

    Returns:
        The packs and the sequences left over: int64 [L].
    """
    bins = grid.bins
    first = np.searchsorted(bins, np.arange(grid.number + 1), side="left") + 1
    last = np.searchsorted(bins, np.arange(grid.number + 1), side="right")
    left = np.concatenate(([0], counts)).astype(np.int64)
    least_repeats = int(counts.sum()) // MOST_PIECES
    result: Mixture = {}
    for strategy, usage in sorted(coarse.items(), key=lambda item: (-max(item[0]), item[0])):
        pattern = np.array(strategy[::-1], dtype=np.int64)
        exact = not grid.up and len(strategy) > 1 and sum(strategy) == grid.number
        packs, repeats = _fill(pattern, usage, left, first, last, grid.max_length, waste, exact, least_repeats)
        for pack, repeat in zip(packs.tolist(), repeats.tolist(), strict=True):
            add_packs(result, tuple(pack), repeat)
    return result, left[1:]


@kernel
def _fill(
    pattern: IntArray,
    usage: int,
    left: IntArray,
    first: IntArray,
    last: IntArray,
    max_length: int,
    waste: int,
    exact: bool,
    least_repeats: int,
) -> tuple[IntArray, IntArray]:
    """Up to `usage` packs with one length from each bin of `pattern`; takes them out of `left`.

    Returns the packs, int64 [packs, bins], and how often each is used.
    """
    size = pattern.size
    packs = np.zeros((64, size), dtype=np.int64)
    repeats = np.zeros(64, dtype=np.int64)
    found = 0
    while usage > 0:
        if found == packs.shape[0]:
            packs, repeats = np.concatenate((packs, np.zeros_like(packs))), np.concatenate((repeats, np.zeros_like(repeats)))
        pack = packs[found]
        if not _choose_lengths(pattern, left, first, last, max_length, waste, exact, pack):
            break
        repeat = usage
        for length in pack:
            whole = 1 + left[length] // np.sum(pack == length)
            repeat = min(repeat, max(1 + left[length] // (8 * size), min(least_repeats, whole)))
        for length in pack:
            left[length] -= repeat - 1
        repeats[found] = repeat
        usage -= repeat
        found += 1
    return packs[:found], repeats[:found]


@kernel
def _choose_lengths(
    pattern: IntArray,
    left: IntArray,
    first: IntArray,
    last: IntArray,
    room: int,
    waste: int,
    exact: bool,
    pack: IntArray,
) -> bool:
    """One length from each bin into `pack`, taken out of `left`; False and nothing taken if there are none.

    With `exact` they fill the room up to `waste`; else they have to fit.
    """
    size = pattern.size
    least, most = np.sum(first[pattern]), np.sum(last[pattern])
    pack[:] = 0
    for place in range(size):
        low, high = first[pattern[place]], last[pattern[place]]
        least, most = least - low, most - high
        if exact and place == size - 2:
            one, two = _choose_pair(left, low, high, last[pattern[size - 1]], room, waste)
            if one == 0:
                return _give_back(left, pack)
            pack[size - 2], pack[size - 1] = one, two
            left[one] -= 1
            left[two] -= 1
            return True
        best = _most_numerous(left, max(low, room - most), min(high, room - least)) if exact else 0
        if best == 0:
            best = _most_numerous(left, low, min(high, room - least))
        if best == 0:
            return _give_back(left, pack)
        pack[place] = best
        left[best] -= 1
        room -= best
    return True


@kernel
def _most_numerous(left: IntArray, low: int, high: int) -> int:
    """The length in low .. high of which most are left; 0 if there is none."""
    best = 0
    for length in range(low, high + 1):
        if left[length] > 0 and (best == 0 or left[length] >= left[best]):
            best = length
    return best


@kernel
def _choose_pair(left: IntArray, low: int, high: int, longest: int, room: int, waste: int) -> tuple[int, int]:
    """A length in low .. high and one of up to `longest` that fill the room with the least waste; (0, 0): none."""
    for short in range(waste + 1):
        best, one = 0, 0
        for length in range(low, min(high, room - short - 1) + 1):
            other = room - short - length
            supply = min(left[length], left[other]) if other != length else left[length] // 2
            if other <= longest and supply > best:
                best, one = supply, length
        if best > 0:
            return one, room - short - one
    return 0, 0


@kernel
def _give_back(left: IntArray, pack: IntArray) -> bool:
    """Undo the choices; always False."""
    for length in pack:
        if length > 0:
            left[length] += 1
    return False
