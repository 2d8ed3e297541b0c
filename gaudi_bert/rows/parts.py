"""Files of rows divided into parts that can be read alone: lines that begin in a range of bytes, or runs of row groups.

A compressed file can be read from its front only, and a quoted cell of a table may hold lines, so each is one part. The
parts are a function of the file alone.
"""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors, open_file
from gaudi_bert.config.sections import RowFormat
from gaudi_bert.corpus.documents import LONGEST_LINE_BYTES, Compression, Source, is_json_line, opened_text
from gaudi_bert.rows.records import BYTE_ORDER_MARK, TABLES, RowPart, compression_of, format_by_ending
from gaudi_bert.rows.text_columns import row_groups
from gaudi_bert.rows.types import STANDARD_INPUT, source_name

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
    compression = compression_of(path)
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
    by_ending = format_by_ending(path)
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
    sizes = [size for _, size in row_groups(path)]
    parts, start, size_of_part = [], 0, 0
    for group, size in enumerate(sizes):
        if size_of_part and size_of_part + size > part_bytes:
            parts.append((start, group, size_of_part))
            start, size_of_part = group, 0
        size_of_part += size
    if start < len(sizes):
        parts.append((start, len(sizes), size_of_part))
    return parts
