"""Waiting for what a stage needs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from gaudi_bert.artefacts.names import histogram_part, histogram_parts
from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import load_pipeline
from gaudi_bert.runners.waiting import missing_inputs, wait_for_inputs
from tests.builders.plan_content import plan_content

# What each stage needs of a pipeline that holds evaluation data out, in the order in which it is made.
NEEDS = {
    "prepare": [],
    "histogram": ["examples/examples.json"],
    "plan": ["histogram.json", "histogram-evaluation.json"],
    "write": ["plan.json", "plan-evaluation.json"],
    "write-finish": [
        "packed/train/group-00000.json",
        "packed/train/group-00001.json",
        "packed/evaluation/group-00000.json",
        "packed/evaluation/group-00001.json",
    ],
    "verify": ["packed/train/metadata.json", "packed/evaluation/metadata.json"],
    "train": ["packed/train/verification.json", "packed/evaluation/verification.json"],
    "evaluate": ["train/training.json"],
    "report": ["train/evaluation.json"],
}


@pytest.fixture
def folder(tmp_path: Path) -> WorkFolder:
    return WorkFolder.of(load_pipeline(None), tmp_path, tmp_path)


def make(folder: WorkFolder, name: str) -> None:
    path = folder.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plan_content([{(7,): 2}, {(3, 5): 1}], 8)))


def test_each_stage_waits_for_what_the_one_before_it_makes(folder: WorkFolder) -> None:
    for stage, needed in NEEDS.items():
        for number, name in enumerate(needed):
            assert missing_inputs(folder, stage) == [folder.root / one for one in needed[number:]]
            make(folder, name)
        assert missing_inputs(folder, stage) == []


def test_finishing_waits_for_the_plan_first(folder: WorkFolder) -> None:
    assert missing_inputs(folder, "write-finish") == [folder.root / "plan.json", folder.root / "plan-evaluation.json"]


def test_without_evaluation_data_nothing_of_it_is_waited_for(tmp_path: Path) -> None:
    folder = WorkFolder.of(load_pipeline(None, ["prepare.evaluation_fraction=0"]), tmp_path, tmp_path)
    assert missing_inputs(folder, "plan") == [folder.root / "histogram.json"]
    assert missing_inputs(folder, "report") == [folder.root / "train/training.json"]


def test_given_records_are_not_waited_for(tmp_path: Path) -> None:
    folder = WorkFolder.of(load_pipeline(None, ["prepare.records=/data/records"]), tmp_path, tmp_path)
    assert missing_inputs(folder, "histogram") == []


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_a_histogram_is_there_when_all_its_parts_are(tmp_path: Path, parts: int) -> None:
    whole = tmp_path / "histogram.json"
    (tmp_path / "histogram-evaluation.json").write_text("{}")
    for number in range(parts):
        assert histogram_parts(whole) == []
        part = histogram_part(whole, (number, parts))
        part.write_text("{}")
        part.with_name(f"{part.stem}.settings.json").write_text("{}")
    assert histogram_parts(whole) == [histogram_part(whole, (number, parts)) for number in range(parts)]
    whole.write_text("{}")
    assert histogram_parts(whole) == [whole]


def test_parts_of_another_number_do_not_count(tmp_path: Path) -> None:
    whole = tmp_path / "histogram.json"
    for number, parts in ((0, 2), (0, 3), (1, 3), (2, 3)):
        histogram_part(whole, (number, parts)).write_text("{}")
    assert histogram_parts(whole) == [histogram_part(whole, (number, 3)) for number in range(3)]


def test_waiting_ends_when_the_last_file_appears(folder: WorkFolder) -> None:
    make(folder, "plan.json")
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            make(folder, "plan-evaluation.json")

    said = io.StringIO()
    assert wait_for_inputs(folder, "write", 1000, Reporter(said), sleep=sleep, clock=lambda: sum(waited)) == sum(waited)
    assert len(waited) == 3
    assert said.getvalue().splitlines() == [f"write: waiting for {folder.root / 'plan-evaluation.json'}"]


def test_waiting_is_bounded_and_says_what_is_missing(folder: WorkFolder) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(FailedError, match=r"plan\.json and 1 more: not there after 5\.0 s, so write cannot start"):
        wait_for_inputs(folder, "write", 5, Reporter(quiet=True), sleep=sleep, clock=lambda: now[0])
    assert now[0] == 5.0


def test_a_stage_that_is_none_is_refused(folder: WorkFolder) -> None:
    with pytest.raises(InputError, match="--for packing: no such stage; choose one of prepare"):
        missing_inputs(folder, "packing")
