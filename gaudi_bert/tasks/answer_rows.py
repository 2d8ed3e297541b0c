"""Rows answered by a model, one window after the other (`answer_stream`), as `predict` and `embed` have it.

Each says what its model is and how its outputs become bytes (`RowModel`); the rest is the same for both: copies from and to
object stores, what the answers are a function of, reading, tokenizing, packing, and what becomes of bad rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.store.copies import local_copies
from gaudi_bert.artefacts.store.location import in_store, url_of
from gaudi_bert.artefacts.store.mirrored_folder import mirrored
from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.rows.reading import read_all_rows, read_rows
from gaudi_bert.rows.tokenizer import RowTokenizer, open_tokenizer
from gaudi_bert.rows.tokenizing import check_policy, tokenize_rows
from gaudi_bert.rows.types import STANDARD_INPUT, BadRow, Row, Sequences, TextRow, source_name
from gaudi_bert.rows.window_plan import WindowPlan
from gaudi_bert.tasks.answer_stream import (
    STANDARD_OUTPUT,
    Destination,
    RowSource,
    RowStream,
    StreamResult,
    WindowAnswers,
    answer_stream,
)
from gaudi_bert.tasks.task_rows import file_identity

Precision = Literal["float32", "bfloat16"]
Pooling = Literal["cls", "mean", "max"]
OnBadRow = Literal["stop", "skip"]
"""What a row that cannot be read does: it stops all, before anything is computed; or it is named in its place."""


class Runner(Protocol):
    """A model with its weights, in whatever software, and what of its outputs is wanted."""

    def plan(self, sequences: Sequences, packed: bool) -> WindowPlan:
        """How the sequences of a window share rows."""

    def run(self, sequences: Sequences, plan: WindowPlan) -> Float32Array:
        """The outputs for each sequence, [N, C], or for each token, [T, C]."""


class ModelFolder(Protocol):
    """A model's folder, as BERT in TensorFlow or another encoder in PyTorch (`model_folders.py`).

    Attributes:
        hidden_size, positions: of the model.
        usual_length: most tokens of a text, where nothing says it otherwise.
        identity: of the weights.
    """

    hidden_size: int
    positions: int
    usual_length: int
    identity: str

    def check_fits(self, tokenizer: RowTokenizer) -> None:
        """Refuse a tokenizer of another model."""

    def embedder(self, pooling: Pooling, normalize: bool, precision: Precision, longest: int) -> Runner:
        """The encoder, its outputs pooled; `longest` is the most tokens of a text."""


class RowModel(ABC):
    """A model for rows, and how its outputs become answers.

    Args:
        path: of the folder with the model and its tokenizer.
        model: what lies there.
        settings: how rows are read, and what becomes of those that are too long.
        max_sequence_length: most tokens of a sequence.
        precision: of the matrix products.
        packed: False gives each sequence a row of its own.
        on_bad_row: what becomes of a row that cannot be read.

    Attributes:
        stage: the name of the stage.
        task: None for plain texts.
        labels: of the task's classes.
        lower_case: whether texts are lower-cased before they are tokenized.
        prompt: what precedes each text.
    """

    stage: ClassVar[str]
    task: TaskName | None = None
    labels: tuple[str, ...] = ()
    lower_case = False
    prompt = ""

    def __init__(
        self,
        path: Path,
        model: ModelFolder,
        settings: TaskSettings,
        max_sequence_length: int,
        precision: Precision,
        packed: bool,
        on_bad_row: OnBadRow,
    ) -> None:
        self.path, self.model, self.settings = path, model, settings
        self.max_sequence_length, self.precision, self.packed = max_sequence_length, precision, packed
        self.on_bad_row = on_bad_row

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """All that the answers depend on besides the settings, the model and the rows."""

    @abstractmethod
    def open(self) -> Runner:
        """The model with its weights."""

    @abstractmethod
    def encode(self, values: Float32Array, sequences: Sequences, rows: list[Row]) -> list[bytes]:
        """What is written for each row of a window, given the model's outputs for its sequences."""

    @abstractmethod
    def encode_problem(self, problem: str) -> bytes:
        """What is written in the place of a row that cannot be read."""

    def finish(self, stream: RowStream) -> None:
        """Make the file of all windows."""
        stream.finish()


