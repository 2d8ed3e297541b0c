"""Choose one of a few static batch shapes for the waiting texts, and pack the texts into its rows.

The shapes form a ladder. It begins with one row of 32 slots (16 on a CPU). The length of this row is doubled up to the
longest row, and then the number of rows is doubled. A short query alone therefore costs 32 or 16 slots, and a full queue
fills the largest shape. Texts are packed into rows by first fit, in the order in which they wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.window_plan import max_depth

_MOST_SHAPES = 12
_NEARLY = 0.9
"""A shape is good enough if it computes at least this fraction of the tokens per second of the fastest shape.

The smallest shape that is good enough is chosen, because texts that arrive meanwhile must wait for the batch. In a
simulation with 32 clients and the costs of MiniLM on a CPU, fractions of 1.0, 0.9 and 0.8 answered 90, 97 and 93 texts per
second of the mix of lengths, and 333, 322 and 300 queries per second.
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
    """A shape that is filled with texts.

    Attributes:
        shape: The shape.
        rows: For each row, the indices of its texts.
        tokens: The number of tokens of all these texts.
    """

    shape: Shape
    rows: list[list[int]]
    tokens: int


def make_ladder(row_length: int, batch_rows: int, shortest: int = 32) -> tuple[Shape, ...]:
    """Return the ladder of shapes in ascending order. If it would have too many shapes, the smallest are left out.

    Args:
        row_length: The number of slots of the longest row.
        batch_rows: The number of rows of the largest shape.
        shortest: The number of slots of the shortest row.

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
    """Put each text into the first row that has room for it, and return the indices of the texts in each row.

    Texts for which no row has room are left out. The first n rows of the result equal the result for a shape with n rows of
    the same length.

    Args:
        lengths: The number of tokens of each text.
        shape: The shape to fill.
    """
    most, free = max_depth(shape.length), [shape.length] * shape.rows
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
    """Choose the smallest shape that computes nearly as many tokens per second as the fastest one, and fill it with texts.

    Args:
        lengths: The number of tokens of each waiting text, which must not exceed the longest row. The first text is always
            included.
        costs: The seconds of a batch of each shape. They must not decrease from a shape to the next larger shape.
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
    """Return the smallest shape that computes nearly as many tokens per second as the fastest shape.

    Args:
        tokens: The number of tokens that a batch of each shape would contain.
        costs: The seconds of a batch of each shape.
    """
    fastest = max(count / costs[shape] for shape, count in tokens.items())
    return min(shape for shape, count in tokens.items() if count / costs[shape] >= _NEARLY * fastest)
