"""The same rows from every format, however a file is written or divided; a header is never a row, no option is ignored."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow", exc_type=ImportError)

import pyarrow
from pyarrow import parquet
from pydantic import ValidationError

from gaudi_bert.common import files
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings, TokenizeSettings
from gaudi_bert.rows.reading import SkippedRows, read_rows
from gaudi_bert.rows.types import TASKS_WITH_LABELS, Row, RowPosition, TextRow

COLUMNS = ("id", "comment", "other", "stars")
ROWS = [("7", "so, so", "x", "0.5"), ("8", 'he said "no"\nand left', "", "3"), ("9", "four  words \u2028 here", "z", "-1")]
PLAIN = [(number, text.replace("\n", " "), *rest) for number, text, *rest in ROWS]


def content_of(kind: str, rows: Sequence[Sequence[str]], header: bool = True) -> bytes:
    if kind == "jsonl":
        lines = (json.dumps(dict(zip(COLUMNS, row, strict=True)) | {"other": row[2] or None}) for row in rows)
        return "".join(f"{line}\n" for line in lines).encode()
    table = [COLUMNS, *rows] if header else rows
    if kind == "csv":
        text = io.StringIO()
        csv.writer(text).writerows(table)
        return text.getvalue().encode()
    if kind == "tsv":
        return "".join("\t".join(row) + "\n" for row in table).encode()
    sink = pyarrow.BufferOutputStream()
    columns = [[cell or None for cell in column] for column in zip(*rows, strict=True)]
    parquet.write_table(pyarrow.table(dict(zip(COLUMNS, columns, strict=True))), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def rows_of(path: Path, task: Any = None, labelled: bool = False, **settings: Any) -> list[Row]:
    return list(read_rows(path, task, TaskSettings(**settings), labelled=labelled))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd])
def test_every_format_gives_the_same_rows(tmp_path: Path, kind: str, compress: Any) -> None:
    rows = PLAIN if kind == "tsv" else ROWS
    is_table = kind in ("csv", "tsv")
    ending = {bytes: "", gzip.compress: ".gz", zstd: ".zst"}[compress]
    if kind == "parquet" and ending:
        pytest.skip("Parquet is compressed inside")
    path = tmp_path / f"x.{kind}{ending}"
    path.write_bytes(compress(content_of(kind, rows)))
    named = {"text": "comment", "text_pair": "other", "label": "stars"}
    expected = [(row[1], row[2] or None, float(row[3])) for row in rows]
    if not is_table:  # whose cells are texts
        assert [row[1:3] for row in rows_of(path, text="comment", text_pair="other")] == [row[:2] for row in expected]
    found = rows_of(path, "regression", labelled=True, **named)
    assert [tuple(row)[1:] for row in found] == expected
    assert [row[1:] for row in rows_of(path, text="comment")] == [(row[1], None, None) for row in rows]
    if is_table:
        path.write_bytes(compress(content_of(kind, rows, header=False)))
        bare = rows_of(path, "regression", labelled=True, columns=COLUMNS, **named)
        assert [tuple(row)[1:] for row in bare] == expected


HEADERS = [
    (("text", "label"), [("text", "label"), ("nice", "joy")]),
    (("text", "label"), [("comment", "sentiment"), ("nice", "joy")]),
    (("a", "b"), [("Review", "Stars")]),
    (("id", "text", "label"), [("", "comment", "rating"), ("0", "nice", "5"), ("1", "bad", "1")]),
    (("text", "label"), [("kommentar", "sterne"), ("sehr gut", "5"), ("schlecht", "1.5")]),
    (("text", "other"), [("first name", "OTHER"), ("x", "y")]),
]
NO_HEADERS = [
    (("text", "label"), [("great", "joy"), ("very bad", "anger"), ("so so", "joy")]),
    (("text", "label"), [("great", "3"), ("very bad", "1")]),
    (("text", "label"), [("text is a word", "joy")]),
    (("text",), [("Hello",), ("how are you",)]),
    (("text", "label"), [("", "joy")]),
    (("text", "other"), [("text", "text")]),
    (("text", "label"), [("great", "joy"), ("5", "anger"), ("", "joy")]),
]


@pytest.mark.parametrize("kind", ["csv", "tsv"])
@pytest.mark.parametrize(("columns", "table"), HEADERS)
def test_a_header_under_given_names_is_refused(tmp_path: Path, kind: str, columns: Any, table: Any) -> None:
    path = tmp_path / f"x.{kind}"
    path.write_bytes(b"\xef\xbb\xbf" + content_of(kind, table, header=False))
    settings = {"columns": columns, "text": columns[0]}
    with pytest.raises(
        InputError, match=r"line 1 \(row 1\): .* looks like a header, .*leave --columns out and .*or pass --no-header"
    ):
        rows_of(path, **settings)
    assert len(rows_of(path, **settings, no_header=True)) == len(table)
    with pytest.raises(InputError, match="without a header, name the columns too: --columns"):
        rows_of(path, no_header=True)


@pytest.mark.parametrize("kind", ["csv", "tsv"])
@pytest.mark.parametrize(("columns", "table"), NO_HEADERS)
def test_a_row_is_not_treated_as_a_header(tmp_path: Path, kind: str, columns: Any, table: Any) -> None:
    path = tmp_path / f"x.{kind}"
    path.write_bytes(content_of(kind, table, header=False))
    assert [row[1] for row in rows_of(path, columns=columns)] == [cells[0] for cells in table]


CELLS = st.text(st.characters(exclude_characters="\t\n\r", exclude_categories=("Cs",)), min_size=1, max_size=9)


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=30))
def test_no_row_is_lost(tmp_path_factory, table: list[tuple[str, str]]) -> None:
    for kind in ("csv", "tsv"):
        path = tmp_path_factory.mktemp("tables") / f"x.{kind}"
        path.write_bytes(content_of(kind, table, header=False))
        rows = rows_of(path, columns=("text", "other"), no_header=True)
        assert [row[1] for row in rows] == [cells[0] for cells in table]


FORMATS = {
    "jsonl": '{"words": ["a"], "body": "b"}\n',
    "csv": "words,body\na,b\n",
    "tsv": "words\tbody\na\tb\n",
    "txt": "a\n",
    "conll": "a O\n",
}
TEXTS = {"text", "text_pair"}
APPLY = {
    None: TEXTS,
    "classification": TEXTS | {"label"},
    "multi-label": TEXTS | {"label"},
    "regression": TEXTS | {"label"},
    "token-classification": {"tokens", "tags", "text"},
    "masked-language-modelling": {"text"},
    "causal-language-modelling": {"text"},
    "question-answering": set(),
    "reranking": {"query", "document", "positive", "negative", "label"},
}


@pytest.mark.parametrize("key", ["text", "text_pair", "label", "tokens", "tags"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("task", APPLY)
def test_a_column_that_is_named_is_read_or_refused(tmp_path: Path, task: Any, kind: str, key: str) -> None:
    path = tmp_path / f"x.{kind}"
    path.write_text(FORMATS[kind])
    for labelled in (True, False) if task in TASKS_WITH_LABELS else (False,):
        applies = kind in ("jsonl", "csv", "tsv") and key in APPLY[task] - (set() if labelled else {"label", "tags"})
        with pytest.raises(InputError) as caught:
            rows_of(path, task, labelled, **{key: "none"})
        refused = ("does not apply", "CoNLL is for token-classification")
        assert any(reason in str(caught.value) for reason in refused) is not applies


def test_names_of_columns_are_for_tables(tmp_path: Path) -> None:
    for kind in ("jsonl", "txt", "conll"):
        (tmp_path / f"x.{kind}").write_text(FORMATS[kind])
        for option in ({"columns": ("text", "x")}, {"no_header": True}, {"delimiter": ";"}):
            with pytest.raises(InputError, match=r"--(columns|no-header|delimiter) is for CSV and TSV"):
                rows_of(tmp_path / f"x.{kind}", "token-classification", **option)


def test_a_second_text_that_is_named_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a", "b": "c"}\n{"text": "a", "b": null}\n{"text": "a"}\n')
    with pytest.raises(InputError, match=r"line 3 \(row 3\): has no 'b', only 'text'; name the column with --text-pair"):
        rows_of(tmp_path / "x.jsonl", text_pair="b")
    (tmp_path / "x.csv").write_text("text,b\na,c\na,\n")
    assert rows_of(tmp_path / "x.csv", text_pair="b") == [
        TextRow(RowPosition(1, 2), "a", "c"),
        TextRow(RowPosition(2, 3), "a"),
    ]


SCORED, NAMED = {"text": "a", "label": "c"}, {"columns": ("text", "label")}
CAUSAL = "causal-language-modelling"
QUESTION = '{"question": "why?", "context": "c", "answers": []}'


@pytest.mark.parametrize(
    ("name", "content", "task", "settings", "line"),
    [
        ("x.csv", "a,b,c\nso so,2,3\n", "regression", SCORED, "CSV, a (text), c (label); line 2 (row 1) begins 'so so'"),
        ("x.tsv", "so\tjoy\n", "classification", NAMED, "TSV, text, label; line 1 (row 1) begins 'so'"),
        ("x.jsonl", '\n{"text": "a", "text_pair": "b"}', None, {}, "JSON lines, text, text_pair; line 2 (row 1) begins 'a'"),
        ("x.txt", "a  b" * 50, None, {}, "plain text; line 1 (row 1) begins '" + ("a b" * 50)[:60] + "...'"),
        ("x.conll", "Bonn O\nis O\n", "token-classification", {}, "CoNLL, tokens, tags; line 1 (row 1) begins 'Bonn is'"),
        ("x.jsonl", '{"input_ids": [5]}', CAUSAL, {}, "JSON lines, input_ids; line 1 (row 1) begins '[5]'"),
        (
            "x.jsonl",
            QUESTION,
            "question-answering",
            {},
            "JSON lines, question, context, answers; line 1 (row 1) begins 'why?'",
        ),
    ],
)
def test_the_first_line_says_what_is_read(
    tmp_path: Path, name: str, content: str, task: Any, settings: Any, line: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    said: list[str] = []
    labelled = task is not None and "language" not in task
    assert list(read_rows(path, task, TaskSettings(**settings), labelled=labelled, say=said.append))
    assert said == [f"{path}: reads {line}"]


def test_settings_of_tokenize_read_a_pair_only_where_it_is_named() -> None:
    def reading(**given: Any) -> TaskSettings:
        return TokenizeSettings(max_sequence_length=9, **given).reading

    assert (reading().text_pair, reading().named) == ("text", set())
    assert (reading(text_column="a").text_pair, reading(text_column="a").named) == ("a", {"text"})
    assert reading(text_pair_column="b").named == {"text_pair"}


# --- as spreadsheets write tables; what cannot be read; effort that has a bound


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "cp1252", "latin-1", "utf-16", "utf-16-le", "utf-16-be", "mac-roman"]
)
@pytest.mark.parametrize(("kind", "delimiter"), [("csv", ";"), ("csv", "\t"), ("csv", None), ("tsv", None), ("tsv", "|")])
def test_tables_of_any_separator_and_encoding(tmp_path: Path, kind: str, delimiter: Any, encoding: str) -> None:
    rows = [("id", "text"), ("1", "süß, (so)"), ("2", "größer: 0,5"), ("3", "")]
    separator = delimiter or ("," if kind == "csv" else "\t")
    content = io.StringIO()
    if kind == "csv":
        csv.writer(content, delimiter=separator).writerows(rows)
    else:
        content.write("".join(separator.join(row) + "\r\n" for row in rows))
    path = tmp_path / f"x.{kind}.gz"
    path.write_bytes(gzip.compress(content.getvalue().encode(encoding)))
    given = {"encoding": encoding} if "utf-8" not in encoding else {}
    found = rows_of(path, **given, **({"delimiter": delimiter} if delimiter else {}))
    assert [row[1] for row in found] == [cells[1] for cells in rows[1:]]
    assert [str(row.position) for row in found] == ["line 2 (row 1)", "line 3 (row 2)", "line 4 (row 3)"]


@pytest.mark.parametrize("kind", ["jsonl", "txt", "conll"])
@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_every_text_has_an_encoding(tmp_path: Path, kind: str, encoding: str) -> None:
    path = tmp_path / f"x.{kind}"
    path.write_bytes({"jsonl": '{"text": "süß"}\n', "txt": "süß\n", "conll": "süß O\n"}[kind].encode(encoding))
    (row,) = rows_of(path, "token-classification" if kind == "conll" else None, encoding=encoding)
    assert row[1] == (("süß",) if kind == "conll" else "süß")


@pytest.mark.parametrize(
    ("name", "content", "settings", "messages"),
    [
        ("x.csv", b"Nr;Text\n1;so\n", {}, ["pass --delimiter ';'", "it has no column 'text': name one with"]),
        ("x.csv", b"Nr\tText\n1\tso\n", {}, ["pass --delimiter TAB"]),
        ("x.tsv", b"Nr,Text\n1,so\n", {}, ["pass --delimiter ','"]),
        (
            "x.csv",
            "Nr;Text\n1;süß\n".encode("cp1252"),
            {},
            ["pass --delimiter ';'", "such as --encoding cp1252", "it has no column 'text'"],
        ),
        ("x.tsv", b"a\t0\n", {"columns": ("text", "b", "c")}, ["line 1 (row 1): has 2 cells, the columns are 3"]),
        ("x.csv", b"1;so\n", {"columns": ("id", "text")}, ["line 1 (row 1): has 1 cells", "pass --delimiter ';'"]),
        ("x.csv", "Nr,text\n1,süß\n".encode("cp1252"), {}, ["line 2: not UTF-8 at its byte 3", "--encoding cp1252"]),
        ("x.csv", "Nr,text\n".encode("utf-16"), {}, ["line 1: not UTF-8", "--encoding utf-16"]),
        ("x.txt", "süß\n".encode("utf-16"), {}, ["--encoding utf-16"]),
        ("x.txt", b"\x81\n", {"encoding": "cp1252"}, ["line 1 (row 1): not cp1252 at its byte 0", "--encoding utf-8"]),
        ("x.txt", b"\xff\xfea", {"encoding": "utf-16"}, ["not utf-16", "name another --encoding"]),
        ("x.csv", ",".join(map(str, range(10**5))).encode() + b",7", {}, ["two columns are called '7'"]),
    ],
)
def test_what_a_spreadsheet_wrote_is_named_with_the_option(
    tmp_path: Path, name: str, content: bytes, settings: Any, messages: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        rows_of(tmp_path / name, **settings)
    assert all(message in str(caught.value) for message in messages), caught.value


def test_a_header_may_be_one_column_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a; b\nso\n")
    assert [row[1] for row in rows_of(tmp_path / "x.csv", text="a; b")] == ["so"]


@pytest.mark.parametrize("given", [{"delimiter": text} for text in ("", ";;", "\n", '"')] + [{"encoding": "hex"}])
def test_a_separator_is_one_character_and_an_encoding_is_known(given: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"must be one character|must be an encoding"):
        TaskSettings(**given)  # type: ignore[arg-type]
    assert [TaskSettings(delimiter=tab).delimiter for tab in ("\t", "tab", "TAB", "\\t")] == ["\t"] * 4


@pytest.mark.parametrize(
    ("name", "content", "kept"),
    [
        ("x.jsonl", b'{"text": 3}\n{"text": "a"}\nno\n\xff\n{"text": "b"}\n', ["a", "b"]),
        ("x.csv", b"id,text\n1,a\n2\n3,b\n", ["a", "b"]),
        ("x.tsv", b"id\ttext\n1\ta\n2\t\xff\n3\tb\n", ["a", "b"]),
        ("x.txt", b"a\n\xff\nb\n", ["a", "b"]),
    ],
)
def test_rows_that_cannot_be_read_are_left_out_and_counted(
    tmp_path: Path, name: str, content: bytes, kept: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    skipped = SkippedRows()
    rows = list(read_rows(tmp_path / name, None, TaskSettings(on_bad_row="skip"), skipped=skipped))
    assert [row[1] for row in rows] == kept
    assert skipped.rows == (3 if name == "x.jsonl" else 1)
    with pytest.raises(InputError) as caught:
        rows_of(tmp_path / name)
    assert skipped.first == str(caught.value)


BOUND, BOMB = 1 << 18, 1 << 23
BOMBS = {
    "a line of JSON": ("x.jsonl", b'{"text": "' + b"a" * BOMB, None, "a line is longer than 0.25 MiB"),
    "a cell": ("x.csv", b"text\n" + b"a" * BOMB, None, "a line is longer than"),
    "a cell of many lines": ("x.csv", b'text\n"' + b"a\n" * (BOMB // 2), None, "the row that ends here is longer than"),
    "a header": ("x.csv", b"," * BOMB, None, "a line is longer than"),
    "tabs": ("x.tsv", b"\t" * BOMB, None, "a line is longer than"),
    "a text": ("x.txt", b"a" * BOMB, None, "a line is longer than"),
    "a text of UTF-16": ("x.txt", b"\xff\xfe" + b"a\0" * BOMB, None, "a line is longer than"),
    "a sentence": ("x.conll", b"a O\n" * (BOMB // 4), "token-classification", "the sentence is longer than"),
    "an article": ("x.json", b'{"data": ["' + b"a" * BOMB, "question-answering", "is longer than 1 MiB"),
    "a key": ("x.json", b'{"' + b"a" * BOMB, "question-answering", "is longer than"),
    "a depth": ("x.json", b'{"data": ' + b"[" * BOMB, "question-answering", "is longer than"),
    "space": ("x.json", b" " * BOMB, "question-answering", "is longer than"),
}


@pytest.mark.parametrize(("name", "content", "task", "message"), BOMBS.values(), ids=list(BOMBS))
def test_no_reader_holds_more_than_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, task: Any, message: str
) -> None:
    monkeypatch.setattr(files, "LONGEST_ROW_BYTES", BOUND)
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress(content, 1))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=message):
            rows_of(path, task, encoding="utf-16" if content.startswith(b"\xff\xfe") else "utf-8")
        assert tracemalloc.get_traced_memory()[1] < 8 * BOUND + (4 << 20)
    finally:
        tracemalloc.stop()
