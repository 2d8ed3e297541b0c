"""`--set packing.KEY=VALUE` of `plan`, `write` and `pack`: every key arrives, and what makes no sense is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gaudi_bert.artefacts.completion import read_signature
from gaudi_bert.artefacts.packed import Metadata, TableMetadata
from gaudi_bert.artefacts.plan import Plan
from gaudi_bert.config.sections import PackingSettings
from tests.builders.command_line import refusal, succeed
from tests.builders.folders import contents
from tests.builders.packing_case import PackingCase, make_case
from tests.builders.tables import random_rows, write_parquet

# Of each key, a value that is not the default, as it is typed and as it is stored.
VALUES = {
    "algorithm": ("lpfhp", "lpfhp"),
    "depth": ("2", 2),
    "leftovers": ("complement", "complement"),
    "masked_slots": ("17", 17),
    "group_sequences": ("46", 46),
    "group_bytes": ("2MiB", 2 * 2**20),
    "shard_multiple": ("3", 3),
    "shard_bytes": ("70kB", 70_000),
    "seed": ("7", 7),
}
TABLE = ("--max-sequence-length", 64)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "rows.parquet"
    write_parquet(path, random_rows(300, 60, seed=11), row_group_size=50)
    return path


def test_there_is_a_value_of_every_key() -> None:
    assert set(VALUES) == set(PackingSettings.model_fields)
    assert all(stored != getattr(PackingSettings(), name) for name, (_, stored) in VALUES.items())


def test_plan_takes_every_key(case: PackingCase, tmp_path: Path) -> None:
    counted = case.plan.with_name("histogram.json")
    for name, (text, stored) in VALUES.items():
        out = tmp_path / f"{name}.json"
        succeed("plan", counted, "--out", out, "--set", f"packing.{name}={text}")
        settings = read_signature(out.with_name(f"{name}.settings.json")).settings
        assert settings == {**PackingSettings().model_dump(mode="json"), name: stored}


def test_pack_takes_every_key_as_plan_does(case: PackingCase, tmp_path: Path) -> None:
    typed = [f"--set=packing.{name}={text}" for name, (text, _) in VALUES.items()]
    succeed("pack", case.records, "--out", tmp_path / "packed", *typed, "--verify")
    plan = Plan.read(tmp_path / "packed-plan" / "plan.json")
    assert (plan.depth, plan.masked_slots, plan.shard_multiple, plan.seed) == (2, 17, 3, 7)
    assert len(Metadata.read(tmp_path / "packed").groups) == plan.group_count > 1


def test_an_option_and_a_key_are_the_same_and_the_key_wins(case: PackingCase, tmp_path: Path) -> None:
    counted = case.plan.with_name("histogram.json")
    succeed("plan", counted, "--out", tmp_path / "option.json", "--depth", 2)
    succeed("plan", counted, "--out", tmp_path / "key.json", "--depth", 4, "--set", "packing.depth=2")
    assert (tmp_path / "option.json").read_bytes() == (tmp_path / "key.json").read_bytes()


def test_write_takes_what_the_plan_leaves_open(case: PackingCase, tmp_path: Path) -> None:
    write = ("write", case.records, "--plan", case.plan)
    changed = ("--set", "packing.shard_multiple=3", "--set", "packing.shard_bytes=2kB")
    succeed(*write, "--out", tmp_path / "packed", *changed)
    metadata = Metadata.read(tmp_path / "packed")
    assert metadata.shard_multiple == 3
    assert set(metadata.shard_table.group_sizes % 3) == {0}
    assert metadata.shard_table.bytes.max() <= 2_000 < Metadata.read(case.packed).shard_table.bytes.max()
    succeed("verify", case.records, tmp_path / "packed")
    for part in (1, 0):
        succeed(*write, "--out", tmp_path / "parts", *changed, "--shard", f"{part}/2")
    assert "written with shard_multiple = 3, not shard_multiple = 4" in refusal(*write, "--out", tmp_path / "parts")
    succeed(*write, "--out", tmp_path / "parts", *changed, "--finish")
    packs = {name: data for name, data in contents(tmp_path / "packed").items() if "verif" not in name}
    assert contents(tmp_path / "parts") == packs


@pytest.mark.parametrize("name", sorted(set(VALUES) - {"shard_multiple", "shard_bytes"}))
def test_write_refuses_what_the_plan_has_decided(case: PackingCase, tmp_path: Path, name: str) -> None:
    typed = f"packing.{name}={VALUES[name][0]}"
    line = refusal("write", case.records, "--plan", case.plan, "--out", tmp_path / "packed", "--set", typed)
    assert line.startswith(f"--set {typed}: plan.json has decided `packing.{name}`; give it to `gaudi-bert plan`")
    assert not (tmp_path / "packed").exists()


def test_tables_take_the_keys_that_they_have(table: Path, tmp_path: Path) -> None:
    for name, (text, stored) in VALUES.items():
        command = ("pack", table, "--out", tmp_path / name, *TABLE, "--set", f"packing.{name}={text}")
        if name in ("leftovers", "masked_slots"):
            assert refusal(*command).startswith(f"--set packing.{name}={text}: is for TFRecords, and {table} is a table; ")
            assert not (tmp_path / name).exists()
            continue
        succeed(*command, "--verify")
        settings = read_signature(TableMetadata.path_in(tmp_path / name).with_name("settings.json")).settings
        assert settings[name] == stored
        assert settings["algorithm"] == "lpfhp"
        assert name == "depth" or settings["depth"] == "max"
    too_few = refusal("pack", table, "--out", tmp_path / "few", *TABLE, "--set", "packing.group_bytes=3")
    assert too_few.startswith("--set packing.group_bytes=3: must be an integer, >= 1,048,576")


@pytest.mark.parametrize("command", ["plan", "write", "pack", "pack a table"])
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("packing.shard_multipel=8", "unknown key `packing.shard_multipel`; did you mean `packing.shard_multiple`?"),
        ("packing.shard_multiple=0", "must be an integer, >= 1 and <= 4,096"),
        ("packing.depth=x", "must be an integer from 1 to 1,024, or `max` for no limit"),
        ("training.updates=8", "this command reads the keys of `packing` alone, such as packing.depth=4"),
        ("name=mine", "this command reads the keys of `packing` alone, such as packing.depth=4"),
        ("packing", "write it as key.path=value, for example packing.depth=4"),
    ],
)
def test_a_wrong_key_is_one_line(
    case: PackingCase, table: Path, tmp_path: Path, command: str, typed: str, said: str
) -> None:
    inputs = {
        "plan": ("plan", case.plan.with_name("histogram.json")),
        "write": ("write", case.records, "--plan", case.plan),
        "pack": ("pack", case.records),
        "pack a table": ("pack", table, *TABLE),
    }
    assert refusal(*inputs[command], "--out", tmp_path / "out", "--set", typed) == f"--set {typed}: {said}"
    assert not (tmp_path / "out").exists()


def test_json_of_a_plan_with_a_key(case: PackingCase, tmp_path: Path) -> None:
    counted = case.plan.with_name("histogram.json")
    done = succeed("plan", counted, "--out", tmp_path / "plan.json", "--set", "packing.depth=1", "--json")
    assert json.loads(done.stdout)["depth_used"] == 1
