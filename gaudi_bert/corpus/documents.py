"""Find text sources, detect their formats, and read their documents one at a time.

A source is a text file or the documentation that is bundled with Python. Supported formats are plain text with blank lines
between documents, WikiExtractor's `<doc ...>` blocks, and JSON lines, each of them optionally compressed with gzip. The
format is detected from the beginning of the file. A source is identified by its relative name, its size and the CRC-32 of
its bytes.

A document is read as a list of sentences. A document with more than `DOCUMENT_CHARACTERS` characters is cut between lines
into several documents, so that memory does not depend on its size.
"""

from __future__ import annotations

import glob
import gzip
import html
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Literal

from gaudi_bert.common.arrow import require_pyarrow
from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.features import BUILT_IN_TEXTS
from gaudi_bert.common.files import LONGEST_ROW_BYTES, explain_os_errors, open_file
from gaudi_bert.corpus.python_texts import convert_texts_to_documents, load_python_texts
from gaudi_bert.corpus.sentences import LineLayout, detect_line_layout, split_lines_into_sentences

Compression = Literal["gzip", "zstd"]
_FormatName = Literal["plain text", "WikiExtractor", "JSON lines", "Python documentation"]

DOCUMENT_CHARACTERS = 1 << 20
_READ_BYTES = 1 << 20
_SAMPLE_DOCUMENTS = 200
_SAMPLE_LINES = 2000

_GZIP_MAGIC = b"\x1f\x8b"
_OTHER_COMPRESSIONS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
_TITLE = re.compile(r'\btitle="([^"]*)"')


# --- sources


@dataclass(frozen=True)
class Source:
    """A source of text: a file, or a text that is bundled with Python.

    Attributes:
        name: The relative path of the file, which is the same on every machine, or a key of `BUILT_IN_TEXTS`.
        path: The path of the file, or None for a text that is bundled with Python.
        size_bytes: The size of the file, or 0 for a text that is bundled with Python.
    """

    name: str
    path: Path | None
    size_bytes: int

    @property
    def display_name(self) -> str:
        """The name that messages use for the source."""
        return str(self.path) if self.path is not None else self.name


def find_sources(texts: Sequence[str], folder: Path) -> list[Source]:
    """Return the text sources that the setting `prepare.text` lists, in a fixed order and without duplicates.

    Args:
        texts: Files, folders, globs, or keys of `BUILT_IN_TEXTS`.
        folder: The folder that relative paths start from.

    Raises:
        InputError: A text does not exist, or a folder or glob contains no files.
    """
    if not texts:
        raise InputError(
            f"prepare.text: the setting is missing; set it to files, folders, globs or {' or '.join(BUILT_IN_TEXTS)}"
        )
    sources: list[Source] = []
    seen_paths: set[Path] = set()
    for text in texts:
        if text in BUILT_IN_TEXTS:
            sources.append(Source(text, None, 0))
            continue
        for name, path in _list_text_files(text, folder):
            if path.resolve() not in seen_paths:
                seen_paths.add(path.resolve())
                sources.append(Source(name, path, path.stat().st_size))
    return sources


def _list_text_files(path_or_glob: str, folder: Path) -> list[tuple[str, Path]]:
    """List the files at a path or glob as (relative name, path), sorted by name. Hidden files are left out.

    Raises:
        InputError: The path does not exist, or there are no files.
    """
    path = folder / Path(path_or_glob).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        files = [child for child in path.rglob("*") if child.is_file()]
        base_folder = path
    elif glob.has_magic(path_or_glob):
        files = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
        base_folder = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    else:
        raise InputError(f"{path}: the path does not exist; check prepare.text")
    names_and_paths = sorted((child.relative_to(base_folder).as_posix(), child) for child in files)
    names_and_paths = [
        (name, child) for name, child in names_and_paths if not any(part.startswith(".") for part in name.split("/"))
    ]
    if not names_and_paths:
        raise InputError(f"{path}: the folder or pattern contains no files; check prepare.text")
    return names_and_paths


def compute_source_identity(source: Source) -> dict[str, Any]:
    """Return the name, size and CRC-32 of a text source. They are stored in settings.json to detect changed input."""
    checksum, size = 0, 0
    if source.path is None:
        content = json.dumps(load_python_texts(source.name), sort_keys=True, ensure_ascii=True).encode("utf-8")
        checksum, size = zlib.crc32(content), len(content)
    else:
        with explain_os_errors(source.path, "read"), open_file(source.path) as handle:
            while chunk := handle.read(_READ_BYTES):
                checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
    return {"name": source.name, "bytes": size, "crc32": f"{checksum:08x}"}


