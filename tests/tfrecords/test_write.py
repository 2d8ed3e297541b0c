"""The write stage: the same bytes whoever writes, even shares, refusals, and what a full disk or a lost file does to it."""

from __future__ import annotations

import json
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.artefacts.plan import WritablePlan
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import exclusive_lock
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.tfrecords.plan import plan_packs
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import PackedSchema
from gaudi_bert.tfrecords.write import (
    _BYTES_OF_A_SEQUENCE,
    _BYTES_OF_A_TOKEN,
    _get_available_memory,
    _read_group_into_memory,
    pack_records,
    write_packed_records,
)
from tests.builders.folders import contents
from tests.builders.packing_case import PackingCase, make_case, packed_keys
from tests.builders.reporters import a_run
from tests.builders.shards import shards_of


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    return make_case(tmp_path_factory.mktemp("case"), files=7, sequences_per_file=40)


def sequences_in(packed: Path) -> Counter:
    keys: Counter = Counter()
    for shard in shards_of(packed):
        if shard.bytes:
            for payload in read_records(packed / shard.name):
                keys.update(packed_keys({name: values.tolist() for name, values in decode_example(payload).items()}))
    return keys


def test_threads_shards_and_order_do_not_matter(case: PackingCase, tmp_path: Path) -> None:
    expected = contents(case.packed)
    write_packed_records(case.records, case.plan, tmp_path / "one", a_run(workers=1))
    write_packed_records(case.records, case.plan, tmp_path / "five", a_run(workers=5))
    for number in (2, 0, 1):
        summary = write_packed_records(case.records, case.plan, tmp_path / "parts", a_run(part=(number, 3)))
        assert summary.facts["groups_written"] == summary.facts["groups"]
        assert not (tmp_path / "parts" / "metadata.json").exists()
    write_packed_records(case.records, case.plan, tmp_path / "parts", a_run(finish=True))
    for name in ("one", "five", "parts"):
        assert contents(tmp_path / name) == expected


def test_a_seed_makes_another_folder_of_the_same_sequences(case: PackingCase, tmp_path: Path) -> None:
    settings = PackingSettings(group_sequences=80, shard_multiple=4, seed=99)
    plan_packs([case.plan.with_name("histogram.json")], tmp_path / "other.json", settings, a_run())
    write_packed_records(case.records, tmp_path / "other.json", tmp_path / "reseeded", a_run())
    assert sequences_in(tmp_path / "reseeded") == sequences_in(case.packed)
    assert contents(tmp_path / "reseeded") != contents(case.packed)


def test_a_second_run_does_nothing_and_a_lost_shard_is_written_again(case: PackingCase, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    shutil.copytree(case.packed, out)
    assert write_packed_records(case.records, case.plan, out, a_run()).skipped
    (out / "metadata.json").unlink()
    shard = next(path for path in sorted(out.glob("packed-00001-*")) if path.stat().st_size)
    shard.unlink()
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("packed-00000-*")}
    write_packed_records(case.records, case.plan, out, a_run())
    assert contents(out) == contents(case.packed)
    assert kept == {path.name: path.stat().st_mtime_ns for path in out.glob("packed-00000-*")}


