"""Values of rows: checked, and named with their row where they are wrong; names of labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import csv, parquet

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.reading import read_rows
from gaudi_bert.rows.types import RowPosition, TaggedRow
from tests.builders.rows import SQUAD, rows_of, write


def test_words_of_a_text_know_where_they_start(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"text": "Bonn, am  Rhein!"}')
    (row,) = rows_of(path, "token-classification", labelled=False)
    bare = write(tmp_path / "bare.conll", "a\nb\n")
    assert rows_of(bare, "token-classification", labelled=False) == [TaggedRow(RowPosition(1, 1), ("a", "b"))]
    assert isinstance(row, TaggedRow)
    assert row.tokens == ("Bonn", ",", "am", "Rhein", "!")
    assert row.word_starts().tolist() == [0, 4, 6, 10, 15]
    assert TaggedRow(RowPosition(1), ("ab", "c", "def")).word_starts().tolist() == [0, 3, 5]


MISPLACED = '{"question": "q", "context": "cat", "answers": [{"text": "at", "answer_start": 0}]}'
BAD: list[tuple[str, str | bytes, str, str]] = [
    (
        "x.jsonl",
        '{"txt": "a", "label": "b"}',
        "classification",
        "line 1 (row 1): the row has no column 'text', only 'txt', 'label'",
    ),
    ("x.jsonl", '{"text": "a"}', "classification", "line 1 (row 1): the row has no column 'label'"),
    ("x.jsonl", '{"text": " ", "label": "b"}', "classification", "line 1 (row 1): text is empty"),
    ("x.jsonl", '{"text": 3, "label": "b"}', "classification", "line 1 (row 1): text is 3; it must be a text"),
    (
        "x.jsonl",
        '{"text": "a", "label": 3}',
        "classification",
        "line 1 (row 1): label is the number 3; pass a file with the names of the labels",
    ),
    ("x.jsonl", '{"text": "a", "label": ["b"]}', "classification", "label is ['b']; it must be the name of a label"),
    ("x.jsonl", '{"text": "a", "label": true}', "multi-label", "label is True; it must be a list of names"),
    ("x.jsonl", '{"text": "a", "label": NaN}', "regression", "label is nan; a label of regression must be a finite number"),
    ("x.jsonl", '{"text": "a", "label": -1' + "0" * 400 + "}", "regression", "label is a number of 1,329 bits"),
    ("x.tsv", "text\tlabel\na\t1_000", "regression", "label is '1_000'; a label of regression must be a finite number"),
    (
        "x.jsonl",
        '{"input_ids": [2, true]}',
        "causal-language-modelling",
        "input_ids[1] is True; a token id must be an integer",
    ),
    ("x.jsonl", '{"tokens": ["a"], "tags": []}', "token-classification", "line 1 (row 1): the row has 1 words and 0 tags"),
    ("x.jsonl", '{"tokens": ["a", ""], "tags": ["O", "O"]}', "token-classification", "tokens[1] is ''"),
    ("x.jsonl", '{"text": "a"}', "token-classification", "line 1 (row 1): the row has no column 'tokens', only 'text'"),
    ("x.jsonl", '{"question": "q", "context": "c"}', "question-answering", "line 1 (row 1): the row has no `answers`"),
    (
        "x.jsonl",
        MISPLACED,
        "question-answering",
        "line 1 (row 1): expected the answer 'at' at character 0 of the context, found 'ca'",
    ),
    (
        "x.json",
        '{"data": {}}',
        "question-answering",
        "does not have the structure of SQuAD, because the file contains no list `data`",
    ),
    ("x.json", '{"data": [{"paragraphs": [{"qas": [1]}]}]}', "question-answering", "a paragraph has no key `context`"),
    ("x.json", '{"data": []} garbage', "question-answering", "not valid JSON (Extra data"),
    (
        "x.jsonl",
        '{"text": "a", "label": "b", "text": "c"}',
        "classification",
        "has the key 'text' twice; remove one of them",
    ),
    ("x.conll", "a\u00a0b\n", "token-classification", "line 1 (row 1): the word 'a\\xa0b' has no tag"),
    ("x.conll", "a O\n\n\tO\n", "token-classification", "line 3 (row 2): there is no word before the tag"),
    ("x.json", json.dumps(SQUAD), "classification", "only question-answering reads SQuAD files"),
    (
        "x.csv",
        "good,joy\nbad,fear\n",
        "classification",
        "if the file has no header line, name all columns: --columns text,label,id",
    ),
    ("x.csv", 'text,label\n"a,b\n', "classification", "line 2: the row is not valid CSV"),
    ("x.xyz", "a", "classification", "extension is not supported"),
    ("x.parquet", "no", "classification", "cannot be read as a Parquet"),
]
RETRIEVAL: list[tuple[str, str, str]] = [
    ("embedding", '{"anchor": "a cat"}', "the row has no column 'positive', only 'anchor'; name the"),
    ("embedding", '{"anchor": "cat", "positive": "cat"}', "both texts are 'cat'"),
    (
        "embedding",
        '{"anchor": "a", "positive": "b", "label": 0}',
        "the row has a column label, but rows with anchor and positive",
    ),
    ("reranking", '{"query": "a", "document": "b", "label": 2}', "label is 2; labels of reranking must be numbers from 0"),
    ("reranking", '{"query": "a", "label": 1}', "the row has no column 'document', only"),
    ("reranking", '{"query": "a", "positive": 5}', "positive is 5; it must be a text or a list of texts"),
    ("reranking", '{"query": "a", "positive": "b", "negatives": ["c", " "]}', "negatives contains an empty text; write"),
    ("reranking", '{"query": "a", "positive": "b", "label": 2}', "label is 2; labels of reranking must be numbers from 0"),
    (
        "reranking",
        '{"query": "a", "positive": ["b", "c"], "labels": [1]}',
        "the row has 2 texts in positive and 1 in labels",
    ),
    ("reranking", '{"query": "a", "positive": ["b"], "scores": [0.5]}', "the row has scores in addition to positive"),
    ("reranking", '{"query": "a", "positive": "b", "score": 0.5}', "the row has score in addition to positive"),
    (
        "reranking",
        '{"query": "a", "positive": "b", "label": 1, "score": 1}',
        "the row has label and score in addition to positive",
    ),
    (
        "reranking",
        '{"query": "a", "positive": "b", "negative_1": "c", "labels": [1]}',
        "the row has labels in addition to negative_1",
    ),
    (
        "reranking",
        '{"query": "a", "positive": "b", "negative": "c", "scores": [0.9]}',
        "the row has scores in addition to positive",
    ),
    ("embedding", '{"anchor": "a", "positive": ["b", "c"], "labels": [1, 0]}', "positive is ['b', 'c']; it must be a text"),
    (
        "embedding",
        '{"anchor": "a", "positive": "b", "negative_1": "c", "scores": [0.9, 0.1]}',
        "the row has a column scores, but rows with anchor",
    ),
]
BAD += [("x.jsonl", row, task, f"line 1 (row 1): {message}") for task, row, message in RETRIEVAL]


@pytest.mark.parametrize(("name", "content", "task", "message"), BAD)
def test_bad_rows_are_named(tmp_path: Path, name: str, content: str | bytes, task: Any, message: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(InputError) as caught:
        rows_of(path, task)
    text = str(caught.value)
    assert message in text
    assert text.startswith(str(path))
    assert "\n" not in text


def test_numbers_beyond_the_names_of_labels(tmp_path: Path) -> None:
    labels = write(tmp_path / "labels.txt", "no\nyes\n")
    path = write(tmp_path / "x.jsonl", '{"text": "a", "label": 1}\n{"text": "a", "label": "no"}\n{"text": "a", "label": 2}')
    found = read_rows(path, "classification", TaskSettings(labels=str(labels)), labelled=True)
    assert [next(found).label, next(found).label] == ["yes", "no"]  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"line 3 \(row 3\): label is 2; the --labels file defines only the labels 0 to 1"):
        next(found)
    write(labels, "no\nno\n")
    with pytest.raises(InputError, match="line 2: 'no' is listed twice"):
        rows_of(path, "classification", labels=str(labels))


def test_a_class_number_may_have_leading_zeros(tmp_path: Path) -> None:
    labels, zeros = str(write(tmp_path / "labels.txt", "no\nyes\n")), 5000
    (row,) = rows_of(write(tmp_path / "x.tsv", f"text\tlabel\na\t{'0' * zeros}1\n"), "classification", labels=labels)
    assert row[1:] == ("a", None, "yes")
    for digits in (f"{'0' * zeros}2", f"-{'0' * zeros}1", f"{10**400}"):
        with pytest.raises(InputError, match="the --labels file defines only the labels 0 to 1"):
            rows_of(write(tmp_path / "x.tsv", f"text\tlabel\na\t{digits}\n"), "classification", labels=labels)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_numbered_negatives_are_read_in_the_order_of_their_numbers(tmp_path: Path, kind: str) -> None:
    columns = {"text": ["q", "q"], "anchor": ["a", "f"], "positive": ["b", "g"], "negative_10": ["e", None]}
    table = pyarrow.table({**columns, "negative_2": ["d", "i"], "negative_1": ["c", "h"]})
    path = tmp_path / f"x.{kind}"
    (csv.write_csv if kind == "csv" else parquet.write_table)(table, path)
    said: list[str] = []
    found = list(read_rows(path, "embedding", TaskSettings(), labelled=True, say=said.append))
    assert [row[1] for row in found] == [("a", "b", "c", "d", "e"), ("f", "g", "h", "i")]
    assert "anchor, positive, negative_1, negative_2, negative_10;" in said[0]
