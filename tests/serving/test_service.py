"""Overload and faults: what waits is bounded, clients that go take their texts along, a failing batch fails alone."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import select
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gaudi_bert.common.errors import FailedError
from gaudi_bert.engines.pytorch.encoder_model import build_encoder
from gaudi_bert.serving.model import ServedModel
from gaudi_bert.serving.queue import PendingRequest, Queue
from gaudi_bert.serving.service import _BODIES_AT_ONCE, AcceptedRequest, FairThread
from tests.builders.agree import agree
from tests.builders.encoders import TEXTS
from tests.builders.served import Served, served_in_thread, wait_until


class Gate:
    """Holds up or breaks the encoder of a served model, in place of a device that is slow, or fails."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.passes, self.broken_tokens, self.is_lost, self.delay_seconds = 0, 0, False, 0.0

    def hook(self, module: Any, arguments: Any, inputs: dict[str, torch.Tensor]) -> None:
        self.passes += 1
        self.open.wait()
        time.sleep(self.delay_seconds)
        tokens = int((inputs["position_ids"] > 2).sum()) if "position_ids" in inputs else 0  # the trial has rows without
        if self.is_lost or (self.broken_tokens and tokens >= self.broken_tokens):
            raise RuntimeError("the device says no")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()

    def build(*arguments: Any, **options: Any) -> Any:
        model = build_encoder(*arguments, **options)
        model.module.register_forward_pre_hook(made.hook, with_kwargs=True)
        return model

    monkeypatch.setattr("gaudi_bert.engines.pytorch.encoder_model.build_encoder", build)
    return made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as clients:
        yield clients


def embed(served: Served, inputs: Any) -> Any:
    return served.post("/embed", {"inputs": inputs})


def occupy_device(served: Served, gate: Gate, pool: ThreadPoolExecutor) -> Future[Any]:
    """Hold the device up with one text, and return its request."""
    gate.open.clear()
    first = pool.submit(embed, served, "alpha")
    wait_until(lambda: served.metrics()["te_request_input_length_count"] == 1)
    wait_until(lambda: served.metrics()["te_queue_size"] == 0)
    return first


