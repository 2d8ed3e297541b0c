"""What stands between the routes and the device: state, tokenizing, waiting, and what happens to those that wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
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
from gaudi_bert.serving.queue import Batch, PendingRequest, Queue
from gaudi_bert.serving.schemas import RefusedError
from gaudi_bert.serving.settings import ServeSettings
from gaudi_bert.serving.turns import Requester, Turns

_TEXTS_OF_TURN, _CHARACTERS_OF_TURN = 64, 1 << 14  # that are tokenized before another request has its turn
_BODIES_AT_ONCE = 16  # of the largest size, from their first byte until their request is answered
_SMALL_BYTES, _SMALL_TEXTS = 1 << 16, 32  # of a request that is read and answered on the event loop
_LONGEST_BATCH_SECONDS = 60.0  # and 20 times as long as measured: then the device is treated as dead


class Ticket(Requester):
    """One accepted request.

    Attributes:
        size: bytes of its body.
        texts: the number of its texts, once they are known.
        is_arriving: whether it has no texts in the queue yet.
    """

    def __init__(self, deadline: float, size: int) -> None:
        super().__init__(deadline)
        self.size, self.texts, self.is_arriving = size, 0, True

    @property
    def is_small(self) -> bool:
        """Whether the request is read and answered within a few milliseconds."""
        return self.size <= _SMALL_BYTES and self.texts <= _SMALL_TEXTS


class Service:
    """A model that is being opened, answers, or stops.

    Attributes:
        model: None while it is being opened.
        costs: seconds of a batch of each shape.
        stopping: whether no more requests are accepted.
        requests: the number of requests whose answers are not yet with the transport.
        arriving: the number of requests that are read completely and have no texts in the queue yet, because they are being
            parsed or tokenized. The device's thread may read it too.
    """

    def __init__(
        self, open_model: Callable[[], tuple[ServedModel, dict[Shape, float]]], settings: ServeSettings, model_id: str
    ) -> None:
        self.settings, self.model_id = settings, model_id
        self.queue = Queue(settings.queue_texts)
        self.queue.count_arriving = lambda: self.arriving
        self.metrics = Metrics(lambda: (self.queue.texts, self.queue.tokens))
        self.model: ServedModel | None = None
        self.costs: dict[Shape, float] = {}
        self.stopping, self.requests, self.arriving, self._body_bytes = False, 0, 0, 0
        self._waiting: dict[PendingRequest, asyncio.Future[None]] = {}
        self._turns, self._characters = Turns("tokenizer"), 0
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
        self.queue.max_tokens = self.settings.queue_tokens or max(2 * largest.slots, computed)

    def _count(self, batch: Batch, seconds: float) -> None:
        self.metrics.batch(batch.shape, sum(map(len, batch.rows)), batch.tokens, seconds)
        if seconds < self.costs[batch.shape]:  # what was measured at the start was disturbed
            self.costs.update({shape: min(cost, seconds) for shape, cost in self.costs.items() if shape <= batch.shape})
            self._bound_queue()

    def _end(self, reason: Exception | None) -> None:
        self.reason, self.stopping = reason, True
        for pending in list(self._waiting):
            self._settle(pending, reason or RefusedError(503, "unhealthy", "the server is stopping"))
        self.ended.set()

    def _settle(self, pending: PendingRequest, error: Exception | None) -> None:
        future = self._waiting.pop(pending, None)
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
        seconds = max(1, math.ceil(min(self.queue.estimate_wait_seconds(), self.settings.queue_seconds)))
        return RefusedError(429, "overloaded", "too much waits to be computed; send it again later", seconds)

    async def body(self, http: Request) -> bytes:
        """Read the body of a request, of bounded size and in bounded time. Then `ticket` counts its bytes.

        Raises:
            RefusedError: the body is too large or too slow, or too many others are in work.
            ClientDisconnect: the client went away.
        """
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

    @contextmanager
    def ticket(self, size: int) -> Iterator[Ticket]:
        """Count a request as accepted, and the bytes of its body, until it is answered."""
        ticket = Ticket(time.monotonic() + self.settings.queue_seconds, size)
        self._body_bytes += size
        self.arriving += 1
        try:
            yield ticket
        finally:
            self._body_bytes -= size
            self._arrived(ticket)

    def _arrived(self, ticket: Ticket) -> None:
        self.arriving -= ticket.is_arriving
        ticket.is_arriving = False

    async def while_connected(self, http: Request, answer: Coroutine[Any, Any, bytes]) -> bytes:
        """Return what `answer` returns, and cancel it if the client goes away.

        Raises:
            ClientDisconnect: the client went away.
        """
        answering, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_gone(http))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ClientDisconnect
            return answering.result()
        finally:
            gone.cancel()
            answering.cancel()
            del answering  # its exception refers to this frame, and both would keep the request in memory

    async def tokenized(
        self,
        ticket: Ticket,
        texts: Sequence[Any],
        tokenize: Callable[..., Sequences],
        lengths: Sequence[int],
        truncate: bool | None,
    ) -> Sequences:
        """Tokenize the texts of a request, some at a time, so that others are tokenized in between.

        Args:
            ticket: the request.
            texts: at least one of what `tokenize` takes.
            tokenize: returns the sequences of some of them.
            lengths: of each text, the characters that are tokenized.
            truncate: whether texts that are too long are cut; None for the server's setting.

        Raises:
            RefusedError: they are too long, have too many tokens, cannot be given to the model, or wait for too long.
        """
        begun, parts, tokens, ticket.texts = time.monotonic(), [], 0, len(texts)
        portions = _portions(lengths)
        with self._counted_characters(sum(lengths)):
            for portion in portions:
                part = await self.aside(ticket, sum(lengths[portion]), tokenize, texts[portion])
                tokens += len(part.input_ids)
                if part.cut_rows and not (self.settings.auto_truncate if truncate is None else truncate):
                    longest = f"a text has more than {int(part.lengths.max())} tokens"
                    remedy = "send `truncate`: true to cut it, or start the server with --auto-truncate"
                    raise RefusedError(422, "validation", f"{longest}; {remedy}")
                if tokens > self.queue.max_tokens:
                    raise RefusedError(
                        413, "validation", f"the texts have more than {self.queue.max_tokens:,} tokens; send fewer"
                    )
                parts.append(part)
        self.metrics.tokenization_seconds.observe(time.monotonic() - begun)
        return join_sequences(parts, [portion.stop - portion.start for portion in portions])

    @contextmanager
    def _counted_characters(self, characters: int) -> Iterator[None]:
        """Let the characters of a request wait for the tokenizer, if that can read them within `queue_seconds`.

        As many again are kept free for requests of a single turn.
        """
        most = self._turns.rate * self.settings.queue_seconds * (1 if characters > _CHARACTERS_OF_TURN else 2)
        if self._characters and self._characters + characters > most:
            raise self._full()
        self._characters += characters
        try:
            yield
        finally:
            self._characters -= characters

    async def aside(self, ticket: Ticket, characters: int, function: Callable[..., Any], *arguments: object) -> Any:
        """Call what needs the tokenizer where texts are tokenized, when it is the request's turn."""
        try:
            return await self._turns.call(ticket, characters, function, *arguments)
        except InputError as error:
            raise RefusedError(422, "tokenizer", str(error)) from None
        except TimeoutError:
            waited = f"waited {self.settings.queue_seconds:g} s for the tokenizer"
            raise RefusedError(503, "overloaded", waited, 1) from None

    async def computed(self, ticket: Ticket, model: ServedModel, sequences: Sequences) -> PendingRequest:
        """Have sequences computed, and wait for it.

        Raises:
            RefusedError: the queue is full, they waited for too long, or their batch failed.
        """
        rows = len(sequences.input_ids) if model.is_per_token else len(sequences)
        outputs = np.zeros((rows, model.width), np.float32)
        pending = PendingRequest(sequences, outputs, lambda *done: self._call(self._settle, *done))
        future = self._loop.create_future()
        self._arrived(ticket)  # before the device's thread sees the texts, or it would wait for this request itself
        if not self.queue.add(pending):
            raise self._full()
        self._waiting[pending] = future
        for length in pending.lengths:
            self.metrics.tokens.observe(length)
        try:
            await asyncio.wait({future}, timeout=max(0.0, ticket.deadline - time.monotonic()))
            if not future.done():
                if self.queue.remove(pending):
                    raise RefusedError(503, "overloaded", f"waited {self.settings.queue_seconds:g} s for the device", 1)
                await asyncio.wait({future})
            self._raise_failure(future, pending)
        finally:
            self._waiting.pop(pending, None)
            self.queue.remove(pending)
        self.metrics.queue_seconds.observe(pending.started_at - pending.accepted_at)
        self.metrics.inference_seconds.observe(time.monotonic() - pending.started_at)
        return pending

    def _raise_failure(self, future: asyncio.Future[None], pending: PendingRequest) -> None:
        error = future.exception()
        if isinstance(error, RefusedError):
            raise error
        if error is not None:
            raise RefusedError(424, "backend", f"the batch of this request failed: {type(error).__name__}") from error
        if not np.isfinite(pending.outputs).all():
            raise RefusedError(424, "backend", "the model's outputs for a text are not finite")


async def _gone(http: Request) -> None:
    """Wait until the client has closed its connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _portions(lengths: Sequence[int]) -> list[slice]:
    """Return slices of consecutive texts that are tokenized in one turn, from the characters of each text."""
    starts, characters = [0], 0
    for number, length in enumerate(lengths):
        if number > starts[-1] and (characters + length > _CHARACTERS_OF_TURN or number - starts[-1] == _TEXTS_OF_TURN):
            starts.append(number)
            characters = 0
        characters += length
    return [slice(*each) for each in pairwise([*starts, len(lengths)])]
