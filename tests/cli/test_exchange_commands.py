"""Tables in, Parquet out, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders.command_line import run_command

pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)


def test_from_a_table_to_packed_parquet(tmp_path: Path) -> None:
    rows = [list(range(1, 2 + number % 19)) for number in range(90)]
    parquet.write_table(pyarrow.table({"input_ids": rows}), tmp_path / "rows.parquet")
    records, packed, plan = tmp_path / "records", tmp_path / "packed", tmp_path / "plan.json"
    imported = run_command("import", tmp_path / "rows.parquet", "--out", records, "--max-sequence-length", 20, "--json")
    assert imported.returncode == 0, imported.stderr
    assert json.loads(imported.stdout)["sequences"] == 90
    run_command("histogram", records, "--out", tmp_path / "histogram.json")
    run_command("plan", tmp_path / "histogram.json", "--out", plan, "--algorithm", "spfhp")
    write = ("write", records, "--plan", plan, "--out", packed)
    refused = run_command(*write, "--shard", "0/2", "--parquet")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    written = run_command(*write, "--parquet", "--predecessor-metadata", "--json")
    assert written.returncode == 0, written.stderr
    result = json.loads(written.stdout)
    assert result["parquet"] == str(packed / "parquet")
    assert json.loads(Path(result["predecessor_metadata"]).read_text())["original_number_of_samples"] == 90
    lengths = [length for row in parquet.read_table(packed / "parquet").to_pylist() for length in row["seq_lens"]]
    assert sorted(lengths) == sorted(map(len, rows))


def test_a_bad_row_is_one_line(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"input_ids": [[1], []]}), tmp_path / "rows.parquet")
    done = run_command("import", tmp_path / "rows.parquet", "--out", tmp_path / "records")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: {tmp_path / 'rows.parquet'}: row 1: has no token; leave empty rows out"]
