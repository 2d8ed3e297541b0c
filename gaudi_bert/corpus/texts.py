"""Texts for a tokenizer, one at a time and as they are: lines of plain text, a field of JSON lines, or a column of Parquet.

What a source holds is told by its first bytes, plain or compressed with gzip or zstd. It is divided into parts that can be
read alone: lines that begin in a range of bytes, or runs of row groups. A compressed file can be read from its front only,
so it is one part. The parts are a function of the file, whoever reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.common.files import explained_os_errors, open_file
from gaudi_bert.corpus.documents import LONGEST_LINE_BYTES, Compression, Source, is_json_line, opened_text
from gaudi_bert.corpus.python_texts import documentation_documents, python_texts
from gaudi_bert.records.tables.texts import read_text_column, row_groups

_Form = Literal["lines", "json", "parquet", "built-in"]
_Compression = Literal["gzip", "zstd"]

_COMPRESSIONS: dict[bytes, _Compression] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
_PARQUET = b"PAR1"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Text(NamedTuple):
    """A text, and the number of its line or row in its part, from 1."""

    number: int
    text: str


@dataclass(frozen=True)
class TextPart:
    """What is read alone of a source.

    Attributes:
        start, end: the bytes in which its lines begin, or its row groups; of what is compressed, 0 and the file's size.
        size_bytes: about how much of the file that is.
    """

    source: Source
    form: _Form
    compression: Compression | None
    start: int
    end: int
    size_bytes: int

    @property
    def path(self) -> Path:
        """The file."""
        return self.source.path or Path(self.source.name)

    def place(self, number: int) -> str:
        """How messages name the line or the row `number` of this part, counted through the whole file."""
        path = self.path
        if self.form == "built-in":
            return f"{path}: text {number}"
        if self.form == "parquet":
            return f"{path}: row {sum(rows for rows, _ in row_groups(path)[: self.start]) + number - 1}"
        before = 0
        if self.start:
            with open_file(path) as handle:
                while handle.tell() < self.start:
                    before += handle.read(min(1 << 20, self.start - handle.tell())).count(b"\n")
                handle.seek(self.start - 1)
                before += handle.read(1) != b"\n"  # the line in which the part before ends
        return f"{path}: line {before + number}"


def text_parts(source: Source, part_bytes: int) -> list[TextPart]:
    """The parts of a source, in order, of about `part_bytes` each where its format allows that."""
    path = source.path
    if path is None:
        return [TextPart(source, "built-in", None, 0, 0, 0)]
    with explained_os_errors(path, "read"), open_file(path) as handle:
        beginning = handle.read(6)
    for magic, name in _OTHERS.items():
        if beginning.startswith(magic):
            raise InputError(f"{path}: compressed with {name}; unpack it, or compress it with gzip or zstd")
    if beginning.startswith(_PARQUET):
        return _parquet_parts(source, path, part_bytes)
    compression = next((name for magic, name in _COMPRESSIONS.items() if beginning.startswith(magic)), None)
    form = _form_of_lines(path, compression)
    if compression is not None:
        return [TextPart(source, form, compression, 0, source.size_bytes, source.size_bytes)]
    starts = range(0, source.size_bytes, part_bytes)
    ends = [min(start + part_bytes, source.size_bytes) for start in starts]
    return [TextPart(source, form, None, start, end, end - start) for start, end in zip(starts, ends, strict=True)]


def read_texts(part: TextPart, column: str) -> Iterator[Text]:
    """The texts of a part, as they are; blank lines are none, a blank value of a field or column is one.

    Args:
        column: the field of JSON, or the column of Parquet, that holds the text.
    """
    if part.form == "built-in":
        documents = documentation_documents(python_texts(part.source.name))
        yield from (Text(number, "\n".join(document)) for number, document in enumerate(documents, start=1))
    elif part.form == "parquet":
        yield from _parquet_texts(part, column)
    else:
        for number, line in enumerate(_lines(part), start=1):
            if line.strip():
                text = line.rstrip(b"\r\n") if part.form == "lines" else line
                yield Text(
                    number, _decoded(part, number, text) if part.form == "lines" else _field(part, number, text, column)
                )


# --- lines


def _form_of_lines(path: Path, compression: Compression | None) -> _Form:
    """Whether the first line that is not blank is an object of JSON."""
    with opened_text(path, compression) as handle:
        first = b""
        while not first.strip() and (line := handle.readline(LONGEST_LINE_BYTES)):
            first = line.removeprefix(_BYTE_ORDER_MARK)
    if first.startswith(b"<doc "):
        raise InputError(f"{path}: holds WikiExtractor's <doc ...>; extract it once more with --json, a text on each line")
    return "json" if is_json_line(first.lstrip(), path) else "lines"


def _lines(part: TextPart) -> Iterator[bytes]:
    """The lines that begin in the bytes of a part; every line of a compressed file."""
    path = part.path
    with opened_text(path, part.compression) as handle:
        at = part.start
        if at:
            handle.seek(at - 1)
            at += len(handle.readline()) - 1
        while part.compression is not None or at < part.end:
            line = handle.readline(LONGEST_LINE_BYTES)
            if not line:
                return
            if len(line) >= LONGEST_LINE_BYTES:
                most = LONGEST_LINE_BYTES >> 20
                raise InputError(f"{path}: a line is longer than {most} MiB; break it, if this is text")
            yield line if at else line.removeprefix(_BYTE_ORDER_MARK)
            at += len(line)


def _decoded(part: TextPart, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 at its byte {error.start}; convert the file, for example with iconv -t UTF-8"
        raise InputError(f"{part.place(number)}: {reason}") from error


def _field(part: TextPart, number: int, line: bytes, column: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{part.place(number)}: is not JSON ({shortened(str(error))}); write one object on each line"
        ) from error
    if not isinstance(record, dict):
        raise InputError(f'{part.place(number)}: {shown(record)} is not an object; write for example {{"text": "..."}}')
    text = record.get(column)
    if not isinstance(text, str):
        has = f"{column} is {shown(text)}" if column in record else f"has no {column}, only {', '.join(record) or 'nothing'}"
        raise InputError(f"{part.place(number)}: {has}; it must hold a text, or name its field with --text-column")
    if b"\\ud" in line.lower():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"{part.place(number)}: {column} holds half a character at {error.start}; write the other half too"
            ) from error
    return text


# --- Parquet


def _parquet_parts(source: Source, path: Path, part_bytes: int) -> list[TextPart]:
    """Runs of row groups; a larger one is a part of its own."""
    sizes = [size for _, size in row_groups(path)]
    parts, start, held = [], 0, 0
    for group, size in enumerate(sizes):
        if held and held + size > part_bytes:
            parts.append(TextPart(source, "parquet", None, start, group, held))
            start, held = group, 0
        held += size
    if start < len(sizes):
        parts.append(TextPart(source, "parquet", None, start, len(sizes), held))
    return parts


def _parquet_texts(part: TextPart, column: str) -> Iterator[Text]:
    for number, text in enumerate(read_text_column(part.path, column, range(part.start, part.end)), start=1):
        if text is None:
            raise InputError(f"{part.place(number)}: {column} is null; fill it, or leave the row out")
        yield Text(number, text)
