"""Rows as they come out of each format; columns that are named are read or refused; bad rows and bombs."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from gaudi_bert.common import files
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.reading import SkippedRows, read_rows
from gaudi_bert.rows.types import TASKS_WITH_LABELS, IdsRow, Row, RowPosition, TaggedRow, TextRow
from tests.builders.rows import rows_of, write

ROWS: list[tuple[str, str, str | None, dict[str, Any], list[Row]]] = [
    (
        "x.jsonl.gz",
        '\ufeff{"text": "a b", "label": "good"}\n\n{"text": "c", "text_pair": "d\\u2028e", "label": "bad"}',
        "classification",
        {},
        [TextRow(RowPosition(1, 1), "a b", None, "good"), TextRow(RowPosition(2, 3), "c", "d\u2028e", "bad")],
    ),
    (  # a line ends at a line feed only
        "x.tsv",
        'say "no\t3\tid1\r\none\rtwo\u2028three\x0bfour\t0,3\tid2\n',
        "multi-label",
        {"columns": ("text", "label", "id"), "labels": "labels.txt"},
        [
            TextRow(RowPosition(1, 1), 'say "no', None, ("anger",)),
            TextRow(RowPosition(2, 2), "one\rtwo\u2028three\x0bfour", None, ("joy", "anger")),
        ],
    ),
    (  # CSV has quotes, and lines within them
        "x.csv",
        'sentence,score\n"one, ""two""\nthree",0.5\nfour,-2\n',
        "regression",
        {"text": "sentence", "label": "score"},
        [TextRow(RowPosition(1, 2), 'one, "two"\nthree', None, 0.5), TextRow(RowPosition(2, 4), "four", None, -2.0)],
    ),
    (  # a query with its documents is so many pairs
        "x.jsonl",
        '{"q": "a", "positive": ["b", "c"], "negatives": ["d"]}\n{"q": "e", "positive": "f"}\n'
        '{"q": "g", "document": "h", "label": 0.5}',
        "reranking",
        {"query": "q"},
        [
            *(TextRow(RowPosition(1, 1), "a", text, label) for text, label in (("b", 1.0), ("c", 1.0), ("d", 0.0))),
            TextRow(RowPosition(2, 2), "e", "f", 1.0),
            TextRow(RowPosition(3, 3), "g", "h", 0.5),
        ],
    ),
    (  # as mine_hard_negatives of sentence-transformers writes triplets, n-tuples, labelled pairs and labelled lists
        "x.jsonl",
        '{"query": "a", "positive": "b", "negative": "c"}\n{"query": "d", "positive": "e", "negative_1": "f"}\n'
        '{"query": "g", "positive": "h", "label": 0}\n{"query": "i", "positive": ["j", "k"], "labels": [0, 0.5]}\n',
        "reranking",
        {},
        [
            *(TextRow(RowPosition(1, 1), "a", text, label) for text, label in (("b", 1.0), ("c", 0.0))),
            *(TextRow(RowPosition(2, 2), "d", text, label) for text, label in (("e", 1.0), ("f", 0.0))),
            TextRow(RowPosition(3, 3), "g", "h", 0.0),
            *(TextRow(RowPosition(4, 4), "i", text, label) for text, label in (("j", 0.0), ("k", 0.5))),
        ],
    ),
    ("x.txt", "one\n\ntwo\n", None, {}, [TextRow(RowPosition(1, 1), "one"), TextRow(RowPosition(2, 3), "two")]),
    (
        "x.conll",
        "-DOCSTART- -X- O\n\nBonn NNP B-place\nis VBZ O\n\n\n# x O\n",
        "token-classification",
        {},
        [TaggedRow(RowPosition(1, 3), ("Bonn", "is"), ("B-place", "O")), TaggedRow(RowPosition(2, 7), ("#",), ("O",))],
    ),
]


@pytest.mark.parametrize(("name", "content", "task", "settings", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_rows_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, task: Any, settings: Any, expected: list[Row]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("labels.txt"), "joy\nfear\nlove\nanger\n")
    assert rows_of(write(Path(name), content), task, **settings) == expected


def test_parquet(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": [["x"], []]}), tmp_path / "x.parquet")
    assert rows_of(tmp_path / "x.parquet", "multi-label") == [
        TextRow(RowPosition(1), "a", None, ("x",)),
        TextRow(RowPosition(2), "b", None, ()),
    ]
    parquet.write_table(pyarrow.table({"input_ids": [[5, 6], [7]]}), tmp_path / "ids.parquet")
    assert rows_of(tmp_path / "ids.parquet", "masked-language-modelling") == [
        IdsRow(RowPosition(1), (5, 6)),
        IdsRow(RowPosition(2), (7,)),
    ]


ANCHOR, LIST = '{"anchor": "a", "positive": "b", "negatives": ["c"]}', '{"query": "a", "positive": "b", "negatives": ["c"]}'


@pytest.mark.parametrize(
    ("task", "content", "named"),
    [
        ("embedding", ANCHOR, {"negative": "no"}),
        ("embedding", '{"text": "a", "text_pair": "b", "label": 1}', {"negative": "no"}),
        ("reranking", LIST, {"negative": "no"}),
        ("reranking", '{"query": "a", "document": "b", "label": 1}', {"positive": "no"}),
    ],
)
def test_a_column_that_is_named_is_there(tmp_path: Path, task: Any, content: str, named: dict[str, str]) -> None:
    path = write(tmp_path / "x.jsonl", content)
    assert rows_of(path, task)
    with pytest.raises(InputError, match="has no column '"):
        rows_of(path, task, **named)


SPACES = [chr(code) for code in (0xB, 0xC, 0x1C, 0x85, 0xA0, 0x2003, 0x2028, 0x202F, 0x3000)]


@pytest.mark.parametrize("separator", [" ", "\t", "  "])
def test_a_word_of_conll_may_hold_any_space_but_the_separator(tmp_path: Path, separator: str) -> None:
    words = [f"10{space}000" for space in SPACES]
    lines = "".join(f"{word}{separator}x{separator}B-n\n" for word in words)
    (row,) = rows_of(write(tmp_path / "x.conll", lines), "token-classification")
    assert row == TaggedRow(RowPosition(1, 1), tuple(words), ("B-n",) * len(words))


def test_labels_of_documents_are_named_where_they_are_read_and_ignored_for_predictions(tmp_path: Path) -> None:
    path, said = write(tmp_path / "x.jsonl", '{"query": "i", "positive": ["j", "k"], "labels": [0, 2, 1]}'), []
    rows = list(read_rows(path, "reranking", TaskSettings(), say=said.append))
    assert [row.text_pair for row in rows if isinstance(row, TextRow)] == ["j", "k"]
    path = write(path, '{"query": "i", "positive": ["j", "k"], "labels": [0, 1]}')
    list(read_rows(path, "reranking", TaskSettings(), labelled=True, say=said.append))
    assert ["labels (label)" in line for line in said] == [False, True]


# --- columns that are named are read or refused, and the first line says which


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
        refused = ("has no effect", "only token-classification reads CoNLL files")
        assert any(reason in str(caught.value) for reason in refused) is not applies


@pytest.mark.parametrize("kind", ["jsonl", "txt", "conll"])
@pytest.mark.parametrize("option", [{"columns": ("text", "x")}, {"no_header": True}, {"delimiter": ";"}])
def test_names_of_columns_are_for_tables(tmp_path: Path, kind: str, option: dict[str, Any]) -> None:
    path = write(tmp_path / f"x.{kind}", FORMATS[kind])
    with pytest.raises(InputError, match=r"--(columns|no-header|delimiter) applies only to CSV and TSV"):
        rows_of(path, "token-classification", **option)


def test_a_second_text_that_is_named_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a", "b": "c"}\n{"text": "a", "b": null}\n{"text": "a"}\n')
    with pytest.raises(
        InputError, match=r"line 3 \(row 3\): the row has no column 'b', only 'text'; name the column with --text-pair"
    ):
        rows_of(tmp_path / "x.jsonl", text_pair="b")
    (tmp_path / "x.csv").write_text("text,b\na,c\na,\n")
    assert rows_of(tmp_path / "x.csv", text_pair="b") == [
        TextRow(RowPosition(1, 2), "a", "c"),
        TextRow(RowPosition(2, 3), "a"),
    ]


SCORED, NAMED = {"text": "a", "label": "c"}, {"columns": ("text", "label")}
CAUSAL, ANSWERS = "causal-language-modelling", "question-answering"
QUESTION = '{"question": "y?", "context": "c", "answers": []}'


@pytest.mark.parametrize(
    ("name", "content", "task", "settings", "line"),
    [
        (
            "x.csv",
            "a,b,c\nso so,2,3\n",
            "regression",
            SCORED,
            "CSV, a (text), c (label); line 2 (row 1) begins with 'so so'",
        ),
        ("x.tsv", "so\tjoy\n", "classification", NAMED, "TSV, text, label; line 1 (row 1) begins with 'so'"),
        (
            "x.jsonl",
            '\n{"text": "a", "text_pair": "b"}',
            None,
            {},
            "JSON lines, text, text_pair; line 2 (row 1) begins with 'a'",
        ),
        ("x.txt", "a  b" * 50, None, {}, "plain text; line 1 (row 1) begins with '" + ("a b" * 50)[:60] + "...'"),
        (
            "x.conll",
            "Bonn O\nis O\n",
            "token-classification",
            {},
            "CoNLL, tokens, tags; line 1 (row 1) begins with 'Bonn is'",
        ),
        ("x.jsonl", '{"input_ids": [5]}', CAUSAL, {}, "JSON lines, input_ids; line 1 (row 1) begins with '5'"),
        ("x.jsonl", QUESTION, ANSWERS, {}, "JSON lines, question, context, answers; line 1 (row 1) begins with 'y?'"),
    ],
)
def test_the_first_line_says_what_is_read(
    tmp_path: Path, name: str, content: str, task: Any, settings: Any, line: str
) -> None:
    path, said = write(tmp_path / name, content), []
    labelled = task is not None and "language" not in task
    assert list(read_rows(path, task, TaskSettings(**settings), labelled=labelled, say=said.append))
    assert said == [f"{path}: reading {line}"]


@pytest.mark.parametrize("kind", ["jsonl", "txt", "conll"])
@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_every_text_has_an_encoding(tmp_path: Path, kind: str, encoding: str) -> None:
    path = tmp_path / f"x.{kind}"
    path.write_bytes({"jsonl": '{"text": "süß"}\n', "txt": "süß\n", "conll": "süß O\n"}[kind].encode(encoding))
    (row,) = rows_of(path, "token-classification" if kind == "conll" else None, encoding=encoding)
    assert row[1] == (("süß",) if kind == "conll" else "süß")


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
BOMBS = [
    ("x.jsonl", b'{"text": "' + b"a" * BOMB, None, "a line is longer than 0.25 MiB"),
    ("x.csv", b'text\n"' + b"a\n" * (BOMB // 2), None, "the row that ends here is longer than"),
    ("x.csv", b"," * BOMB, None, "a line is longer than"),
    ("x.tsv", b"\t" * BOMB, None, "a line is longer than"),
    ("x.txt", b"\xff\xfe" + b"a\0" * BOMB, None, "a line is longer than"),
    ("x.conll", b"a O\n" * (BOMB // 4), "token-classification", "the sentence is longer than"),
    ("x.json", b'{"data": ' + b"[" * BOMB, "question-answering", "is longer than 1 MiB"),
]


@pytest.mark.parametrize(("name", "content", "task", "message"), BOMBS, ids=range(len(BOMBS)))
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