def answer_rows(
    open_folder: Callable[[Path], RowModel],
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
        row_model, signature, answerer = _open_model(open_folder, folder, rows_file)
        read = read_all_rows if row_model.on_bad_row == "skip" else read_rows
        says = iter([reporter.say])  # the rows of a file are read twice
        source = RowSource(
            lambda: read(rows_file, row_model.task, row_model.settings, say=next(says, None)), rows_file == STANDARD_INPUT
        )
        destination = Destination(answers_file, signature, row_model.finish, overwrite)
        result = answer_stream(source, answerer, destination, reporter)
    if result.cut_rows:
        were = "cut to" if row_model.settings.too_long == "truncate" else "read in windows of"
        most = row_model.max_sequence_length
        reporter.say(f"{result.cut_rows:,} of {result.rows:,} rows were too long and were {were} {most} tokens")
    if result.bad_rows:
        reporter.say(f"{result.bad_rows:,} of {result.rows:,} rows cannot be read: they are named in their places")
    return replace(result, max_sequence_length=row_model.max_sequence_length)


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
    open_folder: Callable[[Path], RowModel], folder: Path, data: str
) -> tuple[RowModel, Signature, _WindowAnswerer]:
    """The model, what its answers are a function of, and what answers a window of rows."""
    model = open_folder(folder)
    tokenizer = open_tokenizer(folder)
    model.model.check_fits(tokenizer)
    inputs = {
        "model": model.model.identity,
        "tokenizer": tokenizer.sha256,
        "data": "standard input" if data == STANDARD_INPUT else file_identity(Path(data)),
    }
    chosen = {} if model.on_bad_row == "stop" else {"on_bad_row": model.on_bad_row}
    task = model.settings.model_dump(mode="json", exclude_defaults=True)
    signature = Signature(model.stage, {**model.options(), **chosen, "task": task}, inputs)
    return model, signature, _WindowAnswerer(model, tokenizer, data)


class _WindowAnswerer:
    """Answers windows of rows by a model, and says beforehand whether it can."""

    def __init__(self, model: RowModel, tokenizer: RowTokenizer, data: str) -> None:
        check_policy(model.task, model.settings)
        self._model, self._tokenizer, self._data = model, tokenizer, data
        self._runner = model.open()

    def check(self, rows: Sequence[Row | BadRow]) -> None:
        """Refuse rows that `answer` would refuse; where a text of any length is cut, it was read and that is all."""
        takes_any = self._model.settings.too_long == "truncate" and self._model.task != "question-answering"
        if not takes_any and self._model.on_bad_row == "stop":
            self._tokenize([row for row in rows if not isinstance(row, BadRow)])

    def answer(self, rows: Sequence[Row | BadRow]) -> WindowAnswers:
        """Answer a window of rows."""
        model = self._model
        good, sequences, problems = self._readable(rows)
        plan, answers = None, []
        if sequences is not None:
            plan = self._runner.plan(sequences, model.packed)
            answers = model.encode(self._runner.run(sequences, plan), sequences, good)
        following = iter(answers)
        data = b"".join(
            model.encode_problem(problems[place]) if place in problems else next(following) for place in range(len(rows))
        )
        cut = 0 if sequences is None else sequences.cut_rows
        tokens, slots, gain = (0, 0, 1.0) if plan is None else (plan.tokens, plan.slots, plan.gain)
        return WindowAnswers(data, cut, tokens, slots, gain, len(problems))

    def _readable(self, rows: Sequence[Row | BadRow]) -> tuple[list[Row], Sequences | None, dict[int, str]]:
        """The rows that can be answered, tokenized; and what is wrong with the others, by their places."""
        source = f"{source_name(self._data)}: "
        problems = {place: row.problem.removeprefix(source) for place, row in enumerate(rows) if isinstance(row, BadRow)}
        good = {place: row for place, row in enumerate(rows) if not isinstance(row, BadRow)}
        try:
            return list(good.values()), self._tokenize(list(good.values())), problems
        except InputError:
            if self._model.on_bad_row == "stop":
                raise
        for place, row in list(good.items()):  # one or another is too long: which?
            try:
                self._tokenize([row])
            except InputError as error:
                problems[place] = str(error).removeprefix(source)
                del good[place]
        return list(good.values()), self._tokenize(list(good.values())), problems

    def _tokenize(self, rows: list[Row]) -> Sequences | None:
        """The sequences of rows; None of none."""
        model = self._model
        if model.lower_case or model.prompt:
            rows = [self._prepared(row) if isinstance(row, TextRow) else row for row in rows]
        if not rows:
            return None
        return tokenize_rows(
            rows,
            self._tokenizer,
            task=model.task,
            settings=model.settings,
            max_sequence_length=model.max_sequence_length,
            labels=model.labels,
            file=self._data,
        )

    def _prepared(self, row: TextRow) -> TextRow:
        """A row as the model was trained to read it."""
        row = row._replace(text=self._model.prompt + row.text)
        if not self._model.lower_case:
            return row
        return row._replace(text=row.text.lower(), text_pair=None if row.text_pair is None else row.text_pair.lower())
