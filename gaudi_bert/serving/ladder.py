"""The ladder: the few static shapes that a server computes, and how waiting texts are packed into one of them.

One row of 32 slots (on a CPU of 16), twice as many, up to the longest row; then 2 rows of that length, 4, 8. So one short
query costs 32 slots or 16, and a full queue fills the largest shape. Texts go into rows by first fit in the order in which
they wait, the oldest first. Of all shapes the one is taken that computes most tokens a second by its measured cost; among
those that are nearly as fast the cheapest, so that what comes next waits less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.window_plan import deepest

_MOST_SHAPES = 12
_NEARLY = 0.9
"""A shape that computes at least this share of the tokens a second of the fastest one is as good."""
_BESIDE_BULK = 0.5
"""The same while single texts come beside a request of many: what is in such a batch, and what comes next, waits less."""


class Shape(NamedTuple):
    """Rows of a batch, and the slots of each."""

    rows: int
    length: int

    @property
    def slots(self) -> int:
        """Slots of all rows."""
        return self.rows * self.length

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}"


class Fill(NamedTuple):
    """A shape, and the numbers of the waiting texts that each of its rows holds."""

    shape: Shape
    rows: list[list[int]]
    tokens: int


def ladder(row_length: int, batch_rows: int, shortest: int = 32) -> tuple[Shape, ...]:
    """Return the shapes from one row of `shortest` slots to `batch_rows` rows of `row_length`, ascending."""
    lengths = [row_length]
    while lengths[0] > shortest:
        lengths.insert(0, 1 << ((lengths[0] - 1).bit_length() - 1))
    rows = [1]
    while rows[-1] < batch_rows:
        rows.append(min(2 * rows[-1], batch_rows))
    if len(rows) >= _MOST_SHAPES:
        raise InputError(
            f"--batch-rows {batch_rows}: makes {len(rows)} shapes, at most {_MOST_SHAPES} are computed; lower it"
        )
    shapes = [Shape(1, length) for length in lengths] + [Shape(count, row_length) for count in rows[1:]]
    return tuple(shapes[-_MOST_SHAPES:])


def first_fit(lengths: Sequence[int], shape: Shape) -> list[list[int]]:
    """Put texts into the first row that has room, in their order; what fits nowhere is omitted.

    The rows of a shape with fewer rows of the same length are the first ones of this result.
    """
    most, free = deepest(shape.length), [shape.length] * shape.rows
    rows: list[list[int]] = [[] for _ in free]
    shortest, first = min(lengths, default=1), 0
    for number, length in enumerate(lengths):
        for row in range(first, shape.rows):
            if free[row] >= length and len(rows[row]) < most:
                rows[row].append(number)
                free[row] -= length
                break
        while first < shape.rows and (free[first] < shortest or len(rows[first]) == most):
            first += 1
        if first == shape.rows:
            break
    return rows


def choose(lengths: Sequence[int], costs: Mapping[Shape, float], urgent: int = 0) -> Fill:
    """Return the shape that computes most of the waiting texts' tokens a second, and what fills it.

    Args:
        lengths: tokens of each waiting text, at most the longest row; the first one is computed in any case.
        costs: seconds of a batch of each shape, which do not fall from a shape to the next.
        urgent: so many of the first texts are better computed soon than with many others.
    """
    largest = max(costs)
    of_longest = first_fit(lengths, largest)
    fills = []
    for shape in sorted(costs):
        if shape.length < lengths[0]:
            continue
        rows = of_longest[: shape.rows] if shape.length == largest.length else first_fit(lengths, shape)
        fills.append(Fill(shape, rows, sum(lengths[number] for row in rows for number in row)))
    best = max(fill.tokens / costs[fill.shape] for fill in fills)

    def is_good(fill: Fill) -> bool:
        holds_urgent = urgent > 0 and sum(number < urgent for row in fill.rows for number in row) == urgent
        return fill.tokens / costs[fill.shape] >= (_BESIDE_BULK if holds_urgent else _NEARLY) * best

    return next(fill for fill in fills if is_good(fill))
