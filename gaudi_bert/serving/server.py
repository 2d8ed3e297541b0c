"""Run the server process of `gaudi-bert serve`, with its listening socket, connections, signals and log.

The server listens while the model is being opened, and answers 503 meanwhile. On SIGTERM or Ctrl-C it accepts no more
requests, answers the accepted requests within the grace period, and ends with exit code 0. If the device is lost, it ends
with exit code 1. The routes are in `app.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import logging
import os
import queue
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO, cast

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gaudi_bert.artefacts.mirrored_folder import open_local_copies
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.serving.app import make_app
from gaudi_bert.serving.batch_shapes import Shape, list_batch_shapes
from gaudi_bert.serving.device import measure_batch_seconds, measure_longest_single_thread_row
from gaudi_bert.serving.model import ServedModel, open_served_model
from gaudi_bert.serving.service import Service
from gaudi_bert.serving.settings import ServeSettings

# The length of the shortest row in slots, for each kind of device. The next two mappings contain the default sizes of the
# longest row and of a full batch. If the longest row were shorter, more slots would be empty. If it were longer, attention
# would be slower, above all on a CPU.
_SHORTEST_ROW = {"cpu": 16, "cuda": 32, "hpu": 32}
_USUAL_ROW = {"cpu": 256, "cuda": 512, "hpu": 512}
_BATCH_SLOTS = {"cpu": 2048, "cuda": 16384, "hpu": 16384}
_MOST_HEADER_BYTES, _PARSED_BYTES = 1 << 16, 1 << 12
_ASK_SECONDS, _TCP_CLOSE = 0.2, 7  # TCP_INFO reports state 7 for a connection after a reset
_STANDARD_ERROR, _MOST_LOG_TEXTS = 2, 1000
# The time in seconds after which Python may switch to another thread. The device thread waits at most this long for a thread
# that parses requests.
_SWITCH_SECONDS = 0.0005
_POLL_SECONDS, _JOIN_SECONDS = 0.05, 10.0


class _Server(uvicorn.Server):
    """A uvicorn server that installs no signal handlers, because `serve` handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


class _Connection(HttpToolsProtocol):
    """An HTTP/1.1 connection with stricter limits than those of uvicorn.

    The connection is closed if the headers of a request do not arrive in time or are too long. Pipelined requests are parsed
    only a few at a time. A client that closes its own side of the connection after a complete request still gets its answer.
    """

    _reads_headers, _header_bytes, _unread, _is_half_closed = True, 0, b"", False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start a timer that closes the connection if the headers of the first request do not arrive in time."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Parse new data. If earlier requests of the connection are still unanswered, keep the data for later."""
        self._unread += data
        self._parse_unread_data()

    def _parse_unread_data(self) -> None:
        """Parse received data. If a pipelined request must wait, keep the rest of the data and pause reading.

        The data is parsed in small parts. uvicorn stops the timer for headers as soon as any data arrives. This method keeps
        the timer until the headers are complete, so that a client cannot hold the connection by sending headers slowly.
        """
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        at = 0
        while at < len(self._unread) and not self.pipeline and not self.transport.is_closing():
            part = self._unread[at : at + _PARSED_BYTES]
            at += len(part)
            super().data_received(part)
            self._header_bytes = self._header_bytes + len(part) if self._reads_headers else 0
            if self._header_bytes > _MOST_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("The headers are too long.")
        self._unread = self._unread[at:]
        if self._unread:
            self.flow.pause_reading()
        if timer is not None and self.cycle is not None and not self.cycle.response_complete:
            timer.cancel()
        elif self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = timer

    def on_message_begin(self) -> None:
        """Start counting the header bytes of a new request."""
        super().on_message_begin()
        self._reads_headers, self._header_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Stop counting header bytes, and start the route that handles the request."""
        super().on_headers_complete()
        self._reads_headers = False

    def on_response_complete(self) -> None:
        """Continue with the next request of the connection. If the client has closed its side, close the connection."""
        super().on_response_complete()
        if self._unread and not self.transport.is_closing():
            self._parse_unread_data()
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore the `Upgrade` header of a request, and close the connection after the answer.

        By default, uvicorn writes a warning to the log for each such request.
        """
        self._unread = b""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def eof_received(self) -> bool:
        """Return whether to keep the connection open after the client has closed its side.

        It is kept open if a complete request is not yet answered, because the client may still wait for the answer.
        """
        self._is_half_closed = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if self._is_half_closed:
            self.loop.call_later(_ASK_SECONDS, self._close_if_client_disconnected, True)
        return self._is_half_closed

    def _close_if_client_disconnected(self, is_first_check: bool) -> None:
        """Close the connection if the client no longer waits for its answer. Otherwise, check again after 0.2 seconds.

        A client that has left answers data with a TCP reset, but it must receive data first. Therefore the first call sends
        an interim response if this is possible.
        """
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        connected = self.transport.get_extra_info("socket")
        if connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.transport.abort()
            return
        if is_first_check and not self.pipeline and not self.cycle.response_started and self.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # clients must ignore an interim response
        self.loop.call_later(_ASK_SECONDS, self._close_if_client_disconnected, False)


