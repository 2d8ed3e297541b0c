from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.plan import Plan
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.packs.plan import plan_packs
from tests.builders.agree import agree
from tests.builders.histograms import HISTOGRAMS
from tests.builders.reporters import a_run


def histogram(files: int, sequences: int, length: int = 16, part: slice = slice(None)) -> dict[str, Any]:
    """Files of sequences of all lengths, or a part of them; a fifth of the positions are masked, at least one."""
    entries = []
    for number in range(files)[part]:
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
    result = plan_packs([write(tmp_path / "histogram.json", source)], tmp_path / "plan.json", settings(), a_run())
    made = json.loads((tmp_path / "plan.json").read_text())
    assert (made["format_version"], made["algorithm"], made["depth"], made["seed"]) == (2, "lpfhp", 3, 12345)
    assert (made["max_sequence_length"], made["max_predictions"], made["masked_slots"]) == (16, 3, 6)
    files = sorted((file for group in made["groups"] for file in group["files"]), key=lambda file: file["name"])
    assert [file["name"] for file in files] == [file["name"] for file in source["files"]]
    assert [file["crc32c"] for file in files] == [0, 1, 2, 3, 4]
    assert len(made["groups"]) == 2
    covered = [0] * 16
    for group in made["groups"]:
        assert sum(count for _, count in group["strategies"]) == group["packs"] >= group["lower_bound"]
        for strategy, count in group["strategies"]:
            for length in strategy:
                covered[length - 1] += count
    assert covered == source["counts"]
    assert result.content.as_json() == made["totals"]
    agree(result.content.efficiency, 1 - result.content.padding_tokens / (16 * result.content.packs))
    agree(result.content.packing_factor, result.content.sequences / result.content.packs)
    more = plan_packs([tmp_path / "histogram.json"], tmp_path / "more.json", settings(masked_slots=9), a_run())
    assert more.content.masked_slots == 9


def test_finished_is_skipped_and_other_settings_and_histograms_are_refused(tmp_path: Path) -> None:
    source, out = write(tmp_path / "histogram.json", histogram(2, 100)), tmp_path / "plan.json"
    first = plan_packs([source], out, settings(), a_run())
    again = plan_packs([source], out, settings(), a_run())
    assert (again.skipped, again.content) == (True, first.content)
    with pytest.raises(InputError, match=r"depth: 3 in the file, 4 now"):
        plan_packs([source], out, settings(depth=4), a_run())
    write(source, histogram(3, 100))
    with pytest.raises(InputError, match="histogram_sha256"):
        plan_packs([source], out, settings(), a_run())


def test_counts_alone_are_planned_and_said_not_to_be_writable(tmp_path: Path) -> None:
    heard = io.StringIO()
    result = plan_packs([HISTOGRAMS / "squad-384.json"], tmp_path / "plan.json", settings(), a_run(reporter=Reporter(heard)))
    made = json.loads((tmp_path / "plan.json").read_text())
    assert result.content.packs == 40_631
    assert made["writable"] is False
    assert (made["groups"][0]["files"], made["masked_slots"]) == ([], None)
    assert "no counts per file" in heard.getvalue()


def test_depth_max_stores_the_depth_that_is_used(tmp_path: Path) -> None:
    source = write(tmp_path / "histogram.json", histogram(2, 300))
    result = plan_packs([source], tmp_path / "plan.json", settings(depth="max"), a_run())
    made = json.loads((tmp_path / "plan.json").read_text())
    assert made["depth"] == result.content.depth_used < 16
    assert made["depth"] == max(len(strategy) for group in made["groups"] for strategy, _ in group["strategies"])
    assert made["masked_slots"] == 3 + made["depth"]


def test_the_plan_of_many_groups_does_not_depend_on_how_they_were_counted(tmp_path: Path) -> None:
    many = [write(tmp_path / f"{n}.json", histogram(150, 20, part=slice(n, None, 3))) for n in range(3)]
    chosen = settings(group_sequences=22)  # each file is a group
    totals = plan_packs(many, tmp_path / "a.json", chosen, a_run()).content
    whole = write(tmp_path / "histogram.json", histogram(150, 20))
    for histograms, workers in ((many[::-1], 3), ([whole], 1)):
        plan_packs(histograms, tmp_path / "b.json", chosen, a_run(workers=workers, overwrite=True))
        assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    content = Plan.read(tmp_path / "a.json")
    strategies = {strategy for group in content.groups for strategy, _ in group.strategies}
    assert (
        (totals.groups, totals.strategies_used)
        == (150, len(strategies))
        == (len(content.groups), len(content.strategy_counts))
    )
