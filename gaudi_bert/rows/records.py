"""Records of files of rows, whatever format they are in: the one reader behind every command that takes rows.

JSON lines, CSV, TSV, Parquet and plain lines hold records, plain or compressed with gzip or zstd. A line ends at a line feed
and nowhere else: people's comments hold carriage returns and other characters that Python would also take for the end of a
line. TSV is split at tabs, with no quoting, as GLUE and GoEmotions are written; CSV is quoted.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from gaudi_bert.common.arrow import opened_parquet, validated
from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.common.files import explained_os_errors, open_file
from gaudi_bert.config.sections import RowFormat, TaskSettings
from gaudi_bert.corpus.documents import LONGEST_LINE_BYTES, Compression, Source, is_json_line, opened_text
from gaudi_bert.corpus.python_texts import documentation_documents, python_texts
from gaudi_bert.rows.types import STANDARD_INPUT, source_name

Record: TypeAlias = Mapping[str, Any]
NumberedRecord: TypeAlias = tuple[int, Record | InputError]
_CellRows: TypeAlias = Generator[tuple[int, list[str] | InputError], None, None]

ENDINGS: dict[str, RowFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".conll": "conll",
    ".bio": "conll",
    ".iob": "conll",
    ".json": "squad",
    ".txt": "txt",
}
TABLES = ("csv", "tsv")
COMPRESSIONS: dict[bytes, Compression] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Of a task's records besides the columns that settings name.
_OTHER_COLUMNS = ("input_ids", "question", "context", "answers", "is_impossible", "id")

_ROWS_LOOKED_AT = 20
_PARQUET_ROWS_AT_ONCE = 256
_LONGEST_NAME = 40
_NAME = re.compile(r"[^\W\d]\w*(?:[ ._-]\w+){0,2}")
_NUMBER = re.compile(r"[+-]?[0-9]*\.?[0-9]+")
_USUAL_NAMES = frozenset(
    {"text", "text_pair", "text1", "text2", "text_a", "text_b", "sentence", "sentence1", "sentence2", "comment", "review"}
    | {"comment_text", "title", "body", "content", "message", "tweet", "question", "question1", "question2", "answer"}
    | {"premise", "hypothesis", "query", "passage", "document", "label", "labels", "class", "category", "target"}
    | {"sentiment", "emotion", "score", "rating", "stars", "similarity", "id", "idx", "index"}
)


@dataclass(frozen=True)
class RowPart:
    """A file of rows, or what is read alone of it.

    Attributes:
        name: in messages; of a text that Python carries, its name.
        path: None for standard input, and for a text that Python carries.
        start, end: the bytes in which its lines begin, or its row groups; `end` is None for a file that is read to its end.
        size_bytes: about how much of the file that is.
    """

    name: str
    path: Path | None
    kind: RowFormat | Literal["built-in"]
    compression: Compression | None = None
    start: int = 0
    end: int | None = None
    size_bytes: int = 0

    def location(self, number: int) -> str:
        """How messages name the row `number` of this part (of a file with lines, the line), counted through the file."""
        before = 0
        if self.path is not None and self.start:
            if self.kind == "parquet":
                before = sum(rows for rows, _ in _row_groups(self.path)[: self.start])
            else:
                before = _lines_before(self.path, self.start)
        return f"{self.name}: row {before + number}"

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The bytes of the file as they were before they were compressed."""
        if self.path is None:
            yield sys.stdin.buffer
        else:
            with opened_text(self.path, self.compression) as handle:
                yield handle


def complete_file(path: str | Path, given: RowFormat | None) -> RowPart:
    """A file, or standard input, as one part; its format is the given one, or by its ending."""
    if str(path) == STANDARD_INPUT:  # which holds JSON lines
        return RowPart(source_name(path), None, given or "jsonl")
    kind = given or _format_by_ending(path)
    if kind is None:
        raise InputError(f"{path}: unknown ending; known are {', '.join(ENDINGS)} (and .gz, .zst), or give --format jsonl")
    return RowPart(str(path), Path(path), kind, _compression_of(Path(path)))


def _format_by_ending(path: str | Path) -> RowFormat | None:
    """The format that a file's name states."""
    name = Path(path).name.lower()
    return ENDINGS.get(Path(name.removesuffix(".gz").removesuffix(".zst")).suffix)


def _compression_of(path: Path) -> Compression | None:
    """How a file is compressed, by its first bytes."""
    with explained_os_errors(path, "read"), open_file(path) as handle:
        beginning = handle.read(4)
    return next((name for magic, name in COMPRESSIONS.items() if beginning.startswith(magic)), None)


def read_records(part: RowPart, settings: TaskSettings) -> Iterator[NumberedRecord]:
    """The records of a part with their numbers, from 1; one that cannot be read is an error in its position."""
    if part.kind == "built-in":
        documents = documentation_documents(python_texts(part.name))
        yield from ((number, {settings.text: "\n".join(lines)}) for number, lines in enumerate(documents, start=1))
    elif part.kind == "parquet":
        yield from _parquet(part, settings)
    else:
        with part.opened() as handle:
            if part.kind == "jsonl":
                yield from _json_lines(part, handle)
            elif part.kind == "txt":
                for number, line in text_lines(part, handle):
                    if isinstance(line, InputError) or line.strip():
                        yield number, line if isinstance(line, InputError) else {settings.text: line}
            else:
                with closing(_tab_cells(part, handle) if part.kind == "tsv" else _comma_cells(part, handle)) as cells:
                    yield from _table(part, settings, cells)