def test_a_request_is_not_expected_any_more_when_it_waits(embedding: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the device would wait for the request whose texts it already has."""
    add, expected = Queue.add, []

    def watch(queue: Queue, request: PendingRequest) -> bool:
        expected.append(queue.count_arriving())
        return add(queue, request)

    monkeypatch.setattr(Queue, "add", watch)
    assert embed(embedding, "alpha").status == 200
    assert expected == [0]


def test_what_exceeds_the_queue_is_refused_at_once(folders: dict[str, Path], gate: Gate, pool: ThreadPoolExecutor) -> None:
    with served_in_thread(folders["embedding"], batch_rows=1, queue_texts=7) as served:
        first = occupy_device(served, gate, pool)
        waiting = pool.submit(embed, served, TEXTS[:6])
        wait_until(lambda: served.metrics()["te_queue_size"] == 6)
        refused = embed(served, TEXTS[:2])
        assert (refused.status, refused.json["error_type"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert served.get("/health").status == 200
        gate.open.set()
        assert (first.result().status, waiting.result().status) == (200, 200)
        assert embed(served, TEXTS[:2]).status == 200


def test_a_text_that_waits_too_long_is_refused_and_leaves(
    folders: dict[str, Path], gate: Gate, pool: ThreadPoolExecutor
) -> None:
    with served_in_thread(folders["embedding"], batch_rows=1, queue_seconds=0.5) as served:
        first = occupy_device(served, gate, pool)
        late = embed(served, TEXTS[:3])
        assert (late.status, late.json["error_type"]) == (503, "overloaded")
        assert served.metrics()["te_queue_size"] == 0
        gate.open.set()
        assert first.result().status == 200


def test_a_client_that_goes_away_takes_its_texts_along(
    folders: dict[str, Path], gate: Gate, pool: ThreadPoolExecutor
) -> None:
    with served_in_thread(folders["embedding"], batch_rows=1) as served:
        first = occupy_device(served, gate, pool)
        connection = http.client.HTTPConnection("127.0.0.1", served.port)
        connection.request("POST", "/embed", json.dumps({"inputs": TEXTS[:9]}))
        wait_until(lambda: served.metrics()["te_queue_size"] == 9)
        connection.close()
        wait_until(lambda: served.metrics()["te_queue_size"] == 0)
        passes = gate.passes
        gate.open.set()
        assert first.result().status == 200
        assert embed(served, "alpha").status == 200
        assert gate.passes == passes + 1


@pytest.fixture
def tokenizer_gate(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[int]]:
    """An event that holds up tokenization until it is set, and the number of texts of each turn that began."""
    is_open, turns, tokenized = threading.Event(), list[int](), ServedModel.tokenize

    def wait_and_tokenize(self: ServedModel, rows: Any, *arguments: Any, **options: Any) -> Any:
        turns.append(len(rows))
        is_open.wait()
        return tokenized(self, rows, *arguments, **options)

    monkeypatch.setattr(ServedModel, "tokenize", wait_and_tokenize)
    return is_open, turns


def test_texts_of_clients_that_went_away_are_not_tokenized(
    folders: dict[str, Path], tokenizer_gate: tuple[threading.Event, list[int]], pool: ThreadPoolExecutor
) -> None:
    is_open, turns = tokenizer_gate
    with served_in_thread(folders["embedding"], batch_rows=1) as served:
        connections = [http.client.HTTPConnection("127.0.0.1", served.port) for _ in range(20)]
        for connection in connections:
            connection.request("POST", "/embed", json.dumps({"inputs": TEXTS[:70] * 3}))
        wait_until(lambda: served.metrics().get('te_request_count_total{method="embed"}') == 20)
        query = pool.submit(embed, served, "alpha")
        wait_until(lambda: served.metrics().get('te_request_count_total{method="embed"}') == 21)
        for connection in connections:
            connection.close()
        wait_until(lambda: served.metrics()["gaudi_bert_disconnects_total"] == 20)
        is_open.set()
        assert query.result().status == 200
        assert turns == [64, 1]


def test_a_query_is_tokenized_before_the_bulks_that_wait(
    folders: dict[str, Path], tokenizer_gate: tuple[threading.Event, list[int]], pool: ThreadPoolExecutor
) -> None:
    is_open, turns = tokenizer_gate
    with served_in_thread(folders["embedding"], batch_rows=1) as served:
        bulks = [pool.submit(embed, served, TEXTS[:70]) for _ in range(10)]
        wait_until(lambda: served.metrics().get('te_request_count_total{method="embed"}') == 10)
        query = pool.submit(embed, served, "alpha")
        wait_until(lambda: served.metrics().get('te_request_count_total{method="embed"}') == 11)
        wait_until(lambda: len(turns) == 1)
        is_open.set()
        assert query.result().status == 200
        assert {bulk.result().status for bulk in bulks} == {200}
        assert 1 in turns[1:3]  # one more turn if the query was not yet read when the gate opened


def test_a_request_that_waits_too_long_for_the_tokenizer_is_refused(
    folders: dict[str, Path], tokenizer_gate: tuple[threading.Event, list[int]], pool: ThreadPoolExecutor
) -> None:
    is_open, turns = tokenizer_gate
    with served_in_thread(folders["embedding"], batch_rows=1, queue_seconds=0.5) as served:
        first = pool.submit(embed, served, "alpha")
        wait_until(lambda: len(turns) == 1)
        late = embed(served, "beta")
        assert (late.status, "tokenizer" in late.json["error"]) == (503, True)
        assert served.get("/health").status == 200
        is_open.set()
        assert first.result().status in (200, 503)
        assert embed(served, "beta").status == 200


def test_a_batch_that_fails_fails_its_own_requests_alone(
    folders: dict[str, Path], gate: Gate, pool: ThreadPoolExecutor
) -> None:
    with served_in_thread(folders["embedding"], batch_rows=1) as served:
        expected = embed(served, "alpha").json
        gate.broken_tokens = 55
        long = " ".join(["alpha"] * 62)
        answers = [pool.submit(embed, served, text) for text in ["alpha", long] * 6]
        statuses = Counter(answer.result().status for answer in answers)
        assert (statuses[424], statuses[200]) == (6, 6)
        agree(embed(served, "alpha").json, expected)
        assert served.get("/health").status == 200


def test_a_device_that_is_lost_ends_the_server(folders: dict[str, Path], gate: Gate, pool: ThreadPoolExecutor) -> None:
    from tests.builders import served as builder

    ended: list[BaseException] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda hooked: ended.append(hooked.exc_value))
        with builder.served_in_thread(folders["embedding"], batch_rows=1) as served:
            gate.open.clear()
            answers = [pool.submit(embed, served, text) for text in TEXTS[:9]]
            wait_until(lambda: served.metrics()["te_request_input_length_count"] == 9)
            gate.is_lost = True
            gate.open.set()
            assert {answer.result().status for answer in answers} <= {424, 503}
    assert isinstance(ended[0], FailedError)
    assert ended[0].exit_code == 1


def test_requests_take_turns_so_a_query_does_not_wait_for_a_bulk(
    folders: dict[str, Path], gate: Gate, pool: ThreadPoolExecutor
) -> None:
    with served_in_thread(folders["embedding"], batch_rows=1) as served:
        gate.open.clear()
        bulk = pool.submit(embed, served, TEXTS * 10)
        wait_until(lambda: served.metrics()["te_queue_size"] > 600)
        query = pool.submit(embed, served, "alpha")
        wait_until(lambda: served.metrics()["te_request_input_length_count"] == len(TEXTS) * 10 + 1)
        before = gate.passes
        gate.open.set()
        assert query.result().status == 200
        assert gate.passes - before <= 4
        assert bulk.result().status == 200


def test_ten_times_too_much_is_answered_or_refused_and_then_all_is_as_before(
    folders: dict[str, Path], pool: ThreadPoolExecutor
) -> None:
    with served_in_thread(folders["embedding"], batch_rows=1, queue_texts=20) as served:
        expected = np.array(embed(served, TEXTS[:20]).json)

        def ask(number: int) -> int:
            answer = embed(served, TEXTS[number % 20])
            assert answer.status in (200, 429)
            if answer.status == 200:
                agree(answer.json[0], expected[number % 20])
            return answer.status

        assert Counter(pool.map(ask, range(800)))[200] > 0
        agree(embed(served, TEXTS[:20]).json, expected)
        assert served.metrics()["te_queue_size"] == 0


def test_too_many_texts_bytes_or_tokens_are_413(folders: dict[str, Path]) -> None:
    bounds = {"request_texts": 5, "request_bytes": 2000, "queue_tokens": 300}
    with served_in_thread(folders["embedding"], batch_rows=1, **bounds) as served:
        for inputs in (["a"] * 6, "a" * 3000, [TEXTS[0]] * 5 + ["a"], [" ".join(["alpha"] * 62)] * 5):
            assert embed(served, inputs).status == 413
        stated = socket.create_connection(("127.0.0.1", served.port), timeout=60)
        stated.sendall(b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n\r\n")
        assert b" 413 " in stated.recv(100)
        stated.close()
        body = b'{"inputs": "alpha"}'
        assert served.send("POST", "/embed", body.ljust(2000), content_type="application/json").status == 200
        for _ in range(2 * _BODIES_AT_ONCE):  # of all bodies together, those that are read now count
            assert served.post("/embed", {"inputs": "alpha", "unknown": "x" * 1900}).status == 200


def test_a_query_is_read_although_large_bodies_have_used_up_the_bytes_of_all(folders: dict[str, Path]) -> None:
    size = 200_000
    unfinished = b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (size, b" " * (size - 1))
    with served_in_thread(folders["embedding"], batch_rows=1, request_bytes=size) as served, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=60))
            for _ in range(_BODIES_AT_ONCE + 1)
        ]
        for client in clients:
            client.sendall(unfinished)
        (rejected,), _, _ = select.select(clients, [], [], 60)
        assert b" 429 " in rejected.recv(100)
        for _ in range(5):
            assert served.post("/embed", {"inputs": "alpha", "unknown": "x" * 1900}).status == 200


def test_a_cost_that_was_measured_on_a_busy_machine_is_corrected(folders: dict[str, Path], gate: Gate) -> None:
    """At 0.2 s for 64 slots 9,600 tokens may wait for 30 s; once a batch was faster, more of them may."""
    gate.delay_seconds = 0.2
    with served_in_thread(folders["embedding"], row_length=64, batch_rows=1) as served:
        gate.delay_seconds = 0.0
        long = " ".join(["alpha"] * 62)
        assert embed(served, 200 * [long]).status == 413
        assert embed(served, long).status == 200
        assert embed(served, 200 * [long]).status == 200


@pytest.mark.slow
def test_nothing_compiles_after_readiness(folders: dict[str, Path]) -> None:
    """Torch counts the graphs that it compiles, and the answers are those of the model that is not compiled."""
    from torch._dynamo.utils import counters

    if shutil.which("g++") is None:
        pytest.skip("C++ COMPILER MISSING: torch.compile needs g++ on a CPU")
    texts = [" ".join(["alpha"] * words) for words in (1, 3, 17, 40, 60)]
    with served_in_thread(folders["embedding"], compile=True, row_length=64, batch_rows=2) as served:
        compiled = counters["stats"]["unique_graphs"]
        assert compiled >= len(served.get("/info").json["shapes"])
        for count in (1, 2, 5, 30):
            found = served.post("/embed", {"inputs": (6 * texts)[:count]}).json
        assert counters["stats"]["unique_graphs"] == compiled
    with served_in_thread(folders["embedding"], row_length=64, batch_rows=2) as served:
        agree(found, served.post("/embed", {"inputs": 6 * texts}).json, 1e-5)


# --- the tokenizer's thread: queries overtake bulks, bulks do not starve, and nothing is done for those who went away


class Scene:
    """A thread that is held up until `open`, and the order in which it then worked."""

    def __init__(self) -> None:
        self.thread, self.order, self.open = FairThread("test"), list[str](), threading.Event()

    async def ask(self, name: str, *batch_seconds: int, deadline: float | None = None) -> None:
        request = AcceptedRequest(time.monotonic() + 1000 if deadline is None else deadline, 0)
        for cost in batch_seconds:
            await self.thread.call_in_time_slice(request, cost, self.work, name)

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


def test_a_cancelled_time_slice_passes_on() -> None:
    async def scenario() -> None:
        scene = Scene()
        first = await started(scene.ask("first", 1))
        second = await started(scene.ask("second", 1))
        third = await started(scene.ask("third", 1))
        scene.thread._start_next_time_slice()  # noqa: SLF001 - the second has its time slice, and is cancelled before it notices
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
    monkeypatch.setattr("gaudi_bert.serving.service.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def work() -> None:
        clock[0] += 2

    async def scenario() -> None:
        thread = FairThread("test")
        for _ in range(200):
            await thread.call_in_time_slice(AcceptedRequest(1000, 0), 10_000, work)
        agree(thread.rate, 5_000)

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
