"""TensorBoard's event files: a TFRecord for each report, with a protocol buffer `Event` in it.

The format is two messages, so it is written here: TensorBoard's own writers come with a framework. Of an Event, field 1 is
the time in seconds (double), 2 the step, 3 the version of the file, 5 a Summary; of a Summary, field 1 is a Value; of a
Value, field 1 is its tag and 2 the number (float).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from gaudi_bert.common.files import explained_os_errors
from gaudi_bert.tfrecords.wire.framing import frame

_VERSION = b"brain.Event:2"


class EventWriter:
    """Appends scalars to an event file of its own in `folder`, which is created; each report is flushed at once."""

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