# --- documents


# A text with more lines per sentence than this, on average, is reported as lacking punctuation at the ends of its sentences.
_MAX_LINES_PER_SENTENCE = 50


@dataclass(frozen=True)
class TextFormat:
    """The format of a text source. `str()` returns a description for users and for examples.json.

    Attributes:
        name: The name of the format.
        gzipped: Whether the file is compressed with gzip.
        layout: How sentences are divided into lines.
        lacks_sentence_ends: Whether the text seems to lack punctuation at the ends of sentences, because the sentences at
            its beginning have too many lines.
    """

    name: _FormatName
    gzipped: bool
    layout: LineLayout
    lacks_sentence_ends: bool = False

    def __str__(self) -> str:
        lines = {"sentences": "one sentence a line", "paragraphs": "paragraphs to split", "wrapped": "wrapped lines to join"}
        if self.name == "Python documentation":
            return self.name
        warning = "; no line ends a sentence, so each document is one sentence; write one sentence per line or add stops"
        description = f"{self.name}{', gzipped' if self.gzipped else ''}, {lines[self.layout]}"
        return description + warning if self.lacks_sentence_ends else description


# A line of a text file: (line number, text without surrounding white space).
_Line = tuple[int, str]


def detect_text_format(source: Source) -> TextFormat:
    """Detect the format of a text source from the beginning of its file.

    Raises:
        InputError: The file cannot be read, or its compression is not supported.
    """
    if source.path is None:
        return TextFormat("Python documentation", False, "sentences")
    with explain_os_errors(source.path, "read"), open_file(source.path) as handle:
        beginning = handle.read(6)
    for magic, compression in _OTHER_COMPRESSIONS.items():
        if beginning.startswith(magic):
            raise InputError(
                f"{source.path}: {compression} compression is not supported; decompress the file, or compress it with gzip"
            )
    gzipped = beginning.startswith(_GZIP_MAGIC)
    name: _FormatName = "plain text"
    for _, text in _read_lines(source.path, gzipped):
        if text:
            if text.startswith("<doc "):
                name = "WikiExtractor"
            elif is_json_line(text.encode("utf-8"), source.path):
                name = "JSON lines"
            break
    lines = itertools.islice(_read_document_lines(source.path, name, gzipped), _SAMPLE_LINES)
    documents = itertools.groupby(lines, key=itemgetter(0))
    sample = [[text for _, text in document] for _, document in itertools.islice(documents, _SAMPLE_DOCUMENTS)]
    layout = detect_line_layout(sample)
    sentences = sum(len(split_lines_into_sentences(document, layout)) for document in sample)
    return TextFormat(name, gzipped, layout, _MAX_LINES_PER_SENTENCE * sentences < sum(map(len, sample)))


def is_json_line(first_line: bytes, path: Path) -> bool:
    """Return whether a text file contains JSON lines, judging by its first non-blank line and its name.

    The line must begin with a brace. If it is not valid JSON, the file counts as JSON lines only if its name contains
    `.json`, so that the error is reported later.

    Args:
        first_line: The line.
        path: The path of the file.
    """
    if not first_line.startswith(b"{"):
        return False
    try:
        json.loads(first_line)
    except (ValueError, RecursionError):
        return ".json" in path.name.lower()
    return True


def read_documents(source: Source, text_format: TextFormat) -> Iterator[list[str]]:
    """Read the documents of a text source. Yield each document as a non-empty list of sentences.

    Raises:
        InputError: The file is damaged, is not UTF-8, or does not follow its format.
    """
    if source.path is None:
        yield from convert_texts_to_documents(load_python_texts(source.name)).values()
        return
    lines = _read_document_lines(source.path, text_format.name, text_format.gzipped)
    for _, document in itertools.groupby(lines, key=itemgetter(0)):
        for piece in _cut_long_document(text for _, text in document):
            sentences = split_lines_into_sentences(piece, text_format.layout)
            if sentences:
                yield sentences


def _cut_long_document(lines: Iterable[str]) -> Iterator[list[str]]:
    """Cut a document between lines into pieces of at most `DOCUMENT_CHARACTERS` characters. Yield the lines of each piece.

    A line that is longer than this is not cut.
    """
    piece: list[str] = []
    characters = 0
    for line in lines:
        if piece and characters + len(line) > DOCUMENT_CHARACTERS:
            yield piece
            piece, characters = [], 0
        piece.append(line)
        characters += len(line)
    yield piece


