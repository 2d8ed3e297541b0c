"""A line of JSON is a row, value for value, or is refused by its number; other formats are in test_pack.py."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

import pyarrow

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import LONGEST_ROW_BYTES
from gaudi_bert.tables.parts import TablePart, list_parts, read_parts, read_table_schema
from tests.builders.agree import identical

GOOD = b'{"a": [1, 2]}\n'


def nested(brackets: bytes, levels: int) -> bytes:
    opening, closing = brackets[:-1], brackets[-1:]
    return b'{"a": ' + opening * levels + b"1" + closing * levels + b"}\n"


def rows_of(path: Path) -> list[dict]:
    schema = read_table_schema(path)
    parts = list_parts(path, schema.names, 10**9, 10**9)
    return [row for table in read_parts(parts, schema.names, schema) for row in table.to_pylist()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


@pytest.mark.parametrize(
    ("content", "row"),
    [
        (b"null\n" + GOOD, 0),
        (GOOD + b"[1]\n", 1),
        (GOOD + b"{} null\n", 1),
        (GOOD + b'{"a": [1]}{"a": [2]}\n', 1),
        (GOOD + b'{"a": [1]}]\n', 1),
        (GOOD + b'{"a":\n[1]}\n', 1),
        (GOOD + b'{"a": "x', 1),
        (GOOD + b'{"a": [1], "a": [2]}', 1),
        (nested(b"[]", 20_000), 0),
        (nested(b'{"a":}', 20_000), 0),
        (GOOD + nested(b"[]", 64), 1),
        (GOOD + b'{"a": [9223372036854775808]}\n', 1),
        (b'{"a": ' + b"9" * 5000 + b"}\n", 0),
        (GOOD + b'{"a": [1], "\xff": 2}\n', 1),
        (b'{"a": [1.5], "b": [true]}\n' * 5000 + b'{"a": [true]}\n', 5000),
        (b'{"a": ["b"]}\n' * 5000 + b'{"a": "b"}\n', 5000),
        (GOOD + b'{"a": [1], "b": "\\ud800"}\n', 1),
        (b"\x00\n", 0),
    ],
)
def test_the_first_row_that_is_none_is_named(path: Path, content: bytes, row: int) -> None:
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"^{path}: row {row}: ") as caught:
        rows_of(path)
    assert len(str(caught.value)) < len(str(path)) + 400


@pytest.mark.parametrize(
    "later", [{"n": 1.5}, {"b": 1}, {"n": True}, {"m": {"y": 1}}, {"n": [1]}, {"t": 1}, {"t": "", "n": "1"}]
)
def test_rows_follow_the_first_ones(path: Path, later: dict) -> None:
    schema = pyarrow.schema(
        [("n", pyarrow.int64()), ("m", pyarrow.struct([("x", pyarrow.int64())])), ("t", pyarrow.string())]
    )
    rows = [{"n": 1, "m": {"x": 2}, "t": "a"}, {"n": None, "m": {}}, later]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = path.stat().st_size
    with pytest.raises(InputError, match=r"rows\.jsonl: row 9: "):
        list(read_parts([TablePart(path, 7, 3, size, 0, 0, size)], schema.names, schema))
    part = TablePart(path, 7, 2, size, 0, 0, size - len(json.dumps(later)) - 1)
    (good,) = read_parts([part], schema.names, schema)
    assert good.to_pylist() == [{"n": 1, "m": {"x": 2}, "t": "a"}, {"n": None, "m": {"x": None}, "t": None}]


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": "' + b"x" * (LONGEST_ROW_BYTES + (17 << 20)) + b'"}\n', 1))
    with pytest.raises(InputError, match=r"rows\.jsonl\.gz: a line is longer than 64 MiB; write one JSON object per line"):
        read_table_schema(path)


@pytest.mark.parametrize(
    "content",
    ["2024-05-01", "2024-05-01 10:00:00", "2024-05-01T10:00:00.5Z", ["2024-05-01"], {"day": {"of": ["2024-05-01"]}, "n": 1}],
)
def test_a_text_stays_a_text(path: Path, content: object) -> None:
    path.write_text("".join(json.dumps({"date": content, "n": number}) + "\n" for number in range(3)))
    assert rows_of(path) == [{"date": content, "n": number} for number in range(3)]


ROUNDED = 2**53 + 1


@pytest.mark.parametrize(
    ("rows", "row"),
    [
        ([{"a": 1.0}, {"a": ROUNDED}], 1),
        ([{"a": -ROUNDED}, {"a": 1.5}], 1),
        ([{"a": 1.0, "t": str(ROUNDED)}] * 7 + [{"a": 2**63 - 1, "t": "x"}, {"a": 2**53, "t": "x"}], 7),
        ([{"a": {"b": [0.5, 1]}}, {"a": {"b": [1, ROUNDED]}}], 1),
        ([{"a": [{"b": 1.5}, {"b": None}]}, {}, {"a": [{}, {"b": ROUNDED}]}], 2),
    ],
)
@pytest.mark.parametrize("start", ["", "\ufeff", "\n\n"])
def test_a_number_that_its_column_does_not_hold_is_refused(path: Path, rows: list[dict], row: int, start: str) -> None:
    lines = [json.dumps(each) + "\n" for each in rows]
    path.write_text(start + "".join(lines), encoding="utf-8")
    with pytest.raises(InputError, match=rf"row {row}: .*\d{{16}}"):
        rows_of(path)
    path.write_text(start + "".join(lines[:row] + lines[row + 1 :]), encoding="utf-8")
    assert len(rows_of(path)) == len(rows) - 1


def test_what_looks_odd_and_is_sound(path: Path) -> None:
    rows = [
        {"text": '}{][" \\', "number": 9223372036854775807, "real": 0.12345678901234567890123},
        {"text": "\u0660\u2028[[[[", "number": -9223372036854775807, "real": 1e-300},
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    identical(rows_of(path), rows)
    rows = [{"n": 2**53 + 1, "of": 1.5, "t": "12345678901234567"}, {"n": 2**62 + 1, "of": 2**53, "t": ""}]
    path.write_text("\n".join(map(json.dumps, rows)))
    identical(rows_of(path), rows)
    path.write_bytes(nested(b"[]", 63))
    assert len(rows_of(path)) == 1
