"""Divide files of rows into parts that can be read independently, and read their lines, also from gzip or zstd.

A line ends only at a line feed, because texts may contain carriage returns and other characters that Python also treats as
line ends. A line longer than `files.LONGEST_ROW_BYTES` is rejected, so memory stays bounded even if a compressed file
expands to a very long line.
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
from gaudi_bert.corpus.documents import Compression, Source, is_json_line, open_decompressed_file
from gaudi_bert.rows.types import STANDARD_INPUT, RowPosition, format_input_name

# A line with its line feed, or an error if its bytes are not valid in the encoding.
Line: TypeAlias = str | UnicodeDecodeError

_EXTENSIONS: dict[str, RowFormat] = {
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
    """A file of rows, or a part of a file that can be read independently.

    A part of a text file consists of the lines that begin in its range of bytes. A part of a Parquet file consists of row
    groups.

    Attributes:
        name: The name of the file in messages.
        path: The file. None for standard input and for the texts that are bundled with Python.
        kind: The format.
        compression: How the file is compressed, or None.
        encoding: The encoding of the text.
        start: The first byte or row group of the part.
        end: The byte or row group after the last one. None means the end of the file.
        size_bytes: The approximate number of bytes of the file that the part covers.
    """

    name: str
    path: Path | None
    kind: RowFormat | Literal["built-in"]
    compression: Compression | None = None
    encoding: str = "utf-8"
    start: int = 0
    end: int | None = None
    size_bytes: int = 0

    def format_location(self, position: RowPosition) -> str:
        """Return the file name and the position of a row as text for messages. Rows and lines are counted from the beginning
        of the file, even if this part begins later.

        Args:
            position: The position of the row, counted from the beginning of this part.
        """
        if self.path is not None and self.start:
            number, line = position
            if self.kind == "parquet":
                position = RowPosition(number + sum(rows for rows, _ in _read_row_group_sizes(self.path)[: self.start]))
            else:
                lines = rows = 0  # the numbers of lines and rows that begin before this part
                with open_file(self.path) as handle:
                    while handle.tell() < self.start:
                        before = handle.readline(files.LONGEST_ROW_BYTES)
                        lines, rows = lines + 1, rows + bool(before.decode(self.encoding, "replace").strip())
                position = RowPosition(number + rows, None if line is None else line + lines)
        return f"{self.name}: {position}"

    @contextmanager
    def open_bytes(self) -> Iterator[BinaryIO]:
        """Open the file or standard input, and yield a binary stream of its decompressed bytes."""
        if self.path is None:
            yield sys.stdin.buffer
        else:
            with open_decompressed_file(self.path, self.compression) as handle:
                yield handle

    @contextmanager
    def open_lines(self) -> Iterator[Iterator[tuple[int, Line]]]:
        """Open the file, and yield an iterator over the lines that begin in this part, as pairs (line number, line).

        The numbers count from 1. A byte-order mark is removed.
        """
        with self.open_bytes() as handle:
            yield enumerate(
                _decode_line_by_line(self, handle)
                if _has_one_byte_line_feed(self.encoding)
                else _decode_complete_file(self, handle),
                1,
            )

    def decoding_error(self, error: UnicodeDecodeError) -> InputError:
        """Return the error for a line that cannot be decoded with the encoding of the file."""
        encoding = "UTF-8" if self.encoding == "utf-8" else self.encoding
        return InputError(
            f"the line is not {encoding} at byte {error.start}; {self.encoding_remedy(error).partition(': ')[2]}"
        )

    def encoding_remedy(self, error: UnicodeDecodeError) -> str:
        """Return the remedy for a line that cannot be decoded, which is the option that sets another encoding."""
        other = "cp1252" if self.encoding == "utf-8" else "utf-8"
        if self.encoding == "utf-8" and error.object[:2] in _UTF_16_MARKS:
            other = "utf-16"
        return f"the text is not {self.encoding}: pass the encoding, such as --encoding {other}, or save the file as UTF-8"


def _has_one_byte_line_feed(encoding: str) -> bool:
    """Return whether an encoding stores a line feed as one byte. If so, lines can be found without decoding. For UTF-16 and
    UTF-32, the result is false.
    """
    return "\n".encode(encoding) == b"\n"


def _decode_line_by_line(part: RowPart, handle: BinaryIO) -> Iterator[Line]:
    """Decode and yield the lines that begin in a part of a file. The encoding must store a line feed as one byte.

    A line that cannot be decoded is yielded as an error.
    """
    at = part.start
    if at:
        handle.seek(at - 1)
        at += len(handle.readline()) - 1
    while part.end is None or at < part.end:
        data = handle.readline(files.LONGEST_ROW_BYTES)
        if not data:
            return
        _check_line_length(part, len(data))
        try:
            line: Line = data.decode(part.encoding)
        except UnicodeDecodeError as error:
            line = error
        yield line.removeprefix(BYTE_ORDER_MARK) if at == 0 and isinstance(line, str) else line
        at += len(data)


def _decode_complete_file(part: RowPart, handle: BinaryIO) -> Iterator[Line]:
    """Decode a complete file, and yield its lines. Encodings such as UTF-16 need this, because their lines can be found only
    after decoding.
    """
    text = io.TextIOWrapper(handle, part.encoding, newline="\n")
    try:
        for number in count(1):
            line = text.readline(files.LONGEST_ROW_BYTES)
            if not line:
                return
            _check_line_length(part, len(line))
            yield line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
    except UnicodeError as error:
        raise InputError(
            f"{part.name}: the file is not {part.encoding} ({shorten(str(error))}); pass another --encoding"
        ) from error
    finally:
        text.detach()


def _check_line_length(part: RowPart, length: int) -> None:
    """Raise an InputError if a line is so long that only its beginning was read."""
    if length >= files.LONGEST_ROW_BYTES:
        raise InputError(f"{part.name}: a line is longer than {format_max_row_size()}; divide it into several lines")


def format_max_row_size() -> str:
    """Return the maximum size of a line, row or sentence as text for messages, such as "64 MiB"."""
    return f"{files.LONGEST_ROW_BYTES / 2**20:g} MiB"


def make_whole_file_part(path: str | Path, settings: TaskSettings) -> RowPart:
    """Return a single part that covers a whole file or standard input.

    Args:
        path: The file, or `-` for standard input.
        settings: The settings of the task. If they specify no format, the file extension determines it.

    Raises:
        InputError: The path is a folder, or its extension is unknown.
    """
    if str(path) == STANDARD_INPUT:  # standard input has no ending, so JSON lines are the default
        return RowPart(format_input_name(path), None, settings.format or "jsonl", encoding=settings.encoding)
    if Path(path).is_dir():
        raise InputError(f"{path}: this is a folder; pass a file in it")
    kind = settings.format or _format_from_extension(path)
    if kind is None:
        raise InputError(
            f"{path}: the file extension is not supported; pass --format, or a file that ends in {', '.join(_EXTENSIONS)}, "
            "optionally with .gz or .zst"
        )
    # The settings of a trained model contain the encoding of the table that it was trained on. Use this encoding only for
    # tables. Read files of other formats as UTF-8 unless the user sets an encoding.
    encoding = settings.encoding if kind in TABLES or "encoding" in settings.keys_set_by_user else "utf-8"
    return RowPart(str(path), Path(path), kind, _detect_compression(Path(path)), encoding)


def _format_from_extension(path: str | Path) -> RowFormat | None:
    """Return the row format that a file extension stands for, or None if the extension is unknown. The extensions `.gz` and
    `.zst` are ignored.
    """
    return _EXTENSIONS.get(Path(Path(path).name.lower().removesuffix(".gz").removesuffix(".zst")).suffix)


def _detect_compression(path: Path) -> Compression | None:
    """Return how a file is compressed, according to its first bytes. Return None if it is not compressed."""
    with explain_os_errors(path, "read"), open_file(path) as handle:
        beginning = handle.read(4)
    return next((name for magic, name in _COMPRESSIONS.items() if beginning.startswith(magic)), None)


def _read_row_group_sizes(path: Path) -> list[tuple[int, int]]:
    """Return (number of rows, bytes) for each row group of a Parquet file."""
    with open_parquet(path) as table:
        groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
        return [(group.num_rows, group.total_byte_size) for group in groups]


# --- Dividing files into parts that can be read independently. A part of a text file is a range of bytes: it consists of the
# lines that begin in this range. A part of a Parquet file is a run of row groups.
#
# A compressed file can be read only from its beginning, a quoted cell of a table may contain line ends, and in UTF-16 a
# single byte does not show where a line ends. Therefore such a file is a single part. The parts depend only on the file and
# its settings.

_UNSUPPORTED_COMPRESSIONS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
_PARQUET = b"PAR1"


def split_source(source: Source, settings: TaskSettings, part_bytes: int) -> list[RowPart]:
    """Divide a data source into parts of about `part_bytes` that can be read independently, and return them in order. A
    source that cannot be divided becomes a single part.

    The format comes from the settings, or otherwise from the file extension. If the extension is unknown, the format is
    detected from the beginning of the file. Data that was copied from standard input is read as JSON lines, unless the
    settings specify a format.

    Args:
        source: The source.
        settings: The settings of the task.
        part_bytes: The size of a part in bytes.

    Raises:
        InputError: The file cannot be read, or is compressed in an unsupported way.
    """
    path, name, given, encoding = source.path, source.display_name, settings.format, settings.encoding
    if path is None:
        return [RowPart(name, None, "built-in")]
    compression = _detect_compression(path)
    if source.name == format_input_name(STANDARD_INPUT):
        name, given = source.name, given or "jsonl"
    kind = given or _detect_format(path, compression)
    if kind == "parquet":
        return [RowPart(name, path, kind, None, encoding, *groups) for groups in _split_row_groups(path, part_bytes)]
    if compression is not None or kind in TABLES or not _has_one_byte_line_feed(encoding):
        return [RowPart(name, path, kind, compression, encoding, size_bytes=source.size_bytes)]
    size = source.size_bytes
    bounds = ((start, min(start + part_bytes, size)) for start in range(0, size, part_bytes))
    return [RowPart(name, path, kind, None, encoding, start, end, end - start) for start, end in bounds]


def _detect_format(path: Path, compression: Compression | None) -> RowFormat:
    """Detect and return the format of a file from its extension or, if the extension does not determine the format, from its
    content.

    A file that begins like Parquet is Parquet. A file whose first line is a JSON object is JSON lines. Every other file is
    plain text.

    Raises:
        InputError: The file is compressed in an unsupported way, or contains the XML-like output of WikiExtractor.
    """
    by_ending = _format_from_extension(path)
    if by_ending in (*TABLES, "jsonl", "parquet"):
        return by_ending
    with explain_os_errors(path, "read"), open_file(path) as handle:
        beginning = handle.read(6)
    for magic, name in _UNSUPPORTED_COMPRESSIONS.items():
        if beginning.startswith(magic):
            raise InputError(
                f"{path}: compression with {name} is not supported; decompress the file, or compress it with gzip or zstd"
            )
    if beginning.startswith(_PARQUET):
        return "parquet"
    with open_decompressed_file(path, compression) as handle:
        first = b""
        while not first.strip() and (line := handle.readline(files.LONGEST_ROW_BYTES)):
            first = line.removeprefix(_UTF_8_MARK)
    if first.startswith(b"<doc "):
        raise InputError(
            f"{path}: the file contains the <doc ...> elements of WikiExtractor; run WikiExtractor again with --json, which "
            "writes one text per line"
        )
    return "jsonl" if is_json_line(first.lstrip(), path) else "txt"


def _split_row_groups(path: Path, part_bytes: int) -> list[tuple[int, int, int]]:
    """Divide the row groups of a Parquet file into ranges of at most `part_bytes`, and return (first row group, end, bytes)
    for each range.

    A row group that is larger becomes a range of its own.
    """
    sizes = [size for _, size in _read_row_group_sizes(path)]
    parts, start, size_of_part = [], 0, 0
    for group, size in enumerate(sizes):
        if size_of_part and size_of_part + size > part_bytes:
            parts.append((start, group, size_of_part))
            start, size_of_part = group, 0
        size_of_part += size
    if start < len(sizes):
        parts.append((start, len(sizes), size_of_part))
    return parts
