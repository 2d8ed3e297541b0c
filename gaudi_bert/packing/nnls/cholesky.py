"""An upper triangular factor R with R^T R = G that follows as columns enter and leave the active set.

Appending a column costs one forward substitution; removing one shifts the later columns and restores the
triangle with Givens rotations (Golub and Van Loan, Matrix Computations, section 6.5). All loops run along rows
of R, which are contiguous. The right-hand side is carried along as `projected` = R^-T g, so that the solution
of G x = g is always one back substitution away.

Innermost loops are kernels of their own on slices: the compiler then sees plain arrays, and vectorises three
times better.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import FloatArray
from gaudi_bert.common.compiled import kernel

__all__ = ["append_column", "remove_column", "solve_factor"]

SMALLEST_PIVOT = 1e-11
"""A column is called dependent when less than this share of its squared norm is new."""


@kernel
def append_column(
    factor: FloatArray, size: int, products: FloatArray, diagonal: float, projected: FloatArray, moment: float
) -> bool:
    """Extend the factor by one column; False (and no change) if the column depends on those that are there.

    Args:
        factor: float64 [capacity, capacity], the leading [size, size] block is in use.
        size: number of columns in the factor.
        products: float64 [>= size], the new column's products with the columns there; overwritten.
        diagonal: the new column's product with itself.
        projected: float64 [capacity], R^-T g; gets its entry `size`.
        moment: the new column's entry of g.
    """
    _substitute_forward(factor, size, products)
    new_share = diagonal
    remainder = moment
    for row in range(size):
        new_share -= products[row] * products[row]
        remainder -= products[row] * projected[row]
    if new_share < SMALLEST_PIVOT * diagonal:
        return False
    for row in range(size):
        factor[row, size] = products[row]
    factor[size, size] = np.sqrt(new_share)
    projected[size] = remainder / factor[size, size]
    return True


@kernel
def _substitute_forward(factor: FloatArray, size: int, values: FloatArray) -> None:
    """values[:size] = R^-T values[:size], four rows of R at a time, to read and write `values` less often."""
    whole = size - size % 4
    for row in range(0, whole, 4):
        first, second, third, fourth = factor[row], factor[row + 1], factor[row + 2], factor[row + 3]
        one = values[row] / first[row]
        two = (values[row + 1] - one * first[row + 1]) / second[row + 1]
        three = (values[row + 2] - one * first[row + 2] - two * second[row + 2]) / third[row + 2]
        four = values[row + 3] - one * first[row + 3] - two * second[row + 3] - three * third[row + 3]
        four /= fourth[row + 3]
        values[row], values[row + 1], values[row + 2], values[row + 3] = one, two, three, four
        rest = slice(row + 4, size)
        _subtract_rows(values[rest], first[rest], second[rest], third[rest], fourth[rest], (one, two, three, four))
    for row in range(whole, size):
        values[row] /= factor[row, row]
        for column in range(row + 1, size):
            values[column] -= values[row] * factor[row, column]


@kernel
def _subtract_rows(
    values: FloatArray,
    first: FloatArray,
    second: FloatArray,
    third: FloatArray,
    fourth: FloatArray,
    factors: tuple[float, float, float, float],
) -> None:
    one, two, three, four = factors
    for column in range(values.size):
        values[column] -= one * first[column] + two * second[column] + three * third[column] + four * fourth[column]


@kernel
def remove_column(factor: FloatArray, size: int, gone: int, projected: FloatArray, carried: FloatArray) -> None:
    """Take column `gone` out of the leading [size, size] block; `carried` is scratch, float64 [>= size]."""
    for row in range(gone):
        _shift_left(factor[row, gone:size])
    last = size - 1
    for column in range(gone, last):
        carried[column] = factor[gone, column + 1]
    carried_projection = projected[gone]
    for row in range(gone, last):
        pivot = factor[row + 1, row + 1]
        scale = 1.0 / np.sqrt(carried[row] * carried[row] + pivot * pivot)
        cosine, sine = carried[row] * scale, pivot * scale
        _rotate(factor[row, row:last], carried[row:last], factor[row + 1, row + 1 : size], cosine, sine)
        lower_projection = projected[row + 1]
        projected[row] = cosine * carried_projection + sine * lower_projection
        carried_projection = cosine * lower_projection - sine * carried_projection


@kernel
def _shift_left(values: FloatArray) -> None:
    for place in range(values.size - 1):
        values[place] = values[place + 1]


@kernel
def _rotate(result: FloatArray, carried: FloatArray, lower: FloatArray, cosine: float, sine: float) -> None:
    """result, carried = (cosine carried + sine lower), (cosine lower - sine carried)."""
    for place in range(result.size):
        upper, below = carried[place], lower[place]
        result[place] = cosine * upper + sine * below
        carried[place] = cosine * below - sine * upper


@kernel
def solve_factor(factor: FloatArray, size: int, projected: FloatArray, solution: FloatArray) -> None:
    """Back substitution: solution[:size] = R^-1 projected[:size], four rows of R at a time."""
    whole = size - size % 4
    for row in range(size - 1, whole - 1, -1):
        total = 0.0
        for column in range(row + 1, size):
            total += factor[row, column] * solution[column]
        solution[row] = (projected[row] - total) / factor[row, row]
    for row in range(whole - 4, -1, -4):
        first, second, third, fourth = factor[row], factor[row + 1], factor[row + 2], factor[row + 3]
        rest = slice(row + 4, size)
        one, two, three, four = _multiply_rows(first[rest], second[rest], third[rest], fourth[rest], solution[rest])
        four = (projected[row + 3] - four) / fourth[row + 3]
        three = (projected[row + 2] - three - third[row + 3] * four) / third[row + 2]
        two = (projected[row + 1] - two - second[row + 3] * four - second[row + 2] * three) / second[row + 1]
        one = (projected[row] - one - first[row + 3] * four - first[row + 2] * three - first[row + 1] * two) / first[row]
        solution[row], solution[row + 1], solution[row + 2], solution[row + 3] = one, two, three, four


@kernel
def _multiply_rows(
    first: FloatArray, second: FloatArray, third: FloatArray, fourth: FloatArray, values: FloatArray
) -> tuple[float, float, float, float]:
    one = two = three = four = 0.0
    for column in range(values.size):
        value = values[column]
        one += first[column] * value
        two += second[column] * value
        three += third[column] * value
        four += fourth[column] * value
    return one, two, three, four
