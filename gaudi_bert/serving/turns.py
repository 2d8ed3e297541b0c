"""A thread that requests share fairly, used for the tokenizer.

Requests take turns. In a turn, the thread handles some of the texts of one request. The order of the turns is that of fair
queuing: a virtual clock counts how many characters of each waiting request would have been handled if the thread served all
requests at the same time, at the same speed. The turn that would end first is the next turn. Therefore a short query
overtakes any number of large requests, and large requests are served no matter how many queries arrive.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_ASSUMED_RATE = 1e6  # the assumed characters per second before the first measurement
_MIN_MEASURED_CHARACTERS = 1_000  # turns with fewer characters are too short to measure the rate


class Requester:
    """A request that uses a `FairThread` once or several times. Between its turns, other requests use the thread.

    Attributes:
        deadline: The time until which the request waits for a turn, in seconds of `time.monotonic`.
        end: The time when its last turn ends, on the virtual clock.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline, self.end = deadline, 0.0


class FairThread:
    """A thread that runs functions for many requests and divides its time fairly among them.

    Methods must be called on the event loop.

    Args:
        name: The name of the thread.

    Attributes:
        rate: The recently measured speed of the thread, in characters per second.
    """

    def __init__(self, name: str) -> None:
        self.rate = _ASSUMED_RATE
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: list[tuple[float, int, int, asyncio.Future[None]]] = []
        self._numbers, self._clock, self._is_taken = itertools.count(), 0.0, False

    async def call_in_time_slice(
        self, requester: Requester, characters: int, function: Callable[..., Any], *arguments: object
    ) -> Any:
        """Wait until this thread has time for a request, call a function on the thread, and return its result.

        Args:
            requester: The request.
            characters: The number of characters that the function handles.
            function: The function.
            *arguments: The arguments of the function.

        Raises:
            TimeoutError: The deadline of the request passed before its turn.
        """
        await self._wait_for_time_slice(requester, characters)
        begun = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        finally:
            if characters >= _MIN_MEASURED_CHARACTERS:
                self.rate += 0.1 * (characters / max(1e-6, time.monotonic() - begun) - self.rate)
            self._start_next_time_slice()

    async def _wait_for_time_slice(self, requester: Requester, characters: int) -> None:
        """Wait until a request gets its next time slice on the shared thread.

        Requests whose functions handle few characters get their time slices earlier.

        Args:
            requester: The request.
            characters: The number of characters that the function handles in this time slice.

        Raises:
            TimeoutError: The deadline of the request passed before.
        """
        requester.end = max(self._clock, requester.end) + characters
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        heapq.heappush(self._waiting, (requester.end, next(self._numbers), characters, turn))
        if not self._is_taken:
            self._start_next_time_slice()
        timer = loop.call_later(requester.deadline - time.monotonic(), _expire_time_slice, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._start_next_time_slice()
            raise
        finally:
            timer.cancel()

    def _start_next_time_slice(self) -> None:
        """Choose the request that may use the thread next. Its turn would end first if the thread served all requests at the
        same time and at the same speed.
        """
        self._is_taken = False
        while self._waiting and not self._is_taken:
            _, _, characters, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._clock += characters / (1 + len(self._waiting))
                self._is_taken = True
                turn.set_result(None)


def _expire_time_slice(turn: asyncio.Future[None]) -> None:
    """Make a request fail with a `TimeoutError` if it is still waiting to use the thread."""
    if not turn.done():
        turn.set_exception(TimeoutError())
