"""One of several processes, whatever connects them: how a value of the first reaches all, and who watches.

Horovod (`tensorflow/horovod.py`) and torch.distributed (`pytorch/distributed.py`) add how arrays travel.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.engines.communicator import Communicator, T
from gaudi_bert.engines.watchdog import Watchdog, watch


@dataclass(frozen=True)
class ConnectedProcess(Communicator):
    """One of several processes; `watchdog` is None until it watches. What sums and broadcasts is added by an engine."""

    watchdog: Watchdog | None = None

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns in the first process, which alone calls it; every process gets it."""
        content = np.frombuffer(pickle.dumps(make()) if self.is_first else b"", np.uint8)
        size = int(self.sum_array(np.array([len(content)]))[0])
        shared = self.sum_array(content if self.is_first else np.zeros(size))
        value: T = pickle.loads(shared.astype(np.uint8).tobytes())
        return value

    def note(self, activity: str, *, slow: bool = False) -> None:
        """Report what this process is doing: a sign of work for the watchdog. `slow`: it may take longer than usual."""
        if self.watchdog is not None:
            self.watchdog.note(activity, slow)

    def arrive(self) -> None:
        """Report that this process's share is done, and that it is about to wait for the others."""
        if self.watchdog is not None:
            self.watchdog.arrive()

    @contextmanager
    def watched(self, settings: LoopSettings) -> Iterator[Communicator]:
        """While the context lasts, the failure, loss or sleep of any process ends all of them (`watchdog.py`).

        The communicator of the context is the one to work with. The device must be open.
        """
        with watch(self, settings) as watchdog:
            yield replace(self, watchdog=watchdog)