# --- lines


def text_lines(part: RowPart, handle: BinaryIO) -> Iterator[tuple[int, str | InputError]]:
    """The lines of UTF-8 that begin in a part, with their numbers from 1, without their ends and a byte-order mark.

    One that is not UTF-8 is an error in its position.
    """
    for number, line in enumerate(_lines(part, handle), start=1):
        try:
            yield number, line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 at its byte {error.start}; save the file as UTF-8"
            yield number, InputError(f"{part.location(number)}: {reason}")


def _lines(part: RowPart, handle: BinaryIO) -> Iterator[bytes]:
    at = part.start
    if at:
        handle.seek(at - 1)
        at += len(handle.readline()) - 1
    while part.end is None or at < part.end:
        line = handle.readline(LONGEST_LINE_BYTES)
        if not line:
            return
        if len(line) >= LONGEST_LINE_BYTES:
            raise InputError(f"{part.name}: a line is longer than {LONGEST_LINE_BYTES >> 20} MiB; break it, if this is text")
        yield line if at else line.removeprefix(BYTE_ORDER_MARK)
        at += len(line)


def _lines_before(path: Path, start: int) -> int:
    """How many lines begin before a byte of a file and are of an earlier part."""
    before = 0
    with open_file(path) as handle:
        while handle.tell() < start:
            before += handle.read(min(1 << 20, start - handle.tell())).count(b"\n")
        handle.seek(start - 1)
        return before + (handle.read(1) != b"\n")  # the line in which the part before ends


def _json_lines(part: RowPart, handle: BinaryIO) -> Iterator[NumberedRecord]:
    for number, line in text_lines(part, handle):
        if isinstance(line, InputError):
            yield number, line
        elif line.strip():
            yield number, _json_record(line, part, number)


def _json_record(line: str, part: RowPart, number: int) -> Record | InputError:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return InputError(f"{part.location(number)}: not JSON ({shortened(str(error))}); write one object per line")
    if not isinstance(record, dict):
        return InputError(
            f'{part.location(number)}: {shortened(line)} is not an object; write for example {{"text": "..."}}'
        )
    return record


# --- tables


def _table(part: RowPart, settings: TaskSettings, rows: _CellRows) -> Iterator[NumberedRecord]:
    """An empty cell means that the value is missing; that of the text is an empty text."""
    columns = list(settings.columns) if settings.columns is not None else None
    if columns is None and settings.no_header:
        raise InputError(f"{part.name}: without a header, name the columns too: --columns text,label,id")
    if columns is not None and not settings.no_header:
        rows = _without_header(part, columns, rows)
    for number, cells in rows:
        if isinstance(cells, InputError):
            if columns is None:
                raise cells
            yield number, cells
            continue
        if columns is None:
            columns = [cell.strip() for cell in cells]
            twice = [column for column in columns if columns.count(column) > 1]
            if twice:
                raise InputError(
                    f"{part.name}: two columns are called {shown(twice[0])}; name them apart, or pass --columns"
                )
        elif len(cells) != len(columns):
            problem = f"has {len(cells)} cells, the columns are {len(columns)} ({', '.join(columns)[:80]})"
            yield number, InputError(f"{part.location(number)}: {problem}; fix the row")
        else:
            named = zip(columns, cells, strict=True)
            record: dict[str, str | None] = {name: cell for name, cell in named if cell != "" or name == settings.text}
            if settings.text_pair in columns:
                record.setdefault(settings.text_pair, None)
            yield number, record


def _without_header(part: RowPart, columns: Sequence[str], rows: _CellRows) -> _CellRows:
    """The rows of a table whose columns are named; refused where the first one names them too."""
    beginning = list(islice(rows, _ROWS_LOOKED_AT))
    (number, first), *following = beginning or [(0, [])]
    if isinstance(first, list) and _is_header(first, columns, [cells for _, cells in following if isinstance(cells, list)]):
        raise InputError(
            f"{part.location(number)}: {shown(first)} looks like a header, which --columns replaces; leave --columns out "
            "and name the column with --text-column, or pass --no-header if it is a row"
        )
    yield from chain(beginning, rows)


def _is_header(first: Sequence[str], columns: Sequence[str], following: Iterable[Sequence[str]]) -> bool:
    """Whether each cell is a name, and one is a usual or a given name, or has nothing but numbers below it."""
    names = [cell.strip() for cell in first if cell.strip()]
    if len(set(names)) < len(names) or not all(len(name) <= _LONGEST_NAME and _NAME.fullmatch(name) for name in names):
        return False
    known = _USUAL_NAMES.union(map(str.lower, columns))
    if any(name.lower() in known for name in names):
        return True
    below = zip(*(cells for cells in following if len(cells) == len(first)), strict=True)
    return any(name.strip() and all(map(_NUMBER.fullmatch, cells)) for name, cells in zip(first, below, strict=False))


