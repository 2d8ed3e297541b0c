from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.plan import Plan
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.tfrecords.plan import plan
from tests.builders.agree import agree
from tests.builders.folders import contents
from tests.builders.histograms import HISTOGRAMS
from tests.builders.plans import whole_plan
from tests.builders.reporters import a_run


def histogram(files: int, sequences: int, length: int = 16) -> dict[str, Any]:
    """Files of sequences of all lengths; a fifth of the positions are masked, at least one."""
    entries = []
    for number in range(files):
        rows = [[size, max(1, size // 5), sequences // length + (size + number) % 3] for size in range(3, length + 1)]
        sums = {"sequences": sum(row[2] for row in rows), "tokens": sum(row[0] * row[2] for row in rows)}
        entries.append({"name": f"part-{number:05d}.tfrecord", "bytes": 1000, "crc32c": number, **sums, "counts": rows})
    counts = [sum(row[2] for entry in entries for row in entry["counts"] if row[0] == size + 1) for size in range(length)]
    sizes = {"max_sequence_length": length, "max_predictions": 3}
    return {**sizes, "counts": counts, "files": entries, "vocabulary": {"size": 99, "sha256": "00"}}


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def settings(**changes: Any) -> PackingSettings:
    return PackingSettings.model_validate({"group_sequences": 1000, "algorithm": "lpfhp", **changes})


def test_a_plan_holds_what_the_contract_says(tmp_path: Path) -> None:
    source = histogram(files=5, sequences=300)
    result = plan([write(tmp_path / "histogram.json", source)], tmp_path / "plan.json", settings(), a_run())
    made = whole_plan(tmp_path / "plan.json")
    assert (made["format_version"], made["algorithm"], made["depth"], made["seed"]) == (2, "lpfhp", 3, 12345)
    assert (made["max_sequence_length"], made["max_predictions"], made["masked_slots"]) == (16, 3, 6)
    assert made["vocabulary"] == source["vocabulary"]
    assert sorted(name for group in made["groups"] for name in group["files"]) == [file["name"] for file in source["files"]]
    assert sorted(file["crc32c"] for file in made["files"]) == [0, 1, 2, 3, 4]
    assert [part["packs"] for part in made["parts"]] == [[group["packs"] for group in made["groups"]]]
    assert [part["input_bytes"] for part in made["parts"]] == [[1000 * len(group["files"]) for group in made["groups"]]]
    assert len(made["groups"]) == 2
    covered = [0] * 16
    for group in made["groups"]:
        assert sum(count for _, count in group["strategies"]) == group["packs"] >= group["lower_bound"]
        for strategy, count in group["strategies"]:
            for length in strategy:
                covered[length - 1] += count
    assert covered == source["counts"]
    totals = result.content.as_json()
    assert totals == made["totals"]
    assert result.content.packs - result.content.lower_bound == result.content.gap
    agree(result.content.efficiency, 1 - result.content.padding_tokens / (16 * result.content.packs))
    agree(result.content.packing_factor, result.content.sequences / result.content.packs)
    assert "seconds" not in (tmp_path / "plan.json").read_text()


def test_finished_is_skipped_and_other_settings_are_refused(tmp_path: Path) -> None:
    source, out = write(tmp_path / "histogram.json", histogram(2, 100)), tmp_path / "plan.json"
    first = plan([source], out, settings(), a_run())
    again = plan([source], out, settings(), a_run())
    assert again.skipped
    assert again.content == first.content
    with pytest.raises(InputError, match=r"with --depth 3, not --depth 4"):
        plan([source], out, settings(depth=4), a_run())
    assert plan([source], out, settings(depth=4), a_run(overwrite=True)).content.packs <= first.content.packs
    write(source, histogram(3, 100))
    with pytest.raises(InputError, match="histogram_sha256"):
        plan([source], out, settings(depth=4), a_run())


def test_counts_alone_are_planned_and_said_not_to_be_writable(tmp_path: Path) -> None:
    heard = io.StringIO()
    result = plan([HISTOGRAMS / "squad-384.json"], tmp_path / "plan.json", settings(), a_run(reporter=Reporter(heard)))
    made = whole_plan(tmp_path / "plan.json")
    assert result.content.packs == 40_631
    assert made["writable"] is False
    assert (made["files"], made["groups"][0]["files"], made["masked_slots"]) == ([], [], None)
    assert "cannot be written" in heard.getvalue()


def test_a_file_larger_than_a_group_is_said(tmp_path: Path) -> None:
    heard = io.StringIO()
    source = write(tmp_path / "histogram.json", histogram(2, 300))
    plan([source], tmp_path / "plan.json", settings(group_sequences=50), a_run(reporter=Reporter(heard)))
    assert "part-00000.tfrecord" in heard.getvalue()
    assert "a separate group" in heard.getvalue()


def test_depth_max_stores_the_depth_that_is_used(tmp_path: Path) -> None:
    source = write(tmp_path / "histogram.json", histogram(2, 300))
    result = plan([source], tmp_path / "plan.json", settings(depth="max"), a_run())
    made = whole_plan(tmp_path / "plan.json")
    assert made["depth"] == result.content.depth_used < 16
    assert made["depth"] == max(len(strategy) for group in made["groups"] for strategy, _ in group["strategies"])
    assert made["masked_slots"] == 3 + made["depth"]


def test_masked_slots_are_honoured_or_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "histogram.json", histogram(2, 300))
    usual = plan([source], tmp_path / "usual.json", settings(), a_run())
    assert usual.content.masked_slots_needed <= usual.content.masked_slots == 6
    assert plan([source], tmp_path / "more.json", settings(masked_slots=9), a_run()).content.masked_slots == 9
    with pytest.raises(InputError, match="masked_slots is 5, these packs need 6"):
        plan([source], tmp_path / "none.json", settings(masked_slots=5), a_run())


# --- a plan in parts


MANY = settings(group_sequences=22)
"""Each file of `histogram(files=150, sequences=20)` is a group of its own: three parts."""


@pytest.fixture
def many(tmp_path: Path) -> list[Path]:
    """A histogram of 150 files in three."""
    whole = histogram(150, 20)
    paths = []
    for number in range(3):
        files = whole["files"][number::3]
        counts = [sum(row[2] for file in files for row in file["counts"] if row[0] == size + 1) for size in range(16)]
        paths.append(write(tmp_path / f"histogram-{number}.json", {**whole, "files": files, "counts": counts}))
    return paths


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_in_any_order_give_the_same_plan(many: list[Path], tmp_path: Path, parts: int) -> None:
    whole = plan(many, tmp_path / "whole" / "plan.json", MANY, a_run()).content
    assert sorted(contents(tmp_path / "whole")) == [*(f"plan-0000{part}.json" for part in range(3)), *PLAN_FILES]
    out = tmp_path / "parts" / "plan.json"
    results = [plan(many[::-1], out, MANY, a_run(part=(part, parts))) for part in reversed(range(parts))]
    assert sum(result.groups for result in results) == whole.groups == 150
    assert sum(result.packs for result in results) == whole.packs
    assert sum(result.tokens for result in results) == whole.tokens
    heard = io.StringIO()
    again = plan(many, out, MANY, a_run(reporter=Reporter(heard), part=(0, 1)))
    assert (again.groups, again.groups_written) == (150, 0)
    assert "3 of 3 parts are there already" in heard.getvalue()
    plan(many, out, MANY, a_run(finish=True))
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert plan(many, out, MANY, a_run(part=(0, 5))).skipped


PLAN_FILES = ("plan.json", "plan.settings.json")


def test_parts_that_are_missing_are_named_and_others_refused(many: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    plan(many, out, MANY, a_run(part=(2, 3)))
    plan(many, out, MANY, a_run(part=(0, 3)))
    with pytest.raises(FailedError, match=r"1 of 3 parts are not written, the first is part 1; run `gaudi-bert plan`"):
        plan(many, out, MANY, a_run(finish=True))
    with pytest.raises(InputError, match=r"plan\.json was written with --depth 3, not --depth 4"):
        plan(many, out, settings(group_sequences=22, depth=4), a_run(part=(1, 3)))
    with pytest.raises(InputError, match=r"written from other input .histogram_sha256"):
        plan(many[:2], out, MANY, a_run(part=(1, 3)))
    # Told to overwrite, the parts of other settings go.
    few = settings(group_sequences=60)
    plan(many, out, few, a_run(overwrite=True, part=(0, 3)))
    assert [path.name for path in tmp_path.glob("plan-*.json")] == ["plan-00000.json"]
    with pytest.raises(FailedError, match="1 of 2 parts are not written, the first is part 1"):
        plan(many, out, few, a_run(finish=True))
    plan(many, out, few, a_run())
    assert Plan.read(out).group_count == 75


def test_the_totals_are_those_of_all_parts_together(many: list[Path], tmp_path: Path) -> None:
    for path in many:
        value = json.loads(path.read_text())
        for file in value["files"]:
            file["counts"] = [[size, 1 + size % 2, count] for size, _, count in file["counts"]]
        write(path, value)
    totals = plan(many, tmp_path / "plan.json", MANY, a_run()).content
    content = Plan.read(tmp_path / "plan.json")
    content.check_totals()
    groups = whole_plan(tmp_path / "plan.json")["groups"]
    strategies = {tuple(strategy) for group in groups for strategy, _ in group["strategies"]}
    assert totals.strategies_used == len(strategies) == len(content.mixture)
    assert totals.masked_slots_needed == max(sum(1 + size % 2 for size in strategy) for strategy in strategies) == 4


def test_the_shard_that_ends_last_finishes_where_it_is_told(many: list[Path], tmp_path: Path) -> None:
    whole = plan(many, tmp_path / "whole" / "plan.json", MANY, a_run()).content
    out = tmp_path / "shards" / "plan.json"
    first = plan(many, out, MANY, a_run(part=(1, 2)), last_finishes=True)
    assert not out.exists()
    last = plan(many, out, MANY, a_run(part=(0, 2)), last_finishes=True)
    assert (first.groups, last.content) == (64, whole)
    assert contents(tmp_path / "shards") == contents(tmp_path / "whole")
