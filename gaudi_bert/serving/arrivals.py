"""A forecast of the requests that arrive just after the device has become free, and how long to wait for them.

Clients that wait for their answers send the next request soon after a batch is done. A short row costs nearly as much as
one of twice its length, so it saves time to compute these requests together with those that wait already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from gaudi_bert.serving.ladder import Shape, choose_shape

_WINDOWS = 8
"""Windows that are remembered. Simulated with eight clients, a query takes 3.56 ms of the device with one window, and 3.34
to 3.36 ms with 2 to 32 windows. Fewer windows forget a client that has left sooner."""


class _Window(NamedTuple):
    """Requests that arrived within a window, their tokens, and the seconds from its start until the last of them."""

    requests: int = 0
    tokens: int = 0
    last_seconds: float = 0.0


class ArrivalForecast:
    """Counts the requests that arrive in the windows that begin whenever the device is free and something waits.

    A window is as long as one row of the shortest shape takes. Nothing is waited for beyond it.
    """

    def __init__(self) -> None:
        self._windows: deque[_Window] = deque(maxlen=_WINDOWS)
        self._current, self._started_at = _Window(), float("-inf")

    def start_window(self, now: float) -> None:
        """Remember the window before, and start the next one at `now`."""
        if self._started_at > float("-inf"):
            self._windows.append(self._current)
        self._current, self._started_at = _Window(), now

    def add_arrival(self, now: float, tokens: int, costs: Mapping[Shape, float]) -> None:
        """Count a request of so many tokens if the current window lasts at `now`."""
        seconds = now - self._started_at
        if seconds <= costs[min(costs)]:
            self._current = _Window(self._current.requests + 1, self._current.tokens + tokens, seconds)

    def wait_until(self, waiting_tokens: int, arriving: int, costs: Mapping[Shape, float]) -> float:
        """Return until when a free device should wait before it computes the tokens that wait.

        Args:
            waiting_tokens: tokens that wait already.
            arriving: the number of requests that are accepted and will wait in a moment.
            costs: seconds of a batch of each shape.

        Returns:
            The start of the window, unless the device computes more tokens per second if it waits for what is
            expected, waiting counted. Then the start of the window plus the seconds after which this is no longer so, but at
            most those of one row of the shortest shape.
        """
        requests, tokens, last_seconds = (sum(values) for values in zip(_Window(), *self._windows, strict=True))
        usual = requests / len(self._windows) if self._windows else 0.0
        expected = max(round(usual - self._current.requests), arriving)
        gap = last_seconds / requests if requests else 0.0
        tokens_each = tokens / requests if requests else waiting_tokens
        shape, tokens_now = _fill(waiting_tokens, costs)
        rate_now, longest = tokens_now / costs[shape], 0.0
        for number in range(1, expected + 1):
            shape, filled = _fill(waiting_tokens + number * tokens_each, costs)
            if filled / (costs[shape] + number * gap) > rate_now:
                longest = max(longest, filled / rate_now - costs[shape])
        return self._started_at + min(longest, costs[min(costs)])


def _fill(tokens: float, costs: Mapping[Shape, float]) -> tuple[Shape, float]:
    """Return the shape that is chosen while so many tokens wait, and how many of them it holds if no slot stays empty."""
    filled = {shape: min(tokens, shape.slots) for shape in costs}
    shape = choose_shape(filled, costs)
    return shape, filled[shape]
