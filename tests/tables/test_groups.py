"""The rows of a table, read in groups and cut into sequences; the first wrong row is named."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

from gaudi_bert.common.errors import InputError
from gaudi_bert.tables.pack import pack_table
from tests.builders import tables
from tests.builders.reporters import a_run
from tests.builders.tables import settings
from tests.oracles.packed_table import check_packed_table


@pytest.mark.parametrize("policy", ["truncate", "split", "drop"])
def test_rows_that_are_too_long(tmp_path: Path, policy: str) -> None:
    rows = tables.random_rows(83, 150, seed=5)
    tables.write_stream(tmp_path / "rows.arrow", rows)
    chosen = settings(too_long=policy, group_sequences=30)
    result = pack_table(tmp_path / "rows.arrow", tmp_path / "out", chosen, a_run(), verify=True)
    check_packed_table(tmp_path / "out", rows, 61, policy)
    long = [len(row["input_ids"]) for row in rows if len(row["input_ids"]) > 61]
    effect = result.written.content.too_long
    assert effect.rows == len(long)
    assert effect.dropped_rows == (len(long) if policy == "drop" else 0)
    assert effect.dropped_tokens == {"truncate": sum(long) - 61 * len(long), "split": 0, "drop": sum(long)}[policy]
    assert effect.added_sequences == (sum(-(-size // 61) - 1 for size in long) if policy == "split" else 0)


def test_a_large_row_group_is_read_in_runs(tmp_path: Path) -> None:
    rows = tables.random_rows(101, 61, seed=9)
    tables.write_parquet(tmp_path / "rows.parquet", rows, row_group_size=1000)
    chosen = settings(group_sequences=30)
    result = pack_table(tmp_path / "rows.parquet", tmp_path / "out", chosen, a_run(), verify=True)
    assert len(result.written.content.groups) == 4
    check_packed_table(tmp_path / "out", rows, 61)


@pytest.mark.parametrize(("ending", "token"), [("parquet", 2**32 + 7), ("arrow", -1), ("jsonl", 2**31)])
def test_numbers_that_would_wrap_are_named(tmp_path: Path, ending: str, token: int) -> None:
    write = {"parquet": tables.write_parquet, "arrow": tables.write_stream, "jsonl": tables.write_lines}[ending]
    write(tmp_path / f"rows.{ending}", [{"input_ids": [2, 3]}, {"input_ids": [2, token, 3]}])
    with pytest.raises(InputError, match=rf"rows.{ending}: row 1: input_ids contains {token}, .* between 0 and 2147483647"):
        pack_table(tmp_path / f"rows.{ending}", tmp_path / "out", settings(), a_run())
    assert not (tmp_path / "out").exists()
