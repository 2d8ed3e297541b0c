"""Read the rows of a task's data one after the other, in bounded memory, from files of any supported format.

Records come from JSON lines, from CSV and TSV and from SQuAD (`formats.py`), from Parquet, from plain lines, and from the
sentences of CoNLL (one word and its tag per line, and a blank line after each sentence). `fields.py` turns records into
rows. Before the first record, the settings are checked against the format and the task, so that an option that has no effect
is reported as an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import TypeVar

from gaudi_bert.common import files
from gaudi_bert.common.arrow import open_parquet, validate_arrow_buffers
from gaudi_bert.common.errors import InputError, short_repr, shorten
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.sections import OnBadRow, TaskName, TaskSettings
from gaudi_bert.corpus.documents import convert_texts_to_documents
from gaudi_bert.corpus.python_texts import load_python_texts
from gaudi_bert.rows.fields import (
    NAMING_OPTIONS,
    RowParser,
    expand_into_pairs,
    find_label_columns,
    find_negative_columns,
    format_column_option,
    read_label_names,
)
from gaudi_bert.rows.formats import JSON, read_squad_questions, read_table
from gaudi_bert.rows.parts import TABLES, RowPart, format_max_row_size, make_whole_file_part
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
# The names of these columns are fixed. The names of all other columns come from the settings.
_OTHER_COLUMNS = ("input_ids", "question", "context", "answers", "is_impossible", "id")
_PARQUET_ROWS_AT_ONCE = 256
_DOCUMENT_LINE = "-DOCSTART-"
_FORMATS = {"jsonl": "JSON lines", "csv": "CSV", "tsv": "TSV", "parquet": "Parquet", "conll": "CoNLL", "squad": "SQuAD"}
_TEXT_LAYOUT, _PAIR_LAYOUT = ("text",), ("text", "text_pair", "label")
# The column layouts that the rows of each task may have. A layout is a tuple of settings, each of which contains a column
# name. A task that is not listed here has the layout `_PAIR_LAYOUT`.
_LAYOUTS: dict[TaskName | None, tuple[tuple[str, ...], ...]] = {
    None: (("text", "text_pair"),),
    "token-classification": (("tokens", "tags"), _TEXT_LAYOUT),
    "masked-language-modelling": (_TEXT_LAYOUT,),
    "causal-language-modelling": (_TEXT_LAYOUT,),
    "question-answering": ((),),
    "reranking": (("query", "document", "label"), ("query", "positive", "negative")),
    "embedding": (("anchor", "positive", "negative"), _PAIR_LAYOUT),
}
_ALL_COLUMNS = frozenset(key for layouts in (*_LAYOUTS.values(), (_PAIR_LAYOUT,)) for layout in layouts for key in layout)
_LABEL_COLUMNS, _OPTIONAL_COLUMNS = ("label", "tags"), ("text_pair", "negative")
_MAX_SHOWN_CHARACTERS = 60


def read_rows(
    path: str | Path,
    task: TaskName | None,
    settings: TaskSettings,
    *,
    labelled: bool = False,
    say: Callable[[str], None] | None = None,
    skipped: SkippedRows | None = None,
) -> Iterator[Row]:
    """Yield the rows of a file in the order of the file. The rows are read one at a time.

    Args:
        path: The file, or `-` for standard input.
        task: The task, or None for plain texts.
        settings: The settings of the task. Their `on_bad_row` determines whether a row that cannot be read stops the reading
            or is skipped.
        labelled: Whether a row without labels, tags or answers is rejected. Otherwise labels are ignored.
        say: Called once with a line about the columns and the first row, after the first row was read.
        skipped: Counts the rows that are skipped.

    Raises:
        InputError: The file, an option or a row is invalid. The message names the file and the row.
    """
    part = make_whole_file_part(path, settings)
    return raise_or_skip_bad_rows(read_part(part, task, settings, labelled=labelled, say=say), settings.on_bad_row, skipped)


def check_first_row(path: str, task: TaskName | None, settings: TaskSettings, *, labelled: bool = False) -> None:
    """Raise an InputError if the first row of a file cannot be read. Callers check this first, because loading a model takes
    seconds.

    Standard input is not checked, because it can be read only once.

    Args:
        path: The file, or `-` for standard input.
        task: The task, or None for plain texts.
        settings: The settings of the task.
        labelled: Whether a row without labels is rejected.

    Raises:
        InputError: The first row cannot be read.
    """
    if path != STANDARD_INPUT:
        next(read_rows(path, task, settings, labelled=labelled), None)


class SkippedRows:
    """Counts the rows that cannot be read and were skipped, and stores the error message for the first of them."""

    def __init__(self) -> None:
        self.rows, self.first = 0, ""

    def __str__(self) -> str:
        verb = "was" if self.rows == 1 else "were"
        return f"{format_count(self.rows, 'row')} cannot be read and {verb} skipped; the first problem: {self.first}"

    def add(self, problem: str) -> None:
        """Count a skipped row, and store its error message if it is the first."""
        self.rows, self.first = self.rows + 1, self.first or problem


def raise_or_skip_bad_rows(
    rows: Iterator[Row | BadRow], on_bad_row: OnBadRow = "stop", skipped: SkippedRows | None = None
) -> Iterator[Row]:
    """Yield the rows that can be read. Skip the other rows, or raise an InputError at the first of them, depending on
    `on_bad_row`.

    Args:
        rows: The rows, including any `BadRow`.
        on_bad_row: "stop" raises an exception at the first `BadRow`, and "skip" skips each of them.
        skipped: Counts the rows that are skipped.

    Raises:
        InputError: A row cannot be read, and `on_bad_row` is "stop".
    """
    for row in rows:
        if not isinstance(row, BadRow):
            yield row
        elif on_bad_row == "stop":
            raise InputError(row.problem)
        elif skipped is not None:
            skipped.add(row.problem)


def read_part(
    part: RowPart,
    task: TaskName | None,
    settings: TaskSettings,
    *,
    labelled: bool = False,
    say: Callable[[str], None] | None = None,
) -> Iterator[Row | BadRow]:
    """Yield the rows of a part of a file. A row that cannot be read is yielded as a `BadRow`.

    Args:
        part: The part.
        task: The task, or None for plain texts.
        settings: The settings of the task.
        labelled: Whether a row without labels, tags or answers is rejected. Otherwise labels are ignored.
        say: Called once with a line about the columns and the first row, after the first row was read.

    Raises:
        InputError: The format does not match the task, an option has no effect, or the file cannot be read any further.
    """
    _check_options_apply(part, task, settings, labelled)
    label_names = read_label_names(Path(settings.labels)) if settings.labels is not None else None
    reading = settings
    if task == "reranking":  # the two texts of a pair are a query and a document
        reading = settings.model_copy(update={"text": settings.query, "text_pair": settings.document})
    parser = RowParser(task, reading, label_names, labelled, part.kind in TABLES and settings.columns is None)
    records: Iterator[PlacedRecord]
    if part.kind == "squad":
        records = read_squad_questions(part)
    elif part.kind == "conll":
        records = _read_conll(part, settings, labelled)
    else:
        records = _read_records(part, settings, task, labelled)
    first = list(islice(records, 1)) if task == "reranking" else []
    if task == "reranking":
        records = expand_into_pairs(chain(first, records), settings, labelled=labelled)
    for position, record in records:
        try:
            if isinstance(record, InputError):
                raise record
            row = parser.parse_record(position, record)
        except InputError as error:
            yield BadRow(position, f"{part.format_location(position)}: {error}")
            continue
        if say is not None:
            whole = first[0][1] if first else record  # one record of a file may have become several pairs
            columns = _list_read_columns(task, settings, row, record if isinstance(whole, InputError) else whole, labelled)
            say(_describe_first_row(part, settings, row, columns))
            say = None
        yield row


def split_into_windows(rows: Iterator[_Row], size: int) -> Iterator[list[_Row]]:
    """Yield the rows in lists of `size` rows, which are called windows. The last list may be shorter."""
    while window := list(islice(rows, size)):
        yield window


def batch_by_size(
    rows: Iterable[_Row], size_of: Callable[[_Row], int], target_size: int, max_rows: int | None = None
) -> Iterator[list[_Row]]:
    """Yield the rows in lists. A list is complete when the total size of its rows reaches `target_size`, or when it contains
    `max_rows` rows.

    Args:
        rows: The rows.
        size_of: Returns the size of a row.
        target_size: The total size at which a list is complete.
        max_rows: The largest number of rows in a list. None means no limit.
    """
    batch: list[_Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += size_of(row)
        if size >= target_size or len(batch) == max_rows:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_options_apply(part: RowPart, task: TaskName | None, settings: TaskSettings, labelled: bool) -> None:
    """Raise an InputError if the task does not support the format of the file, or if an option that the user set has no
    effect.

    Raises:
        InputError: The format does not match, or an option would have no effect.
    """
    if part.kind == "squad" and task != "question-answering":
        reader = "plain texts need" if task is None else f"{task} needs"
        raise InputError(f"{part.name}: only question-answering reads SQuAD files; {reader} JSON lines (.jsonl) or a table")
    if part.kind == "conll" and task != "token-classification":
        raise InputError(f"{part.name}: only token-classification reads CoNLL files; pass JSON lines (.jsonl) or a table")
    of_tables = {"--columns": settings.columns, "--no-header": settings.no_header or None, "--delimiter": settings.delimiter}
    for option, value in of_tables.items() if part.kind not in TABLES else ():
        if value is not None and option.strip("-").replace("-", "_") in settings.keys_set_by_user:
            raise InputError(
                f"{part.name}: {option} applies only to CSV and TSV, but the format is {part.kind}; remove the option"
            )
    if part.kind in ("parquet", "built-in") and "encoding" in settings.keys_set_by_user and settings.encoding != "utf-8":
        raise InputError(
            f"{part.name}: --encoding applies only to text files, but the format is {part.kind}; remove the option"
        )
    has_columns = part.kind in (*TABLES, "jsonl", "parquet")
    layouts = _list_column_layouts(task, labelled)
    of_task = set().union(*layouts)
    for key in sorted(_ALL_COLUMNS & settings.keys_set_by_user):
        if not (has_columns and key in of_task):
            reason = f"because the task reads no {key}" if has_columns else "because the file has no named columns"
            raise InputError(f"{part.name}: {_format_setting_name(key)} has no effect, {reason}; remove it")
    named = settings.keys_set_by_user & of_task
    if not any(named <= set(layout) for layout in layouts):
        kinds, both = (
            " or ".join(", ".join(layout) for layout in layouts),
            " and ".join(map(_format_setting_name, sorted(named))),
        )
        raise InputError(f"{part.name}: {both} cannot be combined; name only columns of one of these groups: {kinds}")


def _list_column_layouts(task: TaskName | None, labelled: bool) -> list[tuple[str, ...]]:
    """Return the column layouts that are possible for the rows of a task. A layout is a tuple of the settings that name the
    columns.
    """
    layouts = _LAYOUTS.get(task, (_PAIR_LAYOUT,))
    return [tuple(key for key in layout if labelled or key not in _LABEL_COLUMNS) for layout in layouts]


def _choose_column_layout(
    task: TaskName | None, settings: TaskSettings, labelled: bool, columns: Iterable[str]
) -> tuple[str, ...]:
    """Choose which settings name the columns of a row, for example `text` and `label`, given the names of all columns.

    Only layouts that contain all settings that the user named are possible. Return the first of them whose columns are all
    present, or otherwise the first one.
    """
    layouts = [
        layout for layout in _list_column_layouts(task, labelled) if settings.keys_set_by_user & _ALL_COLUMNS <= set(layout)
    ]
    known = set(columns)
    needed = ([getattr(settings, key) for key in layout if key not in _OPTIONAL_COLUMNS] for layout in layouts)
    return next((layout for layout, names in zip(layouts, needed, strict=True) if known.issuperset(names)), layouts[0])


def _format_setting_name(key: str) -> str:
    """Return the name of a key of the `task` settings for messages. If there is a command-line option for the key, it comes
    first, as in `--label-column (task.label)`.
    """
    return f"{NAMING_OPTIONS[key]} (task.{key})" if key in NAMING_OPTIONS else f"task.{key}"


def _missing_column_remedies(
    task: TaskName | None, settings: TaskSettings, labelled: bool, columns: Sequence[str]
) -> list[str]:
    """Return one remedy for each required column that a table does not contain. An optional column is required only if the
    user named it.
    """
    if task in LANGUAGE_MODELLING and "input_ids" in columns:
        return []
    keys = _choose_column_layout(task, settings, labelled, columns)
    needed = {
        key: getattr(settings, key) for key in keys if key not in _OPTIONAL_COLUMNS or key in settings.keys_set_by_user
    }
    missing = {key: column for key, column in needed.items() if column not in columns}
    return [
        f"the column {short_repr(column)} is missing: name the column with {format_column_option(key)}"
        for key, column in missing.items()
    ]


def _describe_first_row(part: RowPart, settings: TaskSettings, row: Row, columns: list[str]) -> str:
    """Return a line for the user that states which columns are read from a file, and how its first row begins."""
    content = row.question if isinstance(row, QuestionRow) else row[1]
    text = content if isinstance(content, str) else " ".join(map(str, content[:_MAX_SHOWN_CHARACTERS]))
    begins = " ".join(text[: 4 * _MAX_SHOWN_CHARACTERS].split())
    begins = begins if len(begins) <= _MAX_SHOWN_CHARACTERS else f"{begins[:_MAX_SHOWN_CHARACTERS]}..."
    kind = f"{_FORMATS[part.kind]}, {', '.join(columns)}" if part.kind in _FORMATS else "plain text"
    if part.kind in TABLES and settings.delimiter is not None:
        kind = kind.replace(",", f" with {settings.delimiter!r} between cells,", 1)
    if part.encoding != "utf-8":
        kind = kind.replace(",", f" in {part.encoding},", 1)
    return f"{part.name}: reading {kind}; {row.position} begins with {begins!r}"


def _list_read_columns(task: TaskName | None, settings: TaskSettings, row: Row, record: Record, labelled: bool) -> list[str]:
    """Return the names of the columns that a row was read from.

    If a column's name differs from its purpose, the purpose follows in parentheses.
    """
    if isinstance(row, QuestionRow):
        return ["question", "context", *(["answers"] if labelled else [])]
    if isinstance(row, IdsRow):
        return ["input_ids"]
    layout = _choose_column_layout(task, settings, labelled, record)
    if isinstance(row, TaggedRow):
        layout = _TEXT_LAYOUT if row.starts is not None else ("tokens", "tags")[: 1 + (row.tags is not None)]
    columns = {key: [getattr(settings, key)] for key in layout if key != "negative"}
    columns |= {"negative": find_negative_columns(record, settings)} if "negative" in layout else {}
    columns |= {"label": find_label_columns(record)} if labelled and task == "reranking" and "negative" in layout else {}
    return [
        name if name == key or (key == "negative" and name.startswith(key)) else f"{name} ({key})"
        for key, names in columns.items()
        for name in names
        if name in record
    ]


# --- records: JSON lines, tables, Parquet, plain lines


def _read_records(part: RowPart, settings: TaskSettings, task: TaskName | None, labelled: bool) -> Iterator[PlacedRecord]:
    """Yield the position and the content of each record in a part. If a record cannot be read, yield an InputError in its
    place.
    """
    if part.kind == "built-in":
        documents = convert_texts_to_documents(load_python_texts(part.name)).values()
        yield from (
            (RowPosition(number), {settings.text: "\n".join(lines)}) for number, lines in enumerate(documents, start=1)
        )
    elif part.kind == "parquet":
        yield from _read_parquet(part, settings, task)
    else:
        with part.open_lines() as lines:
            if part.kind in TABLES:
                needed = partial(_missing_column_remedies, task, settings, labelled)
                with closing(read_table(part, settings, lines, needed)) as records:
                    yield from records
            else:
                row = count(1)
                for number, line in lines:
                    if isinstance(line, UnicodeDecodeError):
                        yield RowPosition(next(row), number), part.decoding_error(line)
                    elif line.strip():  # the line is a JSON object or a text
                        position, text = RowPosition(next(row), number), line.removesuffix("\n").removesuffix("\r")
                        yield position, _parse_json_record(text) if part.kind == "jsonl" else {settings.text: text}


def _parse_json_record(line: str) -> Record | InputError:
    """Parse a line of JSON into a record. If the line is not a JSON object, return an error."""
    try:
        record = JSON.decode(line)
    except InputError as error:
        return error
    except (ValueError, RecursionError) as error:
        return InputError(f"the line is not valid JSON ({shorten(str(error))}); write one object per line")
    if not isinstance(record, dict):
        return InputError(f'{shorten(line)} is not an object; write, for example, {{"text": "..."}}')
    return record


def _read_parquet(part: RowPart, settings: TaskSettings, task: TaskName | None) -> Iterator[PlacedRecord]:
    """Yield the rows of a Parquet file as records.

    Only the columns that the task may need are read. All columns are read if the text column is missing, so that the error
    can list them, and for tasks whose rows have several layouts.

    Raises:
        InputError: The part is standard input, which cannot be read as Parquet.
    """
    if part.path is None:
        raise InputError("standard input: Parquet cannot be read from a stream; pass a file name")
    known = (settings.text, settings.text_pair, settings.label, settings.tokens, settings.tags, *_OTHER_COLUMNS)
    with open_parquet(part.path) as table:
        names = table.schema_arrow.names
        is_text = settings.text in names and task not in ("embedding", "reranking")
        columns = [name for name in names if name in known] if is_text else None
        groups = None if part.end is None else list(range(part.start, part.end))
        batches = table.iter_batches(_PARQUET_ROWS_AT_ONCE, row_groups=groups, columns=columns, use_threads=False)
        rows = (row for batch in batches for row in validate_arrow_buffers(part.path, batch).to_pylist())
        yield from ((RowPosition(number), row) for number, row in enumerate(rows, start=1))


# --- CoNLL


def _read_conll(part: RowPart, settings: TaskSettings, labelled: bool) -> Iterator[PlacedRecord]:
    """Yield the sentences of a CoNLL file as records. Each line of the file contains a word and its tag.

    The first column of a line is the word, and the last column is its tag.

    Columns are separated by tabs if the line contains a tab, and otherwise by spaces. No other whitespace separates columns,
    because a word may contain a no-break space.

    Raises:
        InputError: A sentence is too long or has a tag for some words only, a word is missing, or `labelled` is true and a
            tag is missing.
    """
    words: list[str] = []
    tags: list[str] = []
    position, size = RowPosition(1), 0
    with part.open_lines() as lines:
        for number, line in chain(lines, [(0, "")]):
            if isinstance(line, UnicodeDecodeError):
                raise InputError(f"{part.format_location(position._replace(line=number))}: {part.decoding_error(line)}")
            text = line.rstrip("\r\n")
            cells = [cell.strip(" ") for cell in text.split("\t")] if "\t" in text else text.strip(" ").split(" ")
            if not any(cells) or cells[0] == _DOCUMENT_LINE:
                if words:  # the sentence ends
                    if tags and len(tags) != len(words):
                        problem = f"a sentence of {len(words)} words has {len(tags)} tags; write one tag for each word"
                        raise InputError(f"{part.format_location(position)}: {problem}")
                    yield position, {settings.tokens: words, settings.tags: tags} if tags else {settings.tokens: words}
                    words, tags, position, size = [], [], RowPosition(position.number + 1), 0
                continue
            position, size = position if words else position._replace(line=number), size + len(line)
            problem = ""
            if size > files.LONGEST_ROW_BYTES:
                problem = f"the sentence is longer than {format_max_row_size()}; end each sentence with a blank line"
            elif not cells[0]:
                problem = "there is no word before the tag; write a word, a tab and a tag on each line"
            elif labelled and len(cells) < 2:
                problem = f"the word {short_repr(cells[0])} has no tag; write a word, a tab and a tag on each line"
            if problem:
                raise InputError(f"{part.format_location(position._replace(line=number))}: {problem}")
            words.append(cells[0])
            tags += cells[-1:] if len(cells) > 1 else []
