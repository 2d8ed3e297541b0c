"""The ladder of static shapes that a server computes, and how waiting texts are packed into one of them.

The ladder begins with one row of 32 slots (16 on a CPU), then doubles the length up to the longest row, then doubles the
number of rows. So one short query costs 32 or 16 slots, and a full queue fills the largest shape. Texts go into rows by
first fit, in the order in which they wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.window_plan import deepest

_MOST_SHAPES = 12
_NEARLY = 0.9
"""A shape is good enough if it computes at least this share of the tokens per second that the fastest shape computes.

Of the good ones the smallest is taken, because what arrives meanwhile waits for it. Simulated with MiniLM's costs on a CPU
and 32 clients, shares of 1.0, 0.9 and 0.8 answer 90, 97 and 93 texts per second of the mix, and 333, 322 and 300 queries.
"""


class Shape(NamedTuple):
    """The number of rows of a batch, and the number of slots of each row."""

    rows: int
    length: int

    @property
    def slots(self) -> int:
        """The number of slots of all rows."""
        return self.rows * self.length

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}"


class Fill(NamedTuple):
    """A shape, for each of its rows the indices of the texts that the row holds, and the number of their tokens."""

    shape: Shape
    rows: list[list[int]]
    tokens: int


def make_ladder(row_length: int, batch_rows: int, shortest: int = 32) -> tuple[Shape, ...]:
    """Return the shapes from one row of `shortest` slots to `batch_rows` rows of `row_length`, ascending.

    Raises:
        InputError: `batch_rows` would need too many shapes.
    """
    lengths = [row_length]
    while lengths[0] > shortest:
        lengths.insert(0, 1 << ((lengths[0] - 1).bit_length() - 1))
    rows = [1]
    while rows[-1] < batch_rows:
        rows.append(min(2 * rows[-1], batch_rows))
    if len(rows) >= _MOST_SHAPES:
        raise InputError(
            f"--batch-rows {batch_rows}: would need {len(rows)} shapes, at most {_MOST_SHAPES} are supported; lower it"
        )
    shapes = [Shape(1, length) for length in lengths] + [Shape(count, row_length) for count in rows[1:]]
    return tuple(shapes[-_MOST_SHAPES:])


def first_fit(lengths: Sequence[int], shape: Shape) -> list[list[int]]:
    """Put texts into the first row that has room, in their order, and return the indices of the texts in each row.

    Texts that fit into no row are omitted. The first n rows of the result are the result for n rows of the same length.
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


def choose_fill(lengths: Sequence[int], costs: Mapping[Shape, float]) -> Fill:
    """Return the cheapest of the shapes that compute nearly the most tokens per second, filled with waiting texts.

    Args:
        lengths: the number of tokens of each waiting text, at most the longest row. The first text is always included.
        costs: seconds of a batch of each shape, which do not decrease from a shape to the next larger one.
    """
    largest = max(costs)
    longest_rows = first_fit(lengths, largest)
    fills = {}
    for shape in costs:
        if shape.length >= lengths[0]:
            rows = longest_rows[: shape.rows] if shape.length == largest.length else first_fit(lengths, shape)
            fills[shape] = Fill(shape, rows, sum(lengths[index] for row in rows for index in row))
    return fills[choose_shape({shape: fill.tokens for shape, fill in fills.items()}, costs)]


def choose_shape(tokens: Mapping[Shape, float], costs: Mapping[Shape, float]) -> Shape:
    """Return the smallest shape that computes nearly the most tokens per second, from the tokens that each would hold."""
    fastest = max(count / costs[shape] for shape, count in tokens.items())
    return min(shape for shape, count in tokens.items() if count / costs[shape] >= _NEARLY * fastest)
