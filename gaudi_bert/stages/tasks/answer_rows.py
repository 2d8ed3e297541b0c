"""Rows answered by a model, one window after the other: from a file or a pipe, to a file or a pipe, in bounded memory.

`predict` and `embed` each say what their model is and how its outputs become bytes (`RowModel`); the rest is the same for
both: copies from and to object stores, what the answers are a function of, tokenizing, packing, progress, and resuming.

Beside OUT lie `.OUT.partial`, the answers so far, and `.OUT.progress.json`, which says how much of them counts. A window is
first flushed to the disk and then counted: what a killed run wrote beyond the count is cut off. When all windows are
written, the partial file gets its name and the count is removed. Answers for an object store are uploaded once they are
complete: a run that is killed before that starts again.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple

from gaudi_bert.artefacts.base import Artefact, Count, Sha256
from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.artefacts.store.copies import local_copies
from gaudi_bert.artefacts.store.location import in_store, url_of
from gaudi_bert.artefacts.store.mirrored_folder import mirrored, shown
from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import (
    atomic_file,
    exclusive_lock,
    explained_os_errors,
    hidden_beside,
    put_in_place,
)
from gaudi_bert.common.progress import LOG_LINE_EVERY_SECONDS, Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.stages.tasks.task_rows import file_identity
from gaudi_bert.tasks.rows.reading import read_rows, windows
from gaudi_bert.tasks.rows.tokenizer import RowTokenizer, open_tokenizer
from gaudi_bert.tasks.rows.tokenizing import tokenize_rows
from gaudi_bert.tasks.rows.types import STANDARD_INPUT, Row, Sequences, TextRow
from gaudi_bert.training.device import open_device
from gaudi_bert.training.prediction import Compute, PackRunner
from gaudi_bert.training.weights.sources import Weights
from gaudi_bert.training.weights.task_models import weights_checksum
from gaudi_bert.training.window_plan import plan_window

Precision = Literal["float32", "bfloat16"]

WINDOW_ROWS = 8192
"""Rows that are packed, answered and written together."""
STANDARD_OUTPUT = "-"


class RowModel(ABC):
    """A model for rows, and how its outputs become answers.

    Args:
        folder: holds the model and its tokenizer.
        hidden_size: of the model.
        settings: how rows are read, and what becomes of those that are too long.
        max_sequence_length: most tokens of a sequence.
        precision: of the matrix products.
        packed: False gives each sequence a row of its own.

    Attributes:
        stage: the name of the stage.
        task: None for plain texts.
        labels: of the task's classes.
        lower_case: whether texts are lower-cased before they are tokenized.
    """

    stage: ClassVar[str]
    task: TaskName | None = None
    labels: tuple[str, ...] = ()
    lower_case = False

    def __init__(
        self,
        folder: Path,
        hidden_size: int,
        settings: TaskSettings,
        max_sequence_length: int,
        precision: Precision,
        packed: bool,
    ) -> None:
        self.folder, self.hidden_size, self.settings = folder, hidden_size, settings
        self.max_sequence_length, self.precision, self.packed = max_sequence_length, precision, packed

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """All that the answers depend on besides the settings, the model and the rows."""

    @abstractmethod
    def open(self, weights: Weights, compute_dtype: Precision) -> tuple[Compute, Literal["sequence", "token"], int]:
        """The model with its weights; whether it answers for each sequence or for each token; the values of an answer."""

    @abstractmethod
    def encode(self, values: Float32Array, sequences: Sequences, rows: list[Row]) -> bytes:
        """What is written for a window of rows, given the model's outputs for its sequences."""

    def finish(self, stream: RowStream) -> None:
        """Make the file of all windows."""
        stream.finish()


def answer_rows(
    open_folder: Callable[[Path], tuple[RowModel, Weights]],
    model: Path,
    data: str,
    out: str,
    *,
    reporter: Reporter,
    overwrite: bool,
    store: StoreSettings | None,
) -> StreamResult:
    """Answer the rows of a file.

    Args:
        open_folder: reads the folder `model`.
        model: a folder, or its URL in an object store.
        data: a file of rows, or its URL, or `-`.
        out: the file of answers, or its URL, or `-` for standard output, which cannot be resumed.
        reporter: where progress goes.
        overwrite: replace what other settings made.
        store: how object stores are reached.
    """
    with _local_files(model, data, out, store) as (folder, rows_file, answers_file):
        _check_apart(rows_file, answers_file)
        row_model, signature, answer = _open_model(open_folder, folder, rows_file)
        from_pipe = rows_file == STANDARD_INPUT
        destination = Destination(answers_file, signature, row_model.finish, overwrite, from_pipe)
        return answer_stream(read_rows(rows_file, row_model.task, row_model.settings), answer, destination, reporter)


