"""Documents of a text file, one at a time: plain text, WikiExtractor's `<doc ...>` blocks, JSON lines; plain or gzipped.

What a file is, is found from its first bytes, never from its name. A document is a list of non-empty, stripped lines. One of
more than `DOCUMENT_CHARACTERS` is cut between lines into several, so that memory stays bounded.
"""

from __future__ import annotations

import gzip
import html
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.corpus.documentation import documentation_documents
from gaudi_bert.corpus.python_texts import python_texts
from gaudi_bert.corpus.sentences import Layout, detect_layout, sentences_of_lines
from gaudi_bert.corpus.sources import Source

__all__ = ["DOCUMENT_CHARACTERS", "TextFormat", "detect_format", "read_documents"]

FormatName = Literal["plain text", "WikiExtractor", "JSON lines", "Python documentation"]

DOCUMENT_CHARACTERS = 1 << 20
_LONGEST_LINE_BYTES = 64 << 20
_SAMPLE_DOCUMENTS = 200
_SAMPLE_LINES = 2000

_GZIP_MAGIC = b"\x1f\x8b"
_OTHER_COMPRESSIONS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
_TITLE = re.compile(r'\btitle="([^"]*)"')


@dataclass(frozen=True)
class TextFormat:
    """What a source was found to be."""

    name: FormatName
    gzipped: bool
    layout: Layout

    def __str__(self) -> str:
        lines = {"sentences": "one sentence a line", "paragraphs": "paragraphs to split", "wrapped": "wrapped lines to join"}
        if self.name == "Python documentation":
            return self.name
        return f"{self.name}{', gzipped' if self.gzipped else ''}, {lines[self.layout]}"


@dataclass(frozen=True)
class _Line:
    """A line of text with its number, from 1, for messages."""

    number: int
    text: str


def detect_format(source: Source) -> TextFormat:
    """Find what `source` is from its beginning.

    Raises:
        InputError: it cannot be read, is compressed in another way, or its beginning is malformed.
    """
    if source.path is None:
        return TextFormat("Python documentation", False, "sentences")
    with _open_bytes(source.path) as handle:
        beginning = handle.read(6)
    for magic, compression in _OTHER_COMPRESSIONS.items():
        if beginning.startswith(magic):
            raise InputError(f"{source.path}: compressed with {compression}; unpack it, or compress it with gzip")
    gzipped = beginning.startswith(_GZIP_MAGIC)
    name: FormatName = "plain text"
    for line in _read_lines(source.path, gzipped):
        if line.text:
            name = _format_of_line(line.text, source.path)
            break
    sample: list[list[str]] = []
    lines = 0
    for document in itertools.islice(_split_documents(source.path, name, gzipped), _SAMPLE_DOCUMENTS):
        sample.append(document[: _SAMPLE_LINES - lines])
        lines += len(sample[-1])
        if lines >= _SAMPLE_LINES:
            break
    return TextFormat(name, gzipped, detect_layout(sample))


def _format_of_line(text: str, path: Path) -> FormatName:
    if text.startswith("<doc "):
        return "WikiExtractor"
    if text.startswith("{"):
        names = path.name.lower()
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return "JSON lines" if ".json" in names else "plain text"
        return "JSON lines"
    return "plain text"


def read_documents(source: Source, text_format: TextFormat) -> Iterator[list[str]]:
    """The documents of `source`, each a non-empty list of sentences.

    Raises:
        InputError: the file is missing, truncated, not UTF-8, or a record of it is malformed.
    """
    if source.path is None:
        yield from documentation_documents(python_texts(source.name))
        return
    for lines in _split_documents(source.path, text_format.name, text_format.gzipped):
        for piece in _cut(lines):
            sentences = sentences_of_lines(piece, text_format.layout)
            if sentences:
                yield sentences


def _cut(lines: list[str]) -> Iterator[list[str]]:
    piece: list[str] = []
    characters = 0
    for line in lines:
        if piece and characters + len(line) > DOCUMENT_CHARACTERS:
            yield piece
            piece, characters = [], 0
        piece.append(line)
        characters += len(line)
    yield piece


def _split_documents(path: Path, name: FormatName, gzipped: bool) -> Iterator[list[str]]:
    split = {"plain text": _plain_documents, "WikiExtractor": _wikiextractor_documents, "JSON lines": _json_documents}[name]
    return (document for document in split(path, _read_lines(path, gzipped)) if document)


def _plain_documents(path: Path, lines: Iterator[_Line]) -> Iterator[list[str]]:
    document: list[str] = []
    for line in lines:
        if line.text:
            document.append(line.text)
        elif document:
            yield document
            document = []
    yield document


def _wikiextractor_documents(path: Path, lines: Iterator[_Line]) -> Iterator[list[str]]:
    document: list[str] | None = None
    title = ""
    for line in lines:
        if line.text.startswith("<doc "):
            if document is not None:
                raise InputError(f"{path}: line {line.number}: <doc> inside a <doc>; the </doc> before it is missing")
            title_match = _TITLE.search(line.text)
            title = html.unescape(title_match[1]) if title_match else ""
            document = []
        elif line.text == "</doc>":
            yield document or []
            document = None
        elif line.text and document is None:
            raise InputError(
                f"{path}: line {line.number}: text outside <doc ...> and </doc>; the file is not as WikiExtractor wrote it"
            )
        elif line.text and document is not None and (document or html.unescape(line.text) != title):
            document.append(line.text)
    yield document or []


def _json_documents(path: Path, lines: Iterator[_Line]) -> Iterator[list[str]]:
    for line in lines:
        if not line.text:
            continue
        try:
            value = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path}: line {line.number}: not JSON ({shortened(str(error))}); mend or remove the line"
            ) from error
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise InputError(f"{path}: line {line.number}: no field `text` with a string in it; mend or remove the line")
        yield [stripped for part in text.splitlines() if (stripped := part.strip())]


def _open_bytes(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}; check the file and its permissions") from error


def _read_lines(path: Path, gzipped: bool) -> Iterator[_Line]:
    """The stripped lines of a UTF-8 file; a byte order mark is skipped."""
    offset = 0
    with _open_bytes(path) as raw:
        handle = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if gzipped else raw
        for number in itertools.count(1):
            try:
                line = handle.readline(_LONGEST_LINE_BYTES)
            except (EOFError, zlib.error, OSError) as error:
                raise InputError(
                    f"{path}: line {number}: cannot read on ({error}); the file is damaged or cut short"
                ) from error
            if not line:
                return
            if len(line) >= _LONGEST_LINE_BYTES:
                raise InputError(
                    f"{path}: line {number} is longer than {_LONGEST_LINE_BYTES >> 20} MiB; break its lines, if this is text"
                )
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                place = f"byte {offset + error.start}{' of the unpacked text' if gzipped else ''} (line {number})"
                raise InputError(
                    f"{path}: not UTF-8 at {place}; convert the file, for example with iconv -t UTF-8"
                ) from error
            offset += len(line)
            yield _Line(number, text.strip())
