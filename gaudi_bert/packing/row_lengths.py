"""Choose row lengths for a histogram if the cost of a row grows faster than its length.

With full attention, a row of 8,192 positions costs more than 16 rows of 512 positions, which hold as many tokens. Therefore
texts of different lengths are packed into rows of up to three lengths. Each sequence goes into the shortest row that holds
it, and the sequences of each row length are packed on their own, with a proven lower bound.

For every choice of a few candidate lengths, a lower bound of the cost follows from the bounds on its packs, without
planning. The choices are then examined in the order of this bound, until none can be cheaper than the best so far. Optimal
plans with many packs exceed their bound by at most a few thousandths, so the bound is used as the number of packs. With few
packs, the packs are planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError, join_with_and
from gaudi_bert.packing.algorithms import pack_histogram, resolve_depth
from gaudi_bert.packing.certificate import prove_bound_by_length_threshold, prove_bound_by_totals
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.strategies import Packing

# The maximum number of row lengths. Each of them needs its own compiled graph.
MOST_LENGTHS = 3

# The fraction of the cost that several row lengths must save. Otherwise a single row length is used, which needs only one
# compiled graph.
LEAST_GAIN = 0.05

# The maximum number of candidate row lengths. If there are more multiples of `length_multiple`, the candidates grow by a
# constant ratio.
_MOST_CANDIDATES = 32

# Combinations of row lengths are sorted by a lower bound on their cost. At most this many combinations are then examined
# further.
_MOST_PLANNED = 40

# If the sequences for one row length need at least this many rows, the lower bound is used as the number of rows. An optimal
# packing exceeds the bound by at most a few thousandths.
_MANY_PACKS = 100


# Attention multiplies the cost of a token by 1 + length / (_ATTENTION_SHARE * hidden size), as measured on CPUs. Layers with
# an attention window cost as much as other layers, because they also compute the full mask.
_ATTENTION_SHARE = 2.6

# The hidden size to assume if the model is not known yet.
USUAL_HIDDEN_SIZE = 768

# A function that returns the cost of a row with the given number of positions, in any unit.
Cost = Callable[[int], float]


def estimate_row_cost(length: int, hidden_size: int) -> float:
    """Return the cost of a row of `length` positions, relative to the cost of a single token without attention."""
    return length * (1 + length / (_ATTENTION_SHARE * hidden_size))


@dataclass(frozen=True)
class RowLengths:
    """The row lengths that were chosen for a histogram, and their estimated cost."""

    lengths: tuple[int, ...]  # ascending; each sequence is in the shortest row that holds it
    cost: float  # estimated cost of all rows
    one_length_cost: float  # estimated cost with one row length, the shortest that holds all sequences
    padded_cost: float  # estimated cost of batches of single sequences, padded to the longest of each batch
    _rows: _RowPlanner = field(repr=False)

    @property
    def packings(self) -> tuple[Packing, ...]:
        """The packing for each row length, computed on first use."""
        return tuple(
            self._rows.plan_interval(interval) for interval in self._rows.list_intervals_with_sequences(self.lengths)
        )

    def format_row_cost_comparison(self) -> str:
        """Return a line that compares the cost of these rows with that of a single row length and that of padded batches."""
        one, padded = self.cost / self.one_length_cost, self.cost / self.padded_cost
        beside = f"{one:.2f} times that of rows of a single length and " if len(self.lengths) > 1 else ""
        lengths = join_with_and(f"{length:,}" for length in self.lengths)
        padded_text = f"{padded:.2f} times that of batches padded to their longest sequence"
        return f"rows of {lengths}: the estimated cost is {beside}{padded_text}"


def choose_row_lengths(
    length_counts: IntArray,
    row_cost: Cost,
    *,
    row_lengths: tuple[int, ...] | None = None,
    length_multiple: int = 64,
    max_row_length: int | None = None,
    depth: int | str = "max",
    algorithm: str = "optimal",
    batch_sequences: int = 32,
) -> RowLengths:
    """Choose the row lengths with the smallest estimated cost for a histogram, unless `row_lengths` specifies them.

    Args:
        length_counts: int64 [longest sequence], the number of sequences of length 1, 2, and so on; at least one sequence.
        row_cost: the cost of a row, as a function of its length.
        row_lengths: the row lengths to use, ascending, or None to choose them. Lengths that no sequence needs are dropped.
        length_multiple: chosen lengths are multiples of this number, except `max_row_length` itself.
        max_row_length: the longest row allowed, such as the number of positions of a model; None for no limit.
        depth: the maximum number of sequences per pack, or "max" for no limit.
        algorithm: the packing algorithm.
        batch_sequences: sequences per batch in the padded batches with which the cost is compared.

    Returns:
        The row lengths with their estimated costs.

    Raises:
        InputError: a sequence is longer than the longest row, or there is no sequence.
    """
    if not length_counts.any():
        raise InputError("row lengths cannot be chosen, because there are no sequences; add some")
    needed = int(np.flatnonzero(length_counts)[-1]) + 1
    if max_row_length is not None and needed > max_row_length:
        raise InputError(
            f"the longest sequence has {needed} tokens, but rows have at most {max_row_length}; truncate or drop it"
        )
    if row_lengths is not None and needed > row_lengths[-1]:
        raise InputError(
            f"the longest sequence has {needed} tokens, but the longest row has {row_lengths[-1]}; add a longer row"
        )
    planner = _RowPlanner(length_counts, row_cost, depth, algorithm)
    last = -(-needed // length_multiple)
    steps = range(1, last + 1) if last <= _MOST_CANDIDATES else np.geomspace(1, last, _MOST_CANDIDATES).round().astype(int)
    candidates = sorted({min(int(step) * length_multiple, max_row_length or last * length_multiple) for step in steps})
    best = row_lengths or _choose_cheapest_lengths(planner, candidates)
    # A batch is padded to its longest sequence. Therefore compute for each length the probability that it is the longest in
    # a random batch.
    occurring, sequences = np.flatnonzero(length_counts) + 1, int(length_counts.sum())
    none_longer = (np.cumsum(length_counts[occurring - 1]) / sequences) ** min(batch_sequences, sequences)
    is_longest = np.diff(none_longer, prepend=0.0)
    return RowLengths(
        lengths=tuple(interval.row_length for interval in planner.list_intervals_with_sequences(best)),
        cost=planner.total_cost(best),
        one_length_cost=planner.total_cost((candidates[-1],)),
        padded_cost=float(sequences * (is_longest @ np.array([row_cost(length) for length in occurring.tolist()]))),
        _rows=planner,
    )


def _choose_cheapest_lengths(planner: _RowPlanner, candidates: list[int]) -> tuple[int, ...]:
    """Return the cheapest combination of candidate row lengths. If using several lengths saves too little, return only the
    longest candidate.
    """
    *shorter, longest = candidates
    choices = [(*some, longest) for number in range(1, MOST_LENGTHS) for some in combinations(shorter, number)]
    best: tuple[int, ...] = (longest,)
    best_cost = planner.total_cost(best) * (1.0 - LEAST_GAIN)
    by_min_cost = sorted((planner.total_cost(choice, planner.compute_min_rows), choice) for choice in choices)
    for min_cost, choice in by_min_cost[:_MOST_PLANNED]:
        if min_cost >= best_cost:
            break
        if planner.total_cost(choice) < best_cost:
            best, best_cost = choice, planner.total_cost(choice)
    return best


class _LengthInterval(NamedTuple):
    """The sequences of more than `longer_than` and at most `row_length` tokens, which are packed into rows of this size."""

    longer_than: int
    row_length: int


class _RowPlanner:
    """Computes and caches how many rows the sequences in an interval of lengths need, and what these rows cost. All
    sequences of an interval go into rows of the same length.
    """

    def __init__(self, counts: IntArray, cost: Cost, depth: int | str, algorithm: str) -> None:
        self._counts, self._cost, self._depth, self._algorithm = counts, cost, depth, algorithm
        self._bounds: dict[_LengthInterval, int] = {}
        self._packings: dict[_LengthInterval, Packing] = {}

    def list_intervals_with_sequences(self, row_lengths: tuple[int, ...]) -> list[_LengthInterval]:
        """Divide the sequence lengths into intervals at the given row lengths, and return the intervals that contain
        sequences.
        """
        intervals = (_LengthInterval(*pair) for pair in pairwise((0, *row_lengths)))
        return [interval for interval in intervals if self._counts[slice(*interval)].any()]

    def plan_interval(self, interval: _LengthInterval) -> Packing:
        """Pack the sequences in an interval of lengths into rows of its row length, or reuse the packing from an earlier
        call.
        """
        if interval not in self._packings:
            self._packings[interval] = pack_histogram(
                Histogram(interval.row_length, self._select_counts_in_interval(interval)), self._algorithm, self._depth
            )
        return self._packings[interval]

    def total_cost(
        self, row_lengths: tuple[int, ...], count_interval_packs: Callable[[_LengthInterval], int] | None = None
    ) -> float:
        """Return the total cost of packing all sequences into rows of the given lengths.

        The cost is the number of rows of each length, times the cost of a row of this length. `count_interval_packs` returns
        the number of rows for the sequences in an interval of lengths. With `compute_min_rows`, the result is a lower bound.
        """
        pack_count_of = count_interval_packs or self._estimate_packs
        return sum(
            pack_count_of(interval) * self._cost(interval.row_length)
            for interval in self.list_intervals_with_sequences(row_lengths)
        )

    def _estimate_packs(self, interval: _LengthInterval) -> int:
        """Return the number of rows for the sequences in an interval of lengths. If an optimal packing would need almost as
        few rows as the lower bound, return the bound without packing.
        """
        bound = self.compute_min_rows(interval)
        return bound if self._algorithm == "optimal" and bound >= _MANY_PACKS else self.plan_interval(interval).packs

    def compute_min_rows(self, interval: _LengthInterval) -> int:
        """Return a lower bound on the number of rows for the sequences in an interval of lengths."""
        if interval not in self._bounds:
            counts, depth = self._select_counts_in_interval(interval), resolve_depth(self._depth, interval.row_length)
            proofs = prove_bound_by_totals(counts, depth), prove_bound_by_length_threshold(counts, depth)
            self._bounds[interval] = max(proof.bound for proof in proofs)
        return self._bounds[interval]

    def _select_counts_in_interval(self, interval: _LengthInterval) -> IntArray:
        """Return the histogram counts of the sequences in an interval of lengths, int64 [row_length]. Counts of shorter
        sequences are 0.
        """
        result = np.zeros(interval.row_length, dtype=np.int64)
        own = self._counts[slice(*interval)]
        result[interval.longer_than : interval.longer_than + len(own)] = own
        return result
