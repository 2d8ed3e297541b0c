"""Rows as they come out of each format, and what is said of bad ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.reading import windows
from gaudi_bert.rows.types import IdsRow, Row, RowPosition, TaggedRow, TextRow
from tests.builders.rows import rows_of, write

JSON_LINES = '\ufeff{"text": "a b", "label": "good"}\n\n{"text": "c", "text_pair": "d\\u2028e", "label": "bad"}'
ROWS: list[tuple[str, str, str | None, dict[str, Any], list[Row]]] = [
    *(
        (
            name,
            JSON_LINES,
            "classification",
            {},
            [TextRow(RowPosition(1, 1), "a b", None, "good"), TextRow(RowPosition(2, 3), "c", "d\u2028e", "bad")],
        )
        for name in ("x.jsonl", "x.jsonl.gz")
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
    pyarrow = pytest.importorskip("pyarrow")

    parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": [["x"], []]}), tmp_path / "x.parquet")
    rows = rows_of(tmp_path / "x.parquet", "multi-label")
    assert rows == [TextRow(RowPosition(1), "a", None, ("x",)), TextRow(RowPosition(2), "b", None, ())]
    parquet.write_table(pyarrow.table({"input_ids": [[5, 6], [7]]}), tmp_path / "ids.parquet")
    assert rows_of(tmp_path / "ids.parquet", "masked-language-modelling") == [
        IdsRow(RowPosition(1), (5, 6)),
        IdsRow(RowPosition(2), (7,)),
    ]


def test_windows_of_rows() -> None:
    rows: list[Row] = [TextRow(RowPosition(number), "x") for number in range(7)]
    assert [len(window) for window in windows(iter(rows), 3)] == [3, 3, 1]
    assert list(windows(iter([]), 3)) == []


ANCHOR, LIST = '{"anchor": "a", "positive": "b", "negatives": ["c"]}', '{"query": "a", "positive": "b", "negatives": ["c"]}'


@pytest.mark.parametrize(
    ("task", "content", "named"),
    [
        ("embedding", ANCHOR, {"negative": "no"}),
        ("embedding", ANCHOR, {"anchor": "no"}),
        ("embedding", ANCHOR, {"positive": "no"}),
        ("embedding", ANCHOR, {"text": "no"}),
        ("embedding", ANCHOR, {"label": "no"}),
        ("embedding", '{"text": "a", "text_pair": "b", "label": 1}', {"anchor": "no"}),
        ("embedding", '{"text": "a", "text_pair": "b", "label": 1}', {"negative": "no"}),
        ("reranking", LIST, {"negative": "no"}),
        ("reranking", LIST, {"positive": "no"}),
        ("reranking", LIST, {"query": "no"}),
        ("reranking", LIST, {"document": "no"}),
        ("reranking", '{"query": "a", "document": "b", "label": 1}', {"positive": "no"}),
        ("classification", '{"text": "a", "label": "b"}', {"text_pair": "no"}),
        ("classification", '{"text": "a", "label": "b"}', {"label": "no"}),
        ("classification", '{"text": "a", "label": "b"}', {"text": "no"}),
        ("token-classification", '{"tokens": ["a"], "tags": ["O"]}', {"tokens": "no"}),
        ("token-classification", '{"tokens": ["a"], "tags": ["O"]}', {"tags": "no"}),
        ("masked-language-modelling", '{"text": "a"}', {"text": "no"}),
    ],
)
def test_a_column_that_is_named_is_there(tmp_path: Path, task: Any, content: str, named: dict[str, str]) -> None:
    path = write(tmp_path / "x.jsonl", content)
    assert rows_of(path, task)
    with pytest.raises(InputError, match="has no '"):
        rows_of(path, task, **named)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read: No such file"):
        rows_of(tmp_path / "none.jsonl", "classification")


SPACES = [chr(code) for code in (0xB, 0xC, 0x1C, 0x85, 0xA0, 0x2003, 0x2028, 0x202F, 0x3000)]


@pytest.mark.parametrize("separator", [" ", "\t", "  "])
def test_a_word_of_conll_may_hold_any_space_but_the_separator(tmp_path: Path, separator: str) -> None:
    words = [f"10{space}000" for space in SPACES]
    lines = "".join(f"{word}{separator}x{separator}B-n\n" for word in words)
    (row,) = rows_of(write(tmp_path / "x.conll", lines), "token-classification")
    assert row == TaggedRow(RowPosition(1, 1), tuple(words), ("B-n",) * len(words))
