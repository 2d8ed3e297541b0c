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
from typing import Any

from gaudi_bert.artefacts.base import whole_lines
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors, write_text
from gaudi_bert.tfrecords.wire.framing import frame


class MetricsWriter:
    """Appends to `metrics.jsonl` and to TensorBoard in one folder; use it as a context.

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
        with explained_os_errors(self.path, "write"):
            self._handle = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        self._board = _EventWriter(Path(folder) / "tensorboard")

    def write(self, kind: str, update: int, values: Mapping[str, float]) -> None:
        """Write one report of `kind` "train" or "evaluation"."""
        line: dict[str, Any] = {"update": update, "kind": kind, **values}
        with explained_os_errors(self.path, "write"):
            self._handle.write(json.dumps(line, allow_nan=False) + "\n")
            self._handle.flush()
        self._board.write(update, {f"{kind}/{name}": value for name, value in values.items()})

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.close()
        self._board.close()


# --- TensorBoard's event files: a TFRecord for each report, with a protocol buffer `Event` in it
#
# The format is two messages, so it is written here: TensorBoard's own writers come with a framework. Of an Event, field 1 is
# the time in seconds (double), 2 the step, 3 the version of the file, 5 a Summary; of a Summary, field 1 is a Value; of a
# Value, field 1 is its tag and 2 the number (float).

_VERSION = b"brain.Event:2"


class _EventWriter:
    """Appends scalars to its own event file in `folder`, which is created; each report is flushed at once."""

    def __init__(self, folder: Path) -> None:
        now = time.time()
        self._path = folder / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
        with explained_os_errors(self._path, "write"):
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = open(self._path, "ab")  # noqa: SIM115 - closed by close
        self._append(_time(now) + _message(3, _VERSION))

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """Write numbers by their tags."""
        summary = b"".join(
            _message(1, _message(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in values.items()
        )
        self._append(_time(time.time()) + b"\x10" + _varint(update) + _message(5, summary))

    def close(self) -> None:
        """Close the file."""
        self._handle.close()

    def _append(self, event: bytes) -> None:
        with explained_os_errors(self._path, "write"):
            self._handle.write(frame(event))
            self._handle.flush()


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
