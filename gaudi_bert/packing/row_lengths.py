"""Rows of several lengths: which lengths, where the cost of a row grows faster than its length.

With full attention a row of 8,192 positions costs more than 16 rows of 512 that hold as many tokens. So texts of different
lengths are packed into rows of up to three lengths: each sequence goes to the shortest row that it fits, and the sequences
of each length are packed by themselves, with their proven bound.

Every choice of a few candidate lengths is given its least cost by the bounds on its packs, which take no planning. The
choices are then looked at, the cheapest first, until none can be cheaper than the best so far. Many packs that are planned
optimally are as many as their bound, or a few thousandths more, so the bound counts as their number; others are planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError, enumerated
from gaudi_bert.plan.algorithms import pack_histogram, resolve_depth
from gaudi_bert.plan.certificate import simple_certificate, threshold_certificate
from gaudi_bert.plan.histogram import Histogram
from gaudi_bert.plan.strategies import Packing

MOST_LENGTHS = 3
"""Each is a graph to compile."""

LEAST_GAIN = 0.05
"""The share of the cost that several lengths must save; else one length stays, which is one graph to compile."""

_MOST_CANDIDATES = 32
"""Lengths that are tried: all multiples if they are at most so many, else as many in equal ratios."""

_MOST_PLANNED = 40
"""Choices of lengths that are looked at after their bound."""

_MANY_PACKS = 100
"""So many are nearly as many as their bound."""


# A token costs (1 + length of the row / (this * hidden size)) of what it would cost without attention; measured on CPUs.
# Layers with a window compute the complete mask too.
_ATTENTION_SHARE = 2.6

USUAL_HIDDEN_SIZE = 768
"""Of the model by which rows are chosen where none is known."""

Cost = Callable[[int], float]
"""What a row of so many positions costs, in any unit."""


def row_cost(length: int, hidden_size: int) -> float:
    """Return the cost of a row, in units of a token without attention."""
    return length * (1 + length / (_ATTENTION_SHARE * hidden_size))


@dataclass(frozen=True)
class RowLengths:
    """Rows of one to a few lengths."""

    lengths: tuple[int, ...]  # ascending; a sequence is in the shortest row that holds it
    cost: float  # of all rows, estimated
    one_length_cost: float  # of rows of one length, the shortest that holds all sequences
    padded_cost: float  # of batches of single sequences, each padded to its longest
    _rows: _RowPlanner = field(repr=False)

    @property
    def packings(self) -> tuple[Packing, ...]:
        """The packs of each length, planned now."""
        return tuple(self._rows.plan(*interval) for interval in self._rows.intervals(self.lengths))

    def format_cost(self) -> str:
        """The cost compared with that of other ways, for people."""
        one, padded = self.cost / self.one_length_cost, self.cost / self.padded_cost
        beside = f"{one:.2f} of that of rows of one length, " if len(self.lengths) > 1 else ""
        lengths = enumerated(f"{length:,}" for length in self.lengths)
        return f"rows of {lengths}: estimated cost {beside}{padded:.2f} of that of batches padded to their longest sequence"


def choose_row_lengths(
    counts: IntArray,
    cost: Cost,
    *,
    lengths: tuple[int, ...] | None = None,
    multiple: int = 64,
    longest: int | None = None,
    depth: int | str = "max",
    algorithm: str = "optimal",
    batch_sequences: int = 32,
) -> RowLengths:
    """Choose lengths of rows for sequences.

    Args:
        counts: int64 [longest sequence], sequences of length 1, 2, ...; at least one sequence.
        cost: of a row.
        lengths: those of rows, ascending, where they are given; a length that no sequence needs is omitted.
        multiple: every length is a multiple of this, or `longest`.
        longest: no row may be longer, such as the positions of a model; None for no limit.
        depth, algorithm: of each packing, as `pack_histogram`.
        batch_sequences: of the padded batches that the cost is compared with.

    Raises:
        InputError: a sequence is longer than the longest row, or an argument is out of its range.
    """
    if not counts.any():
        raise InputError("there is no sequence to choose the lengths of rows for")
    needed = int(np.flatnonzero(counts)[-1]) + 1
    if longest is not None and needed > longest:
        raise InputError(f"the longest sequence has {needed} tokens, the longest row {longest}; cut it or leave it out")
    if lengths is not None and needed > lengths[-1]:
        raise InputError(f"the longest sequence has {needed} tokens, the longest row {lengths[-1]}; give it a longer one")
    rows = _RowPlanner(counts, cost, depth, algorithm)
    last = -(-needed // multiple)
    steps = range(1, last + 1) if last <= _MOST_CANDIDATES else np.geomspace(1, last, _MOST_CANDIDATES).round().astype(int)
    candidates = sorted({min(int(step) * multiple, longest or last * multiple) for step in steps})
    best = lengths or _choose_cheapest(rows, candidates)
    # Single sequences, drawn at random for batches: how often one of each length is the longest of its batch.
    occurring, sequences = np.flatnonzero(counts) + 1, int(counts.sum())
    none_longer = (np.cumsum(counts[occurring - 1]) / sequences) ** min(batch_sequences, sequences)
    is_longest = np.diff(none_longer, prepend=0.0)
    return RowLengths(
        lengths=tuple(length for _, length in rows.intervals(best)),
        cost=rows.cost(best),
        one_length_cost=rows.cost((candidates[-1],)),
        padded_cost=float(sequences * (is_longest @ np.array([cost(length) for length in occurring.tolist()]))),
        _rows=rows,
    )


def _choose_cheapest(rows: _RowPlanner, candidates: list[int]) -> tuple[int, ...]:
    """One length, or several that save enough."""
    *shorter, longest = candidates
    choices = [(*some, longest) for number in range(1, MOST_LENGTHS) for some in combinations(shorter, number)]
    best: tuple[int, ...] = (longest,)
    best_cost = rows.cost(best) * (1.0 - LEAST_GAIN)
    least = sorted((rows.cost(choice, rows.bound), choice) for choice in choices)
    for least_cost, choice in least[:_MOST_PLANNED]:
        if least_cost >= best_cost:
            break
        if rows.cost(choice) < best_cost:
            best, best_cost = choice, rows.cost(choice)
    return best


class _RowPlanner:
    """The rows of any length for the sequences of more than `above` and at most `length` tokens; each planned once."""

    def __init__(self, counts: IntArray, cost: Cost, depth: int | str, algorithm: str) -> None:
        self._counts, self._cost, self._depth, self._algorithm = counts, cost, depth, algorithm
        self._bounds: dict[tuple[int, int], int] = {}
        self._packings: dict[tuple[int, int], Packing] = {}

    def intervals(self, choice: tuple[int, ...]) -> list[tuple[int, int]]:
        """(above, length) of each of the lengths that some sequence needs."""
        return [(above, length) for above, length in pairwise((0, *choice)) if self._counts[above:length].any()]

    def plan(self, above: int, length: int) -> Packing:
        """The rows, planned."""
        if (above, length) not in self._packings:
            histogram = Histogram(length, self._counts_between(above, length))
            self._packings[above, length] = pack_histogram(histogram, self._algorithm, self._depth)
        return self._packings[above, length]

    def cost(self, choice: tuple[int, ...], packs: Callable[[int, int], int] | None = None) -> float:
        """Return the cost of all rows; by `bound`, a bound of it, without a plan."""
        count = packs or self._estimate_packs
        return sum(count(*interval) * self._cost(interval[1]) for interval in self.intervals(choice))

    def _estimate_packs(self, above: int, length: int) -> int:
        bound = self.bound(above, length)
        return bound if self._algorithm == "optimal" and bound >= _MANY_PACKS else self.plan(above, length).packs

    def bound(self, above: int, length: int) -> int:
        """Return how many rows are needed at least."""
        if (above, length) not in self._bounds:
            part, depth = self._counts_between(above, length), resolve_depth(self._depth, length)
            proofs = simple_certificate(part, depth), threshold_certificate(part, depth)
            self._bounds[above, length] = max(proof.bound for proof in proofs)
        return self._bounds[above, length]

    def _counts_between(self, above: int, length: int) -> IntArray:
        part = np.zeros(length, dtype=np.int64)
        own = self._counts[above:length]
        part[above : above + len(own)] = own
        return part
