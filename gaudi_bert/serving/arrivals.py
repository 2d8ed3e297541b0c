"""Forecast how many requests will arrive in the next milliseconds, and decide how long the free device waits for them.

Clients that wait for their answers send their next requests soon after a batch is done. Computing a short row takes nearly
as long as computing a row of twice its length, so it saves time to compute these requests together with those that already
wait. The forecast is the average number of requests in the last windows. A window is a short time that begins when the
device is free and a request waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from gaudi_bert.serving.batch_shapes import Shape, choose_efficient_shape

_WINDOWS = 8
"""The number of past windows over which the forecast averages.

In a simulation with eight clients, a query took 3.56 ms of device time with one window, and 3.34 to 3.36 ms with 2 to 32
windows. With fewer windows, the forecast sooner stops expecting a client that has left.
"""


class _Window(NamedTuple):
    """The requests that arrived within one window: their number, their size, and the time of the last one.

    Attributes:
        requests: The number of requests.
        tokens: The number of tokens of all these requests.
        last_seconds: The seconds from the start of the window to the last request.
    """

    requests: int = 0
    tokens: int = 0
    last_seconds: float = 0.0


class ArrivalForecast:
    """Counts the requests that arrive in short time windows, and forecasts how many will still arrive in the current window.

    A window begins whenever the device is free and a request waits. It ends after the time that the device takes to compute
    one row of the shortest shape, so the device never waits longer than this. If the batch is computed sooner, the window
    ends with the batch.
    """

    def __init__(self) -> None:
        self._windows: deque[_Window] = deque(maxlen=_WINDOWS)
        self._current, self._started_at, self._is_open = _Window(), float("-inf"), False

    def start_window(self, now: float) -> None:
        """Start a new time window at the time `now`. Keep the counts of the previous window for the forecast."""
        if self._started_at > float("-inf"):
            self._windows.append(self._current)
        self._current, self._started_at, self._is_open = _Window(), now, True

    def end_window(self) -> None:
        """Stop counting requests in the current window, because the device has finished its batch.

        From now on, clients that have received their answers send their next requests. If these requests counted, the
        device would wait for a second client although there is only one.
        """
        self._is_open = False

    def add_arrival(self, now: float, tokens: int, batch_seconds: Mapping[Shape, float]) -> None:
        """Count a request in the current window. Do nothing if the window has already ended.

        Args:
            now: The time at which the request arrived, in seconds.
            tokens: The number of tokens of the request.
            batch_seconds: The seconds that a batch of each shape takes.
        """
        seconds = now - self._started_at
        if self._is_open and seconds <= batch_seconds[min(batch_seconds)]:
            self._current = _Window(self._current.requests + 1, self._current.tokens + tokens, seconds)

    def compute_wait_deadline(
        self, waiting_tokens: int, arriving_requests: int, batch_seconds: Mapping[Shape, float]
    ) -> float:
        """Return the time until which the free device should wait for more requests before it computes the next batch.

        Args:
            waiting_tokens: The number of tokens that already wait.
            arriving_requests: The number of requests that were accepted and will be in the queue in a moment.
            batch_seconds: The seconds that a batch of each shape takes.

        Returns:
            The start of the window if the device should not wait. Waiting pays if the device then computes more tokens per
            second, including the waiting time. In this case, the time after which waiting would no longer pay, but at most
            the end of the window.
        """
        requests, tokens, last_seconds = (sum(values) for values in zip(_Window(), *self._windows, strict=True))
        usual = requests / len(self._windows) if self._windows else 0.0
        expected = max(round(usual - self._current.requests), arriving_requests)
        gap = last_seconds / requests if requests else 0.0
        tokens_each = tokens / requests if requests else waiting_tokens
        shape, tokens_now = _choose_shape_for_tokens(waiting_tokens, batch_seconds)
        rate_now, longest = tokens_now / batch_seconds[shape], 0.0
        for number in range(1, expected + 1):
            shape, filled = _choose_shape_for_tokens(waiting_tokens + number * tokens_each, batch_seconds)
            if filled / (batch_seconds[shape] + number * gap) > rate_now:
                longest = max(longest, filled / rate_now - batch_seconds[shape])
        return self._started_at + min(longest, batch_seconds[min(batch_seconds)])


def _choose_shape_for_tokens(tokens: float, batch_seconds: Mapping[Shape, float]) -> tuple[Shape, float]:
    """Return the batch shape that would be chosen for this many waiting tokens, and how many of the tokens it would contain.

    This is an estimate, which assumes that the texts can fill all slots of a shape.
    """
    filled = {shape: min(tokens, shape.slots) for shape in batch_seconds}
    shape = choose_efficient_shape(filled, batch_seconds)
    return shape, filled[shape]
