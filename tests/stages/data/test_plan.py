from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.packing.certificate import Certificate, check_certificate
from gaudi_bert.stages.data.plan import plan
from tests.builders.agree import agree
from tests.builders.histograms import HISTOGRAMS
from tests.builders.reporters import QUIET


def histogram(files: int, sequences: int, length: int = 16) -> dict[str, Any]:
    """Files of sequences of all lengths; a fifth of the positions are masked, at least one."""
    entries = []
    for number in range(files):
        rows = [[size, max(1, size // 5), sequences // length + (size + number) % 3] for size in range(3, length + 1)]
        entries.append(
            {
                "name": f"part-{number:05d}.tfrecord",
                "bytes": 1000,
                "crc32c": number,
                "sequences": sum(row[2] for row in rows),
                "tokens": sum(row[0] * row[2] for row in rows),
                "counts": rows,
            }
        )
    counts = [sum(row[2] for entry in entries for row in entry["counts"] if row[0] == size + 1) for size in range(length)]
    return {
        "max_sequence_length": length,
        "max_predictions": 3,
        "counts": counts,
        "files": entries,
        "vocabulary": {"size": 99, "sha256": "00"},
    }


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def settings(**changes: Any) -> PackingSettings:
    return PackingSettings.model_validate({"group_sequences": 1000, "algorithm": "lpfhp", **changes})


def test_a_plan_holds_what_the_contract_says(tmp_path: Path) -> None:
    source = histogram(files=5, sequences=300)
    result = plan([write(tmp_path / "histogram.json", source)], tmp_path / "plan.json", settings(), reporter=QUIET)
    made = json.loads((tmp_path / "plan.json").read_text())
    assert (made["format_version"], made["algorithm"], made["depth"], made["seed"]) == (1, "lpfhp", 3, 12345)
    assert (made["max_sequence_length"], made["max_predictions"], made["masked_slots"]) == (16, 3, 6)
    assert made["vocabulary"] == source["vocabulary"]
    assert sorted(name for group in made["groups"] for name in group["files"]) == [file["name"] for file in source["files"]]
    assert [file["crc32c"] for file in made["files"]] == [0, 1, 2, 3, 4]
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


def test_a_plan_is_a_function_of_its_inputs(tmp_path: Path) -> None:
    whole = histogram(files=6, sequences=200)
    halves = [{**whole, "files": whole["files"][start::2]} for start in range(2)]
    for half in halves:
        half["counts"] = [
            sum(row[2] for file in half["files"] for row in file["counts"] if row[0] == size + 1) for size in range(16)
        ]
    one = write(tmp_path / "histogram.json", whole)
    several = [write(tmp_path / f"histogram-{number}.json", half) for number, half in enumerate(halves)]
    for name, sources in (("a", [one]), ("b", [one]), ("c", several)):
        plan(sources, tmp_path / name / "plan.json", settings(algorithm="nnls"), reporter=QUIET)
    assert (tmp_path / "a/plan.json").read_bytes() == (tmp_path / "b/plan.json").read_bytes()
    assert (tmp_path / "a/plan.json").read_bytes() == (tmp_path / "c/plan.json").read_bytes()


def test_finished_is_skipped_and_other_settings_are_refused(tmp_path: Path) -> None:
    source, out = write(tmp_path / "histogram.json", histogram(2, 100)), tmp_path / "plan.json"
    first = plan([source], out, settings(), reporter=QUIET)
    again = plan([source], out, settings(), reporter=QUIET)
    assert again.skipped
    assert again.content == first.content
    with pytest.raises(InputError, match=r"with --depth 3; you asked for --depth 4"):
        plan([source], out, settings(depth=4), reporter=QUIET)
    assert plan([source], out, settings(depth=4), reporter=QUIET, overwrite=True).content.packs <= first.content.packs
    write(source, histogram(3, 100))
    with pytest.raises(InputError, match="histogram_sha256"):
        plan([source], out, settings(depth=4), reporter=QUIET)


def test_counts_alone_are_planned_and_said_not_to_be_writable(tmp_path: Path) -> None:
    heard = io.StringIO()
    result = plan([HISTOGRAMS / "squad-384.json"], tmp_path / "plan.json", settings(), reporter=Reporter(heard))
    made = json.loads((tmp_path / "plan.json").read_text())
    assert result.content.packs == 40_631
    assert made["writable"] is False
    assert (made["files"], made["groups"][0]["files"], made["masked_slots"]) == ([], [], None)
    assert "cannot be written" in heard.getvalue()


def test_the_bound_can_be_checked_from_the_plan(tmp_path: Path) -> None:
    source = HISTOGRAMS / "squad-384.json"
    plan([source], tmp_path / "plan.json", settings(algorithm="optimal"), reporter=QUIET)
    group = json.loads((tmp_path / "plan.json").read_text())["groups"][0]

    prices = np.array(group["bound_prices"])
    counts = np.array(json.loads(source.read_text())["counts"])
    proven = check_certificate(Certificate(prices, 3, group["lower_bound"]), counts)
    assert proven == group["lower_bound"] == group["packs"] == 40_195


def test_a_file_larger_than_a_group_is_said(tmp_path: Path) -> None:
    heard = io.StringIO()
    source = write(tmp_path / "histogram.json", histogram(2, 300))
    plan([source], tmp_path / "plan.json", settings(group_sequences=50), reporter=Reporter(heard))
    assert "part-00000.tfrecord" in heard.getvalue()
    assert "a group of its own" in heard.getvalue()


def test_depth_max_stores_the_depth_that_is_used(tmp_path: Path) -> None:
    source = write(tmp_path / "histogram.json", histogram(2, 300))
    result = plan([source], tmp_path / "plan.json", settings(depth="max"), reporter=QUIET)
    made = json.loads((tmp_path / "plan.json").read_text())
    assert made["depth"] == result.content.depth_used < 16
    assert made["depth"] == max(len(strategy) for group in made["groups"] for strategy, _ in group["strategies"])
    assert made["masked_slots"] == 3 + made["depth"]


def test_masked_slots_are_honoured_or_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "histogram.json", histogram(2, 300))
    usual = plan([source], tmp_path / "usual.json", settings(), reporter=QUIET)
    assert usual.content.masked_slots_needed <= usual.content.masked_slots == 6
    small = plan([source], tmp_path / "small.json", settings(masked_slots=3), reporter=QUIET)
    assert small.content.masked_slots == 3
    costs = {row.masked_slots: row.packs for row in usual.content.smaller_masked_slots}
    assert small.content.packs == costs.get(3, small.content.packs)
    with pytest.raises(InputError, match="give at least 3"):
        plan([source], tmp_path / "none.json", settings(masked_slots=2), reporter=QUIET)
