"""Servers for tests, in a thread of this process or in a process of their own, and a client of the standard library."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaudi_bert.common.progress import Reporter
from gaudi_bert.serving.server import open_listening_socket, serve_until
from gaudi_bert.serving.settings import ServeSettings
from tests.builders.waiting import wait_until

_COMMAND = [sys.executable, "-m", "gaudi_bert", "serve", "--device", "cpu"]


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Served:
    """A server at a port of this machine; `process` is None for one in a thread."""

    port: int
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return Answer(response.status, response.read(), {name.lower(): value for name, value in response.getheaders()})

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, **headers)

    def post(self, path: str, content: Any, **headers: str) -> Answer:
        return self.send("POST", path, json.dumps(content).encode(), content_type="application/json", **headers)

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics").body.decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    def is_ready(self) -> bool:
        try:
            return self.get("/health").status == 200
        except OSError:
            return False


@contextlib.contextmanager
def served_in_thread(model: Path, api_key: str | None = None, **settings: Any) -> Iterator[Served]:
    """A server of this process, on a loop of its own."""
    chosen, begun = ServeSettings(port=0, device="cpu", **settings), threading.Event()
    found: dict[str, Any] = {}
    with open_listening_socket(chosen) as listener:
        served = Served(listener.getsockname()[1])

        async def run() -> None:
            found["loop"], found["stop"] = asyncio.get_running_loop(), asyncio.Event()
            begun.set()
            await serve_until(found["stop"], listener, model, chosen, api_key, Reporter())

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        try:
            begun.wait()
            wait_until(lambda: served.is_ready() or not thread.is_alive())
            yield served
        finally:
            if thread.is_alive():
                found["loop"].call_soon_threadsafe(found["stop"].set)
            thread.join()


@contextlib.contextmanager
def served_in_process(model: Path, folder: Path, *options: object, standard_error: int | None = None) -> Iterator[Served]:
    """`gaudi-bert serve` as users start it, killed at the end if it still runs.

    Args:
        model: the folder of the model.
        folder: a folder for the log.
        options: more options of the command.
        standard_error: where it writes, if not to the log.
    """
    if standard_error is not None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [*_COMMAND, "--model", str(model), "--port", str(port), *map(str, options)]
        process = subprocess.Popen(command, stderr=standard_error)
        try:
            served = Served(port, process)
            wait_until(lambda: served.is_ready() or process.poll() is not None)
            yield served
        finally:
            process.kill()
            process.wait()
        return
    log = folder / "serve.log"
    command = [*_COMMAND, "--model", str(model), "--port", "0"]
    with log.open("wb") as handle:
        process = subprocess.Popen([*command, *map(str, options)], stdout=handle, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: b"http://" in log.read_bytes() or process.poll() is not None)
        text = log.read_text()
        assert process.poll() is None, text
        yield Served(int(text.partition("http://127.0.0.1:")[2].partition(":")[0]), process, log)
    finally:
        process.kill()
        process.wait()