class _LogStream(io.TextIOBase):
    """A text stream that writes to standard error on a separate thread, so that a blocked log does not block the server.

    Lines are lost if too many are waiting, or if they cannot be written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._texts: queue.Queue[str] = queue.Queue(_MOST_LOG_TEXTS)
        threading.Thread(target=self._write_texts, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        """Queue a text for the thread, and return without waiting until it is written."""
        with contextlib.suppress(queue.Full):
            self._texts.put_nowait(text)
        return len(text)

    def _write_texts(self) -> None:
        """Write queued texts to standard error. This method runs on the thread of the stream."""
        while True:
            with contextlib.suppress(OSError):
                os.write(_STANDARD_ERROR, self._texts.get().encode("utf-8", "replace"))


def serve(path: Path, settings: ServeSettings) -> None:
    """Serve the model in a folder until the process receives SIGTERM or Ctrl-C.

    Args:
        path: The model folder, or its URL.
        settings: The settings of the server.

    Raises:
        InputError: The model, the file with the key, or the address cannot be used.
        FailedError: The device is lost.
    """
    api_key = None if settings.api_key_file is None else _read_api_key(settings.api_key_file)

    log = cast("TextIO", _LogStream())
    logging.basicConfig(stream=log, format="%(levelname)s: %(message)s")

    async def until_signal(listener: socket.socket) -> None:
        """Run the server until the process receives SIGTERM or Ctrl-C."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve_until(stop, listener, path, settings, api_key, Reporter(log))

    sys.setswitchinterval(_SWITCH_SECONDS)
    with open_listening_socket(settings) as listener:
        uvloop.run(until_signal(listener))


