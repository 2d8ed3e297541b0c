"""Rows of a search: negatives in columns of any number."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.reading import read_rows


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_numbered_negatives_are_read_in_the_order_of_their_numbers(tmp_path: Path, ending: str) -> None:
    columns = {"text": ["q", "q"], "anchor": ["a", "f"], "positive": ["b", "g"], "negative_10": ["e", None]}
    columns |= {"negative_2": ["d", "i"], "negative_1": ["c", "h"]}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    path = tmp_path / f"x.{ending}"
    if ending == "parquet":
        parquet.write_table(pyarrow.table(columns), path)
    elif ending == "csv":
        path.write_text(
            "\n".join(",".join(value or "" for value in each) for each in (columns, *(row.values() for row in rows)))
        )
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    found = list(read_rows(path, "embedding", TaskSettings(), labelled=True, say=said.append))
    assert [row[1] for row in found] == [("a", "b", "c", "d", "e"), ("f", "g", "h", "i")]
    assert "anchor, positive, negative_1, negative_2, negative_10;" in said[0]
