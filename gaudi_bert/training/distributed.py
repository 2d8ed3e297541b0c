"""Who else trains, and how sums travel between the processes.

The training loop speaks to a `Communicator` only. With one process nothing travels. Gradients are summed, not averaged:
the loss of every process is already divided by the weights of the whole update (see `step.py`), so the sum is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

__all__ = ["Communicator", "connect"]


@dataclass(frozen=True)
class Communicator:
    """One process on its own: rank 0 of 1.

    Attributes:
        rank: the number of this process, from 0.
        size: how many processes train together.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks: rank 0."""
        return self.rank == 0

    def sum_tensors(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over all processes, inside a graph or outside."""
        return list(tensors)

    def sum_array(self, values: np.ndarray) -> np.ndarray:
        """The sum over all processes of a small host array (float64)."""
        return np.asarray(values, np.float64)

    def any_true(self, value: bool) -> bool:
        """Whether `value` is true in at least one process; the same answer in all."""
        return bool(self.sum_array(np.array([float(value)]))[0] > 0)

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        """Give every process the values of rank 0."""

    def barrier(self) -> None:
        """Wait until every process is here."""


def connect() -> Communicator:
    """Join the processes that were started together; without a launcher, this one alone."""
    return Communicator()
