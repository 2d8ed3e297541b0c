"""Commands of data as they are typed: what is printed, and one line for whatever is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.completion import read_signature
from gaudi_bert.artefacts.packed import RecordMetadata, TableMetadata
from gaudi_bert.config.sections import PackingSettings
from tests.builders import tables
from tests.builders.command_line import refusal, succeed
from tests.builders.folders import contents
from tests.builders.packing_case import PackingCase, make_case

pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)

PACK = ("--max-sequence-length", "16", "--algorithm", "lpfhp")


def test_pack_and_verify(tmp_path: Path) -> None:
    tables.write_parquet(tmp_path / "rows.parquet", [{"input_ids": [1] * size} for size in (16, 9, 7, 20, 3)])
    pack = ("pack", tmp_path / "rows.parquet", *PACK)
    packed = succeed(*pack, "--out", tmp_path / "out", "--too-long", "split", "--verify").stdout.splitlines()
    assert packed[0].startswith("5 rows (6 sequences) became 4 packs")
    assert packed[-1] == f"Next: gaudi-bert train --data {tmp_path / 'out'} --out run/ --model MODEL"
    again = succeed(*pack, "-o", tmp_path / "out", "--too-long", "split", "--verbose", "-q").stdout.splitlines()
    assert "algorithm lpfhp, depth 2" in again
    assert not any(line.startswith("Next:") for line in again)
    assert "5 rows, 6 sequences in 4 packs" in succeed("verify", tmp_path / "rows.parquet", tmp_path / "out").stdout
    result = json.loads(succeed(*pack, "--out", tmp_path / "dropped", "--too-long", "drop", "--json").stdout)
    assert result["too_long"] == {"policy": "drop", "rows": 1, "dropped_rows": 1, "dropped_tokens": 20, "added_sequences": 0}
    parts = (*pack, "--out", tmp_path / "parts", "--too-long", "truncate")
    succeed(*parts, "--shard", "0/1")
    succeed(*parts, "--finish", "--group-bytes", "1GiB")


@pytest.mark.parametrize(
    ("name", "content", "options", "reason"),
    [
        ("t.parquet", {"input_ids": [[1], []]}, "", "t.parquet: row 1: the row contains no token"),
        ("t.parquet", {"input_ids": [[1], None]}, "", "t.parquet: row 1: input_ids is null"),
        ("t.parquet", {"input_ids": [[1], [2, 3]], "labels": [[1], [2]]}, "", "row 1: labels has 1 values, but"),
        ("t.parquet", {"input_ids": [[1], [2, 0]], "attention_mask": [[1], [1, 0]]}, "", "1: attention_mask contains a 0"),
        ("t.parquet", {"input_ids": [[1]], "row": [1]}, "", "column row has the name of a column that packing adds"),
        ("t.parquet", {"input_ids": [[1] * 17, [1] * 18]}, "", "row 0: expected 1 to 16 tokens, found 17; increase"),
        ("t.parquet", {"input_ids": []}, "", "column input_ids must contain lists of integers, but has type null"),
        ("t.parquet", {"input_ids": [[1]]}, "--too-long cut", "--too-long cut: must be error, truncate, "),
        ("t.parquet", {"input_ids": [[1]]}, "--columns label", "has no column label, only input_ids"),
        ("t.parquet", {"input_ids": [[1]]}, "--shard 0/2 --verify", "--shard cannot be combined with --verify"),
        ("t.jsonl", b'{"input_ids": [1]}\n{"input_ids": ["a"]}\n', "", "t.jsonl: row 1: "),
        ("t.jsonl", b"\n\n", "", "t.jsonl: the table contains no rows"),
        (
            "t.jsonl.gz",
            gzip.compress(b'{"input_ids": [1]}\n' * 99, mtime=0)[:-9],
            "",
            "t.jsonl.gz: the compressed data is damaged or incomplete",
        ),
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
        ("nothing", pyarrow.array([{}, {}], pyarrow.struct([])), "struct<>, which cannot be packed"),
        (
            "labels",
            pyarrow.array([[1, 2], [3]], pyarrow.list_(pyarrow.uint32())),
            "uint32, which cannot represent -100",
        ),
        (
            "labels",
            pyarrow.array([[True, False], [True]]),
            "bool, which cannot represent -100",
        ),
        ("labels", pyarrow.array([[1, 2], [3]], pyarrow.list_view(pyarrow.int32())), "which is not supported; cast"),
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
    assert "b.parquet: column input_ids has type list<element: int16>, but list<ele" in refusal(*pack)
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    assert "b.parquet: the file cannot be read as a Parquet or Arrow table" in refusal(*pack)
    assert not (tmp_path / "out").exists()


def test_options_of_tables_are_refused_for_records(tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(b"x")
    line = refusal("pack", tmp_path / "records", "--out", tmp_path / "out", "--too-long", "drop")
    assert line.startswith("--too-long drop: ")


# --- `--set packing.KEY=VALUE` of `plan`, `write` and `pack`: every key arrives, and what makes no sense is one line

# Of each key, a value that is not the default, as it is typed and as it is stored.
VALUES = {
    "algorithm": ("lpfhp", "lpfhp"),
    "depth": ("2", 2),
    "leftovers": ("complement", "complement"),
    "effort": ("unlimited", "unlimited"),
    "masked_slots": ("17", 17),
    "group_bytes": ("2MiB", 2 * 2**20),
    "shard_bytes": ("70kB", 70_000),
}
TABLE = ("--max-sequence-length", 64)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "rows.parquet"
    tables.write_parquet(path, tables.random_rows(300, 60, seed=11), row_group_size=50)
    return path


def test_plan_takes_every_key(case: PackingCase, tmp_path: Path) -> None:
    sets = [word for name, (text, _) in VALUES.items() for word in ("--set", f"packing.{name}={text}")]
    succeed("plan", case.plan.with_name("histogram.json"), "--out", tmp_path / "plan.json", *sets)
    stored = {name: value for name, (_, value) in VALUES.items()}
    settings = read_signature(tmp_path / "plan.settings.json").settings
    assert settings == {**PackingSettings().model_dump(mode="json"), **stored}


def test_an_option_and_a_key_are_the_same_and_the_key_wins(case: PackingCase, tmp_path: Path) -> None:
    counted = case.plan.with_name("histogram.json")
    succeed("plan", counted, "--out", tmp_path / "option.json", "--depth", 2)
    done = succeed("plan", counted, "--out", tmp_path / "key.json", "--depth", 4, "--set", "packing.depth=2", "--json")
    assert json.loads(done.stdout)["depth_used"] == 2
    assert (tmp_path / "option.json").read_bytes() == (tmp_path / "key.json").read_bytes()


def test_write_takes_what_the_plan_leaves_open(case: PackingCase, tmp_path: Path) -> None:
    write = ("write", case.records, "--plan", case.plan)
    changed = ("--set", "packing.shard_multiple=3", "--set", "packing.shard_bytes=2kB")
    succeed(*write, "--out", tmp_path / "packed", *changed)
    metadata = RecordMetadata.read(tmp_path / "packed")
    assert metadata.shard_multiple == 3
    assert set(metadata.shard_table.shards_per_group % 3) == {0}
    assert metadata.shard_table.bytes.max() <= 2_000 < RecordMetadata.read(case.packed).shard_table.bytes.max()
    succeed("verify", case.records, tmp_path / "packed")
    for part in (1, 0):
        succeed(*write, "--out", tmp_path / "parts", *changed, "--shard", f"{part}/2")
    assert "shard_multiple: 3 in the file, 4 now" in refusal(*write, "--out", tmp_path / "parts")
    succeed(*write, "--out", tmp_path / "parts", *changed, "--finish")
    packs = {name: data for name, data in contents(tmp_path / "packed").items() if "verif" not in name}
    assert contents(tmp_path / "parts") == packs


def test_write_refuses_what_the_plan_has_decided(case: PackingCase, tmp_path: Path) -> None:
    name, typed = "depth", "packing.depth=2"
    line = refusal("write", case.records, "--plan", case.plan, "--out", tmp_path / "packed", "--set", typed)
    assert line.startswith(f"--set {typed}: ")
    assert f"`packing.{name}`" in line
    assert "`gaudi-bert plan`" in line
    assert not (tmp_path / "packed").exists()


def test_tables_take_the_keys_that_they_have(table: Path, tmp_path: Path) -> None:
    pack, taken = ("pack", table, "--out", tmp_path / "out", *TABLE), {}
    for name, (text, stored) in VALUES.items():
        if name in ("leftovers", "masked_slots"):
            line = refusal(*pack, "--set", f"packing.{name}={text}")
            assert line.startswith(f"--set packing.{name}={text}: ")
            assert str(table) in line
        elif name != "algorithm":
            taken[name] = (f"packing.{name}={text}", stored)
    too_few = refusal(*pack, "--set", "packing.group_bytes=3")
    assert too_few.startswith("--set packing.group_bytes=3: must be an integer, >= 1,048,576")
    assert not (tmp_path / "out").exists()
    succeed(*pack, *(word for typed, _ in taken.values() for word in ("--set", typed)), "--verify")
    settings = read_signature(TableMetadata.json_path_in(tmp_path / "out").with_name("settings.json")).settings
    assert {name: settings[name] for name in taken} == {name: stored for name, (_, stored) in taken.items()}
    assert settings["algorithm"] == "optimal"


@pytest.mark.parametrize("words", ["plan h.json", "write . --plan p.json", "pack .", "pack t.jsonl --max-sequence-length 9"])
def test_keys_of_other_sections_are_refused(words: str, tmp_path: Path) -> None:
    line = refusal(*words.split(), "--out", "out", "--set", "training.updates=8", folder=tmp_path)
    assert line.startswith("--set training.updates=8: ")
    assert "`packing`" in line
