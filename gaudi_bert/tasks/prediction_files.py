"""Reading rows and writing their predictions to a file or a pipe, one window of rows at a time, for the stages `predict` and
`embed`.

Two hidden files beside OUT hold the state of an unfinished run. `.OUT.partial` contains the predictions so far, and
`.OUT.progress.json` states how many of its bytes are valid. Each window is flushed to disk before it is counted, so bytes
beyond the count, which a killed run may have written, are truncated. Windows whose rows are unchanged are not computed
again, even if a later row was corrected in the meantime. For an object store, predictions are uploaded once they are
complete, so a run that is killed before that starts from the beginning.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from gaudi_bert.artefacts.base import Artefact, Count, Sha256
from gaudi_bert.artefacts.completion import (
    Signature,
    begin_artefact_unless_finished,
    check_output_path,
    is_artefact_finished,
)
from gaudi_bert.artefacts.mirrored_folder import format_path
from gaudi_bert.common.errors import InputError, StoppedError
from gaudi_bert.common.files import (
    atomic_file,
    exclusive_lock,
    explain_os_errors,
    fingerprint_file,
    hidden_path_beside,
    move_finished_file,
)
from gaudi_bert.common.progress import LOG_LINE_EVERY_SECONDS, Reporter, Task, format_count
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.config.values import Engine, InferencePrecision
from gaudi_bert.rows.parts import make_whole_file_part
from gaudi_bert.rows.reading import raise_or_skip_bad_rows, read_part, split_into_windows
from gaudi_bert.rows.tokenizer import RowTokenizer
from gaudi_bert.rows.tokenizing import resolve_long_row_policy, tokenize_readable_rows, tokenize_rows
from gaudi_bert.rows.types import STANDARD_INPUT, BadRow, Row, Sequences, TextRow, format_input_name
from gaudi_bert.rows.window_plan import WindowPlan

STANDARD_OUTPUT = "-"


@dataclass(frozen=True)
class PredictOptions:
    """The options of the command `predict`.

    Attributes:
        max_sequence_length: The largest number of tokens in a sequence. None for the length with which the model was
            trained.
        precision: The precision of matrix products.
        packed: Whether sequences may share a row. Otherwise each sequence has its own row.
        group_by: "query" writes one line per query, with its documents ranked. None writes one line per row.
        engine: The library that runs the model.
        device: The device.
        compile: Whether the model is compiled. None for the device's default in training.
    """

    max_sequence_length: int | None = None
    precision: InferencePrecision = "float32"
    packed: bool = True
    group_by: str | None = None
    engine: Engine = "auto"
    device: Literal["auto", "cpu", "cuda", "hpu"] = "auto"
    compile: bool | None = False

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, get_args(InferencePrecision))
        check_choice("group-by", self.group_by, ("query",))


def check_choice(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    """Check that an option has an allowed value. None is always allowed.

    Args:
        name: The option, without dashes.
        value: Its value.
        allowed: The allowed values.

    Raises:
        InputError: The value is not allowed.
    """
    if value is not None and value not in allowed:
        raise InputError(f"--{name} {value}: the value must be one of {', '.join(allowed)}")


@dataclass(frozen=True)
class RowSource:
    """Reads the rows of a file, and tokenizes them for a model.

    Attributes:
        file: The file, or `-` for standard input, which can be read only once.
        settings: The settings of the task, which name the columns.
        tokenizer: The tokenizer of the model.
        max_sequence_length: The largest number of tokens in a sequence.
        task: The task, or None for plain texts.
        labels: The names of the labels by number.
        prompt: Text that precedes every text, or the first text of a pair.
    """

    file: str
    settings: TaskSettings
    tokenizer: RowTokenizer
    max_sequence_length: int
    task: TaskName | None = None
    labels: tuple[str, ...] = ()
    prompt: str = ""

    @property
    def is_pipe(self) -> bool:
        """Whether the rows come from standard input, which can be read only once."""
        return self.file == STANDARD_INPUT

    def make_signature(self, stage: str, options: dict[str, Any], model_identity: str) -> Signature:
        """Return a signature that identifies the options, the model and the input of the predictions.

        Args:
            stage: The name of the stage.
            options: The options that affect the predictions.
            model_identity: The identity of the weights.
        """
        data = "standard input" if self.is_pipe else fingerprint_file(Path(self.file))
        inputs = {"model": model_identity, "tokenizer": self.tokenizer.sha256, "data": data}
        task = self.settings.model_dump(mode="json", exclude_defaults=True)
        return Signature(stage, {**options, "task": task}, inputs)

    def read_rows(self, say: Callable[[str], None] | None = None) -> Iterator[Row | BadRow]:
        """Yield the rows from the beginning of the file. `say` is called once with a line that describes the first row.

        Depending on `task.on_bad_row`, a row that cannot be read is yielded as a `BadRow` or raises an InputError.
        """
        rows = read_part(make_whole_file_part(self.file, self.settings), self.task, self.settings, say=say)
        return rows if self.settings.on_bad_row == "skip" else raise_or_skip_bad_rows(rows)

    def check_rows_tokenizable(self, rows: Sequence[Row | BadRow]) -> None:
        """Check that all given rows can be tokenized, unless the settings skip rows that cannot be tokenized.

        The rows are not tokenized if this cannot fail, because texts of any length are truncated and an empty text still has
        special tokens.

        Raises:
            InputError: A row cannot be tokenized, and such rows are not skipped.
        """
        takes_any = resolve_long_row_policy(self.task, self.settings) == "truncate" and self.task != "question-answering"
        takes_any = takes_any and self.tokenizer.tokenizer.num_special_tokens_to_add(is_pair=False) > 0
        if not takes_any and self.settings.on_bad_row == "stop":
            self._tokenize([row for row in rows if not isinstance(row, BadRow)])

    def tokenize_window(self, window: Sequence[Row | BadRow]) -> tuple[list[Row], Sequences | None, dict[int, str]]:
        """Tokenize the rows of a window. Return the rows that can be tokenized, their sequences, and the problem of every
        other row by its index in the window.

        If no row can be tokenized, the sequences are None.
        """
        rows, sequences, problems = tokenize_readable_rows(window, self.settings.on_bad_row, self._tokenize)
        source = f"{format_input_name(self.file)}: "
        return rows, sequences, {index: problem.removeprefix(source) for index, problem in problems.items()}

    def _tokenize(self, rows: list[Row]) -> Sequences:
        """Tokenize rows as in training, and return their sequences."""
        if self.prompt:
            rows = [row._replace(text=self.prompt + row.text) if isinstance(row, TextRow) else row for row in rows]
        return tokenize_rows(
            rows,
            self.tokenizer,
            task=self.task,
            settings=self.settings,
            max_sequence_length=self.max_sequence_length,
            labels=self.labels,
            file=self.file,
        )


# --- predictions and their progress

# `predict` and `embed` pack, compute and write this many rows at a time.
WINDOW_ROWS = 8192


@dataclass(frozen=True)
class StreamResult:
    """The numbers of rows and tokens that a run of `predict` or `embed` has processed.

    Attributes:
        rows: The number of rows with a prediction, including the rows of an interrupted run that was resumed.
        cut_rows: The number of rows that were truncated or split into windows.
        tokens: The number of tokens.
        padding: The fraction of the computed slots that held no token.
        packed: Whether any rows were packed.
        skipped: Whether nothing was computed because the predictions already existed.
        bad_rows: The number of rows that cannot be read. Their predictions contain the problem.
        max_sequence_length: The largest number of tokens in a sequence.
    """

    rows: int
    cut_rows: int
    tokens: int
    padding: float
    packed: bool
    skipped: bool = False
    bad_rows: int = 0
    max_sequence_length: int = 0

    def format_lines(self, out: str | None = None) -> list[str]:
        """Return lines of text that describe the result to the user. If the output file `out` is given, the last line names
        it.
        """
        if self.skipped:
            return []
        counted = f"{format_count(self.rows, 'row')}, {format_count(self.tokens, 'token')}"
        cut = f"; {self.cut_rows:,} were longer than {self.max_sequence_length} tokens" if self.cut_rows else ""
        bad = f"; {self.bad_rows:,} cannot be read" if self.bad_rows else ""
        lines = [f"{counted}{cut}{bad}; {100 * self.padding:.1f} % of the computed tokens are padding"]
        return lines if out is None else [*lines, f"Wrote {out}"]


@contextmanager
def open_prediction_output(
    out: str, signature: Signature, rows: RowSource, reporter: Reporter, *, overwrite: bool, task: Task | None = None
) -> Iterator[PredictionStream]:
    """Yield a stream that writes predictions to a file or to standard output.

    Args:
        out: The file, or `-` for standard output, which cannot be resumed.
        signature: Everything that determines the predictions.
        rows: The rows.
        reporter: Reports messages and progress.
        overwrite: Whether predictions of other settings are replaced. Otherwise they are an error.
        task: The progress display, or None.

    Raises:
        InputError: The file exists with other settings, or contains something else.
        FailedError: Another process is writing the file.
    """
    if out == STANDARD_OUTPUT:
        yield PredictionStream(rows, reporter, task)
        return
    if not is_artefact_finished(Path(out), Path(out), signature):
        check_output_path(Path(out), Path(out), signature.stage, overwrite)
    with exclusive_lock(Path(out), str(Path(out))):
        yield _PredictionFile(Path(out), signature, rows, reporter, overwrite, task)


@contextmanager
def show_progress(name: str, rows_file: str, out: str, reporter: Reporter) -> Iterator[Task | None]:
    """Show a progress bar while a command runs. The bar appears before the model is loaded.

    Args:
        name: The name of the command.
        rows_file: The file of the rows, or `-` for standard input.
        out: The file of the predictions, or `-` for standard output.
        reporter: Shows the progress.

    Yields:
        The progress display. None if the rows come from a pipe, because the number of rows is then unknown.

    Raises:
        StoppedError: The user stopped the command before the first window was stored.
    """
    try:
        # The 1 is a placeholder. It is replaced by the number of rows as soon as all rows have been checked.
        with nullcontext() if rows_file == STANDARD_INPUT else reporter.task(name, 1, "rows") as task:
            yield task
    except KeyboardInterrupt as error:
        if out == STANDARD_OUTPUT or not _progress_path(Path(out)).exists():
            raise StoppedError(
                "stopped before the first predictions were written; run the same command again to start from the beginning"
            ) from error
        raise


def _progress_path(out: Path) -> Path:
    """Return the path of the hidden progress file of `out`, which states how many bytes of the partial predictions are
    valid.
    """
    return hidden_path_beside(out, "progress.json")


class PredictionStream:
    """Writes predictions to standard output, one window of consecutive rows at a time.

    Attributes:
        name: The destination, for messages.
        finished: Whether the predictions already exist, so that there is nothing to compute.
        progress: What was written so far.
    """

    name = "standard output"
    finished = False

    def __init__(self, rows: RowSource, reporter: Reporter, task: Task | None = None) -> None:
        self.progress = _StreamProgress(signature="0" * 64)
        self._rows, self._reporter, self._task = rows, reporter, task
        self._reported_gain, self._packed, self._last_line = False, False, 0.0

    def read_remaining_windows(self) -> Iterator[list[Row | BadRow]]:
        """Yield the rows that have no prediction yet, one window of consecutive rows at a time.

        All rows of a file are checked before the first window is yielded. A pipe is not checked in advance, because it can
        be read only once.

        Raises:
            InputError: A row cannot be read, there are no rows, or a pipe provides other rows than the interrupted run.
        """
        if self.finished:
            return
        total = 0
        if not self._rows.is_pipe:
            for window in split_into_windows(self._rows.read_rows(self._reporter.say), WINDOW_ROWS):
                self._rows.check_rows_tokenizable(window)
                total += len(window)
        remaining = split_into_windows(self._rows.read_rows(self._reporter.say if self._rows.is_pipe else None), WINDOW_ROWS)
        skipped, checksum = 0, 0
        while skipped < self.progress.rows and (answered := next(remaining, None)):
            checksum, skipped = _extend_checksum(answered, checksum), skipped + len(answered)
        if (skipped, checksum) != (self.progress.rows, self.progress.input_checksum):
            if self._rows.is_pipe:
                raise InputError(
                    f"{self.name}: the rows from standard input differ from those of the interrupted run; pass --overwrite "
                    "to start again"
                )
            self.progress = _StreamProgress(signature=self.progress.signature)
            remaining = split_into_windows(self._rows.read_rows(), WINDOW_ROWS)
        if self.progress.rows:
            self._reporter.say(f"{self.name}: resuming after row {self.progress.rows:,}")
        if self._task is not None:
            self._task.reset_progress(self.progress.rows, total)
        self._last_line = time.monotonic()
        yield from remaining
        if not self.progress.rows:
            raise InputError("the input contains no rows; pass a file with at least one row")

    def advance_progress_bar(self, rows_per_step: float, steps: int = 1) -> None:
        """Advance the progress bar by `steps` steps. Each step is a number of rows, which may be a fraction of a row."""
        if self._task is not None:
            self._task.advance(rows_per_step * steps)

    def write_window(
        self,
        window: Sequence[Row | BadRow],
        encoded: bytes,
        sequences: Sequences | None,
        plan: WindowPlan | None,
        bad_rows: int,
    ) -> None:
        """Write the predictions for a window of rows, and update the numbers of rows and tokens that were processed.

        After the first window, report what packing gains. For a pipe, also report the number of rows so far.

        Args:
            window: All rows of the window.
            encoded: The predictions, encoded as they are written.
            sequences: The sequences of the rows, or None if no row could be read.
            plan: The packs of the sequences, or None.
            bad_rows: The number of rows that cannot be read.
        """
        tokens, slots, gain = (plan.tokens, plan.slots, plan.gain) if plan is not None else (0, 0, 1.0)
        done = self.progress
        self.progress = done.model_copy(
            update={
                "rows": done.rows + len(window),
                "input_checksum": _extend_checksum(window, done.input_checksum),
                "cut_rows": done.cut_rows + (0 if sequences is None else sequences.cut_rows),
                "tokens": done.tokens + tokens,
                "slots": done.slots + slots,
                "bad_rows": done.bad_rows + bad_rows,
            }
        )
        self.write_bytes(encoded)
        if not self._reported_gain:
            padding = f"{100 * (1 - tokens / max(slots, 1)):.1f} % padding"
            packed = f"on, {gain:.2f} times less computation than with one sequence per row, {padding}"
            unpacked = f"off, because it would save less than 2 % of the computation for these rows; {padding}"
            self._reporter.say(f"packing: {packed if gain > 1 else unpacked}")
            self._reported_gain = True
        self._packed |= gain > 1
        is_time = self._reporter.live or time.monotonic() - self._last_line >= LOG_LINE_EVERY_SECONDS
        if self._task is None and is_time:
            self._last_line = time.monotonic()
            self._reporter.show(f"{self.progress.rows:,} rows")

    def write_bytes(self, encoded: bytes) -> None:
        """Write the encoded predictions of a window of rows. The numbers of rows and tokens in `progress` already include
        this window.
        """
        sys.stdout.buffer.write(encoded)
        sys.stdout.buffer.flush()

    def finish(self, convert: Callable[[Path, BinaryIO], None] | None = None) -> None:
        """Complete the output after the last window was written. For standard output, this does nothing.

        Args:
            convert: `convert(partial, handle)` writes the final file from the partial file. None if the partial file is the
                final file.
        """

    def make_result(self) -> StreamResult:
        """Return the result of the run, and report to the user how many rows were truncated or could not be read."""
        self._reporter.clear()
        length = self._rows.max_sequence_length
        if self.finished:
            return StreamResult(0, 0, 0, 0.0, False, skipped=True, max_sequence_length=length)
        done = self.progress
        if done.cut_rows:
            is_cut = resolve_long_row_policy(self._rows.task, self._rows.settings) == "truncate"
            were = "truncated to" if is_cut else "split into windows of"
            self._reporter.say(f"{done.cut_rows:,} of {done.rows:,} rows were too long and were {were} {length} tokens")
        if done.bad_rows:
            self._reporter.say(
                f"{done.bad_rows:,} of {done.rows:,} rows cannot be read, and their predictions contain the problem"
            )
        padding = round(1 - done.tokens / done.slots, 4) if done.slots else 0.0
        return StreamResult(
            done.rows, done.cut_rows, done.tokens, padding, self._packed, bad_rows=done.bad_rows, max_sequence_length=length
        )


class _PredictionFile(PredictionStream):
    """Writes predictions to a file, one window of consecutive rows at a time, so that a killed run can be resumed.

    If the file already exists and was computed from the same settings and inputs, it is finished from the start. If a
    partial file exists, the run resumes after its last complete window.
    """

    def __init__(
        self, out: Path, signature: Signature, rows: RowSource, reporter: Reporter, overwrite: bool, task: Task | None = None
    ) -> None:
        super().__init__(rows, reporter, task)
        self.out, self.name = out, str(format_path(out))
        self._partial, self._count = hidden_path_beside(out, "partial"), _progress_path(out)
        self.finished = begin_artefact_unless_finished(out, out, signature, overwrite)
        if self.finished:
            if rows.is_pipe:
                raise InputError(f"{out}: the file already exists; choose another file, or pass --overwrite")
            reporter.say(f"{self.name}: already complete, nothing to do")
        inputs = {name: value for name, value in signature.inputs.items() if name != "data"}
        self.progress = _StreamProgress(signature=replace(signature, inputs=inputs).sha256)
        starts_again = overwrite and rows.is_pipe
        if not self.finished and not starts_again and self._count.exists() and self._partial.exists():
            stored = _StreamProgress.read(self._count)
            if stored.signature == self.progress.signature and self._partial.stat().st_size >= stored.bytes:
                self.progress = stored
        self._handle: BinaryIO | None = None

    def write_bytes(self, encoded: bytes) -> None:
        """Write the encoded predictions of a window of rows to disk before counting them in the progress file."""
        with explain_os_errors(self.out, "write"):
            handle = self._open_partial_file()
            handle.write(encoded)
            handle.flush()
            os.fsync(handle.fileno())
            size = handle.tell()
        self.progress = self.progress.model_copy(update={"bytes": size})
        self.progress.write(self._count)

    def finish(self, convert: Callable[[Path, BinaryIO], None] | None = None) -> None:
        """Turn the partial file into the output file by renaming or converting it, and remove the progress file."""
        if self.finished:
            return
        self._open_partial_file().close()
        self._handle = None
        if convert is None:
            move_finished_file(self._partial, self.out)
        else:
            with atomic_file(self.out) as handle:
                convert(self._partial, handle)
            self._partial.unlink(missing_ok=True)
        self._count.unlink(missing_ok=True)

    def _open_partial_file(self) -> BinaryIO:
        """Return the partial file, positioned at its end. If it is not open yet, open it and truncate it after its valid
        part.
        """
        if self._handle is None:
            with explain_os_errors(self.out, "write"):
                self.out.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                os.ftruncate(descriptor, self.progress.bytes)
                self._handle = os.fdopen(descriptor, "r+b")
                self._handle.seek(self.progress.bytes)
        return self._handle


class _StreamProgress(Artefact):
    """The content of a progress file, which records how many bytes of a partial file are valid and how many rows they
    contain.

    Attributes:
        signature: The SHA-256 of the settings and inputs, without the data.
        rows: The number of rows with a prediction.
        bytes: The size of the valid part.
        input_checksum: The CRC-32 of these rows. It identifies them even if a later row of the file was corrected.
        cut_rows: The number of rows that were truncated or split into windows.
        tokens: The number of tokens in all windows.
        slots: The number of computed slots in all windows.
        bad_rows: The number of rows that cannot be read.
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


def _extend_checksum(window: Sequence[Row | BadRow], checksum: int) -> int:
    """Return the CRC-32 of all rows up to the end of a window, given the CRC-32 of the rows before this window."""
    for row in window:
        checksum = zlib.crc32(repr(row).encode("utf-8", "surrogatepass"), checksum)
    return checksum
