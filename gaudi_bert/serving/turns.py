"""Turns of requests on one thread: while it works for one request, others wait for their next turn.

A turn costs the characters that it handles. A clock counts what each waiting request would have received if all had been
served at once, in equal shares. The turn that would then be over first is the next one, so a query overtakes any number of
bulks, and bulks are served however many queries come.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_FIRST_RATE = 1e6  # characters per second, before any is measured
_LEAST_MEASURED = 1_000  # characters: fewer do not show the rate


class Requester:
    """A request that takes turns.

    Attributes:
        deadline: on the monotonic clock, until when it waits.
        end: when its last turn is over, on the clock of shares.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline, self.end = deadline, 0.0


class Turns:
    """A thread, and the requests that wait for it. Its methods are called on the event loop only.

    Attributes:
        rate: characters per second of the thread, as measured lately.
    """

    def __init__(self, name: str) -> None:
        self.rate = _FIRST_RATE
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: list[tuple[float, int, int, asyncio.Future[None]]] = []
        self._numbers, self._clock, self._is_taken = itertools.count(), 0.0, False

    async def call(self, requester: Requester, cost: int, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function on the thread, when it is this request's turn.

        Raises:
            TimeoutError: the request's deadline passed before.
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
        """Give the turn to the first request that still waits."""
        self._is_taken = False
        while self._waiting and not self._is_taken:
            _, _, cost, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._clock += cost / (1 + len(self._waiting))
                self._is_taken = True
                turn.set_result(None)


def _expire(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_exception(TimeoutError())
