"""An upper triangular factor R with R^T R = G that follows as columns enter and leave the active set.

Appending a column costs one forward substitution; removing one shifts the later columns and restores the triangle with Givens
rotations (Golub and Van Loan, Matrix Computations, section 6.5). All loops run along rows of R, which are contiguous. The right-hand side is
carried along as `projected` = R^-T g, so that the solution of G x = g is always one back substitution away.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.packing.compiled import kernel

__all__ = ["append_column", "remove_column", "solve_factor"]

SMALLEST_PIVOT = 1e-11
"""A column is called dependent when less than this share of its squared norm is new."""


@kernel
def append_column(
    factor: np.ndarray, size: int, products: np.ndarray, diagonal: float, projected: np.ndarray, moment: float
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
    new_share = diagonal
    remainder = moment
    for row in range(size):
        entry = products[row] / factor[row, row]
        products[row] = entry
        new_share -= entry * entry
        remainder -= entry * projected[row]
        for column in range(row + 1, size):
            products[column] -= entry * factor[row, column]
    if new_share < SMALLEST_PIVOT * diagonal:
        return False
    for row in range(size):
        factor[row, size] = products[row]
    factor[size, size] = np.sqrt(new_share)
    projected[size] = remainder / factor[size, size]
    return True


@kernel
def remove_column(factor: np.ndarray, size: int, gone: int, projected: np.ndarray, carried: np.ndarray) -> None:
    """Take column `gone` out of the leading [size, size] block; `carried` is scratch, float64 [>= size]."""
    for row in range(gone):
        for column in range(gone, size - 1):
            factor[row, column] = factor[row, column + 1]
    for column in range(gone, size - 1):
        carried[column] = factor[gone, column + 1]
    carried_projection = projected[gone]
    for row in range(gone, size - 1):
        below = factor[row + 1]
        above = factor[row]
        norm = np.sqrt(carried[row] * carried[row] + below[row + 1] * below[row + 1])
        cosine, sine = carried[row] / norm, below[row + 1] / norm
        for column in range(row, size - 1):
            kept, lower = carried[column], below[column + 1]
            above[column] = cosine * kept + sine * lower
            carried[column] = cosine * lower - sine * kept
        lower_projection = projected[row + 1]
        projected[row] = cosine * carried_projection + sine * lower_projection
        carried_projection = cosine * lower_projection - sine * carried_projection


@kernel
def solve_factor(factor: np.ndarray, size: int, projected: np.ndarray, solution: np.ndarray) -> None:
    """Back substitution: solution[:size] = R^-1 projected[:size]."""
    for row in range(size - 1, -1, -1):
        total = 0.0
        for column in range(row + 1, size):
            total += factor[row, column] * solution[column]
        solution[row] = (projected[row] - total) / factor[row, row]
