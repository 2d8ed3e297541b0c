"""Files of rows, the parts of them that can be read alone, and their lines, plain or compressed with gzip or zstd.

A line ends at a line feed and nowhere else: people's comments hold carriage returns and other characters that Python would
also take for the end of a line. No line is held beyond `files.LONGEST_ROW_BYTES`, whatever it was compressed to.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from gaudi_bert.common import files
from gaudi_bert.common.arrow import open_parquet
from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.files import explain_os_errors, open_file
from gaudi_bert.config.sections import RowFormat, TaskSettings
from gaudi_bert.corpus.documents import Compression, Source, is_json_line, opened_text
from gaudi_bert.rows.types import STANDARD_INPUT, RowPosition, source_name

Line: TypeAlias = str | UnicodeDecodeError
"""A line with its end; an error where its bytes are not text of the encoding."""

_ENDINGS: dict[str, RowFormat] = {
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
_COMPRESSIONS: dict[bytes, Compression] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
BYTE_ORDER_MARK = "\ufeff"
_UTF_8_MARK, _UTF_16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class RowPart:
    """A file of rows, or what is read alone of it; `path` is None for standard input, and for a text that Python carries.

    Its lines begin in the bytes, or it has the row groups, `start` to `end`, which is None for a file that is read to its
    end; `size_bytes` is about how much of the file that is.
    """

    name: str
    path: Path | None
    kind: RowFormat | Literal["built-in"]
    compression: Compression | None = None
    encoding: str = "utf-8"
    start: int = 0
    end: int | None = None
    size_bytes: int = 0

    def location(self, position: RowPosition) -> str:
        """Name a row of this part in messages, counted through the file."""
        if self.path is not None and self.start:
            number, line = position
            if self.kind == "parquet":
                position = RowPosition(number + sum(rows for rows, _ in _row_groups(self.path)[: self.start]))
            else:
                lines = rows = 0  # that begin before this part
                with open_file(self.path) as handle:
                    while handle.tell() < self.start:
                        before = handle.readline(files.LONGEST_ROW_BYTES)
                        lines, rows = lines + 1, rows + bool(before.decode(self.encoding, "replace").strip())
                position = RowPosition(number + rows, None if line is None else line + lines)
        return f"{self.name}: {position}"

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The bytes of the file as they were before they were compressed."""
        if self.path is None:
            yield sys.stdin.buffer
        else:
            with opened_text(self.path, self.compression) as handle:
                yield handle

    @contextmanager
    def lines(self) -> Iterator[Iterator[tuple[int, Line]]]:
        """The lines that begin in the part, with their numbers from 1, without a byte-order mark."""
        with self.opened() as handle:
            yield enumerate(_byte_lines(self, handle) if _has_byte_lines(self.encoding) else _wide_lines(self, handle), 1)

    def not_text(self, error: UnicodeDecodeError) -> InputError:
        """The error for a line that is not text of the encoding."""
        encoding = "UTF-8" if self.encoding == "utf-8" else self.encoding
        return InputError(f"not {encoding} at its byte {error.start}; {self.encoding_remedy(error).partition(': ')[2]}")

    def encoding_remedy(self, error: UnicodeDecodeError) -> str:
        """Return what to do about a line that is not text of the encoding."""
        other = "cp1252" if self.encoding == "utf-8" else "utf-8"
        if self.encoding == "utf-8" and error.object[:2] in _UTF_16_MARKS:
            other = "utf-16"
        return f"its text is not {self.encoding}: say what it is, such as --encoding {other}, or save it as UTF-8"


def _has_byte_lines(encoding: str) -> bool:
    """Whether the byte of a line feed ends a line and is nothing else, as in all encodings but UTF-16 and its like."""
    return "\n".encode(encoding) == b"\n"


def _byte_lines(part: RowPart, handle: BinaryIO) -> Iterator[Line]:
    at = part.start
    if at:
        handle.seek(at - 1)
        at += len(handle.readline()) - 1
    while part.end is None or at < part.end:
        data = handle.readline(files.LONGEST_ROW_BYTES)
        if not data:
            return
        _check_length(part, len(data))
        try:
            line: Line = data.decode(part.encoding)
        except UnicodeDecodeError as error:
            line = error
        yield line.removeprefix(BYTE_ORDER_MARK) if at == 0 and isinstance(line, str) else line
        at += len(data)


def _wide_lines(part: RowPart, handle: BinaryIO) -> Iterator[Line]:
    text = io.TextIOWrapper(handle, part.encoding, newline="\n")
    try:
        for number in count(1):
            line = text.readline(files.LONGEST_ROW_BYTES)
            if not line:
                return
            _check_length(part, len(line))
            yield line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
    except UnicodeError as error:
        raise InputError(f"{part.name}: not {part.encoding} ({shorten(str(error))}); name another --encoding") from error
    finally:
        text.detach()


