"""CSV and TSV with their headers, separators and encodings; SQuAD's JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.types import QuestionRow, RowPosition
from tests.builders.rows import rows_of, write

QUESTIONS = [
    {"id": "a", "question": "What flows?", "answers": [{"text": "Elbe", "answer_start": 4}]},
    {"id": "b", "question": "Why?", "answers": [], "is_impossible": True},
]
PARAGRAPH = {"context": "The Elbe flows north.", "qas": QUESTIONS}
SQUAD = {"version": "v2.0", "data": [{"title": "Rivers", "paragraphs": [PARAGRAPH]}]}


def test_squad(tmp_path: Path) -> None:
    context = "The Elbe flows north."
    expected = [
        QuestionRow(RowPosition(1), "a", "What flows?", context, (("Elbe", 4),)),
        QuestionRow(RowPosition(2), "b", "Why?", context, ()),
    ]
    assert rows_of(write(tmp_path / "x.json", json.dumps(SQUAD)), "question-answering") == expected
    lines = [
        {"id": "a", "question": "What flows?", "context": context, "answers": {"text": ["Elbe"], "answer_start": [4]}},
        {"id": "b", "question": "Why?", "context": context, "answers": []},
    ]
    path = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, lines)))
    assert rows_of(path, "question-answering") == [
        row._replace(position=RowPosition(n, n)) for n, row in enumerate(expected, 1)
    ]


def test_one_line_names_all_that_is_wrong_with_a_table(tmp_path: Path) -> None:
    for header in ("Satz;Art", "Sätze;Art"):
        path = write(tmp_path / "x.csv", f"{header}\nüber;a\n".encode("cp1252"))
        with pytest.raises(InputError) as caught:
            rows_of(path, "classification")
        text = str(caught.value)
        wanted = ["--delimiter ';'", "--encoding cp1252", "--text-column", "--label-column", "\n"]
        assert [each in text for each in wanted] == [True, True, True, True, False]
        (row,) = rows_of(path, "classification", delimiter=";", encoding="cp1252", text=header.split(";")[0], label="Art")
        assert row[1:] == ("über", None, "a")


@pytest.mark.parametrize("sizes", [[], [0], [3, 0, 1, 2]])
@pytest.mark.parametrize("last", [True, False])
def test_every_question_of_squad_is_read(tmp_path: Path, sizes: list[int], last: bool) -> None:
    articles = [{"paragraphs": [{**PARAGRAPH, "qas": QUESTIONS[:2] * size}, {"context": "é]", "qas": []}]} for size in sizes]
    others = {"version": 2.125, "more": {"data": [1]}, "last": 12345}
    content = {**others, "data": articles} if last else {"data": articles, **others}
    path = write(tmp_path / "x.json", "\ufeff" + json.dumps(content, ensure_ascii=False))
    found = rows_of(path, "question-answering")
    assert [row.id for row in found] == [question["id"] for size in sizes for question in QUESTIONS[:2] * size]  # type: ignore
    assert [row.position for row in found] == [RowPosition(number) for number in range(1, len(found) + 1)]
