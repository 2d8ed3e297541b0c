"""Forecast the requests that arrive just after the device has become free, and decide how long to wait for them.

Clients that wait for their answers send their next requests soon after a batch is done. A short row costs nearly as much as
a row of twice its length, so computing these requests together with those that already wait saves time. The forecast is
the average of the last windows, and a window begins when the device is free and something waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from gaudi_bert.serving.ladder import Shape, choose_shape

_WINDOWS = 8
"""The number of windows that are remembered. In a simulation with eight clients, a query took 3.56 ms of device time with
one window, and 3.34 to 3.36 ms with 2 to 32 windows. With fewer windows, a client that has left is forgotten sooner.
"""


class _Window(NamedTuple):
    """The requests that arrived within a window.

    Attributes:
        requests: The number of requests.
        tokens: The number of their tokens.
        last_seconds: The seconds from the start of the window to the last request.
    """

    requests: int = 0
    tokens: int = 0
    last_seconds: float = 0.0


class ArrivalForecast:
    """Counts the requests that arrive in windows, and forecasts how many will arrive in the current window.

    A window begins whenever the device is free and something waits. It is as long as the device takes to compute one row of
    the shortest shape, and the device never waits longer than one window.
    """

    def __init__(self) -> None:
        self._windows: deque[_Window] = deque(maxlen=_WINDOWS)
        self._current, self._started_at = _Window(), float("-inf")

    def start_window(self, now: float) -> None:
        """Remember the current window, and start a new window at the time `now`."""
        if self._started_at > float("-inf"):
            self._windows.append(self._current)
        self._current, self._started_at = _Window(), now

    def add_arrival(self, now: float, tokens: int, costs: Mapping[Shape, float]) -> None:
        """Count a request in the current window, unless the window has already ended.

        Args:
            now: The time at which the request arrived, in seconds.
            tokens: The number of tokens of the request.
            costs: The seconds that a batch of each shape takes.
        """
        seconds = now - self._started_at
        if seconds <= costs[min(costs)]:
            self._current = _Window(self._current.requests + 1, self._current.tokens + tokens, seconds)

    def wait_until(self, waiting_tokens: int, arriving: int, costs: Mapping[Shape, float]) -> float:
        """Return the time until which a free device should wait for further requests before it computes a batch.

        Args:
            waiting_tokens: The number of tokens that already wait.
            arriving: The number of requests that were accepted and will be in the queue in a moment.
            costs: The seconds that a batch of each shape takes.

        Returns:
            The start of the window if waiting does not pay. It pays if the device then computes more tokens per second, with
            the waiting time included. In this case, return the time from which waiting would no longer pay, but at most the
            end of the window.
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
    """Return the shape that would be chosen if this many tokens waited, and how many of them it would contain.

    Texts are treated as if they could fill all slots.
    """
    filled = {shape: min(tokens, shape.slots) for shape in costs}
    shape = choose_shape(filled, costs)
    return shape, filled[shape]
