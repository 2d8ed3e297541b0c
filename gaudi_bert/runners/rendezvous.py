"""A store of keys and values over HTTP: where Horovod's Gloo processes leave their addresses for one another.

PUT writes a value, GET reads it (404 until it is there), DELETE says that a process is done. That is the whole protocol of
Gloo's HTTP store. It runs in a container of its own, on a network that only the training containers share:

    python3 -m gaudi_bert.runners.rendezvous PORT
"""

from __future__ import annotations

import signal
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["READY", "RendezvousServer"]

READY = "rendezvous: ready"
# An address takes a few hundred bytes.
LARGEST_VALUE_BYTES = 1 << 20


class _Handler(BaseHTTPRequestHandler):
    server: RendezvousServer

    def do_PUT(self) -> None:
        """Keep a value."""
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= LARGEST_VALUE_BYTES:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        value = self.rfile.read(length)
        with self.server.lock:
            self.server.values[self.path] = value
        self._answer(HTTPStatus.OK)

    def do_GET(self) -> None:
        """Hand out a value, or 404 while it is not there."""
        with self.server.lock:
            value = self.server.values.get(self.path)
        if value is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, value)

    def do_DELETE(self) -> None:
        """A process has ended; its values stay, since others may still read them."""
        self._answer(HTTPStatus.OK)

    def _answer(self, status: HTTPStatus, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, format: str, *values: Any) -> None:
        """Say nothing of each request."""


class RendezvousServer(ThreadingHTTPServer):
    """The server.

    Attributes:
        values: what was written, by path.
        lock: guards `values`.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Handler)
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()


def main() -> None:
    """Serve on the port given, until SIGTERM."""
    server = RendezvousServer(("", int(sys.argv[1])))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