def _tab_cells(part: RowPart, handle: BinaryIO) -> _CellRows:
    for number, line in text_lines(part, handle):
        if isinstance(line, InputError) or line:
            yield number, line if isinstance(line, InputError) else line.split("\t")


def _comma_cells(part: RowPart, handle: BinaryIO) -> _CellRows:
    csv.field_size_limit(LONGEST_LINE_BYTES)
    lines = io.TextIOWrapper(handle, encoding="utf-8-sig", newline="")
    reader = csv.reader(lines, strict=True)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except UnicodeDecodeError as error:
        raise InputError(f"{part.location(reader.line_num + 1)}: not UTF-8; save the file as UTF-8") from error
    except csv.Error as error:
        raise InputError(f"{part.location(reader.line_num)}: not CSV ({error}); fix its quotes") from error
    finally:
        lines.detach()


def _parquet(part: RowPart, settings: TaskSettings) -> Iterator[NumberedRecord]:
    """The columns that a task may need; all, where that of the text is missing."""
    if part.path is None:
        raise InputError("standard input: Parquet cannot be read as it comes; give the name of the file")
    known = (settings.text, settings.text_pair, settings.label, settings.tokens, settings.tags, *_OTHER_COLUMNS)
    with opened_parquet(part.path) as table:
        names = table.schema_arrow.names
        columns = [name for name in names if name in known] if settings.text in names else None
        groups = None if part.end is None else list(range(part.start, part.end))
        batches = table.iter_batches(_PARQUET_ROWS_AT_ONCE, row_groups=groups, columns=columns, use_threads=False)
        yield from enumerate((row for batch in batches for row in validated(part.path, batch).to_pylist()), start=1)


def _row_groups(path: Path) -> list[tuple[int, int]]:
    """(rows, bytes) of each row group of a Parquet file."""
    with opened_parquet(path) as table:
        groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
        return [(group.num_rows, group.total_byte_size) for group in groups]


# --- files of rows divided into parts that can be read alone: lines that begin in a range of bytes, or runs of row groups.
#
# A compressed file can be read from its front only, and a quoted cell of a table may hold lines, so each is one part. The
# parts are a function of the file alone.

_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
_PARQUET = b"PAR1"


def row_parts(source: Source, given: RowFormat | None, part_bytes: int) -> list[RowPart]:
    """The parts of a source, in order, of about `part_bytes` each where its format allows that.

    Its format is the given one, or by its ending; that of any other name is detected from its beginning. What was copied
    from standard input holds JSON lines.
    """
    path, name = source.path, source.shown
    if path is None:
        return [RowPart(name, None, "built-in")]
    compression = _compression_of(path)
    if source.name == source_name(STANDARD_INPUT):
        name, given = source.name, given or "jsonl"
    kind = given or _format_of(path, compression)
    if kind == "parquet":
        return [RowPart(name, path, kind, None, *groups) for groups in _parquet_parts(path, part_bytes)]
    if compression is not None or kind in TABLES:
        return [RowPart(name, path, kind, compression, size_bytes=source.size_bytes)]
    starts = range(0, source.size_bytes, part_bytes)
    ends = [min(start + part_bytes, source.size_bytes) for start in starts]
    return [RowPart(name, path, kind, None, start, end, end - start) for start, end in zip(starts, ends, strict=True)]


def _format_of(path: Path, compression: Compression | None) -> RowFormat:
    """By the ending; else by the beginning: Parquet, or JSON lines if the first line that is not blank is an object."""
    by_ending = _format_by_ending(path)
    if by_ending in (*TABLES, "jsonl", "parquet"):
        return by_ending
    with explained_os_errors(path, "read"), open_file(path) as handle:
        beginning = handle.read(6)
    for magic, name in _OTHERS.items():
        if beginning.startswith(magic):
            raise InputError(f"{path}: compressed with {name}; unpack it, or compress it with gzip or zstd")
    if beginning.startswith(_PARQUET):
        return "parquet"
    with opened_text(path, compression) as handle:
        first = b""
        while not first.strip() and (line := handle.readline(LONGEST_LINE_BYTES)):
            first = line.removeprefix(BYTE_ORDER_MARK)
    if first.startswith(b"<doc "):
        raise InputError(f"{path}: holds WikiExtractor's <doc ...>; extract it once more with --json, a text on each line")
    return "jsonl" if is_json_line(first.lstrip(), path) else "txt"


def _parquet_parts(path: Path, part_bytes: int) -> list[tuple[int, int, int]]:
    """(first row group, end, bytes) of runs of row groups; a larger one is one part."""
    sizes = [size for _, size in _row_groups(path)]
    parts, start, size_of_part = [], 0, 0
    for group, size in enumerate(sizes):
        if size_of_part and size_of_part + size > part_bytes:
            parts.append((start, group, size_of_part))
            start, size_of_part = group, 0
        size_of_part += size
    if start < len(sizes):
        parts.append((start, len(sizes), size_of_part))
    return parts
