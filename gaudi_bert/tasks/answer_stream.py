"""Windows of rows answered one after the other: from a file or a pipe, to a file or a pipe, in bounded memory.

Beside OUT lie `.OUT.partial`, the answers so far, and `.OUT.progress.json`, which says how much of them counts. A window is
first flushed to the disk and then counted: what a killed run wrote beyond the count is cut off. When all windows are
written, the partial file gets its name and the count is removed. Windows count again where their rows are the same, though
a later row was mended meanwhile. Answers for an object store are uploaded once they are complete: a run that is killed
before that starts again.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from gaudi_bert.artefacts.base import Artefact, Count, Sha256
from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.artefacts.store.mirrored_folder import shown
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import (
    atomic_file,
    exclusive_lock,
    explained_os_errors,
    hidden_beside,
    move_finished_file,
)
from gaudi_bert.common.progress import LOG_LINE_EVERY_SECONDS, Reporter
from gaudi_bert.rows.reading import windows
from gaudi_bert.rows.types import BadRow, Row

WINDOW_ROWS = 8192
"""Rows that are packed, answered and written together."""
STANDARD_OUTPUT = "-"


class WindowAnswers(NamedTuple):
    """The bytes to write for a window; rows that were too long, tokens, slots of all packs, gain by packing; bad rows."""

    data: bytes
    cut_rows: int
    tokens: int
    slots: int
    gain: float
    bad_rows: int = 0


class Answerer(Protocol):
    """Answers windows of rows."""

    def check(self, rows: Sequence[Row | BadRow]) -> None:
        """Refuse rows that `answer` would refuse."""

    def answer(self, rows: Sequence[Row | BadRow]) -> WindowAnswers:
        """Answer a window of rows."""


@dataclass(frozen=True)
class RowSource:
    """Rows that are read from the front, as often as it takes; once where they come from a pipe."""

    read: Callable[[], Iterator[Row | BadRow]]
    from_pipe: bool = False


@dataclass(frozen=True)
class Destination:
    """Where answers go.

    Attributes:
        out: a file, or `-` for standard output, which cannot be resumed.
        signature: of settings and inputs.
        finish: makes the file of all windows.
        overwrite: replace what other settings made.
    """

    out: str
    signature: Signature
    finish: Callable[[RowStream], None]
    overwrite: bool = False


@dataclass(frozen=True)
class StreamResult:
    """What was done.

    Attributes:
        rows: answered, those of an interrupted run too.
        cut_rows: of these, rows that were cut or read in windows.
        tokens: of all sequences.
        padding: share of the computed slots that held no token.
        packed: whether rows were packed anywhere.
        bad_rows: rows that cannot be read and are named in their places.
        max_sequence_length: to how many tokens rows were cut.
    """

    rows: int
    cut_rows: int
    tokens: int
    padding: float
    packed: bool
    skipped: bool = False
    bad_rows: int = 0
    max_sequence_length: int = 0


def answer_stream(
    source: RowSource,
    answerer: Answerer,
    destination: Destination,
    reporter: Reporter,
    window_rows: int | None = None,
) -> StreamResult:
    """Answer all rows in windows (of `WINDOW_ROWS`); those of a file are all read before anything is computed."""
    window_rows = WINDOW_ROWS if window_rows is None else window_rows
    if destination.out == STANDARD_OUTPUT:
        _check(source, answerer, window_rows)
        batches = windows(source.read(), window_rows)
        return _answer_windows(batches, answerer, _StreamProgress(signature="0" * 64), _write_to_pipe, reporter)
    path = Path(destination.out)
    with exclusive_lock(path, str(path)):
        stream = RowStream(path, destination.signature, destination.overwrite and source.from_pipe, destination.overwrite)
        if stream.finished:
            if source.from_pipe:
                raise InputError(f"{path}: already exists; choose another file, or pass --overwrite")
            reporter.say(f"{shown(path)}: already there, nothing to do")
            return StreamResult(0, 0, 0, 0.0, False, skipped=True)
        _check(source, answerer, window_rows)
        batches = windows(source.read(), window_rows)
        if not _skip_answered(batches, stream.progress):
            if source.from_pipe:
                raise InputError(f"{path}: standard input brings other rows than those answered already; pass --overwrite")
            stream.start_anew()
            batches = windows(source.read(), window_rows)
        if stream.progress.rows:
            reporter.say(f"{shown(path)}: going on after {stream.progress.rows:,} rows")
        result = _answer_windows(batches, answerer, stream.progress, stream.append, reporter)
        destination.finish(stream)
    return result


def _check(source: RowSource, answerer: Answerer, window_rows: int) -> None:
    """Find what cannot be read before anything is computed; a pipe can be read once only."""
    if not source.from_pipe:
        for window in windows(source.read(), window_rows):
            answerer.check(window)


def _write_to_pipe(data: bytes, progress: _StreamProgress) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _skip_answered(batches: Iterator[list[Row | BadRow]], progress: _StreamProgress) -> bool:
    """Pass over the rows that are answered; whether they are the same as then."""
    remaining, checksum = progress.rows, 0
    while remaining > 0 and (window := next(batches, None)):
        checksum = _checksum(window, checksum)
        remaining -= len(window)
    return remaining == 0 and checksum == progress.input_checksum


def _checksum(window: Sequence[Row | BadRow], before: int) -> int:
    for row in window:
        before = zlib.crc32(repr(row).encode("utf-8", "surrogatepass"), before)
    return before


def _answer_windows(
    batches: Iterator[list[Row | BadRow]],
    answerer: Answerer,
    progress: _StreamProgress,
    write: Callable[[bytes, _StreamProgress], None],
    reporter: Reporter,
) -> StreamResult:
    """Answer and write each window; report what packing gains, once, and how many rows are done."""
    reported_gain, packed, last_line = False, False, time.monotonic()
    for window in batches:
        answers = answerer.answer(window)
        progress = progress.after(answers, len(window), _checksum(window, progress.input_checksum))
        write(answers.data, progress)
        if not reported_gain:
            reporter.say(_describe_packing(answers))
            reported_gain = True
        packed |= answers.gain > 1
        if reporter.live or time.monotonic() - last_line >= LOG_LINE_EVERY_SECONDS:
            last_line = time.monotonic()
            reporter.show(f"{progress.rows:,} rows")
    if not progress.rows:
        raise InputError("the input holds no rows; give it at least one")
    padding = 1 - progress.tokens / progress.slots if progress.slots else 0.0
    rows, cut, bad = progress.rows, progress.cut_rows, progress.bad_rows
    return StreamResult(rows, cut, progress.tokens, round(padding, 4), packed, bad_rows=bad)


def _describe_packing(answers: WindowAnswers) -> str:
    padding = f"{100 * (1 - answers.tokens / max(answers.slots, 1)):.1f} % padding"
    if answers.gain > 1:
        return f"packing: on, {answers.gain:.2f} times less computation than with one sequence per row, {padding}"
    return f"packing: off, it would gain less than 2 % on these rows; {padding}"


# --- a file that grows window by window


class _StreamProgress(Artefact):
    """What counts of a partial file.

    Attributes:
        signature: of settings and inputs but for the rows, SHA-256.
        rows: input rows that are answered.
        bytes: of the partial file.
        input_checksum: CRC-32 of those rows, to recognise them: a later row may have been mended.
        cut_rows, tokens, slots, bad_rows: sums over all windows.
    """

    remedy = "remove it"

    signature: Sha256
    rows: Count = 0
    bytes: Count = 0
    input_checksum: Count = 0
    cut_rows: Count = 0
    tokens: Count = 0
    slots: Count = 0
    bad_rows: Count = 0

    def after(self, answers: WindowAnswers, rows: int, input_checksum: int) -> _StreamProgress:
        """The progress when one more window is answered, but for `bytes`."""
        return self.model_copy(
            update={
                "rows": self.rows + rows,
                "input_checksum": input_checksum,
                "cut_rows": self.cut_rows + answers.cut_rows,
                "tokens": self.tokens + answers.tokens,
                "slots": self.slots + answers.slots,
                "bad_rows": self.bad_rows + answers.bad_rows,
            }
        )


class RowStream:
    """A file that grows by windows of rows.

    Args:
        out: the file to make.
        signature: of this run.
        anew: nothing of an earlier run counts.
        overwrite: replace what other settings made; else they are refused.

    Attributes:
        finished: the file exists already, of the same settings and inputs.
        progress: what is done.
    """

    def __init__(self, out: Path, signature: Signature, anew: bool = False, overwrite: bool = False) -> None:
        self.out = out
        self._partial, self._count = hidden_beside(out, "partial"), hidden_beside(out, "progress.json")
        self.finished = begin_artefact(out, out, signature, overwrite)
        inputs = {name: value for name, value in signature.inputs.items() if name != "data"}
        self.progress = _StreamProgress(signature=replace(signature, inputs=inputs).sha256)
        if not self.finished and not anew and self._count.exists() and self._partial.exists():
            stored = _StreamProgress.read(self._count)
            if stored.signature == self.progress.signature and self._partial.stat().st_size >= stored.bytes:
                self.progress = stored
        self._handle: BinaryIO | None = None

    def start_anew(self) -> None:
        """Nothing of an earlier run counts."""
        self.progress = _StreamProgress(signature=self.progress.signature)

    def append(self, data: bytes, progress: _StreamProgress) -> None:
        """Write a window and count it; `progress` is what is done with it, but for `bytes`."""
        with explained_os_errors(self.out, "write"):
            handle = self._open()
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
            size = handle.tell()
        self.progress = progress.model_copy(update={"bytes": size})
        self.progress.write(self._count)

    def finish(self) -> None:
        """Give the file its name."""
        self._close()
        move_finished_file(self._partial, self.out)
        self._count.unlink(missing_ok=True)

    def finish_as(self, write: Callable[[Path, BinaryIO], None]) -> None:
        """Make another file of the partial one: `write(partial, handle)` writes it."""
        self._close()
        with atomic_file(self.out) as handle:
            write(self._partial, handle)
        self._partial.unlink(missing_ok=True)
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
        """Close the partial file, which holds what counts and nothing more."""
        self._open().close()
        self._handle = None
