"""Files of rows in parts: texts are the same, once each and in order, however a file is divided."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.corpus.documents import find_sources
from gaudi_bert.rows.parts import split_source
from gaudi_bert.rows.reading import raise_or_skip_bad_rows, read_part


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


# --- texts are the same, once each and in order, however a file is divided


LINES = ["one", "  two words ", "drei äöü", "四", "five\tfive"]


def texts_of(path: Path, part_bytes: int = 1 << 20, column: str = "text") -> list[str]:
    (source,) = find_sources([str(path)], Path())
    settings = TaskSettings() if column == "text" else TaskSettings(text=column)
    parts = split_source(source, settings, part_bytes)
    return [row.text for part in parts for row in raise_or_skip_bad_rows(read_part(part, None, settings))]


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=9), max_size=9),
    st.integers(1, 40),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_parts_of_any_size_hold_every_line_once(tmp_path_factory, lines, part_bytes: int, end: str, last_end: bool) -> None:
    path = tmp_path_factory.mktemp("lines") / "text.txt"
    path.write_bytes(f"x{end}{end.join(lines)}{end if last_end else ''}".encode())
    assert texts_of(path, part_bytes) == ["x", *(line for line in lines if line.encode("utf-8").strip())]


@pytest.mark.parametrize("part_bytes", [7, 1 << 20])
def test_every_format_gives_the_same_texts(tmp_path: Path, part_bytes: int) -> None:
    plain = "\ufeff\n" + "\n".join(LINES) + "\n\n"
    lines = "\n\n".join(json.dumps({"id": 1, "text": text}) for text in LINES) + "\n"
    files = {"plain.txt": plain.encode("utf-8"), "lines.jsonl": lines.encode("utf-8")}
    for name, content in dict(files).items():
        files[f"{name}.gz"] = gzip.compress(content[:9]) + gzip.compress(content[9:])
        files[f"{name}.zst"] = zstd(content[:9]) + zstd(content[9:])
        files[f"{name}.of-another-name"] = files[f"{name}.zst"]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        table = pyarrow.table({"text": pyarrow.array(LINES).cast(kind)})
        parquet.write_table(table, tmp_path / f"{kind.id}.parquet", row_group_size=2)
    for path in sorted(tmp_path.iterdir()):
        assert texts_of(path, part_bytes) == LINES, path.name


def test_the_text_may_have_another_name_and_hold_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one\\ntwo", "text": 3}\n{"body": ""}\n')
    assert texts_of(tmp_path / "a.jsonl", column="body") == ["one\ntwo", ""]


def test_a_text_that_python_carries() -> None:
    (source,) = find_sources(["python-docs"], Path())
    (part,) = split_source(source, TaskSettings(), 1)
    texts = list(read_part(part, None, TaskSettings()))
    assert len(texts) > 50
    assert [text.position.number for text in texts] == list(range(1, len(texts) + 1))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": "b"\n',
            r"a\.jsonl: line 3 \(row 2\): the line is not valid JSON .*; write one object per line",
        ),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', r"line 2 \(row 2\): \[1\] is not an object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', r"line 2 \(row 2\): text is None; it must be a text"),
        ("a.jsonl", b'{"text": "a\\uD800"}\n', r"line 1 \(row 1\): text contains a lone surrogate, .* at character 1"),
        ("a.txt", b"one\ntwo\nth\xffree\n", r"a\.txt: line 3 \(row 3\): the line is not UTF-8 at byte 2"),
        ("a.xml", b'\n<doc id="1">\ntext\n</doc>\n', "contains the <doc .*; run WikiExtractor again with --json"),
        ("a.gz", gzip.compress(b"one\n" * 99, mtime=0)[:20], r"the compressed data is damaged or incomplete"),
        ("a.zst", zstd(b"one\n" * 99)[:14], r"a\.zst: the compressed data is damaged or incomplete"),
        ("a.bz2", b"BZh91AY", r"compression with bzip2 is not supported; decompress the file"),
        ("a.parquet", {"a": ["x"]}, "row 1: the row has no column 'text', only 'a'; .*--text-column"),
        ("a.parquet", {"text": ["x", "y", None, "z"]}, r"a\.parquet: row 3: text is None"),
    ],
)
@pytest.mark.parametrize("part_bytes", [3, 1 << 20])
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: Any, message: str, part_bytes: int) -> None:
    if isinstance(content, dict):
        parquet.write_table(pyarrow.table(content), tmp_path / name, row_group_size=2)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        texts_of(tmp_path / name, part_bytes)
