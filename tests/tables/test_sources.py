"""What files and columns a table has, wherever it is."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.common.errors import InputError
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tables.sources import is_table
from tests.builders import tables
from tests.builders.reporters import a_run
from tests.builders.s3_server import S3Server
from tests.builders.tables import settings
from tests.oracles.packed_table import packs_of


def test_only_chosen_columns_are_packed(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "tags": ["a", "b"], "labels": [1, 2], "name": "x"}]
    tables.write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError, match=r"column tags has type list<.*>, but only lists of numbers can be packed"):
        pack_table(tmp_path / "rows.jsonl", tmp_path / "out", settings(), a_run())
    pack_table(tmp_path / "rows.jsonl", tmp_path / "out", settings(columns=("labels",)), a_run(), verify=True)
    (pack,) = packs_of(tmp_path / "out")
    assert set(pack) == {"input_ids", "labels", "position_ids", "sequence_ids", "seq_lens", "indices"}


def test_a_folder_of_tables_is_known_by_what_is_in_it(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    for name in ("records/part-0", "rows/part-0.parquet"):
        ObjectStore().write(f"s3://bucket/known/{name}", b"x")
    assert is_table("s3://bucket/known/rows")
    assert is_table("s3://bucket/known/none.parquet")
    assert not is_table("s3://bucket/known/records")
