"""Rows of a search: negatives in columns of any number."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pytest
from pyarrow import csv, parquet

from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.reading import read_rows


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
