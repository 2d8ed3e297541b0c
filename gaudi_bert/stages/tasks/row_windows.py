"""Rows in windows, answered one window after the other: from a file or a pipe, to a file or a pipe, in bounded memory."""

from __future__ import annotations

import hashlib
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.row_stream import RowStream, StreamProgress, other_input
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import exclusive_lock, explained_os_errors
from gaudi_bert.common.progress import LOG_LINE_EVERY_SECONDS, Reporter
from gaudi_bert.config import TaskSettings

if TYPE_CHECKING:
    from gaudi_bert.tasks.rows.types import Row
    from gaudi_bert.training.weights.sources import Weights

__all__ = [
    "STANDARD",
    "WINDOW_ROWS",
    "Answered",
    "Destination",
    "StreamResult",
    "answer_stream",
    "check_apart",
    "reading_signature",
]

WINDOW_ROWS = 8192
STANDARD = "-"


class Answered(NamedTuple):
    """What became of a window: the bytes to write, rows that were too long, tokens, slots of all packs, and the gain."""

    data: bytes
    cut_rows: int
    tokens: int
    slots: int
    gain: float


@dataclass(frozen=True)
class Destination:
    """Where answers go.

    Attributes:
        out: a file, or `-` for standard output, which cannot be resumed.
        signature: of settings and inputs.
        finish: makes the file of all windows.
        overwrite: replace what other settings made.
        from_pipe: the rows come from standard input, which the signature does not know.
    """

    out: str
    signature: Signature
    finish: Callable[[RowStream], None]
    overwrite: bool = False
    from_pipe: bool = False


@dataclass(frozen=True)
class StreamResult:
    """What was done.

    Attributes:
        rows: answered, those of an interrupted run too.
        cut_rows: of these, rows that were cut or taken in windows.
        tokens: of all sequences.
        padding: share of the computed slots that held no token.
        packed: whether rows were packed anywhere.
    """

    rows: int
    cut_rows: int
    tokens: int
    padding: float
    packed: bool
    skipped: bool = False


def check_apart(data: str, out: str) -> None:
    """Refuse to write over what is read.

    Raises:
        InputError: both are one file.
    """
    if STANDARD not in (data, out) and Path(out).exists() and Path(data).exists() and Path(out).samefile(data):
        raise InputError(f"{out}: is the data itself; give another file with --out")


def reading_signature(
    stage: str, options: Mapping[str, Any], settings: TaskSettings, weights: Weights, model: Path, data: str
) -> Signature:
    """What a file of answers is a function of: options, how rows are read, the model, its tokenizer, the rows."""
    from gaudi_bert.tasks.rows.tokenizer import open_tokenizer

    inputs = {
        "model": _checksum_of(weights),
        "tokenizer": open_tokenizer(model).sha256,
        "data": "standard input" if data == STANDARD else _file_identity(Path(data)),
    }
    return Signature(stage, {**options, "task": settings.model_dump(mode="json", exclude_defaults=True)}, inputs)


def _checksum_of(weights: Weights) -> str:
    checksum = 0
    for name, value in sorted(weights.variables.items()):
        checksum = zlib.crc32(np.ascontiguousarray(value).tobytes(), zlib.crc32(name.encode(), checksum))
    return f"{checksum:08x}"


def _file_identity(path: Path) -> str:
    digest = hashlib.sha256()
    with explained_os_errors(path, "read"), path.open("rb") as handle:
        while block := handle.read(2**20):
            digest.update(block)
    return f"{path.name}:{digest.hexdigest()}"


