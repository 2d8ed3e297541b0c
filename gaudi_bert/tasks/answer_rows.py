"""Rows as a model takes them: read, tokenized, and those that cannot be read sorted out; for `predict` and `embed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.store.copies import local_copies
from gaudi_bert.artefacts.store.mirrored_folder import mirrored
from gaudi_bert.artefacts.store.objects import in_store, url_of
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.config.values import Precision
from gaudi_bert.rows.reading import good_rows, rows_of_part
from gaudi_bert.rows.records import complete_file
from gaudi_bert.rows.tokenizer import RowTokenizer
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import STANDARD_INPUT, BadRow, Row, Sequences, TextRow, source_name
from gaudi_bert.tasks.task_rows import file_identity

STANDARD_OUTPUT = "-"
OnBadRow = Literal["stop", "skip"]
"""What a row that cannot be read does: it stops all, before anything is computed; or its answer names the problem."""


@dataclass(frozen=True)
class PredictOptions:
    """How rows are answered.

    Attributes:
        max_sequence_length: most tokens of a sequence; None for what the model was trained with.
        precision: of the matrix products.
        packed: False gives each sequence its own row.
        on_bad_row: what becomes of a row that cannot be read.
    """

    max_sequence_length: int | None = None
    precision: Precision = "float32"
    packed: bool = True
    on_bad_row: OnBadRow = "stop"

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("on-bad-row", self.on_bad_row, get_args(OnBadRow))

    def sequence_length(self, positions: int, default: int) -> int:
        """The most tokens of a sequence: as requested, if the model has the positions."""
        requested = self.max_sequence_length
        if requested is not None and not 3 <= requested <= positions:
            raise InputError(
                f"--max-sequence-length {requested}: the model has {positions} positions; give 3 to {positions}"
            )
        return requested or default


def check_choice(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    """Refuse a value of the option `name` that is not allowed."""
    if value is not None and value not in allowed:
        raise InputError(f"--{name} {value}: choose one of {', '.join(allowed)}")


@contextmanager
def local_files(model: Path, data: str, out: str, store: StoreSettings | None) -> Iterator[tuple[Path, str, str]]:
    """Model, rows and answers as files of this machine, copied from and to object stores."""
    if in_store(data) and in_store(out) and url_of(data) == url_of(out):
        raise InputError(f"{url_of(out)}: is the data itself; give another URL with --out")
    with local_copies((model, data), store) as (weights, rows), mirrored(Path(out).parent, store) as folder:
        answers = str(folder / Path(out).name) if in_store(out) else out
        rows_file = str(rows) if in_store(data) else data
        is_pipe = rows_file == STANDARD_INPUT or answers == STANDARD_OUTPUT
        if not is_pipe and Path(answers).exists() and Path(rows_file).exists() and Path(answers).samefile(rows_file):
            raise InputError(f"{answers}: is the data itself; give another file with --out")
        yield weights or model, rows_file, answers


@dataclass(frozen=True)
class ModelRows:
    """The rows of a file, and how a model takes them.

    Attributes:
        file: a path, or `-` for standard input, which can be read once only.
        settings: how rows are read, and what becomes of those that are too long.
        max_sequence_length: most tokens of a sequence.
        on_bad_row: what becomes of a row that cannot be read.
        task: None for plain texts.
        labels: of the task's classes.
        lower_case: whether texts are lower-cased before they are tokenized.
        prompt: what precedes each text.
    """

    file: str
    settings: TaskSettings
    tokenizer: RowTokenizer
    max_sequence_length: int
    on_bad_row: OnBadRow
    task: TaskName | None = None
    labels: tuple[str, ...] = ()
    lower_case: bool = False
    prompt: str = ""

    @property
    def from_pipe(self) -> bool:
        """Whether they can be read once only."""
        return self.file == STANDARD_INPUT

    def signature(self, stage: str, options: dict[str, Any], model_identity: str) -> Signature:
        """All that the answers are a function of."""
        data = "standard input" if self.from_pipe else file_identity(Path(self.file))
        inputs = {"model": model_identity, "tokenizer": self.tokenizer.sha256, "data": data}
        on_bad_row = {} if self.on_bad_row == "stop" else {"on_bad_row": self.on_bad_row}
        task = self.settings.model_dump(mode="json", exclude_defaults=True)
        return Signature(stage, {**options, **on_bad_row, "task": task}, inputs)

    def read(self, say: Callable[[str], None] | None = None) -> Iterator[Row | BadRow]:
        """The rows from the first one; `say` gets a line on what is read."""
        rows = rows_of_part(complete_file(self.file, self.settings.format), self.task, self.settings, say=say)
        return rows if self.on_bad_row == "skip" else good_rows(rows)

    def check(self, window: Sequence[Row | BadRow]) -> None:
        """Refuse rows that `tokenized` would refuse; where a text of any length is cut, it was read and that is all."""
        takes_any = self.settings.too_long == "truncate" and self.task != "question-answering"
        if not takes_any and self.on_bad_row == "stop":
            self._tokenize([row for row in window if not isinstance(row, BadRow)])

    def tokenized(self, window: Sequence[Row | BadRow]) -> tuple[list[Row], Sequences | None, dict[int, str]]:
        """The rows that can be answered, their sequences (None of no row), and the others' problems by their index."""
        source = f"{source_name(self.file)}: "
        problems = {index: row.problem.removeprefix(source) for index, row in enumerate(window) if isinstance(row, BadRow)}
        good = {index: row for index, row in enumerate(window) if not isinstance(row, BadRow)}
        try:
            return list(good.values()), self._tokenize(list(good.values())), problems
        except InputError:
            if self.on_bad_row == "stop":
                raise
        for index, row in list(good.items()):  # one or another is too long: which?
            try:
                self._tokenize([row])
            except InputError as error:
                problems[index] = str(error).removeprefix(source)
                del good[index]
        return list(good.values()), self._tokenize(list(good.values())), problems

    def _tokenize(self, rows: list[Row]) -> Sequences | None:
        if self.lower_case or self.prompt:
            rows = [self._prepared(row) if isinstance(row, TextRow) else row for row in rows]
        if not rows:
            return None
        return tokenize_rows(
            rows,
            self.tokenizer,
            task=self.task,
            settings=self.settings,
            max_sequence_length=self.max_sequence_length,
            labels=self.labels,
            file=self.file,
        )

    def _prepared(self, row: TextRow) -> TextRow:
        """A row as the model was trained to read it."""
        row = row._replace(text=self.prompt + row.text)
        if not self.lower_case:
            return row
        return row._replace(text=row.text.lower(), text_pair=None if row.text_pair is None else row.text_pair.lower())
