"""Rows of a task's data, whatever file they are in, one after the other in bounded memory.

Records are JSON lines, the rows of CSV and TSV, the questions of SQuAD (`formats.py`), the rows of Parquet, plain lines, and
the sentences of CoNLL (a word and its tag per line, a blank line after each sentence); `fields.py` makes rows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import TypeVar

from gaudi_bert.common import files
from gaudi_bert.common.arrow import open_parquet, validate_content
from gaudi_bert.common.errors import InputError, short_repr, shorten
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.sections import OnBadRow, TaskName, TaskSettings
from gaudi_bert.corpus.python_texts import documentation_documents, python_texts
from gaudi_bert.rows.fields import (
    NAMING_OPTIONS,
    RowReader,
    judging_columns,
    naming_option,
    negative_columns,
    ranked_pairs,
    read_label_names,
)
from gaudi_bert.rows.formats import JSON, read_squad, read_table
from gaudi_bert.rows.parts import TABLES, RowPart, complete_file, longest_row
from gaudi_bert.rows.types import (
    LANGUAGE_MODELLING,
    STANDARD_INPUT,
    BadRow,
    IdsRow,
    PlacedRecord,
    QuestionRow,
    Record,
    Row,
    RowPosition,
    TaggedRow,
)

_Row = TypeVar("_Row")
# Of a task's records besides the columns that settings name.
_OTHER_COLUMNS = ("input_ids", "question", "context", "answers", "is_impossible", "id")
_PARQUET_ROWS_AT_ONCE = 256
_DOCUMENT_LINE = "-DOCSTART-"
_FORMATS = {"jsonl": "JSON lines", "csv": "CSV", "tsv": "TSV", "parquet": "Parquet", "conll": "CoNLL", "squad": "SQuAD"}
_PLAIN, _PAIRS = ("text",), ("text", "text_pair", "label")
_FORMS: dict[TaskName | None, tuple[tuple[str, ...], ...]] = {
    None: (("text", "text_pair"),),
    "token-classification": (("tokens", "tags"), _PLAIN),
    "masked-language-modelling": (_PLAIN,),
    "causal-language-modelling": (_PLAIN,),
    "question-answering": ((),),
    "reranking": (("query", "document", "label"), ("query", "positive", "negative")),
    "embedding": (("anchor", "positive", "negative"), _PAIRS),
}
"""The settings that name the columns of a row, for each form that rows of a task have; of other tasks those of a text."""
_ALL_COLUMNS = frozenset(key for forms in (*_FORMS.values(), (_PAIRS,)) for form in forms for key in form)
_LABELS, _MAY_LACK = ("label", "tags"), ("text_pair", "negative")
_MOST_SHOWN = 60


def read_rows(
    path: str | Path,
    task: TaskName | None,
    settings: TaskSettings,
    *,
    labelled: bool = False,
    say: Callable[[str], None] | None = None,
    skipped: SkippedRows | None = None,
) -> Iterator[Row]:
    """The rows of a file, in its order, in bounded memory.

    `path` may be `-` for standard input; `task` is None for plain texts. With `labelled`, a row without labels, tags or
    answers is refused; else they are ignored. `say` gets a line on the columns and the first row, once that is read. Rows
    that cannot be read are refused, or skipped, as the settings have it, and counted in `skipped`.
    """
    part = complete_file(path, settings)
    return good_rows(rows_of_part(part, task, settings, labelled=labelled, say=say), settings.on_bad_row, skipped)


def check_first_row(path: str, task: TaskName | None, settings: TaskSettings, *, labelled: bool = False) -> None:
    """Refuse a file by its first row, before a model is opened, which takes seconds; a pipe is read once only."""
    if path != STANDARD_INPUT:
        next(read_rows(path, task, settings, labelled=labelled), None)


class SkippedRows:
    """Count of the rows that are skipped because they cannot be read, and the problem of the first."""

    def __init__(self) -> None:
        self.rows, self.first = 0, ""

    def __str__(self) -> str:
        return f"{format_count(self.rows, 'row')} cannot be read: left out; the first: {self.first}"

    def add(self, problem: str) -> None:
        """Count a row."""
        self.rows, self.first = self.rows + 1, self.first or problem


def good_rows(
    rows: Iterator[Row | BadRow], on_bad_row: OnBadRow = "stop", skipped: SkippedRows | None = None
) -> Iterator[Row]:
    """The rows; one that cannot be read is refused, or with `skip` skipped."""
    for row in rows:
        if not isinstance(row, BadRow):
            yield row
        elif on_bad_row == "stop":
            raise InputError(row.problem)
        elif skipped is not None:
            skipped.add(row.problem)


def rows_of_part(
    part: RowPart,
    task: TaskName | None,
    settings: TaskSettings,
    *,
    labelled: bool = False,
    say: Callable[[str], None] | None = None,
) -> Iterator[Row | BadRow]:
    """Read the rows of a part of a file; one that cannot be read is a `BadRow`, where the next ones can be read."""
    _check_applies(part, task, settings, labelled)
    label_names = read_label_names(Path(settings.labels)) if settings.labels is not None else None
    reading = settings
    if task == "reranking":  # whose pairs are a query and a document
        reading = settings.model_copy(update={"text": settings.query, "text_pair": settings.document})
    reader = RowReader(task, reading, label_names, labelled, part.kind in TABLES and settings.columns is None)
    records: Iterator[PlacedRecord]
    if part.kind == "squad":
        records = read_squad(part)
    elif part.kind == "conll":
        records = _read_conll(part, settings, labelled)
    else:
        records = _read_records(part, settings, task, labelled)
    first = list(islice(records, 1)) if task == "reranking" else []
    if task == "reranking":
        records = ranked_pairs(chain(first, records), settings, labelled=labelled)
    for position, record in records:
        try:
            if isinstance(record, InputError):
                raise record
            row = reader.row(position, record)
        except InputError as error:
            yield BadRow(position, f"{part.location(position)}: {error}")
            continue
        if say is not None:
            whole = first[0][1] if first else record  # of which a pair may be one of several
            read = record if isinstance(whole, InputError) else whole
            columns = _columns_read(task, settings, row, read, labelled)
            say(_described(part, settings, row, columns))
            say = None
        yield row


def windows(rows: Iterator[_Row], size: int) -> Iterator[list[_Row]]:
    """The rows in lists of `size`; the last one may be shorter."""
    while window := list(islice(rows, size)):
        yield window


def sized_batches(
    rows: Iterable[_Row], size_of: Callable[[_Row], int], enough: int, most_rows: int | None = None
) -> Iterator[list[_Row]]:
    """The rows in lists that end with the row that makes them large enough, or with the row `most_rows`."""
    batch: list[_Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += size_of(row)
        if size >= enough or len(batch) == most_rows:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_applies(part: RowPart, task: TaskName | None, settings: TaskSettings, labelled: bool) -> None:
    """Refuse a format that the task does not read, and columns that are named but are not read."""
    if part.kind == "squad" and task != "question-answering":
        others = "plain texts need" if task is None else f"{task} needs"
        raise InputError(f"{part.name}: SQuAD's JSON is for question-answering, {others} JSON lines (.jsonl) or a table")
    if part.kind == "conll" and task != "token-classification":
        raise InputError(f"{part.name}: CoNLL is for token-classification; give JSON lines (.jsonl) or a table")
    of_tables = {"--columns": settings.columns, "--no-header": settings.no_header or None, "--delimiter": settings.delimiter}
    keys = (name for name, value in of_tables.items() if value is not None)
    option = next((name for name in keys if name.strip("-").replace("-", "_") in settings.named), None)
    if part.kind not in TABLES and option is not None:
        raise InputError(f"{part.name}: {option} is for CSV and TSV, this is {part.kind}; leave it out")
    if part.kind in ("parquet", "built-in") and "encoding" in settings.named and settings.encoding != "utf-8":
        raise InputError(f"{part.name}: --encoding is for files of text, this is {part.kind}; leave it out")
    has_columns = part.kind in (*TABLES, "jsonl", "parquet")
    forms = _forms_of(task, labelled)
    of_task = set().union(*forms)
    for key in sorted(_ALL_COLUMNS & settings.named):
        if not (has_columns and key in of_task):
            reason = f"no {key} is read here" if has_columns else "this file has no named columns"
            raise InputError(f"{part.name}: {_setting(key)} does not apply, {reason}; leave it out")
    named = settings.named & of_task
    if not any(named <= set(form) for form in forms):
        kinds, both = " or ".join(", ".join(form) for form in forms), " and ".join(map(_setting, sorted(named)))
        raise InputError(f"{part.name}: {both} are of rows of two kinds; name columns of one: {kinds}")


def _forms_of(task: TaskName | None, labelled: bool) -> list[tuple[str, ...]]:
    """Return the settings of the columns that are read, for each form that rows may have."""
    forms = _FORMS.get(task, (_PAIRS,))
    return [tuple(key for key in form if labelled or key not in _LABELS) for form in forms]


def _form_of(task: TaskName | None, settings: TaskSettings, labelled: bool, columns: Iterable[str]) -> tuple[str, ...]:
    """Return the form of a row with these columns: one that the settings name, else the first whose columns are there."""
    forms = [form for form in _forms_of(task, labelled) if settings.named & _ALL_COLUMNS <= set(form)]
    known = set(columns)
    needed = ([getattr(settings, key) for key in form if key not in _MAY_LACK] for form in forms)
    complete = [form for form, names in zip(forms, needed, strict=True) if known.issuperset(names)]
    return (complete or forms)[0]


def _setting(key: str) -> str:
    return f"{NAMING_OPTIONS[key]} (task.{key})" if key in NAMING_OPTIONS else f"task.{key}"


def _missing_columns(task: TaskName | None, settings: TaskSettings, labelled: bool, columns: Sequence[str]) -> list[str]:
    """Return what to do about columns of a table that are needed, or named, and are not there."""
    if task in LANGUAGE_MODELLING and "input_ids" in columns:
        return []
    keys = _form_of(task, settings, labelled, columns)
    needed = {key: getattr(settings, key) for key in keys if key not in _MAY_LACK or key in settings.named}
    missing = {key: column for key, column in needed.items() if column not in columns}
    return [f"it has no column {short_repr(column)}: name one with {naming_option(key)}" for key, column in missing.items()]


def _described(part: RowPart, settings: TaskSettings, row: Row, columns: list[str]) -> str:
    """Return what is read of a file, and how its first row begins."""
    content = row.question if isinstance(row, QuestionRow) else row[1]
    text = content if isinstance(content, str) else " ".join(map(str, content[:_MOST_SHOWN]))
    begins = " ".join(text[: 4 * _MOST_SHOWN].split())
    begins = begins if len(begins) <= _MOST_SHOWN else f"{begins[:_MOST_SHOWN]}..."
    kind = f"{_FORMATS[part.kind]}, {', '.join(columns)}" if part.kind in _FORMATS else "plain text"
    if part.kind in TABLES and settings.delimiter is not None:
        kind = kind.replace(",", f" with {settings.delimiter!r} between cells,", 1)
    if part.encoding != "utf-8":
        kind = kind.replace(",", f" in {part.encoding},", 1)
    return f"{part.name}: reads {kind}; {row.position} begins {begins!r}"


def _columns_read(task: TaskName | None, settings: TaskSettings, row: Row, record: Record, labelled: bool) -> list[str]:
    """Return the columns of a record that a row was read from, with what they hold where that is not their name."""
    if isinstance(row, QuestionRow):
        return ["question", "context", *(["answers"] if labelled else [])]
    if isinstance(row, IdsRow):
        return ["input_ids"]
    form = _form_of(task, settings, labelled, record)
    if isinstance(row, TaggedRow):
        form = _PLAIN if row.starts is not None else ("tokens", "tags")[: 1 + (row.tags is not None)]
    columns = {key: [getattr(settings, key)] for key in form if key != "negative"}
    columns |= {"negative": negative_columns(record, settings)} if "negative" in form else {}
    columns |= {"label": judging_columns(record)} if labelled and task == "reranking" and "negative" in form else {}
    return [
        name if name == key or (key == "negative" and name.startswith(key)) else f"{name} ({key})"
        for key, names in columns.items()
        for name in names
        if name in record
    ]


# --- records: JSON lines, tables, Parquet, plain lines


def _read_records(part: RowPart, settings: TaskSettings, task: TaskName | None, labelled: bool) -> Iterator[PlacedRecord]:
    """The records of a part with their positions; one that cannot be read is an error in its position."""
    if part.kind == "built-in":
        documents = documentation_documents(python_texts(part.name)).values()
        yield from (
            (RowPosition(number), {settings.text: "\n".join(lines)}) for number, lines in enumerate(documents, start=1)
        )
    elif part.kind == "parquet":
        yield from _parquet(part, settings, task)
    else:
        with part.lines() as lines:
            if part.kind in TABLES:
                needed = partial(_missing_columns, task, settings, labelled)
                with closing(read_table(part, settings, lines, needed)) as records:
                    yield from records
            else:
                row = count(1)
                for number, line in lines:
                    if isinstance(line, UnicodeDecodeError):
                        position = RowPosition(next(row), number)
                        yield position, part.not_text(line)
                    elif line.strip():  # an object of JSON, or a text
                        position, text = RowPosition(next(row), number), line.removesuffix("\n").removesuffix("\r")
                        yield position, _json_record(text) if part.kind == "jsonl" else {settings.text: text}


def _json_record(line: str) -> Record | InputError:
    try:
        record = JSON.decode(line)
    except InputError as error:
        return error
    except (ValueError, RecursionError) as error:
        return InputError(f"not JSON ({shorten(str(error))}); write one object per line")
    if not isinstance(record, dict):
        return InputError(f'{shorten(line)} is not an object; write for example {{"text": "..."}}')
    return record


def _parquet(part: RowPart, settings: TaskSettings, task: TaskName | None) -> Iterator[PlacedRecord]:
    """The columns that a task may need; all, where that of the text is missing, or rows have several forms."""
    if part.path is None:
        raise InputError("standard input: Parquet cannot be read as it comes; give the name of the file")
    known = (settings.text, settings.text_pair, settings.label, settings.tokens, settings.tags, *_OTHER_COLUMNS)
    with open_parquet(part.path) as table:
        names = table.schema_arrow.names
        is_text = settings.text in names and task not in ("embedding", "reranking")
        columns = [name for name in names if name in known] if is_text else None
        groups = None if part.end is None else list(range(part.start, part.end))
        batches = table.iter_batches(_PARQUET_ROWS_AT_ONCE, row_groups=groups, columns=columns, use_threads=False)
        rows = (row for batch in batches for row in validate_content(part.path, batch).to_pylist())
        yield from ((RowPosition(number), row) for number, row in enumerate(rows, start=1))


# --- CoNLL


def _read_conll(part: RowPart, settings: TaskSettings, labelled: bool) -> Iterator[PlacedRecord]:
    """The sentences of a CoNLL file as records; the word is the first column of a line, the tag the last.

    Columns are divided by tabs, or else by spaces: a word may hold any other character, such as a no-break space. With
    `labelled`, lines without a tag are refused.
    """
    words: list[str] = []
    tags: list[str] = []
    position, size = RowPosition(1), 0
    with part.lines() as lines:
        for number, line in chain(lines, [(0, "")]):
            if isinstance(line, UnicodeDecodeError):
                raise InputError(f"{part.location(position._replace(line=number))}: {part.not_text(line)}")
            text = line.rstrip("\r\n")
            cells = [cell.strip(" ") for cell in text.split("\t")] if "\t" in text else text.strip(" ").split(" ")
            if not any(cells) or cells[0] == _DOCUMENT_LINE:
                if words:  # the sentence ends
                    if tags and len(tags) != len(words):
                        problem = f"a sentence of {len(words)} words has {len(tags)} tags; give each word one"
                        raise InputError(f"{part.location(position)}: {problem}")
                    yield position, {settings.tokens: words, settings.tags: tags} if tags else {settings.tokens: words}
                    words, tags, position, size = [], [], RowPosition(position.number + 1), 0
                continue
            position, size = position if words else position._replace(line=number), size + len(line)
            problem = ""
            if size > files.LONGEST_ROW_BYTES:
                problem = f"the sentence is longer than {longest_row()}; end it by a blank line"
            elif not cells[0]:
                problem = "has no word before its tag; write WORD, a tab, TAG"
            elif labelled and len(cells) < 2:
                problem = f"the word {short_repr(cells[0])} has no tag; write WORD, a tab, TAG"
            if problem:
                raise InputError(f"{part.location(position._replace(line=number))}: {problem}")
            words.append(cells[0])
            tags += cells[-1:] if len(cells) > 1 else []
