"""Find text sources, detect their formats, and read their documents one at a time.

A source is a text file or the documentation that is bundled with Python. Supported formats are plain text with blank lines
between documents, WikiExtractor's `<doc ...>` blocks, and JSON lines, each of them optionally compressed with gzip. The
format is detected from the beginning of the file. A source is identified by its relative name, its size and the CRC-32 of
its bytes.

A document is read as a list of sentences, which a few rules separate (see "sentences" below). A document with more than
`DOCUMENT_CHARACTERS` characters is cut between lines into several documents, so that memory does not depend on its size.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Literal

from gaudi_bert.common.arrow import require_pyarrow
from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.features import BUILT_IN_TEXTS
from gaudi_bert.common.files import LONGEST_ROW_BYTES, explain_os_errors, open_file
from gaudi_bert.corpus.python_texts import load_python_texts

Compression = Literal["gzip", "zstd"]
LineLayout = Literal["sentences", "paragraphs", "wrapped"]
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
    parsers = {"plain text": _parse_plain_text, "WikiExtractor": _parse_wikiextractor, "JSON lines": _parse_json_lines}
    return parsers[format_name](path, _read_lines(path, gzipped))


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


# --- documents from the texts that are bundled with Python

_RULER = re.compile(r"\s*([*=~^+|\-])[*=~^+|\-\s]*")
_MARKER = re.compile(r"\A(?:[*\-•]|\d+\.|\[\d+\])\s+")
# If a paragraph occurs in several texts, only one occurrence is kept. Paragraphs with fewer characters than this, such as
# "For example:", are always kept.
_SHORTEST_REPEATED_PARAGRAPH = 40


def convert_texts_to_documents(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Split each text into sentences. Return a dictionary from text names to lists of sentences, without empty texts.

    If a paragraph occurs in several texts, only the shortest of these texts keeps it. Otherwise a held-out document could
    also be part of a training document.
    """
    seen_paragraphs: set[str] = set()
    documents: dict[str, list[str]] = {}
    for name in sorted(texts, key=lambda name: (len(texts[name]), name)):
        sentences = _split_text(texts[name], seen_paragraphs)
        if sentences:
            documents[name] = sentences
    return dict(sorted(documents.items()))


def _split_text(text: str, seen_paragraphs: set[str]) -> list[str]:
    """Split a text into sentences. Each line of a code example or table counts as one sentence.

    Args:
        text: The text.
        seen_paragraphs: The paragraphs of earlier texts, which are left out. The paragraphs of this text are added, unless
            they are short.
    """
    sentences: list[str] = []
    after_colon = False
    outer_indent = 0
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if line.strip() and not _RULER.fullmatch(line)]
        if not lines:
            continue
        indent = len(lines[0]) - len(lines[0].lstrip())
        is_example = (after_colon and indent > outer_indent) or lines[0].lstrip().startswith(">>>")
        content = " ".join(" ".join(lines).split())
        if not is_example:
            after_colon, outer_indent = content.endswith(":"), indent
        if content in seen_paragraphs:
            continue
        if len(content) >= _SHORTEST_REPEATED_PARAGRAPH:
            seen_paragraphs.add(content)
        if is_example:
            sentences += [" ".join(line.split()) for line in lines]
        elif all("|" in line for line in lines):
            sentences += [" ".join(line.replace("|", " ").split()) for line in lines if line.replace("|", " ").strip()]
        else:
            sentences += split_sentences(_MARKER.sub("", content))
    return sentences


# --- sentences
#
# A sentence ends after `.`, `!`, `?` or `…` and the closing quotes and brackets that follow, if white space comes next and
# the sentence after it does not begin with a lower-case letter. A full stop does not end a sentence in these cases:
#
# - It follows an abbreviation that needs a following word (`Dr.`, `e.g.`: `_ABBREVIATIONS`) or a following number (`No. 5`,
#   `p. 17`: `_NUMBERED_ABBREVIATIONS`).
# - It follows a single capital letter, which is an initial (`J. Smith`), or letters with dots (`U.S. Army`).
# - It is inside a number (`3.14`) or a name (`example.org`), because no white space follows it.
#
# A Chinese or Japanese full stop (`。`, `！`, `？`) always ends a sentence.
#
# The *layout* of a file says how its lines are read. It is detected from the first lines:
#
# - `sentences`: Each line is one sentence, and is not changed.
# - `paragraphs`: Each line is one paragraph, and is split by the rules above.
# - `wrapped`: The lines are broken at a fixed width. The lines of a document are joined and then split.

