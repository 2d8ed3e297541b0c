"""The processes that train together, and how sums travel between them.

The training loop speaks to a `Communicator` only. With one process nothing travels. Gradients are summed, not averaged: the
loss of every process is already divided by the denominators of the complete update (`training/objective.py`), so the sum is
exact. Each engine has its own: Horovod, or torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import FloatArray, WeightArrays
from gaudi_bert.config.sections import LoopSettings

T = TypeVar("T")


@dataclass(frozen=True)
class Communicator:
    """One process on its own: rank 0 of 1.

    `local_size` is the number of processes on this host; `errors` are what a sum raises that another process misses.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    errors: ClassVar[tuple[type[Exception], ...]] = (RuntimeError,)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks: rank 0."""
        return self.rank == 0

    def sum_array(self, values: NDArray[Any]) -> FloatArray:
        """The sum over all processes of a small host array (float64)."""
        return np.asarray(values, np.float64)

    def any_true(self, value: bool) -> bool:
        """Whether `value` is true in at least one process; the same answer in all."""
        return bool(self.sum_array(np.array([float(value)]))[0] > 0)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns in the first process, which alone calls it; every process gets it."""
        return make()

    def broadcast(self, arrays: WeightArrays) -> WeightArrays:
        """The arrays of rank 0, in every process; names and shapes are the same in all."""
        return arrays

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.sum_array(np.zeros(1))

    def note(self, activity: str, *, slow: bool = False) -> None:
        """Report what this process is doing: a sign of work for the watchdog. `slow`: it may take longer than usual."""

    def arrive(self) -> None:
        """Report that this process's share is done, and that it is about to wait for the others."""

    @contextmanager
    def watched(self, settings: LoopSettings) -> Iterator[Communicator]:
        """While the context lasts, the failure, loss or sleep of any process ends all of them (`watchdog.py`).

        The communicator of the context is the one to work with. The device must be open.
        """
        del settings
        yield self