def chosen_length(requested: int | None, positions: int, default: int) -> int:
    """The most tokens of a sequence: as requested, if the model has the positions."""
    if requested is not None and not 3 <= requested <= positions:
        raise InputError(f"--max-sequence-length {requested}: the model has {positions} positions; give 3 to {positions}")
    return requested or default


def check_choice(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    """Refuse a value of the option `name` that is not allowed."""
    if value is not None and value not in allowed:
        raise InputError(f"--{name} {value}: choose one of {', '.join(allowed)}")


@contextmanager
def _local_files(model: Path, data: str, out: str, store: StoreSettings | None) -> Iterator[tuple[Path, str, str]]:
    """Model, rows and answers as files of this machine, copied from and to object stores."""
    if in_store(data) and in_store(out) and url_of(data) == url_of(out):
        raise InputError(f"{url_of(out)}: is the data itself; give another URL with --out")
    with local_copies((model, data), store) as (weights, rows), mirrored(Path(out).parent, store) as folder:
        answers = str(folder / Path(out).name) if in_store(out) else out
        yield weights or model, str(rows) if in_store(data) else data, answers


def _check_apart(data: str, out: str) -> None:
    is_pipe = data == STANDARD_INPUT or out == STANDARD_OUTPUT
    if not is_pipe and Path(out).exists() and Path(data).exists() and Path(out).samefile(data):
        raise InputError(f"{out}: is the data itself; give another file with --out")


def _open_model(
    open_folder: Callable[[Path], tuple[RowModel, Weights]], folder: Path, data: str
) -> tuple[RowModel, Signature, Callable[[list[Row]], WindowAnswers]]:
    """The model, what its answers are a function of, and what answers a window of rows; the weights are held once."""
    model, weights = open_folder(folder)
    tokenizer = open_tokenizer(folder)
    if weights.config is not None:
        tokenizer.check_fits(weights.config.vocab_size, weights.config.type_vocab_size)
    inputs = {
        "model": weights_checksum(weights),
        "tokenizer": tokenizer.sha256,
        "data": "standard input" if data == STANDARD_INPUT else file_identity(Path(data)),
    }
    task = model.settings.model_dump(mode="json", exclude_defaults=True)
    signature = Signature(model.stage, {**model.options(), "task": task}, inputs)
    return model, signature, _window_function(model, weights, tokenizer, data)


def _window_function(
    model: RowModel, weights: Weights, tokenizer: RowTokenizer, data: str
) -> Callable[[list[Row]], WindowAnswers]:
    device = open_device("auto", model.precision)
    compute, per, width = model.open(weights, device.compute_dtype)
    one_shape = device.kind == "hpu"
    runner = PackRunner(compute, per=per, width=width, device=device.name, one_shape=one_shape)

    def answer(rows: list[Row]) -> WindowAnswers:
        if model.lower_case:
            rows = [row._replace(text=row.text.lower()) if isinstance(row, TextRow) else row for row in rows]
        sequences = tokenize_rows(
            rows,
            tokenizer,
            task=model.task,
            settings=model.settings,
            max_sequence_length=model.max_sequence_length,
            labels=model.labels,
            file=data,
        )
        plan = plan_window(
            sequences.lengths,
            hidden_size=model.hidden_size,
            packed=model.packed,
            one_length=model.max_sequence_length if one_shape else None,
        )
        content = model.encode(runner.run(sequences, plan), sequences, rows)
        return WindowAnswers(content, sequences.cut_rows, plan.tokens, plan.slots, plan.gain)

    return answer


# --- windows, from a file or a pipe to a file or a pipe


class WindowAnswers(NamedTuple):
    """The bytes to write for a window; rows that were too long, tokens, slots of all packs, and the gain by packing."""

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
        from_pipe: the rows come from standard input, whose content the signature does not cover.
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
        cut_rows: of these, rows that were cut or read in windows.
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


def answer_stream(
    rows: Iterator[Row],
    answer: Callable[[list[Row]], WindowAnswers],
    destination: Destination,
    reporter: Reporter,
    window_rows: int | None = None,
) -> StreamResult:
    """Answer all rows in windows of `window_rows` (default `WINDOW_ROWS`), by `answer`."""
    batches = windows(rows, WINDOW_ROWS if window_rows is None else window_rows)
    if destination.out == STANDARD_OUTPUT:
        return _answer_windows(batches, answer, _StreamProgress(signature="0" * 64), _write_to_pipe, reporter)
    path = Path(destination.out)
    with exclusive_lock(path, str(path)):
        stream = RowStream(path, destination.signature, destination.overwrite)
        if stream.finished:
            if destination.from_pipe:
                raise InputError(f"{path}: already exists; choose another file, or pass --overwrite")
            reporter.say(f"{shown(path)}: already there, nothing to do")
            return StreamResult(0, 0, 0, 0.0, False, skipped=True)
        _skip_answered(batches, stream.progress, path)
        if stream.progress.rows:
            reporter.say(f"{shown(path)}: going on after {stream.progress.rows:,} rows")
        result = _answer_windows(batches, answer, stream.progress, stream.append, reporter)
        destination.finish(stream)
    return result


def _write_to_pipe(data: bytes, progress: _StreamProgress) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _skip_answered(batches: Iterator[list[Row]], progress: _StreamProgress, path: Path) -> None:
    """Pass over the rows that are answered, which must be the same."""
    remaining, checksum = progress.rows, 0
    while remaining > 0 and (window := next(batches, None)):
        checksum = _checksum(window, checksum)
        remaining -= len(window)
    if remaining or checksum != progress.input_checksum:
        raise InputError(f"{path}: standard input brings other rows than those answered already; pass --overwrite")


def _checksum(window: list[Row], before: int) -> int:
    for row in window:
        before = zlib.crc32(repr(row).encode("utf-8", "surrogatepass"), before)
    return before


def _answer_windows(
    batches: Iterator[list[Row]],
    answer: Callable[[list[Row]], WindowAnswers],
    progress: _StreamProgress,
    write: Callable[[bytes, _StreamProgress], None],
    reporter: Reporter,
) -> StreamResult:
    """Answer and write each window; report what packing gains, once, and how many rows are done."""
    reported_gain, packed, last_line = False, False, time.monotonic()
    for window in batches:
        answers = answer(window)
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
    if progress.cut_rows:
        reporter.say(f"{progress.cut_rows:,} of {progress.rows:,} rows were too long and were cut or read in windows")
    padding = 1 - progress.tokens / progress.slots if progress.slots else 0.0
    return StreamResult(progress.rows, progress.cut_rows, progress.tokens, round(padding, 4), packed)


def _describe_packing(answers: WindowAnswers) -> str:
    padding = f"{100 * (1 - answers.tokens / max(answers.slots, 1)):.1f} % padding"
    if answers.gain > 1:
        return f"packing: on, {answers.gain:.2f} times less computation than with one sequence per row, {padding}"
    return f"packing: off, it would gain less than 2 % on these rows; {padding}"


# --- a file that grows window by window


class _StreamProgress(Artefact):
    """What counts of a partial file.

    Attributes:
        signature: of settings and inputs, SHA-256.
        rows: input rows that are answered.
        bytes: of the partial file.
        input_checksum: CRC-32 of those rows, to recognise another input that comes through a pipe.
        cut_rows, tokens, slots: sums over all windows.
    """

    remedy = "remove it"

    signature: Sha256
    rows: Count = 0
    bytes: Count = 0
    input_checksum: Count = 0
    cut_rows: Count = 0
    tokens: Count = 0
    slots: Count = 0

    def after(self, answers: WindowAnswers, rows: int, input_checksum: int) -> _StreamProgress:
        """The progress when one more window is answered, but for `bytes`."""
        return self.model_copy(
            update={
                "rows": self.rows + rows,
                "input_checksum": input_checksum,
                "cut_rows": self.cut_rows + answers.cut_rows,
                "tokens": self.tokens + answers.tokens,
                "slots": self.slots + answers.slots,
            }
        )


class RowStream:
    """A file that grows by windows of rows.

    Args:
        out: the file to make.
        signature: of this run.
        overwrite: replace what other settings made; else they are refused.

    Attributes:
        finished: the file exists already, of the same settings and inputs.
        progress: what is done.
    """

    def __init__(self, out: Path, signature: Signature, overwrite: bool = False) -> None:
        self.out = out
        self._partial, self._count = hidden_beside(out, "partial"), hidden_beside(out, "progress.json")
        self.finished = begin_artefact(out, out, signature, overwrite)
        self.progress = _StreamProgress(signature=signature.sha256)
        if not self.finished and self._count.exists() and self._partial.exists():
            stored = _StreamProgress.read(self._count)
            if stored.signature == self.progress.signature and self._partial.stat().st_size >= stored.bytes:
                self.progress = stored
        self._handle: BinaryIO | None = None

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
        put_in_place(self._partial, self.out)
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