def _check_length(part: RowPart, length: int) -> None:
    if length >= files.LONGEST_ROW_BYTES:
        raise InputError(f"{part.name}: a line is longer than {longest_row()}; break it, if this is text")


def longest_row() -> str:
    """The bound of a line, a row, a sentence, for messages."""
    return f"{files.LONGEST_ROW_BYTES / 2**20:g} MiB"


def complete_file(path: str | Path, settings: TaskSettings) -> RowPart:
    """A file, or standard input, as one part; its format is the given one, or by its ending."""
    if str(path) == STANDARD_INPUT:  # which holds JSON lines
        return RowPart(source_name(path), None, settings.format or "jsonl", encoding=settings.encoding)
    if Path(path).is_dir():
        raise InputError(f"{path}: cannot read: Is a directory; give a file in it")
    kind = settings.format or _format_by_ending(path)
    if kind is None:
        raise InputError(f"{path}: unknown ending; known are {', '.join(_ENDINGS)} (and .gz, .zst), or give --format jsonl")
    # An encoding that nobody named, that of a model's training data, is for tables alone.
    encoding = settings.encoding if kind in TABLES or "encoding" in settings.named else "utf-8"
    return RowPart(str(path), Path(path), kind, _compression_of(Path(path)), encoding)


def _format_by_ending(path: str | Path) -> RowFormat | None:
    name = Path(path).name.lower()
    return _ENDINGS.get(Path(name.removesuffix(".gz").removesuffix(".zst")).suffix)


def _compression_of(path: Path) -> Compression | None:
    """Return how a file is compressed, by its first bytes."""
    with explain_os_errors(path, "read"), open_file(path) as handle:
        beginning = handle.read(4)
    return next((name for magic, name in _COMPRESSIONS.items() if beginning.startswith(magic)), None)


def _row_groups(path: Path) -> list[tuple[int, int]]:
    """(rows, bytes) of each row group of a Parquet file."""
    with open_parquet(path) as table:
        groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
        return [(group.num_rows, group.total_byte_size) for group in groups]


# --- files of rows divided into parts that can be read alone: lines that begin in a range of bytes, or runs of row groups.
#
# A compressed file can be read from its front only, a quoted cell of a table may hold lines, and in UTF-16 a byte does not
# show where a line ends, so each is one part. The parts are a function of the file and its settings alone.

_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
_PARQUET = b"PAR1"


def row_parts(source: Source, settings: TaskSettings, part_bytes: int) -> list[RowPart]:
    """The parts of a source, in order, of about `part_bytes` each where its format allows that.

    Its format is the given one, or by its ending; that of any other name is detected from its beginning. What was copied
    from standard input holds JSON lines.
    """
    path, name, given, encoding = source.path, source.shown, settings.format, settings.encoding
    if path is None:
        return [RowPart(name, None, "built-in")]
    compression = _compression_of(path)
    if source.name == source_name(STANDARD_INPUT):
        name, given = source.name, given or "jsonl"
    kind = given or _format_of(path, compression)
    if kind == "parquet":
        return [RowPart(name, path, kind, None, encoding, *groups) for groups in _parquet_parts(path, part_bytes)]
    if compression is not None or kind in TABLES or not _has_byte_lines(encoding):
        return [RowPart(name, path, kind, compression, encoding, size_bytes=source.size_bytes)]
    size = source.size_bytes
    bounds = ((start, min(start + part_bytes, size)) for start in range(0, size, part_bytes))
    return [RowPart(name, path, kind, None, encoding, start, end, end - start) for start, end in bounds]


def _format_of(path: Path, compression: Compression | None) -> RowFormat:
    """Return the format by the ending, else by the beginning: Parquet, JSON lines if the first line is an object, text."""
    by_ending = _format_by_ending(path)
    if by_ending in (*TABLES, "jsonl", "parquet"):
        return by_ending
    with explain_os_errors(path, "read"), open_file(path) as handle:
        beginning = handle.read(6)
    for magic, name in _OTHERS.items():
        if beginning.startswith(magic):
            raise InputError(f"{path}: compressed with {name}; unpack it, or compress it with gzip or zstd")
    if beginning.startswith(_PARQUET):
        return "parquet"
    with opened_text(path, compression) as handle:
        first = b""
        while not first.strip() and (line := handle.readline(files.LONGEST_ROW_BYTES)):
            first = line.removeprefix(_UTF_8_MARK)
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
