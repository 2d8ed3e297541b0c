"""The newest figures of a run for Prometheus: plain text at /metrics, served by a thread of the process of rank 0.

The text is that of Prometheus' exposition format 0.0.4: a line of help, a line with the type, and one sample for each
figure. What only grows (`sequences`, `tokens`) is a counter, all else a gauge. No data and no settings are served.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from gaudi_bert.common.errors import FailedError

__all__ = ["MetricsServer"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COUNTERS = {"sequences": "Real sequences trained on.", "tokens": "Real tokens trained on."}


class MetricsServer:
    """Serves what it was given last; use it as a context.

    Args:
        port: where it listens, on all addresses.
        updates: how many updates the run has.

    Raises:
        FailedError: the port is taken.
    """

    def __init__(self, port: int, updates: int) -> None:
        self._values: dict[str, float] = {"updates": updates}
        self._lock = threading.Lock()
        try:
            self._server = ThreadingHTTPServer(("", port), _handler_of(self))
        except OSError as error:
            raise FailedError(
                f"training.metrics_port = {port}: cannot listen there: {error.strerror}; choose another port"
            ) from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_port

    def update(self, kind: str, update: int, values: Mapping[str, float]) -> None:
        """Take one report of `kind` "train" or "evaluation", as it goes into `metrics.jsonl`."""
        with self._lock:
            self._values["update"] = update
            self._values |= {name if name in _COUNTERS else f"{kind}_{name}": value for name, value in values.items()}

    def text(self) -> str:
        """What is served."""
        with self._lock:
            values = dict(self._values)
        lines = []
        for name, value in sorted(values.items()):
            metric = f"gaudi_bert_{name}_total" if name in _COUNTERS else f"gaudi_bert_{name}"
            lines.append(f"# HELP {metric} {_COUNTERS.get(name, f'{name} as in metrics.jsonl.')}")
            lines.append(f"# TYPE {metric} {'counter' if name in _COUNTERS else 'gauge'}")
            lines.append(f"{metric} {float(value)!r}")
        return "\n".join(lines) + "\n"

    def __enter__(self) -> MetricsServer:
        threading.Thread(target=self._server.serve_forever, args=(0.2,), daemon=True, name="metrics").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler_of(server: MetricsServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # for a peer that says nothing

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = server.text().encode("utf-8") if found else b"see /metrics\n"
            self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
            self.send_header("Content-Type", CONTENT_TYPE if found else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None:
            """Say nothing of each request."""

    return Handler
