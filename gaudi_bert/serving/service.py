"""What stands between the routes and the device: state, tokenizing, waiting, and what happens to those that wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from fastapi import Request
from starlette.requests import ClientDisconnect

from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.types import Sequences, join_sequences
from gaudi_bert.serving.device import DeviceThread
from gaudi_bert.serving.ladder import Shape
from gaudi_bert.serving.metrics import Metrics
from gaudi_bert.serving.model import ServedModel
from gaudi_bert.serving.queue import Batch, Queue, Work
from gaudi_bert.serving.schemas import RefusedError
from gaudi_bert.serving.settings import ServeSettings

_TOKENIZED_TOGETHER = 64  # texts: others wait no longer than for these
_BODIES_AT_ONCE = 16  # of the largest size
_LONGEST_BATCH_SECONDS = 60.0  # and 20 times as long as measured: then the device is treated as dead


class Service:
    """A model that is being opened, answers, or stops.

    Attributes:
        model: None while it is being opened.
        costs: seconds of a batch of each shape.
        stopping: whether no more requests are accepted.
        requests: that are in work.
    """

    def __init__(
        self, open_model: Callable[[], tuple[ServedModel, dict[Shape, float]]], settings: ServeSettings, model_id: str
    ) -> None:
        self.settings, self.model_id = settings, model_id
        self.queue = Queue(settings.queue_texts)
        self.metrics = Metrics(lambda: (self.queue.texts, self.queue.tokens))
        self.model: ServedModel | None = None
        self.costs: dict[Shape, float] = {}
        self.stopping, self.requests, self._body_bytes = False, 0, 0
        self._waiting: dict[Work, asyncio.Future[None]] = {}
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        self.ready, self.ended = asyncio.Event(), asyncio.Event()
        self.reason: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self.device = DeviceThread(
            open_model,
            self.queue,
            ready=lambda *result: self._call(self._set_ready, *result),
            computed=lambda batch, seconds: self._call(self._count, batch, seconds),
            ended=lambda reason: self._call(self._end, reason),
        )

    # --- what the device's thread reports

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _set_ready(self, model: ServedModel, costs: dict[Shape, float]) -> None:
        self.model, self.costs, self.queue.costs = model, costs, costs
        self._bound_queue()
        self.ready.set()

    def _bound_queue(self) -> None:
        """Let as many tokens wait as the device computes while they may."""
        largest = max(self.costs)
        computed = int(largest.slots / self.costs[largest] * self.settings.queue_seconds)
        self.queue.most_tokens = self.settings.queue_tokens or max(2 * largest.slots, computed)

    def _count(self, batch: Batch, seconds: float) -> None:
        self.metrics.batch(batch.shape, sum(map(len, batch.rows)), batch.tokens, seconds)
        if seconds < self.costs[batch.shape]:  # what was measured at the start was disturbed
            self.costs.update({shape: min(cost, seconds) for shape, cost in self.costs.items() if shape <= batch.shape})
            self._bound_queue()

    def _end(self, reason: Exception | None) -> None:
        self.reason, self.stopping = reason, True
        for work in list(self._waiting):
            self._settle(work, reason or RefusedError(503, "unhealthy", "the server is stopping"))
        self.ended.set()

    def _settle(self, work: Work, error: Exception | None) -> None:
        future = self._waiting.pop(work, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    # --- what routes ask

    @property
    def is_healthy(self) -> bool:
        """Whether requests are answered: the shapes are computed, the device is not stuck, and nothing stops."""
        busy_since = self.device.busy_since
        longest = _LONGEST_BATCH_SECONDS + 20 * max(self.costs.values(), default=0.0)
        is_stuck = busy_since is not None and time.monotonic() - busy_since > longest
        return self.model is not None and not self.stopping and not is_stuck

    def require_open(self) -> ServedModel:
        """Return the model; a refusal while it is being opened, while the server stops, or where too much waits."""
        if self.model is None or self.stopping:
            raise RefusedError(
                503, "unhealthy", "the server is stopping" if self.stopping else "the model is being opened", 1
            )
        if self.queue.is_full:
            raise self._full()
        return self.model

    def _full(self) -> RefusedError:
        seconds = max(1, math.ceil(min(self.queue.wait_seconds(), self.settings.queue_seconds)))
        return RefusedError(429, "overloaded", "too much waits to be computed; send it again later", seconds)

    async def body(self, http: Request) -> bytes:
        """Read the body of a request, of bounded size and in bounded time."""
        try:
            return await asyncio.wait_for(self._read(http), self.settings.request_seconds)
        except asyncio.TimeoutError:
            raise RefusedError(408, "validation", f"the body took longer than {self.settings.request_seconds:g} s") from None

    async def _read(self, http: Request) -> bytes:
        most, body = self.settings.request_bytes, bytearray()
        stated = http.headers.get("content-length", "")
        if stated.isdigit() and int(stated) > most:
            raise RefusedError(413, "validation", f"the body has {int(stated):,} bytes, at most {most:,} are read")
        try:
            async for part in http.stream():
                if len(body) + len(part) > most:
                    raise RefusedError(413, "validation", f"the body has more than {most:,} bytes")
                if self._body_bytes + len(part) > _BODIES_AT_ONCE * most:
                    raise self._full()
                self._body_bytes += len(part)
                body += part
            return bytes(body)
        finally:
            self._body_bytes -= len(body)

    async def tokenized(
        self, texts: Sequence[object], tokenize: Callable[..., Sequences], truncate: bool | None
    ) -> Sequences:
        """Tokenize the texts of a request, some at a time, so that others are tokenized in between.

        Raises:
            RefusedError: they are too many, too long, have too many tokens, or cannot be given to the model.
        """
        most = self.settings.request_texts
        if not 0 < len(texts) <= most:
            status, what = (
                (413, f"are {len(texts):,} texts, at most {most:,}") if texts else (422, "cannot be empty, at least one")
            )
            raise RefusedError(status, "validation", f"`inputs` {what} of them can be answered")
        begun, parts, tokens = time.monotonic(), [], 0
        portions = [texts[first : first + _TOKENIZED_TOGETHER] for first in range(0, len(texts), _TOKENIZED_TOGETHER)]
        for portion in portions:
            part = await self.aside(tokenize, portion)
            tokens += len(part.input_ids)
            if part.cut_rows and not (self.settings.auto_truncate if truncate is None else truncate):
                longest = int(part.lengths.max())
                raise RefusedError(
                    422, "validation", f"a text has more than {longest} tokens; send `truncate`: true to cut it"
                )
            if tokens > self.queue.most_tokens:
                raise RefusedError(
                    413, "validation", f"the texts have more than {self.queue.most_tokens:,} tokens; send fewer"
                )
            parts.append(part)
        self.metrics.tokenization_seconds.observe(time.monotonic() - begun)
        return join_sequences(parts, list(map(len, portions)))

    async def aside(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call what needs the tokenizer where texts are tokenized."""
        try:
            return await self._loop.run_in_executor(self._tokenizing, function, *arguments)
        except InputError as error:
            raise RefusedError(422, "tokenizer", str(error)) from None

    async def computed(self, http: Request, model: ServedModel, sequences: Sequences) -> Work:
        """Have sequences computed, and wait for it.

        Raises:
            RefusedError: the queue is full, they waited for too long, or their batch failed.
            ClientDisconnect: the client went away, and so have its texts.
        """
        rows = len(sequences.input_ids) if model.is_per_token else len(sequences)
        work = Work(sequences, np.zeros((rows, model.width), np.float32), lambda *done: self._call(self._settle, *done))
        future = self._loop.create_future()
        if not self.queue.add(work):
            raise self._full()
        self._waiting[work] = future
        for length in work.lengths:
            self.metrics.tokens.observe(length)
        gone = asyncio.ensure_future(_gone(http))
        try:
            await asyncio.wait({future, gone}, timeout=self.settings.queue_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not future.done() and not gone.done():
                if self.queue.remove(work):
                    raise RefusedError(503, "overloaded", f"waited {self.settings.queue_seconds:g} s for the device", 1)
                await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise ClientDisconnect
            self._raise_failure(future, work)
        finally:
            gone.cancel()
            self._waiting.pop(work, None)
            self.queue.remove(work)
        self.metrics.queue_seconds.observe(work.started_at - work.accepted_at)
        self.metrics.inference_seconds.observe(time.monotonic() - work.started_at)
        return work

    def _raise_failure(self, future: asyncio.Future[None], work: Work) -> None:
        error = future.exception()
        if isinstance(error, RefusedError):
            raise error
        if error is not None:
            raise RefusedError(424, "backend", f"the batch of this request failed: {type(error).__name__}") from error
        if not np.isfinite(work.outputs).all():
            raise RefusedError(424, "backend", "the model's outputs for a text are not finite")


async def _gone(http: Request) -> None:
    """Wait until the client has closed its connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