def answer_stream(
    rows: Iterator[Row],
    answer: Callable[[list[Row]], Answered],
    destination: Destination,
    reporter: Reporter,
    window_rows: int | None = None,
) -> StreamResult:
    """Answer all rows, in windows.

    Args:
        rows: of the input, from its first.
        answer: for a window.
        destination: where the answers go.
        reporter: where progress goes.
        window_rows: rows that are packed, answered and written together; None for WINDOW_ROWS.

    Raises:
        InputError: a row is wrong, or the file is there and of something else.
    """
    from gaudi_bert.tasks.rows.reading import windows

    window_rows = WINDOW_ROWS if window_rows is None else window_rows
    if destination.out == STANDARD:
        return _to_standard_output(windows(rows, window_rows), answer, reporter)
    path = Path(destination.out)
    with exclusive_lock(path, str(path)):
        stream = RowStream(path, destination.signature, destination.overwrite)
        if stream.finished:
            if destination.from_pipe:
                raise InputError(f"{path}: is there already; choose another file, or pass --overwrite")
            reporter.say(f"{path}: already there, nothing to do")
            return StreamResult(0, 0, 0, 0.0, False, skipped=True)
        waiting = windows(rows, window_rows)
        done = _skip(waiting, stream.progress, path)
        if done.rows:
            reporter.say(f"{path}: going on after {done.rows:,} rows")
        said = _Speaker(reporter)
        for window in waiting:
            answered = answer(window)
            done = _after(done, window, answered)
            stream.append(answered.data, done)
            said.window(answered, done)
        if not done.rows:
            raise InputError("the input holds no rows; give it at least one")
        destination.finish(stream)
    return said.result(done)


def _to_standard_output(
    waiting: Iterator[list[Row]], answer: Callable[[list[Row]], Answered], reporter: Reporter
) -> StreamResult:
    done, said = StreamProgress(signature="0" * 64), _Speaker(reporter)
    for window in waiting:
        answered = answer(window)
        done = _after(done, window, answered)
        sys.stdout.buffer.write(answered.data)
        sys.stdout.buffer.flush()
        said.window(answered, done)
    if not done.rows:
        raise InputError("the input holds no rows; give it at least one")
    return said.result(done)


def _checksum(window: list[Row], before: int) -> int:
    for row in window:
        before = zlib.crc32(repr(row).encode("utf-8", "surrogatepass"), before)
    return before


def _skip(waiting: Iterator[list[Row]], done: StreamProgress, path: Path) -> StreamProgress:
    """Pass over the rows that are answered, which must be the same."""
    left, checksum = done.rows, 0
    while left > 0 and (window := next(waiting, None)):
        checksum = _checksum(window, checksum)
        left -= len(window)
    if left or checksum != done.input_checksum:
        raise other_input(path)
    return done


def _after(done: StreamProgress, window: list[Row], answered: Answered) -> StreamProgress:
    return done.model_copy(
        update={
            "rows": done.rows + len(window),
            "input_checksum": _checksum(window, done.input_checksum),
            "cut_rows": done.cut_rows + answered.cut_rows,
            "tokens": done.tokens + answered.tokens,
            "slots": done.slots + answered.slots,
        }
    )


class _Speaker:
    """Says what packing does, once, and how far it is."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter, self._packed = reporter, False
        self._said = False
        self._last_line = time.monotonic()

    def window(self, answered: Answered, done: StreamProgress) -> None:
        """After each window."""
        if not self._said:
            share = 100 * (1 - answered.tokens / max(answered.slots, 1))
            self._reporter.say(
                f"packing: on, {answered.gain:.2f} times less to compute than one sequence a row, {share:.1f} % padding"
                if answered.gain > 1
                else f"packing: off, it would gain less than 2 % on these rows; {share:.1f} % padding"
            )
        self._said = True
        self._packed |= answered.gain > 1
        if self._reporter.live or time.monotonic() - self._last_line >= LOG_LINE_EVERY_SECONDS:
            self._last_line = time.monotonic()
            self._reporter.show(f"{done.rows:,} rows")

    def result(self, done: StreamProgress) -> StreamResult:
        """At the end."""
        if done.cut_rows:
            self._reporter.say(f"{done.cut_rows:,} of {done.rows:,} rows were longer than a sequence may be")
        padding = 1 - done.tokens / done.slots if done.slots else 0.0
        return StreamResult(done.rows, done.cut_rows, done.tokens, round(padding, 4), self._packed)