async def serve_until(
    stop: asyncio.Event,
    listener: socket.socket,
    path: Path,
    settings: ServeSettings,
    api_key: str | None,
    reporter: Reporter,
) -> None:
    """Open the model and answer requests until `stop` is set. Then answer the accepted requests, and return.

    Args:
        stop: The event that stops the server.
        listener: The listening socket.
        path: The model folder, or its URL.
        settings: The settings of the server.
        api_key: The key that clients must send, or None.
        reporter: Shows that the server is ready.

    Raises:
        InputError: The model cannot be opened.
        FailedError: The device is lost.
    """
    service = Service(lambda: open_and_measure_model(path, settings), settings, settings.model_id or path.resolve().name)
    config = uvicorn.Config(
        make_app(service, api_key),
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # because uvicorn logs a warning for each request that is not HTTP
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(settings.request_seconds)),
    )
    begun, server = time.monotonic(), _Server(config)
    serving = asyncio.ensure_future(server.serve([listener]))
    service.device.start()
    waits = [asyncio.ensure_future(event.wait()) for event in (service.ready, stop, service.ended)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if service.ready.is_set():
        gc.freeze()  # all objects that exist now stay alive, so later garbage collections may skip them
        for note in service.model.loaded.notes if service.model is not None else ():
            reporter.say(note)
        reporter.say(_describe_server(service, listener, time.monotonic() - begun))
        await asyncio.wait(waits[1:], return_when=asyncio.FIRST_COMPLETED)
    service.stopping = True
    deadline = time.monotonic() + settings.grace_seconds
    while service.requests and not service.ended.is_set() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
    service.queue.close()
    config.timeout_graceful_shutdown = 1.0 if service.ended.is_set() else max(1.0, deadline - time.monotonic())
    server.should_exit = True
    await serving
    await asyncio.to_thread(service.device.join, _JOIN_SECONDS)
    for wait in waits:
        wait.cancel()
    if service.reason is not None:
        raise service.reason


def open_and_measure_model(path: Path, settings: ServeSettings) -> tuple[ServedModel, dict[Shape, float]]:
    """Open the model in a folder, and measure how long a batch of each shape takes. Return the model and the seconds by
    shape.

    Args:
        path: The model folder, or its URL.
        settings: The settings of the server.

    Raises:
        InputError: The model cannot be opened, or the length of the rows does not suit it.
        FailedError: A shape with one row cannot be computed.
    """
    with open_local_copies((path,)) as (copy,):
        model = open_served_model(copy or path, settings)
    positions, device = model.loaded.positions, model.torch_model.device.type
    row_length = settings.row_length or min(positions, max(model.max_tokens, _USUAL_ROW[device]))
    if row_length > positions:
        raise InputError(
            f"--row-length {row_length}: the model has only {positions} positions; pass a value from 3 to {positions}"
        )
    if row_length < model.max_tokens:
        raise InputError(
            f"--row-length {row_length}: must be at least the maximum text length, {model.max_tokens} tokens; "
            f"pass a larger value, or --max-sequence-length {row_length}"
        )
    usual = max(1, _BATCH_SLOTS[device] // row_length)
    shapes = list_batch_shapes(row_length, settings.batch_rows or 1 << (usual.bit_length() - 1), _SHORTEST_ROW[device])
    model = replace(model, max_single_thread_slots=measure_longest_single_thread_row(model, shapes))
    return model, measure_batch_seconds(model, shapes)


def _describe_server(service: Service, listener: socket.socket, seconds: float) -> str:
    """Return the log line that names the model and the address of the server."""
    host, port = listener.getsockname()[:2]
    shapes, model = list(service.batch_seconds), service.model
    kind = (
        "" if model is None else f"{model.kind}, texts of up to {model.max_tokens} tokens, {model.torch_model.device.type}, "
    )
    address = f"[{host}]" if ":" in host else host
    return (
        f"serving {service.model_id} on http://{address}:{port}: {kind}{len(shapes)} shapes from {shapes[0]} to "
        f"{shapes[-1]}; ready after {seconds:.1f} s"
    )


def open_listening_socket(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens on the address in the settings.

    Raises:
        InputError: The address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        raise InputError(
            f"--host {settings.host} --port {settings.port}: {error.strerror}; choose another host or port"
        ) from error
    return listener


def _read_api_key(file: Path) -> str:
    """Read the API key from a file.

    Raises:
        InputError: Every user can read the file, it cannot be read, or it does not contain exactly one word of ASCII.
    """
    try:
        if stat.S_IMODE(file.stat().st_mode) & stat.S_IROTH:
            raise InputError(f"--api-key-file {file}: all users can read the file; run `chmod 600 {file}`")
        key = read_text(file).strip()
    except OSError as error:
        raise InputError(f"--api-key-file {file}: {error.strerror}; pass a file that contains the key") from error
    if not key or not key.isascii() or len(key.split()) != 1:
        raise InputError(f"--api-key-file {file}: the file must contain only the key, as one ASCII word without spaces")
    return key