def change_plan(case: PackingCase, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the plan, changed."""
    content = json.loads(case.plan.read_text())
    change(content)
    (folder / "plan.json").write_text(json.dumps(content))
    return folder / "plan.json"


def test_files_that_are_not_those_of_the_plan_are_named(case: PackingCase, tmp_path: Path) -> None:
    records = Path(shutil.copytree(case.records, tmp_path / "records"))
    data = (records / "part-3").read_bytes()
    end = struct.unpack_from("<Q", data)[0] + 16
    for change, reason in (
        (lambda: (records / "part-3").write_bytes(data[end:] + data[:end]), r"part-3: the plan states crc32c = .*, found"),
        (lambda: (records / "part-3").write_bytes(data[:99] + bytes([data[99] ^ 1]) + data[100:]), r"part-3: .* damaged"),
        (lambda: (records / "part-3").rename(records / "part-x"), r"part-x: the plan does not contain this file"),
        (lambda: (records / "part-x").unlink(), r"the file part-3 of the plan is missing"),
        (lambda: (records / "part-3").write_bytes(b"short"), r"part-3: the plan states .* bytes, found 5;"),
    ):
        change()
        with pytest.raises(InputError, match=reason):
            write_packed_records(records, case.plan, tmp_path / "out", a_run(workers=1))
        assert not (tmp_path / "out" / "metadata.json").exists()


def test_a_folder_of_another_plan_is_refused(case: PackingCase, tmp_path: Path) -> None:
    out = Path(shutil.copytree(case.packed, tmp_path / "packed"))
    counts = case.plan.with_name("histogram.json")
    plan_packs([counts], tmp_path / "deeper.json", PackingSettings(depth=5, shard_multiple=4), a_run())
    with pytest.raises(InputError, match=r"masked_slots: \d+ in the file, .*--overwrite"):
        write_packed_records(case.records, tmp_path / "deeper.json", out, a_run())
    write_packed_records(case.records, tmp_path / "deeper.json", out, a_run(overwrite=True))
    assert RecordMetadata.read(out).depth == 5
    assert sequences_in(out) == sequences_in(case.packed)
    with pytest.raises(InputError, match="must not be the folder of the records"):
        write_packed_records(case.records, case.plan, case.records, a_run())


def test_two_writers_of_one_group_are_kept_apart(case: PackingCase, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with exclusive_lock(out / "group-00001.json", "test"), pytest.raises(FailedError, match=r"process \d+ .* writing"):
        write_packed_records(case.records, case.plan, out, a_run())
    assert not (out / "metadata.json").exists()
    write_packed_records(case.records, case.plan, out, a_run())
    assert contents(out) == contents(case.packed)


def test_pack_is_not_shared_between_machines(case: PackingCase, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot pack a part of the records"):
        pack_records(case.records, tmp_path / "out", PackingSettings(), a_run(part=(0, 2)))


def test_a_plan_whose_packs_hold_more_than_their_masked_slots_is_refused(case: PackingCase, tmp_path: Path) -> None:
    def change(plan: dict[str, Any]) -> None:
        plan["masked_slots"] = 1
        plan["totals"] |= {"masked_slots": 1, "masked_slots_needed": 1}

    with pytest.raises(InputError, match="more masked positions than the pack has masked slots"):
        write_packed_records(case.records, change_plan(case, tmp_path, change), tmp_path / "out", a_run())
    assert not list((tmp_path / "out").glob("[!.]*-*"))


@pytest.mark.parametrize(
    ("of_group", "reason"),
    [
        (lambda group: {"bound_prices": None, "lower_bound": group["packs"]}, "its data prove only"),
        (lambda group: {"bound_prices": [0] * 29}, "the prices prove a lower bound of only 0 packs"),
        (lambda group: {"bound_prices": [2**62] * 29}, "prices must be"),
        (lambda group: {"bound_prices": group["bound_prices"][1:]}, "`bound_prices` must have 29 values, but has 28"),
    ],
    ids=["no prices", "prices of 0", "prices that overflow", "one price too few"],
)
def test_the_bound_of_a_plan_is_proven_before_anything_is_written(
    case: PackingCase, tmp_path: Path, of_group: Callable[[dict[str, Any]], dict[str, Any]], reason: str
) -> None:
    def change(plan: dict[str, Any]) -> None:
        group = plan["groups"][1]
        assert group["lower_bound"] > -(-sum(sum(strategy) * count for strategy, count in group["strategies"]) // 29)
        group |= of_group(group)
        bound = sum(group["lower_bound"] for group in plan["groups"])
        plan["totals"] |= {"lower_bound": bound, "gap": plan["totals"]["packs"] - bound}

    with pytest.raises(InputError, match=rf"plan\.json: .*group 1: .*{reason}"):
        write_packed_records(case.records, change_plan(case, tmp_path, change), tmp_path / "out", a_run())
    assert not list((tmp_path / "out").glob("[!.]*-*"))


# --- a group that memory cannot hold is refused before it is read; the estimate is what a group that was read does take


def test_a_group_that_memory_cannot_hold_is_to_be_split(
    case: PackingCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_packs([case.plan.with_name("histogram.json")], tmp_path / "plan.json", PackingSettings(group_sequences=80), a_run())
    monkeypatch.setattr("gaudi_bert.tfrecords.write._get_available_memory", lambda: 2000)
    with pytest.raises(InputError, match=f"{case.records}/part-.: packing group 0 \\(2 files\\) requires"):
        write_packed_records(case.records, tmp_path / "plan.json", tmp_path / "packed", a_run())
    assert [name for name in contents(tmp_path / "packed") if name != "settings.json"] == []


def test_the_estimate_is_a_little_below_what_a_group_takes(tmp_path: Path) -> None:
    case = make_case(tmp_path, files=2, sequences_per_file=400, max_sequence_length=512, max_predictions=76)
    planned = WritablePlan.read(case.plan)
    group = planned.groups[0]
    paths = [case.records / file.name for file in group.files]
    schema = PackedSchema.from_sizes(planned).unpacked_schema
    read = _read_group_into_memory(paths, group.files, schema, lambda size: np.zeros(size, np.uint8), 1, lambda _: None)
    sizes = sum(int(read.rows[name].sum()) for name in ("ids_bytes", "length", "masked_ids_bytes", "positions_bytes"))
    taken = sizes + read.rows.nbytes + read.offsets.nbytes
    assert 0.6 * taken < _BYTES_OF_A_TOKEN * group.tokens + _BYTES_OF_A_SEQUENCE * group.sequences < 1.1 * taken


def test_available_memory_is_that_of_the_machine_or_of_the_container(tmp_path: Path) -> None:
    real = _get_available_memory()
    assert real is not None
    assert 2**20 < real < 2**50
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert _get_available_memory(meminfo, cgroup) is None
    meminfo.write_text("MemTotal:       99 kB\nMemAvailable:   50 kB\n")
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    assert _get_available_memory(meminfo, cgroup) == 50 * 1024
    (cgroup / "memory.max").write_text("2048\n")
    assert _get_available_memory(meminfo, cgroup) == 2048
