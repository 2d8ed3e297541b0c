"""What packing gives on rows: counted by hand on a few, and the published counts of real data where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gaudi_bert.cli.estimate_tables import describe_task_estimate
from gaudi_bert.cli.results import to_json
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import TaskSettings
from gaudi_bert.stages.estimates.estimate_task import TaskEstimate, estimate_task
from tests.builders.bert_folder import write_tokenizer


def found(tmp_path: Path, texts: list[str], **settings: object) -> TaskEstimate:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    folder = write_tokenizer(tmp_path / "model")
    given = TaskSettings(name="classification", **settings)  # type: ignore[arg-type]
    return estimate_task(str(path), folder, given, row_lengths=[8, 16], depths=[1, 2, "max"], reporter=Reporter(quiet=True))


def test_six_rows(tmp_path: Path) -> None:
    """Lengths 3, 3, 3, 5, 6 and 10, of which the last is cut in rows of 8."""
    result = found(tmp_path, ["cat", "dog", "mat", "the cat sat", "the cat sat on", "the cat sat on mat and dog runs"])
    assert (result.sequences, result.longest, result.mean_length) == (6, 10, 5.0)
    by = {(row.max_sequence_length, row.depth): row for row in result.rows}
    assert [by[8, depth].packs for depth in (1, 2, "max")] == [6, 4, 4]
    assert [by[16, depth].packs for depth in (1, 2, "max")] == [6, 3, 2]
    assert (by[8, 1].cut, by[16, 1].cut) == (1, 0)
    assert all(row.gap == 0 for row in result.rows)
    lines = describe_task_estimate(to_json(result))
    assert lines[-1] == "No packing needs fewer: each is proven optimal."
    assert lines[-3].split() == ["16", "0", "6", "(1.000)", "3", "(2.000)", "2", "(3.000)"]


def test_no_rows_and_no_task(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no rows"):
        found(tmp_path, [])
    with pytest.raises(InputError, match=r"task.name is not set"):
        estimate_task("x", tmp_path, TaskSettings(), row_lengths=[8], depths=[1], reporter=Reporter(quiet=True))
