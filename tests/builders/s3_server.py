"""A real S3 server on loopback (moto), in its own process and environment, and a proxy that makes it a bad one."""

from __future__ import annotations

import http.client
import random
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.config.places import StoreSettings

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / "s3-server" / "bin" / "python"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "name-of-the-tests",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
    "AWS_DEFAULT_REGION": "eu-west-1",
}
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server._server.server_port, flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass(frozen=True)
class S3Server:
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def make_bucket(self, name: str) -> None:
        import s3fs

        key, secret, region = ENVIRONMENT.values()
        where = {"endpoint_url": self.endpoint, "client_kwargs": {"region_name": region}, "skip_instance_cache": True}
        s3fs.S3FileSystem(key=key, secret=secret, **where).mkdir(name)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """The server; it ends with the block."""
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen([PYTHON, "-c", _SERVER], stdin=pipe, stdout=pipe, stderr=nothing, text=True) as process:
        yield S3Server(int(process.stdout.readline()))
        process.stdin.close()
        process.wait(30)


def quick(endpoint: str, **values: object) -> StoreSettings:
    """Settings for a server on loopback: short pauses."""
    return StoreSettings(
        **{"endpoint_url": endpoint, "first_pause_seconds": 0.01, "longest_pause_seconds": 0.05, "attempts": 20, **values}
    )


def upload(folder: Path, url: str, objects: ObjectStore) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            objects.upload(path, f"{url}/{path.relative_to(folder).as_posix()}")


def contents(url: str, objects: ObjectStore) -> dict[str, bytes]:
    return {name: objects.read(f"{url}/{name}") for name in objects.list(url)}


# --- a proxy that does wrong what servers and networks do wrong, by a seeded die


FAULTS = ("500", "503", "reset", "slow", "truncated")
_NOT_FORWARDED = {"connection", "keep-alive", "transfer-encoding"}


class FaultyProxy:
    """What the proxy does, to be changed while it runs: of a `share` of requests, one of `faults` goes wrong.

    `after_get` is called with the path after an object was read and before the answer is sent, to replace it; `sent` counts
    the bytes of the bodies of GET requests.
    """

    def __init__(self, upstream_port: int, seed: int) -> None:
        self.upstream_port = upstream_port
        self.share = 0.0
        self.faults: tuple[str, ...] = FAULTS
        self.happened: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.sent = 0
        self.after_get: Callable[[str], None] | None = None
        self.port = 0
        self._random, self._lock = random.Random(seed), threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fault(self) -> str | None:
        with self._lock:
            if self._random.random() >= self.share:
                return None
            fault = self._random.choice(self.faults)
            self.happened[fault] += 1
            return fault

    def flip(self) -> bool:
        with self._lock:
            return self._random.random() < 0.5


@contextmanager
def faulty_proxy(upstream_port: int, seed: int = 7) -> Iterator[FaultyProxy]:
    """A proxy in front of a server on loopback; it ends with the block."""
    proxy = FaultyProxy(upstream_port, seed)

    class Handler(_Handler):
        rules = proxy

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the body of each answer waits 40 ms for its head to be acknowledged
    rules: FaultyProxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        rules, fault = self.rules, self.rules.fault()
        rules.requests[self.command] += 1
        if fault in ("500", "503"):
            self._answer(int(fault), {}, b"<Error><Code>InternalError</Code><Message>injected</Message></Error>")
            return
        if fault == "reset" and rules.flip():
            self._reset()
            return
        if fault == "slow":
            time.sleep(0.05)
        status, headers, answer = self._ask_upstream(body)
        if self.command == "GET" and rules.after_get is not None:
            rules.after_get(self.path)
        if fault == "reset":
            self._reset()
        elif fault == "truncated" and len(answer) > 1 and self.command == "GET":
            self._answer(status, headers, answer, send=len(answer) // 2)
            self._reset()
        else:
            self._answer(status, headers, answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _ask_upstream(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.rules.upstream_port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in (*_NOT_FORWARDED, "expect")}
        connection.request(self.command, self.path, body or None, headers)
        answer = connection.getresponse()
        content = answer.read()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in _NOT_FORWARDED}
        connection.close()
        return answer.status, kept, content

    def _answer(self, status: int, headers: dict[str, str], body: bytes, send: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() != "content-length":
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "GET":
            self.rules.sent += len(body[:send])  # counted first: the client may look as soon as the last byte is there
        if self.command != "HEAD":
            self.wfile.write(body[:send])

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def handle(self) -> None:
        with suppress(OSError, ValueError):  # the other side is gone, or we closed it
            super().handle()

    def finish(self) -> None:
        with suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *_: object) -> None:
        """Say nothing."""
