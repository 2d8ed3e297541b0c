"""Where the reports of a run go: `metrics.jsonl` and TensorBoard.

One JSON line is written for each report, flushed at once. When a run is resumed at an update, later lines are dropped first,
so that the curve has one value per update, whatever was stopped and when.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gaudi_bert.artefacts.base import whole_lines
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors, write_text
from gaudi_bert.tfrecords.wire.framing import frame


class MetricsWriter:
    """Appends to `metrics.jsonl` and to an event file of its own in one folder; use it as a context.

    Lines of updates after `last_update`, written by a run that was stopped, are removed. `evaluated_updates` were evaluated
    already when this was opened.
    """

    def __init__(self, folder: Path, last_update: int) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(whole_lines(self.path) if self.path.exists() else (), start=1):
            try:
                lines.append(json.loads(text))
            except ValueError as error:
                remedy = "remove it, or train again with --overwrite"
                raise InputError(f"{self.path}: line {number} is not JSON; {remedy}") from error
        lines = [line for line in lines if line["update"] <= last_update]
        self.evaluated_updates = {line["update"] for line in lines if line["kind"] == "evaluation"}
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))
        now, board = time.time(), Path(folder) / "tensorboard"
        with explained_os_errors(self.path, "write"):
            board.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
            self._lines, self._events = open(self.path, "ab"), open(board / name, "ab")  # noqa: SIM115 - see __exit__
        self._append(self._events, frame(_time(now) + _message(3, _VERSION)))

    def write(self, kind: str, update: int, values: Mapping[str, float]) -> None:
        """Write one report of `kind` "train" or "evaluation"."""
        line: dict[str, Any] = {"update": update, "kind": kind, **values}
        self._append(self._lines, json.dumps(line, allow_nan=False).encode() + b"\n")
        summary = b"".join(
            _message(1, _message(1, f"{kind}/{name}".encode()) + b"\x15" + struct.pack("<f", value))
            for name, value in values.items()
        )
        self._append(self._events, frame(_time(time.time()) + b"\x10" + _varint(update) + _message(5, summary)))

    def _append(self, handle: BinaryIO, content: bytes) -> None:
        with explained_os_errors(self.path, "write"):
            handle.write(content)
            handle.flush()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.close()
        self._events.close()


# --- TensorBoard's event files: a TFRecord for each report, with a protocol buffer `Event` in it
#
# The format is two messages, so it is written here: TensorBoard's own writers come with a framework. Of an Event, field 1 is
# the time in seconds (double), 2 the step, 3 the version of the file, 5 a Summary; of a Summary, field 1 is a Value; of a
# Value, field 1 is its tag and 2 the number (float).

_VERSION = b"brain.Event:2"


def _time(seconds: float) -> bytes:
    return b"\x09" + struct.pack("<d", seconds)


def _message(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    groups = []
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])