# A non-blank line of a text file: (number of its document in the file, text). Lines are yielded one at a time, because a
# document may not fit in memory.
_DocumentLine = tuple[int, str]


def _read_document_lines(path: Path, format_name: _FormatName, gzipped: bool) -> Iterator[_DocumentLine]:
    """Read a text file of any supported format. Yield each non-blank line with the number of its document."""
    split = {"plain text": _parse_plain_text, "WikiExtractor": _parse_wikiextractor, "JSON lines": _parse_json_lines}[
        format_name
    ]
    return split(path, _read_lines(path, gzipped))


def _parse_plain_text(path: Path, lines: Iterator[_Line]) -> Iterator[_DocumentLine]:
    """Yield the non-blank lines of plain text, where blank lines separate documents."""
    document = 0
    for _, text in lines:
        if text:
            yield document, text
        else:
            document += 1


def _parse_wikiextractor(path: Path, lines: Iterator[_Line]) -> Iterator[_DocumentLine]:
    """Yield the lines between `<doc ...>` and `</doc>`, without the title that WikiExtractor repeats in the first line.

    Raises:
        InputError: A block begins inside another block, or text is outside all blocks.
    """
    title: str | None = None  # None after the first line that does not repeat the title
    is_inside = False
    document = 0
    for number, text in lines:
        if text.startswith("<doc "):
            if is_inside:
                raise InputError(f"{path}: line {number}: a <doc> block begins inside another one; add the missing </doc>")
            title_match = _TITLE.search(text)
            title = html.unescape(title_match[1]) if title_match else ""
            is_inside, document = True, document + 1
        elif text == "</doc>":
            is_inside = False
        elif text and not is_inside:
            raise InputError(f"{path}: line {number}: all text must be between <doc ...> and </doc>; extract the file again")
        elif text and (title is None or html.unescape(text) != title):
            title = None
            yield document, text


def _parse_json_lines(path: Path, lines: Iterator[_Line]) -> Iterator[_DocumentLine]:
    """Yield the lines of the `text` field of each JSON object. Each object is one document.

    Raises:
        InputError: A line is not JSON, or has no field `text` that contains a string.
    """
    for number, line in lines:
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path}: line {number}: the line is not valid JSON ({shorten(str(error))}); fix or remove it"
            ) from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise InputError(f"{path}: line {number}: the field `text` is missing or not a string; fix or remove the line")
        yield from ((number, part.strip()) for part in text.splitlines() if part.strip())


@contextmanager
def open_decompressed_file(path: Path, compression: Compression | None) -> Iterator[BinaryIO]:
    """Open a file, and yield a stream of its bytes. If `compression` is given, the stream decompresses the file.

    Raises:
        InputError: The file cannot be read, is damaged or incomplete.
    """
    with explain_os_errors(path, "read"), open_file(path) as raw:
        try:
            if compression == "gzip":
                with gzip.open(raw) as handle:
                    yield io.BufferedReader(handle)
            elif compression == "zstd":
                pyarrow = require_pyarrow()
                with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd") as handle:
                    yield io.BufferedReader(handle, 1 << 18)
            else:
                yield raw
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise InputError(
                f"{path}: the compressed data is damaged or incomplete ({shorten(str(error))}); compress the file again"
            ) from error


def _read_lines(path: Path, gzipped: bool) -> Iterator[_Line]:
    """Read a UTF-8 file, and yield the number and the stripped text of each line. A byte order mark is skipped.

    Raises:
        InputError: The file is damaged or not UTF-8, or a line is too long.
    """
    offset = 0
    with open_decompressed_file(path, "gzip" if gzipped else None) as handle:
        for number in itertools.count(1):
            line = handle.readline(LONGEST_ROW_BYTES)
            if not line:
                return
            if len(line) >= LONGEST_ROW_BYTES:
                raise InputError(
                    f"{path}: line {number}: a line must be shorter than {LONGEST_ROW_BYTES >> 20} MiB; insert line breaks"
                )
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                position = f"byte {offset + error.start}{' of the unpacked text' if gzipped else ''} (line {number})"
                raise InputError(
                    f"{path}: the text is not valid UTF-8 at {position}; convert it, for example with iconv -t UTF-8"
                ) from error
            offset += len(line)
            yield number, text.strip()
