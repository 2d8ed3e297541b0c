"""Stop on request: SIGTERM (what Kubernetes sends before it takes a pod away) and Ctrl-C end a run after the present update.

The first signal sets a flag that the training loop looks at between updates; a second Ctrl-C interrupts at once.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequest"]

# SIGUSR1 is what mpirun hands on to its ranks when it is asked to stop (`runners/stop_ranks.py`).
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """While used as a context, `requested` becomes true on the first of these signals.

    Outside the main thread, where Python allows no handlers, it never becomes true.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
