"""Waiting for what another thread or process does, in short steps, so that no signal is lost and no clock decides."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], seconds: float = 240) -> None:
    """Wait until a condition holds; it is a failure if it does not within `seconds`, many times what it takes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
