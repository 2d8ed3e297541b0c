"""The service between the HTTP routes and the device thread.

A route reads the body of a request, counts it as an `AcceptedRequest`, has its texts tokenized, and waits until the device
has computed them. The service limits how much memory and time the waiting requests use, and rejects requests beyond these
limits. If the device is lost or the server stops, all waiting requests fail.

Requests share the tokenizer thread fairly. In a time slice, the thread handles some of the texts of one request. The order
of the time slices is that of fair queuing: a virtual clock counts how many characters of each waiting request would have
been handled if the thread served all requests at the same time, at the same speed. The time slice that would end first is
the next one. Therefore a short query overtakes any number of large requests, and large requests are served no matter how
many queries arrive.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from fastapi import Request
from starlette.requests import ClientDisconnect

from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.types import Sequences, concatenate_sequences
from gaudi_bert.serving.batch_shapes import Shape
from gaudi_bert.serving.device import DeviceThread, trim_shape_to_tokens
from gaudi_bert.serving.metrics import Metrics
from gaudi_bert.serving.model import ServedModel
from gaudi_bert.serving.queue import Batch, PendingRequest, Queue
from gaudi_bert.serving.schemas import RequestError
from gaudi_bert.serving.settings import ServeSettings

# The tokenizer thread alternates between requests. After this many texts or characters of one request, it continues with
# another request.
_TEXTS_OF_TIME_SLICE, _CHARACTERS_OF_TIME_SLICE = 64, 1 << 14
# To limit memory, the bodies of all unanswered requests together must not be larger than this many bodies of the maximum
# size.
_BODIES_AT_ONCE = 16
# While a large body is parsed or a large answer is written, the event loop cannot serve other requests. Therefore only
# requests up to these sizes are handled on the event loop, and all others on separate threads.
_SMALL_BYTES, _SMALL_TEXTS = 1 << 16, 32
# If a batch takes too long, /health reports that the device is stuck. The limit is this time plus 20 times the measured time
# of the largest batch shape.
_LONGEST_BATCH_SECONDS = 60.0
_ASSUMED_RATE = 1e6  # the assumed characters per second before the first measurement
_MIN_MEASURED_CHARACTERS = 1_000  # time slices with fewer characters are too short to measure the rate


class AcceptedRequest:
    """A request that has been read completely, but has not been answered yet.

    Attributes:
        deadline: The time until which the request waits for a time slice or for the device, in seconds of `time.monotonic`.
        last_end: The time when its last time slice on the tokenizer thread ends, on the virtual clock of the thread.
        size: The number of bytes of its body.
        texts: The number of its texts, or 0 before the body is parsed.
        is_being_tokenized: Whether the request is still being parsed or tokenized. Its texts are then not in the queue yet.
    """

    def __init__(self, deadline: float, size: int) -> None:
        self.deadline, self.last_end = deadline, 0.0
        self.size, self.texts, self.is_being_tokenized = size, 0, True

    @property
    def can_run_on_event_loop(self) -> bool:
        """Whether the request is small enough to be parsed and answered on the event loop, within a few milliseconds."""
        return self.size <= _SMALL_BYTES and self.texts <= _SMALL_TEXTS


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
        self, accepted: AcceptedRequest, characters: int, function: Callable[..., Any], *arguments: object
    ) -> Any:
        """Wait until this thread has time for a request, call a function on the thread, and return its result.

        Args:
            accepted: The request.
            characters: The number of characters that the function handles.
            function: The function.
            *arguments: The arguments of the function.

        Raises:
            TimeoutError: The deadline of the request passed before its time slice began.
        """
        await self._wait_for_time_slice(accepted, characters)
        begun = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        finally:
            if characters >= _MIN_MEASURED_CHARACTERS:
                self.rate += 0.1 * (characters / max(1e-6, time.monotonic() - begun) - self.rate)
            self._start_next_time_slice()

    async def _wait_for_time_slice(self, accepted: AcceptedRequest, characters: int) -> None:
        """Wait until a request gets its next time slice on the shared thread.

        Requests whose functions handle few characters get their time slices earlier.

        Args:
            accepted: The request.
            characters: The number of characters that the function handles in this time slice.

        Raises:
            TimeoutError: The deadline of the request passed before its time slice began.
        """
        accepted.last_end = max(self._clock, accepted.last_end) + characters
        loop = asyncio.get_running_loop()
        time_slice = loop.create_future()
        heapq.heappush(self._waiting, (accepted.last_end, next(self._numbers), characters, time_slice))
        if not self._is_taken:
            self._start_next_time_slice()
        timer = loop.call_later(accepted.deadline - time.monotonic(), _expire_time_slice, time_slice)
        try:
            await time_slice
        except asyncio.CancelledError:
            if time_slice.done() and not time_slice.cancelled() and time_slice.exception() is None:
                self._start_next_time_slice()
            raise
        finally:
            timer.cancel()

    def _start_next_time_slice(self) -> None:
        """Choose the request that may use the thread next.

        Its time slice would end first if the thread served all requests at the same time and at the same speed.
        """
        self._is_taken = False
        while self._waiting and not self._is_taken:
            _, _, characters, time_slice = heapq.heappop(self._waiting)
            if not time_slice.done():
                self._clock += characters / (1 + len(self._waiting))
                self._is_taken = True
                time_slice.set_result(None)


def _expire_time_slice(time_slice: asyncio.Future[None]) -> None:
    """Make a request fail with a `TimeoutError` if it is still waiting to use the thread."""
    if not time_slice.done():
        time_slice.set_exception(TimeoutError())


class Service:
    """Connects the HTTP routes with the model. It tokenizes texts, queues them for the device thread, and enforces limits.

    Methods must be called on the event loop.

    Args:
        open_model: Opens the model and measures its shapes. Called in the device thread.
        settings: The settings of the server.
        model_id: The name of the model for clients.

    Attributes:
        model: The model, or None while it is being opened.
        batch_seconds: The measured seconds that a batch of each shape takes.
        stopping: Whether the server is stopping, so that no more requests are accepted.
        requests: The number of requests whose answers were not yet passed to the transport.
        arriving: The number of requests that were read completely but have no texts in the queue yet, because they are being
            parsed or tokenized. The device thread may read this number.
        ready: Set when the model is open.
        ended: Set when the device thread has ended.
        reason: The error that ended the device thread, or None.
    """

    def __init__(
        self, open_model: Callable[[], tuple[ServedModel, dict[Shape, float]]], settings: ServeSettings, model_id: str
    ) -> None:
        self.settings, self.model_id = settings, model_id
        self.queue = Queue(settings.queue_texts)
        self.queue.count_arriving = lambda: self.arriving
        self.metrics = Metrics(lambda: (self.queue.texts, self.queue.tokens))
        self.model: ServedModel | None = None
        self.batch_seconds: dict[Shape, float] = {}
        self.stopping, self.requests, self.arriving, self._body_bytes = False, 0, 0, 0
        self._waiting: dict[PendingRequest, asyncio.Future[None]] = {}
        self._tokenizer, self._characters = FairThread("tokenizer"), 0
        # If several threads parsed large bodies at once, they would need more memory and slow down the event loop, so use
        # one thread.
        self.reader = ThreadPoolExecutor(1, "reader")
        self.ready, self.ended = asyncio.Event(), asyncio.Event()
        self.reason: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self.device = DeviceThread(
            open_model,
            self.queue,
            on_ready=lambda *result: self._call_on_event_loop(self._set_served_model, *result),
            on_computed=lambda batch, seconds: self._call_on_event_loop(self._count_batch, batch, seconds),
            on_ended=lambda reason: self._call_on_event_loop(self._fail_waiting_requests, reason),
        )

    # --- callbacks of the device thread

    def _call_on_event_loop(self, function: Callable[..., None], *arguments: object) -> None:
        """Schedule a function call on the event loop.

        This method may be called on any thread.
        """
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _set_served_model(self, model: ServedModel, batch_seconds: dict[Shape, float]) -> None:
        """Store the opened model, so that requests are accepted from now on."""
        self.model, self.batch_seconds, self.queue.batch_seconds = model, batch_seconds, batch_seconds
        self._update_max_queued_tokens()
        self.ready.set()

    def _update_max_queued_tokens(self) -> None:
        """Set the maximum number of tokens in the queue. By default, the device can compute them within `queue_seconds`.

        The default is at least two full batches of the largest shape.
        """
        largest = max(self.batch_seconds)
        computed = int(largest.slots / self.batch_seconds[largest] * self.settings.queue_seconds)
        self.queue.max_tokens = self.settings.queue_tokens or max(2 * largest.slots, computed)

    def _count_batch(self, batch: Batch, seconds: float) -> None:
        """Record a computed batch in the metrics. If the batch was faster than expected, reduce the expected time of its
        shape.

        The expected times of smaller shapes are reduced as well.
        """
        computed = batch.shape if self.model is None else trim_shape_to_tokens(self.model, batch.shape, batch.tokens)
        self.metrics.count_batch(batch.shape, computed.slots, sum(map(len, batch.rows)), batch.tokens, seconds)
        # Other processes may delay a batch, so keep the shortest time that was measured for each shape. A row that was
        # shortened takes less time than its complete shape, so ignore its time.
        if computed == batch.shape and seconds < self.batch_seconds[batch.shape]:
            self.batch_seconds.update(
                {shape: min(cost, seconds) for shape, cost in self.batch_seconds.items() if shape <= batch.shape}
            )
            self._update_max_queued_tokens()

    def _fail_waiting_requests(self, reason: Exception | None) -> None:
        """Make all waiting requests fail, because the device thread has ended."""
        self.reason, self.stopping = reason, True
        for pending in list(self._waiting):
            self._wake_waiting_request(pending, reason or RequestError(503, "unhealthy", "the server is stopping"))
        self.ended.set()

    def _wake_waiting_request(self, pending: PendingRequest, error: Exception | None) -> None:
        """Wake the route that waits for the outputs of a request. If the request failed, the route raises the error."""
        future = self._waiting.pop(pending, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    # --- methods for the routes

    @property
    def is_healthy(self) -> bool:
        """Whether the model is open, the device is not stuck, and the server is not stopping."""
        busy_since = self.device.busy_since
        longest = _LONGEST_BATCH_SECONDS + 20 * max(self.batch_seconds.values(), default=0.0)
        is_stuck = busy_since is not None and time.monotonic() - busy_since > longest
        return self.model is not None and not self.stopping and not is_stuck

    def require_model(self) -> ServedModel:
        """Return the model. Raise an error if the server cannot accept requests right now.

        Raises:
            RequestError: The model is still being opened, the server is stopping, or the queue is full.
        """
        if self.model is None or self.stopping:
            raise RequestError(
                503,
                "unhealthy",
                f"{'the server is stopping' if self.stopping else 'the model is being loaded'}; retry later",
                1,
            )
        if self.queue.is_full:
            raise self._overloaded_error()
        return self.model

    def _overloaded_error(self) -> RequestError:
        """Return the error for a request that is rejected because the server is overloaded. It tells the client when to
        retry.
        """
        seconds = max(1, math.ceil(min(self.queue.estimate_wait_seconds(), self.settings.queue_seconds)))
        return RequestError(429, "overloaded", "the server is overloaded; retry later", seconds)

    async def read_body(self, http: Request) -> bytes:
        """Read the body of an HTTP request. Raise an error if the body is too large or arrives too slowly.

        The caller must then call `accept_request`, which counts the bytes of the body until the request is answered.

        Raises:
            RequestError: The body is too large or takes too long, or the bodies of all requests together are too large.
            ClientDisconnect: The client has closed the connection.
        """
        try:
            return await asyncio.wait_for(self._read_limited_body(http), self.settings.request_seconds)
        except asyncio.TimeoutError:
            raise RequestError(
                408, "validation", f"the body did not arrive within {self.settings.request_seconds:g} s; retry"
            ) from None

    async def _read_limited_body(self, http: Request) -> bytes:
        """Read the body of an HTTP request. Raise an error if the body is too large.

        The bytes of the body count towards the limit for all bodies only while this method runs.
        """
        most, body = self.settings.request_bytes, bytearray()
        stated = http.headers.get("content-length", "")
        if stated.isdigit() and int(stated) > most:
            raise RequestError(
                413,
                "validation",
                f"the body has {int(stated):,} bytes, but at most {most:,} are allowed; send a smaller request",
            )
        try:
            async for part in http.stream():
                if len(body) + len(part) > most:
                    raise RequestError(413, "validation", f"the body has more than {most:,} bytes; send a smaller request")
                # Small bodies, such as those of queries, are read even if large bodies have reached the memory limit for all
                # bodies.
                is_small = len(body) + len(part) <= _SMALL_BYTES
                if not is_small and self._body_bytes + len(part) > _BODIES_AT_ONCE * most:
                    raise self._overloaded_error()
                self._body_bytes += len(part)
                body += part
            return bytes(body)
        finally:
            self._body_bytes -= len(body)

    @contextmanager
    def accept_request(self, body_bytes: int) -> Iterator[AcceptedRequest]:
        """Accept a request after its body was read, and yield it. The caller must answer it before leaving the context.

        While the context is open, the bytes of the body count towards the limit for the bodies of all requests.

        Args:
            body_bytes: The number of bytes of the body.
        """
        accepted = AcceptedRequest(time.monotonic() + self.settings.queue_seconds, body_bytes)
        self._body_bytes += body_bytes
        self.arriving += 1
        try:
            yield accepted
        finally:
            self._body_bytes -= body_bytes
            self._record_tokenization_ended(accepted)

    def _record_tokenization_ended(self, accepted: AcceptedRequest) -> None:
        """Record that a request has been parsed and tokenized, or has failed, so that the device need not wait for it."""
        self.arriving -= accepted.is_being_tokenized
        accepted.is_being_tokenized = False

    async def run_while_connected(self, http: Request, answer: Coroutine[Any, Any, bytes]) -> bytes:
        """Run a coroutine and return its result. Cancel the coroutine if the client closes the connection.

        Args:
            http: The request.
            answer: Computes the answer.

        Raises:
            ClientDisconnect: The client has closed the connection.
        """
        answering, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_wait_for_disconnect(http))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ClientDisconnect
            return answering.result()
        finally:
            gone.cancel()
            answering.cancel()
            # The exception of the task refers to this frame, and the frame refers to the task. This reference cycle would
            # keep the request in memory, so delete the variable.
            del answering

    async def tokenize(
        self,
        accepted: AcceptedRequest,
        texts: Sequence[Any],
        tokenize_texts: Callable[..., Sequences],
        lengths: Sequence[int],
        truncate: bool | None,
    ) -> Sequences:
        """Tokenize the texts of a request on the tokenizer thread, and return their token sequences.

        The texts are tokenized in several time slices, so that other requests are tokenized in between.

        Args:
            accepted: The request that is answered.
            texts: At least one text, in a form that `tokenize_texts` accepts.
            tokenize_texts: Returns the token sequences of some of the texts.
            lengths: The number of characters of each text that are tokenized.
            truncate: Whether to truncate texts that are too long. None means the setting of the server.

        Raises:
            RequestError: A text is too long, the texts have too many tokens, the model does not accept a text, or the
                request waited for too long.
        """
        begun, parts, tokens, accepted.texts = time.monotonic(), [], 0, len(texts)
        batches = _split_into_tokenizer_batches(lengths)
        with self._reserve_characters(sum(lengths)):
            for batch in batches:
                part = await self.run_in_tokenizer_thread(accepted, sum(lengths[batch]), tokenize_texts, texts[batch])
                tokens += len(part.input_ids)
                if part.cut_rows and not (self.settings.auto_truncate if truncate is None else truncate):
                    raise RequestError(
                        422,
                        "validation",
                        f"a text has more than {int(part.lengths.max())} tokens; send `truncate`: true, or start the server "
                        "with --auto-truncate",
                    )
                if tokens > self.queue.max_tokens:
                    raise RequestError(
                        413,
                        "validation",
                        f"the texts have more than {self.queue.max_tokens:,} tokens; send fewer texts in a request",
                    )
                parts.append(part)
        self.metrics.tokenization_seconds.observe(time.monotonic() - begun)
        return concatenate_sequences(parts, [batch.stop - batch.start for batch in batches])

    @contextmanager
    def _reserve_characters(self, characters: int) -> Iterator[None]:
        """While the context is open, count the characters of a request as waiting for the tokenizer.

        Args:
            characters: The number of characters that are tokenized for the request.

        Raises:
            RequestError: The tokenizer needs longer than `queue_seconds` for all waiting characters. For a request that
                takes a single time slice, the limit is twice as high, so that large requests cannot keep small ones out.
        """
        most = self._tokenizer.rate * self.settings.queue_seconds * (1 if characters > _CHARACTERS_OF_TIME_SLICE else 2)
        if self._characters and self._characters + characters > most:
            raise self._overloaded_error()
        self._characters += characters
        try:
            yield
        finally:
            self._characters -= characters

    async def run_in_tokenizer_thread(
        self, accepted: AcceptedRequest, characters: int, function: Callable[..., Any], *arguments: object
    ) -> Any:
        """Wait for a request's time slice on the tokenizer thread, call a function there, and return its result.

        Args:
            accepted: The request that is answered.
            characters: The number of characters that the function handles.
            function: The function.
            *arguments: The arguments of the function.

        Raises:
            RequestError: The function rejected its input, or the request waited for too long.
        """
        try:
            return await self._tokenizer.call_in_time_slice(accepted, characters, function, *arguments)
        except InputError as error:
            raise RequestError(422, "tokenizer", str(error)) from None
        except TimeoutError:
            raise RequestError(
                503, "overloaded", f"the request waited {self.settings.queue_seconds:g} s for the tokenizer; retry later", 1
            ) from None

    async def queue_and_await_outputs(
        self, accepted: AcceptedRequest, model: ServedModel, sequences: Sequences
    ) -> PendingRequest:
        """Add the token sequences of a request to the queue, and wait until the device has computed their outputs.

        Args:
            accepted: The request that is answered.
            model: The model.
            sequences: The sequences.

        Returns:
            The request with its outputs.

        Raises:
            RequestError: The queue is full, the request waited for too long, its batch failed, or an output is not finite.
        """
        outputs = np.zeros((len(sequences.input_ids if model.is_per_token else sequences), model.output_size), np.float32)
        pending = PendingRequest(
            sequences, outputs, lambda *done: self._call_on_event_loop(self._wake_waiting_request, *done)
        )
        future = self._loop.create_future()
        # The device thread waits while requests are still being tokenized. Record that this request is tokenized before its
        # texts enter the queue, because otherwise the thread would wait in vain for this request.
        self._record_tokenization_ended(accepted)
        if not self.queue.add(pending):
            raise self._overloaded_error()
        self._waiting[pending] = future
        for length in pending.lengths:
            self.metrics.tokens.observe(length)
        try:
            await asyncio.wait({future}, timeout=max(0.0, accepted.deadline - time.monotonic()))
            if not future.done():
                if self.queue.remove(pending):
                    raise RequestError(
                        503,
                        "overloaded",
                        f"the request waited {self.settings.queue_seconds:g} s for the device; retry later",
                        1,
                    )
                await asyncio.wait({future})
            self._raise_if_failed(future, pending)
        finally:
            self._waiting.pop(pending, None)
            self.queue.remove(pending)
        self.metrics.queue_seconds.observe(pending.started_at - pending.accepted_at)
        self.metrics.inference_seconds.observe(time.monotonic() - pending.started_at)
        return pending

    def _raise_if_failed(self, future: asyncio.Future[None], pending: PendingRequest) -> None:
        """Raise a `RequestError` if the request failed or an output is not finite."""
        error = future.exception()
        if isinstance(error, RequestError):
            raise error
        if error is not None:
            raise RequestError(
                424, "backend", f"the batch that contained this request failed: {type(error).__name__}"
            ) from error
        if not np.isfinite(pending.outputs).all():
            raise RequestError(424, "backend", "the model's outputs for a text are not finite (nan or infinite)")


async def _wait_for_disconnect(http: Request) -> None:
    """Wait until the client has closed its connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _split_into_tokenizer_batches(character_counts: Sequence[int]) -> list[slice]:
    """Divide the texts of a request into batches that are tokenized one at a time, and return each batch as a slice.

    Other requests may be tokenized between two batches.

    Args:
        character_counts: The number of characters of each text that are tokenized.
    """
    starts, characters = [0], 0
    for number, length in enumerate(character_counts):
        if number > starts[-1] and (
            characters + length > _CHARACTERS_OF_TIME_SLICE or number - starts[-1] == _TEXTS_OF_TIME_SLICE
        ):
            starts.append(number)
            characters = 0
        characters += length
    return [slice(*each) for each in itertools.pairwise([*starts, len(character_counts)])]
