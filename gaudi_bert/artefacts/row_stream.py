"""How far a file has come that is written window by window, so that the same command goes on where it was killed.

Beside OUT lie `.OUT.partial`, what is written so far, and `.OUT.progress.json`, which says how much of that counts. A window
is first flushed to the disk and then counted: what a killed run wrote beyond the count is cut off. When all is there, the
partial file gets its name and the count goes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.artefacts.model import Artefact, Count, Sha256, read_artefact
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, explained_os_errors, flush_folder, hidden_beside, write_json

__all__ = ["RowStream", "StreamProgress", "other_input"]


class StreamProgress(Artefact):
    """What counts of a partial file.

    Attributes:
        signature: of settings and inputs, SHA-256.
        rows: input rows that are answered.
        bytes: of the partial file.
        input_checksum: CRC-32 of those rows, to tell another input that comes through a pipe.
        cut_rows, tokens, slots: sums for what is said at the end.
    """

    signature: Sha256
    rows: Count = 0
    bytes: Count = 0
    input_checksum: Count = 0
    cut_rows: Count = 0
    tokens: Count = 0
    slots: Count = 0


class RowStream:
    """A file that grows by windows of rows.

    Args:
        out: the file to make.
        signature: of this run.
        overwrite: replace what other settings made.

    Attributes:
        finished: it was there already, of the same settings and inputs.
        progress: what is done.

    Raises:
        InputError: other settings or inputs made what is there, and `overwrite` is False.
    """

    def __init__(self, out: Path, signature: Signature, overwrite: bool = False) -> None:
        self.out = out
        self._partial, self._count = hidden_beside(out, "partial"), hidden_beside(out, "progress.json")
        self.finished = begin_artefact(out, out, signature, overwrite)
        content = json.dumps(signature.as_json(), sort_keys=True).encode()
        self.progress = StreamProgress(signature=hashlib.sha256(content).hexdigest())
        if not self.finished and self._count.exists() and self._partial.exists():
            stored = read_artefact(self._count, StreamProgress, f"remove {self._count}")
            if stored.signature == self.progress.signature and self._partial.stat().st_size >= stored.bytes:
                self.progress = stored
        self._handle: BinaryIO | None = None

    def append(self, data: bytes, progress: StreamProgress) -> None:
        """Write a window and count it; `progress` is what is done with it, but for `bytes`."""
        with explained_os_errors(self.out, "write"):
            handle = self._open()
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
            size = handle.tell()
        self.progress = progress.model_copy(update={"bytes": size})
        write_json(self._count, self.progress.as_json())

    def partial(self) -> Path:
        """The file so far, closed, for what is made of it at the end."""
        self._open()
        self._close()
        return self._partial

    def finish(self) -> None:
        """Give the file its name."""
        partial = self.partial()
        with explained_os_errors(self.out, "write"):
            os.replace(partial, self.out)
            flush_folder(self.out.parent)
            self._count.unlink(missing_ok=True)

    def finish_as(self, write: Callable[[Path, BinaryIO], None]) -> None:
        """Make another file of the partial one: `write(partial, handle)` writes it."""
        partial = self.partial()
        with atomic_file(self.out) as handle:
            write(partial, handle)
        partial.unlink(missing_ok=True)
        self._count.unlink(missing_ok=True)

    def _open(self) -> BinaryIO:
        if self._handle is None:
            with explained_os_errors(self.out, "write"):
                self.out.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666)
                os.ftruncate(descriptor, self.progress.bytes)
                self._handle = os.fdopen(descriptor, "r+b")
                self._handle.seek(self.progress.bytes)
        return self._handle

    def _close(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None


def other_input(out: Path) -> InputError:
    """The error for a pipe that brings other rows than the ones that are answered already."""
    return InputError(f"{out}: standard input brings other rows than those answered already; pass --overwrite")
