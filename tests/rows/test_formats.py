"""CSV and TSV: a header is never a row, whatever the separator and the encoding; SQuAD's JSON."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.types import QuestionRow, RowPosition
from tests.builders.rows import PARAGRAPH, QUESTIONS, SQUAD, rows_of, write


def table_of(kind: str, rows: Sequence[Sequence[str]], delimiter: str | None = None) -> str:
    if kind == "tsv":
        return "".join((delimiter or "\t").join(row) + "\r\n" for row in rows)
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter or ",").writerows(rows)
    return text.getvalue()


HEADERS = [
    (("text", "label"), [("comment", "sentiment"), ("nice", "joy")]),
    (("id", "text", "label"), [("", "comment", "rating"), ("0", "nice", "5"), ("1", "bad", "1")]),
    (("text", "label"), [("kommentar", "sterne"), ("sehr gut", "5"), ("schlecht", "1.5")]),
    (("text", "other"), [("first name", "OTHER"), ("x", "y")]),
]
NO_HEADERS = [
    (("text", "label"), [("great", "3"), ("very bad", "1")]),
    (("text", "label"), [("text is a word", "joy")]),
    (("text", "other"), [("text", "text")]),
    (("text", "label"), [("great", "joy"), ("5", "anger"), ("", "joy")]),
]


@pytest.mark.parametrize("kind", ["csv", "tsv"])
@pytest.mark.parametrize(("columns", "table"), HEADERS)
def test_a_header_under_given_names_is_refused(tmp_path: Path, kind: str, columns: Any, table: Any) -> None:
    path = write(tmp_path / f"x.{kind}", "\ufeff" + table_of(kind, table))
    settings = {"columns": columns, "text": columns[0], "labelled": False}
    with pytest.raises(InputError, match=r"line 1 \(row 1\): .* looks like a header"):
        rows_of(path, **settings)
    assert len(rows_of(path, **settings, no_header=True)) == len(table)
    with pytest.raises(InputError, match=r"--no-header requires the column names; .*--columns"):
        rows_of(path, no_header=True)


@pytest.mark.parametrize("kind", ["csv", "tsv"])
@pytest.mark.parametrize(("columns", "table"), NO_HEADERS)
def test_a_row_is_not_treated_as_a_header(tmp_path: Path, kind: str, columns: Any, table: Any) -> None:
    rows = rows_of(write(tmp_path / f"x.{kind}", table_of(kind, table)), labelled=False, columns=columns)
    assert [row[1] for row in rows] == [cells[0] for cells in table]


CELLS = st.text(st.characters(exclude_characters="\t\n\r", exclude_categories=("Cs",)), min_size=1, max_size=9)


@pytest.mark.parametrize("kind", ["csv", "tsv"])
@given(table=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=30))
def test_no_row_is_lost(tmp_path_factory, kind: str, table: list[tuple[str, str]]) -> None:
    path = write(tmp_path_factory.mktemp("tables") / f"x.{kind}", table_of(kind, table))
    rows = rows_of(path, labelled=False, columns=("text", "other"), no_header=True)
    assert [row[1] for row in rows] == [cells[0] for cells in table]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "cp1252", "utf-16", "utf-16-be", "mac-roman"])
@pytest.mark.parametrize(("kind", "delimiter"), [("csv", ";"), ("csv", "\t"), ("csv", None), ("tsv", None), ("tsv", "|")])
def test_tables_of_any_separator_and_encoding(tmp_path: Path, kind: str, delimiter: Any, encoding: str) -> None:
    table = [("id", "text"), ("1", "süß, (so)"), ("2", "größer: 0,5"), ("3", "")]
    path = tmp_path / f"x.{kind}.gz"
    path.write_bytes(gzip.compress(table_of(kind, table, delimiter).encode(encoding)))
    named = {"encoding": encoding} if "utf-8" not in encoding else {}
    found = rows_of(path, labelled=False, **named, **({"delimiter": delimiter} if delimiter else {}))
    assert [row[1] for row in found] == [cells[1] for cells in table[1:]]
    assert [str(row.position) for row in found] == ["line 2 (row 1)", "line 3 (row 2)", "line 4 (row 3)"]


@pytest.mark.parametrize(
    ("name", "content", "settings", "messages"),
    [
        ("x.csv", b"Nr;Text\n1;so\n", {}, ["--delimiter ';'", "the column 'text' is missing"]),
        ("x.csv", b"Nr\tText\n1\tso\n", {}, ["--delimiter TAB"]),
        ("x.tsv", b"Nr,Text\n1,so\n", {}, ["--delimiter ','"]),
        ("x.tsv", b"a\t0\n", {"columns": ("text", "b", "c")}, ["line 1 (row 1): the row has 2 cells, but the table has 3"]),
        ("x.csv", b"1;so\n", {"columns": ("id", "text")}, ["line 1 (row 1): the row has 1 cells", "--delimiter ';'"]),
        ("x.csv", "Nr,text\n1,süß\n".encode("cp1252"), {}, ["line 2: the line is not UTF-8 at byte 3", "--encoding cp1252"]),
        ("x.csv", "Nr,text\n".encode("utf-16"), {}, ["line 1: the line is not UTF-8", "--encoding utf-16"]),
        ("x.txt", "süß\n".encode("utf-16"), {}, ["--encoding utf-16"]),
        (
            "x.txt",
            b"\x81\n",
            {"encoding": "cp1252"},
            ["line 1 (row 1): the line is not cp1252 at byte 0", "--encoding utf-8"],
        ),
        ("x.txt", b"\xff\xfea", {"encoding": "utf-16"}, ["not utf-16", "--encoding"]),
        ("x.csv", ",".join(map(str, range(10**5))).encode() + b",7", {}, ["two columns are called '7'"]),
    ],
)
def test_what_a_spreadsheet_wrote_is_named_with_the_option(
    tmp_path: Path, name: str, content: bytes, settings: Any, messages: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        rows_of(write(tmp_path / name, content), labelled=False, **settings)
    assert all(message in str(caught.value) for message in messages), caught.value


def test_one_line_names_all_that_is_wrong_with_a_table(tmp_path: Path) -> None:
    for header in ("Satz;Art", "Sätze;Art"):
        path = write(tmp_path / "x.csv", f"{header}\nüber;a\n".encode("cp1252"))
        with pytest.raises(InputError) as caught:
            rows_of(path, "classification")
        wanted = ["--delimiter ';'", "--encoding cp1252", "--text-column", "--label-column", "\n"]
        assert [each in str(caught.value) for each in wanted] == [True, True, True, True, False]
        (row,) = rows_of(path, "classification", delimiter=";", encoding="cp1252", text=header.split(";")[0], label="Art")
        assert row[1:] == ("über", None, "a")


def test_a_header_may_be_one_column_whatever_it_is_called(tmp_path: Path) -> None:
    assert [row[1] for row in rows_of(write(tmp_path / "x.csv", "a; b\nso\n"), labelled=False, text="a; b")] == ["so"]


# --- SQuAD


def test_squad(tmp_path: Path) -> None:
    expected = [
        QuestionRow(RowPosition(1), "a", "What flows?", PARAGRAPH["context"], (("Elbe", 4),)),
        QuestionRow(RowPosition(2), "b", "Why?", PARAGRAPH["context"], ()),
    ]
    assert rows_of(write(tmp_path / "x.json", json.dumps(SQUAD)), "question-answering") == expected
    answers = [{"text": ["Elbe"], "answer_start": [4]}, []]
    lines = [
        json.dumps({**question, "context": PARAGRAPH["context"], "answers": each})
        for question, each in zip(QUESTIONS, answers, strict=True)
    ]
    numbered = [row._replace(position=RowPosition(number, number)) for number, row in enumerate(expected, 1)]
    assert rows_of(write(tmp_path / "x.jsonl", "\n".join(lines)), "question-answering") == numbered


@pytest.mark.parametrize("sizes", [[], [0], [3, 0, 1, 2]])
@pytest.mark.parametrize("last", [True, False])
def test_every_question_of_squad_is_read(tmp_path: Path, sizes: list[int], last: bool) -> None:
    articles = [{"paragraphs": [{**PARAGRAPH, "qas": QUESTIONS * size}, {"context": "é]", "qas": []}]} for size in sizes]
    others = {"version": 2.125, "more": {"data": [1]}, "last": 12345}
    content = {**others, "data": articles} if last else {"data": articles, **others}
    path = write(tmp_path / "x.json", "\ufeff" + json.dumps(content, ensure_ascii=False))
    found = rows_of(path, "question-answering")
    assert [row.id for row in found] == [question["id"] for size in sizes for question in QUESTIONS * size]  # type: ignore
    assert [row.position for row in found] == [RowPosition(number) for number in range(1, len(found) + 1)]