_UNFINISHED = """
    Adm Brig Capt Cmdr Col Dr Drs Fr Gen Gov Hon Lt Maj Messrs Mgr Mr Mrs Ms Mt Pres Prof Rep Rev Sen Sgt St Ste
    al approx ca cf e.g eg i.e ie esp viz vs
"""
_NUMBERED = """
    art c ch col fig figs no nos nr op p para pl pp sec v vol vols
    jan feb mar apr jun jul aug sep sept oct nov dec
"""
# A full stop after one of these abbreviations never ends a sentence. The abbreviations are case-sensitive.
_ABBREVIATIONS = frozenset(_UNFINISHED.split())
# A full stop after one of these abbreviations, such as "fig.", does not end a sentence if a number follows. These
# abbreviations are not case-sensitive.
_NUMBERED_ABBREVIATIONS = frozenset(_NUMBERED.split())

_CLOSING = "\"'”’»)\\]"
_BOUNDARY = re.compile(rf"[.!?…]+[{_CLOSING}]*\s+|[。！？]+[{_CLOSING}」』]*\s*")
_OPENING = "\"'“‘«([¿¡*_"
_LAST_WORD = re.compile(r"[^\s\"'“‘«(\[]+$")
_INITIAL_OR_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]|[A-ZÀ-ÖØ-Þ]")
_FINISHED_LINE = re.compile(rf"[.!?…。！？:;][{_CLOSING}」』]*$")

# If the lines of a text contain, on average, at most this many sentence boundaries before their ends, every line counts as
# one sentence. Otherwise, every line counts as a paragraph.
_MOST_INNER_BOUNDARIES = 0.3
_LEAST_LOWER_CASE_STARTS = 0.2
_LEAST_FILL_OF_WRAPPED_LINES = 0.8
_WIDEST_WRAPPED_LINE = 200


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, and return them without surrounding white space. Empty sentences are left out."""
    sentences: list[str] = []
    start = 0
    for boundary in _BOUNDARY.finditer(text):
        if boundary.end() == len(text) or not _is_sentence_continued(text, start, boundary):
            sentences.append(text[start : boundary.end()].strip())
            start = boundary.end()
    sentences.append(text[start:].strip())
    return list(filter(None, sentences))


def _is_sentence_continued(text: str, sentence_start: int, boundary: re.Match[str]) -> bool:
    """Return whether the sentence continues after the given punctuation, for example because the punctuation belongs to an
    abbreviation.

    Args:
        text: The text.
        sentence_start: Where the sentence begins.
        boundary: The match of the punctuation and the white space after it.
    """
    if boundary[0][0] in "。！？":
        return False
    following = text[boundary.end() : boundary.end() + 4].lstrip(_OPENING)
    if following[:1].islower():
        return True
    if boundary[0].rstrip() != ".":
        return False
    word_match = _LAST_WORD.search(text, max(sentence_start, boundary.start() - 40), boundary.start())
    if word_match is None:
        return False
    word = word_match[0]
    if word in _ABBREVIATIONS or (word.lower() in _NUMBERED_ABBREVIATIONS and following[:1].isdigit()):
        return True
    return _INITIAL_OR_DOTTED.fullmatch(word) is not None and word != "I"


def detect_line_layout(documents: Sequence[Sequence[str]]) -> LineLayout:
    """Detect whether each line of a file is a sentence or a paragraph, or whether lines are wrapped at a fixed width.

    Args:
        documents: A sample of its documents, each a list of stripped, non-empty lines.
    """
    lines = [line for document in documents for line in document]
    if not lines:
        return "sentences"
    finished = sum(_FINISHED_LINE.search(line) is not None for line in lines)
    if 2 * finished < len(lines) and _has_wrapped_lines(documents):
        return "wrapped"
    inner_boundaries = sum(len(split_sentences(line)) - 1 for line in lines)
    return "sentences" if inner_boundaries <= _MOST_INNER_BOUNDARIES * len(lines) else "paragraphs"


def _has_wrapped_lines(documents: Sequence[Sequence[str]]) -> bool:
    """Return whether lines seem to be wrapped at a fixed width.

    All lines except the last line of a document must have nearly the same width, and lines must often begin in lower case.
    """
    widths = sorted(len(line) for document in documents for line in document[:-1])
    starts = [line[:1] for document in documents for line in document[1:]]
    if not widths:
        return False
    widest, middle = widths[min(len(widths) - 1, len(widths) * 95 // 100)], widths[(len(widths) - 1) // 2]
    lower_case = sum(start.islower() for start in starts)
    return (
        widest <= _WIDEST_WRAPPED_LINE
        and middle >= _LEAST_FILL_OF_WRAPPED_LINES * widest
        and lower_case >= _LEAST_LOWER_CASE_STARTS * len(starts)
    )


def split_lines_into_sentences(lines: Sequence[str], layout: LineLayout) -> list[str]:
    """Split the lines of a document into sentences. The layout of the file states whether a line is a sentence or a
    paragraph, or whether lines are wrapped.

    Args:
        lines: The non-empty lines of the document.
        layout: The layout of the file, from `detect_line_layout`.
    """
    if layout == "sentences":
        return list(lines)
    if layout == "wrapped":
        return split_sentences(" ".join(lines))
    return [sentence for line in lines for sentence in split_sentences(line)]
