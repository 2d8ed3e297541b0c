"""Choose one of a few batch shapes for the waiting texts, and pack the texts into its rows.

A shape is a number of rows and a number of slots in each row. Devices that compile shapes compile each of them only once.

The smallest shape is one row of 32 slots (16 on a CPU). From shape to shape, the length of this row is doubled up to the
longest row, and then the number of rows is doubled. Therefore a short query alone costs only 32 or 16 slots, and a full
queue fills the largest shape. Texts are packed into rows by first fit, in the order of the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.window_plan import compute_max_sequences_per_row

_MAX_SHAPES = 12
# A batch has the smallest shape that computes at least this fraction of the fastest shape's tokens per second. Small shapes
# are preferred, because texts that arrive while a batch is computed must wait for it. In a simulation with 32 clients and
# the times of MiniLM on a CPU, fractions of 1.0, 0.9 and 0.8 answered 90, 97 and 93 texts per second of the mix of lengths,
# and 333, 322 and 300 queries per second.
_MIN_EFFICIENCY = 0.9


class Shape(NamedTuple):
    """The number of rows in a batch, and the number of token slots in each row."""

    rows: int
    length: int

    @property
    def slots(self) -> int:
        """The number of token slots in all rows together."""
        return self.rows * self.length

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}"


class FilledShape(NamedTuple):
    """A batch shape, and the waiting texts that were packed into its rows.

    Attributes:
        shape: The shape.
        rows: For each row, the indices of its texts.
        tokens: The number of tokens of all these texts.
    """

    shape: Shape
    rows: list[list[int]]
    tokens: int


def list_batch_shapes(row_length: int, batch_rows: int, shortest: int = 32) -> tuple[Shape, ...]:
    """Return the batch shapes that the server uses, from the smallest to the largest.

    The list has at most 12 shapes. If there would be more, the smallest shapes are left out.

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
    if len(rows) >= _MAX_SHAPES:
        raise InputError(
            f"--batch-rows {batch_rows}: would need {len(rows)} batch shapes, but at most {_MAX_SHAPES} are supported; "
            "pass a smaller value"
        )
    shapes = [Shape(1, length) for length in lengths] + [Shape(count, row_length) for count in rows[1:]]
    return tuple(shapes[-_MAX_SHAPES:])


def pack_first_fit(lengths: Sequence[int], shape: Shape) -> list[list[int]]:
    """Put each text into the first row that has room for it, and return the indices of the texts in each row.

    Texts that fit into no row are left out. Which texts the first rows contain does not depend on how many rows follow.

    Args:
        lengths: The number of tokens of each text.
        shape: The shape to fill.
    """
    most, free = compute_max_sequences_per_row(shape.length), [shape.length] * shape.rows
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


def choose_and_fill_shape(lengths: Sequence[int], batch_seconds: Mapping[Shape, float]) -> FilledShape:
    """Choose the shape of the next batch, and pack waiting texts into its rows.

    The result is the smallest shape that computes nearly as many tokens per second as the fastest shape.

    Args:
        lengths: The number of tokens of each waiting text, which must not exceed the longest row. The first text is always
            included.
        batch_seconds: The seconds of a batch of each shape. They must not decrease from a shape to the next larger shape.
    """
    largest = max(batch_seconds)
    longest_rows = pack_first_fit(lengths, largest)
    fills = {}
    for shape in batch_seconds:
        if shape.length >= lengths[0]:
            rows = longest_rows[: shape.rows] if shape.length == largest.length else pack_first_fit(lengths, shape)
            fills[shape] = FilledShape(shape, rows, sum(lengths[index] for row in rows for index in row))
    return fills[choose_efficient_shape({shape: fill.tokens for shape, fill in fills.items()}, batch_seconds)]


def choose_efficient_shape(tokens: Mapping[Shape, float], batch_seconds: Mapping[Shape, float]) -> Shape:
    """Return the smallest shape that computes nearly as many tokens per second as the fastest shape.

    Args:
        tokens: The number of tokens that a batch of each shape would contain.
        batch_seconds: The seconds of a batch of each shape.
    """
    fastest = max(count / batch_seconds[shape] for shape, count in tokens.items())
    return min(shape for shape, count in tokens.items() if count / batch_seconds[shape] >= _MIN_EFFICIENCY * fastest)
