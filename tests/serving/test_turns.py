"""FairThread on a thread: queries overtake bulks, bulks do not starve, and nothing is done for those who went away."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from gaudi_bert.serving.turns import FairThread, Requester
from tests.builders.agree import agree


class Scene:
    """A thread that is held up until `open`, and the order in which it then worked."""

    def __init__(self) -> None:
        self.turns, self.order, self.open = FairThread("test"), list[str](), threading.Event()

    async def ask(self, name: str, *batch_seconds: int, deadline: float | None = None) -> None:
        requester = Requester(time.monotonic() + 1000 if deadline is None else deadline)
        for cost in batch_seconds:
            await self.turns.call_in_time_slice(requester, cost, self.work, name)

    def work(self, name: str) -> None:
        self.open.wait()
        self.order.append(name)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 100))


async def started(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.ensure_future(coroutine)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


def test_a_query_overtakes_all_bulks_that_wait() -> None:
    async def scenario() -> None:
        scene = Scene()
        tasks = [await started(scene.ask(f"bulk {number}", 10_000, 10_000)) for number in range(20)]
        tasks.append(await started(scene.ask("query", 20)))
        scene.open.set()
        await asyncio.gather(*tasks)
        assert scene.order[1] == "query"
        assert scene.order[2:21] == [f"bulk {number}" for number in range(1, 20)]

    run(scenario())


def test_bulks_are_served_while_queries_keep_coming() -> None:
    async def scenario() -> None:
        scene = Scene()
        first = await started(scene.ask("first", 1))
        bulk = await started(scene.ask("bulk", 2_000))

        async def queries() -> None:
            while not bulk.done():
                await scene.ask("query", 100)

        tasks = [await started(queries()) for _ in range(3)]
        scene.open.set()
        await asyncio.gather(first, bulk, *tasks)
        assert scene.order.count("query") <= 3 * 2_000 / 100 + 10

    run(scenario())


def test_what_nobody_waits_for_is_not_done() -> None:
    async def scenario() -> None:
        scene = Scene()
        first = await started(scene.ask("first", 1))
        gone = [await started(scene.ask("gone", 100)) for _ in range(50)]
        last = await started(scene.ask("last", 1_000))
        for task in gone:
            task.cancel()
        scene.open.set()
        await asyncio.gather(first, last)
        assert scene.order == ["first", "last"]

    run(scenario())


def test_a_cancelled_turn_passes_on() -> None:
    async def scenario() -> None:
        scene = Scene()
        first = await started(scene.ask("first", 1))
        second = await started(scene.ask("second", 1))
        third = await started(scene.ask("third", 1))
        scene.turns._start_next_time_slice()  # noqa: SLF001 - the second has its turn, and is cancelled before it notices
        second.cancel()
        scene.open.set()
        await asyncio.gather(first, third)
        with contextlib.suppress(asyncio.CancelledError):
            await second
        assert scene.order == ["first", "third"]

    run(scenario())


def test_the_rate_follows_what_the_thread_achieves(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the work moves: 2 s for 10,000 characters are 5,000 characters per second."""
    clock = [0.0]
    monkeypatch.setattr("gaudi_bert.serving.turns.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def work() -> None:
        clock[0] += 2

    async def scenario() -> None:
        turns = FairThread("test")
        for _ in range(200):
            await turns.call_in_time_slice(Requester(deadline=1000), 10_000, work)
        agree(turns.rate, 5_000)

    run(scenario())


def test_a_request_waits_until_its_deadline() -> None:
    async def scenario() -> None:
        scene = Scene()
        first = await started(scene.ask("first", 1))
        with pytest.raises(TimeoutError):
            await scene.ask("late", 1, deadline=time.monotonic())
        last = await started(scene.ask("last", 1))
        scene.open.set()
        await asyncio.gather(first, last)
        assert scene.order == ["first", "last"]

    run(scenario())
