"""`import`, `pack` and `verify` of tables as they are typed: what is printed, and one line for whatever is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.builders import tables
from tests.builders.command_line import refusal, run_command, run_python, succeed

pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)

PACK = ("--max-sequence-length", "16", "--algorithm", "lpfhp")


def test_pack_and_verify(tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * size} for size in (16, 9, 7, 20, 3)]
    tables.write_parquet(tmp_path / "rows.parquet", rows)
    pack = ("pack", tmp_path / "rows.parquet", *PACK)
    packed = succeed(*pack, "--out", tmp_path / "out", "--too-long", "split", "--verify")
    assert packed.stdout.splitlines() == [
        "5 rows (6 sequences) became 4 packs (1.50 times fewer), proven: none fewer is possible",
        "85.94 % of the slots hold tokens",
        f"Wrote {tmp_path / 'out'} (1 shard)",
        "1 row was too long: split, which added 1 sequence; no token is lost (--too-long split)",
        "verified: every one of 6 sequences is in the packs exactly once",
        f"Next: gaudi-bert train --data {tmp_path / 'out'} --out run/ --model MODEL",
    ]
    again = succeed(*pack, "-o", tmp_path / "out", "--too-long", "split", "--verbose", "-q").stdout.splitlines()
    assert "algorithm lpfhp, depth 2" in again
    assert not any(line.startswith("Next:") for line in again)
    verified = run_command("verify", tmp_path / "rows.parquet", tmp_path / "out", "--overwrite")
    assert verified.stdout.splitlines()[:2] == [
        "5 rows, 6 sequences in 4 packs",
        "every sequence is there exactly once, value for value in input_ids",
    ]
    index = succeed(*pack, "--out", tmp_path / "index", "--too-long", "drop", "--index-only", "--json")
    result = json.loads(index.stdout)
    assert result["too_long"] == {"policy": "drop", "rows": 1, "dropped_rows": 1, "dropped_tokens": 20, "added_sequences": 0}
    parts = (*pack, "--out", tmp_path / "parts", "--too-long", "truncate")
    succeed(*parts, "--shard", "0/1")
    succeed(*parts, "--finish", "--group-bytes", "1GiB")


# As where pandas is not installed, which libraries look for.
WITHOUT_PANDAS = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
sys.meta_path.insert(0, Blocked())
from gaudi_bert.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("options", [(), ("--index-only",)])
def test_tables_need_no_pandas(tmp_path: Path, options: tuple[str, ...]) -> None:
    rows = [{"input_ids": [1, 2], "flags": [True, False], "scores": [0.5, 1.5], "name": str(row)} for row in range(7)]
    tables.write_parquet(tmp_path / "rows.parquet", rows)
    command = ("pack", tmp_path / "rows.parquet", "--out", tmp_path / "out", *PACK, *options, "--verify")
    done = run_python(WITHOUT_PANDAS, *command)
    assert (done.returncode, done.stderr) == (0, "")
    assert "verified: every one of 7 sequences is in the packs exactly once" in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "options", "reason"),
    [
        ("t.parquet", {"input_ids": [[1], []]}, "", "t.parquet: row 1: has no token"),
        ("t.parquet", {"input_ids": [[1], None]}, "", "t.parquet: row 1: input_ids is null"),
        ("t.parquet", {"input_ids": [[1], [2, 3]], "labels": [[1], [2]]}, "", "row 1: labels has 1 values for 2 input_ids"),
        ("t.parquet", {"input_ids": [[1], [2, 0]], "attention_mask": [[1], [1, 0]]}, "", "row 1: attention_mask holds a 0"),
        ("t.parquet", {"input_ids": [[1]], "row": [1]}, "", "column row has a name that packing writes itself"),
        ("t.parquet", {"input_ids": [[1] * 17, [1] * 18]}, "", "row 0: has 17 tokens, allowed are 1 to 16; 2 of 2 rows are"),
        ("t.parquet", {"input_ids": []}, "", "column input_ids holds null; it must hold lists"),
        ("t.parquet", {"input_ids": [[1]]}, "--too-long cut", "--too-long cut: must be error, truncate, "),
        ("t.parquet", {"input_ids": [[1]]}, "--columns label", "has no column label; it has input_ids"),
        ("t.parquet", {"input_ids": [[1]]}, "--shard 0/2 --verify", "--shard excludes --finish and --verify"),
        ("t.jsonl", b'{"input_ids": [1]}\n{"input_ids": ["a"]}\n', "", "t.jsonl: row 1: "),
        ("t.jsonl", b"\n\n", "", "t.jsonl: the table holds no row"),
        ("t.jsonl.gz", gzip.compress(b'{"input_ids": [1]}\n' * 99, mtime=0)[:-9], "", "t.jsonl.gz: is damaged or cut short"),
    ],
)
def test_whatever_is_wrong_is_one_line(tmp_path: Path, name: str, content: Any, options: str, reason: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        parquet.write_table(pyarrow.table(content), path)
    assert reason in refusal("pack", path, "--out", tmp_path / "out", *PACK, *options.split())
    assert "--max-sequence-length" in refusal("pack", path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("when", pyarrow.nulls(2, pyarrow.month_day_nano_interval()), "month_day_nano_interval, which cannot be packed"),
        ("nothing", pyarrow.array([{}, {}], pyarrow.struct([])), "holds struct<>, which cannot be packed"),
        ("labels", pyarrow.array([[1, 2], [3]], pyarrow.list_(pyarrow.uint32())), "lists of uint32, which cannot be -100"),
        ("labels", pyarrow.array([[True, False], [True]]), "lists of bool, which cannot be -100, and padding must be; cast"),
        ("labels", pyarrow.array([[1, 2], [3]], pyarrow.list_view(pyarrow.int32())), "whose lists are not packed; cast"),
    ],
)
def test_columns_that_cannot_be_packed_are_refused_before_anything_is_written(
    tmp_path: Path, column: str, values: Any, reason: str
) -> None:
    table = pyarrow.table({"input_ids": [[1, 2], [3]], column: values})
    with pyarrow.OSFile(str(tmp_path / "t.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    command = ("pack", tmp_path / "t.arrow", "--out", tmp_path / "out", *PACK)
    line = refusal(*command)
    assert f"t.arrow: column {column} " in line
    assert reason in line
    assert not (tmp_path / "out").exists()
    succeed(*command, "--columns", "input_ids")


def test_tables_that_do_not_go_together(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"input_ids": [[1]]}), tmp_path / "a.parquet")
    short = pyarrow.schema([("input_ids", pyarrow.list_(pyarrow.int16()))])
    parquet.write_table(pyarrow.table({"input_ids": [[1]]}, short), tmp_path / "b.parquet")
    pack = ("pack", tmp_path, "--out", tmp_path / "out", *PACK)
    assert "b.parquet: column input_ids holds list<element: int16>, in a.parquet it holds list<ele" in refusal(*pack)
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    assert "b.parquet: cannot be read as a Parquet or Arrow table" in refusal(*pack)
    assert not (tmp_path / "out").exists()


def test_options_of_tables_are_refused_for_records(tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(b"x")
    line = refusal("pack", tmp_path / "records", "--out", tmp_path / "out", "--too-long", "drop")
    assert "--too-long is for tables" in line


def test_from_a_table_to_packed_parquet(tmp_path: Path) -> None:
    rows = [list(range(1, 2 + number % 19)) for number in range(90)]
    parquet.write_table(pyarrow.table({"input_ids": rows}), tmp_path / "rows.parquet")
    records, packed, plan = tmp_path / "records", tmp_path / "packed", tmp_path / "plan.json"
    imported = succeed("import", tmp_path / "rows.parquet", "--out", records, "--max-sequence-length", 20, "--json")
    assert json.loads(imported.stdout)["sequences"] == 90
    succeed("histogram", records, "--out", tmp_path / "histogram.json")
    succeed("plan", tmp_path / "histogram.json", "--out", plan, "--algorithm", "spfhp")
    write = ("write", records, "--plan", plan, "--out", packed)
    succeed(*write)
    convert = ("convert", packed, "--to", "parquet", "--out", tmp_path / "parquet")
    result = json.loads(succeed(*convert, "--json").stdout)
    assert (result["format"], result["sequences"]) == ("parquet", 90)
    assert succeed(*convert).stdout.endswith("(already there, nothing to do)\n")
    lengths = [length for row in parquet.read_table(tmp_path / "parquet").to_pylist() for length in row["seq_lens"]]
    assert sorted(lengths) == sorted(map(len, rows))
