"""Share one thread fairly among requests, which take turns.

The cost of a turn is the number of characters that it handles. The order of the turns is that of fair queuing: a virtual
clock counts how much each waiting request would have received if the thread served all of them at the same time, in equal
shares. The turn that would end first is the next turn. Therefore a short query overtakes any number of large requests, and
large requests are served no matter how many queries arrive.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_FIRST_RATE = 1e6  # the assumed characters per second before the first measurement
_LEAST_MEASURED = 1_000  # turns with fewer characters are too short to measure the rate


class Requester:
    """A request that takes turns.

    Attributes:
        deadline: The time until which the request waits for a turn, in seconds of `time.monotonic`.
        end: The time at which its last turn ends, on the virtual clock.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline, self.end = deadline, 0.0


class Turns:
    """A thread, and the requests that wait for it. Methods must be called on the event loop.

    Args:
        name: The name of the thread.

    Attributes:
        rate: The recently measured speed of the thread, in characters per second.
    """

    def __init__(self, name: str) -> None:
        self.rate = _FIRST_RATE
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: list[tuple[float, int, int, asyncio.Future[None]]] = []
        self._numbers, self._clock, self._is_taken = itertools.count(), 0.0, False

    async def call(self, requester: Requester, cost: int, function: Callable[..., Any], *arguments: object) -> Any:
        """Wait for a turn of a request, call a function on the thread, and return its result.

        Args:
            requester: The request.
            cost: The number of characters that the function handles.
            function: The function.
            *arguments: The arguments of the function.

        Raises:
            TimeoutError: The deadline of the request passed before its turn.
        """
        await self._turn(requester, cost)
        begun = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        finally:
            if cost >= _LEAST_MEASURED:
                self.rate += 0.1 * (cost / max(1e-6, time.monotonic() - begun) - self.rate)
            self._next()

    async def _turn(self, requester: Requester, cost: int) -> None:
        """Wait for the next turn of a request.

        Raises:
            TimeoutError: The deadline of the request passed before.
        """
        requester.end = max(self._clock, requester.end) + cost
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        heapq.heappush(self._waiting, (requester.end, next(self._numbers), cost, turn))
        if not self._is_taken:
            self._next()
        timer = loop.call_later(requester.deadline - time.monotonic(), _expire, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._next()
            raise
        finally:
            timer.cancel()

    def _next(self) -> None:
        """Give the next turn to the request whose turn would end first, among those that still wait."""
        self._is_taken = False
        while self._waiting and not self._is_taken:
            _, _, cost, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._clock += cost / (1 + len(self._waiting))
                self._is_taken = True
                turn.set_result(None)


def _expire(turn: asyncio.Future[None]) -> None:
    """Raise a `TimeoutError` in the request that waits for this turn, unless its turn has come."""
    if not turn.done():
        turn.set_exception(TimeoutError())
