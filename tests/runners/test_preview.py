"""What `--dry-run` says of the stages to come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gaudi_bert.config import load_pipeline
from gaudi_bert.runners.preview import StagePreview, preview_stages
from gaudi_bert.runners.stage_table import STAGES
from tests.builders.plan_content import plan_content


def ahead(folder: Path, *overrides: str) -> dict[str, StagePreview]:
    return {
        step.stage: step for step in preview_stages(load_pipeline(None, overrides), list(STAGES), folder / "work", folder)
    }


def test_each_stage_has_its_image_and_what_it_asks_for(tmp_path: Path) -> None:
    steps = ahead(
        tmp_path,
        *("resources.cards=8", "resources.workers=2", "resources.data_workers=5", "images.tag=v1"),
        "resources.training={cpu: 95, memory: 409Gi}",
    )
    assert list(steps) == list(STAGES)
    assert steps["prepare"].image == "gaudi-bert-data:v1"
    assert [step.containers for step in steps.values()] == [5, 5, 1, 5, 1, 2, 1, 2, 1, 1]
    assert [step.cards for step in steps.values()] == [0, 0, 0, 0, 0, 8, 1, 8, 1, 0]
    assert str(steps["train"]).startswith("train: 2 x gaudi-bert-train-cpu:v1 (95 cpu, 409Gi, 8 cards), about ")
    assert "1 card)" in str(steps["evaluate"])


def test_what_cannot_be_known_is_not_guessed(tmp_path: Path) -> None:
    steps = ahead(tmp_path, "prepare.text=absent/*.txt")
    assert {stage for stage, step in steps.items() if step.seconds is None} == {
        *("prepare", "histogram", "write", "verify", "evaluate", "finetune", "predict")
    }
    assert "time unknown before the data are there" in str(steps["write"])


def test_more_text_and_fewer_pods_take_longer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 4_000_000)
    one = ahead(tmp_path, "prepare.text=a.txt", "prepare.duplicates=10")
    several = ahead(tmp_path, "prepare.text=a.txt", "prepare.duplicates=10", "resources.data_workers=5")
    assert one["prepare"].seconds == pytest.approx(5 + 10 / 2)
    assert several["prepare"].seconds == pytest.approx(5 + 10 / 10)


def test_records_that_are_there_are_measured(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "part").write_bytes(b"x" * 2_000_000)
    steps = ahead(tmp_path, "prepare.records=records")
    assert steps["histogram"].seconds == pytest.approx(5 + 0.01 / 2)


def test_training_takes_as_long_as_its_operations(tmp_path: Path) -> None:
    """BERT large, phase 1: 65,536 x 7,038 sequences of 128 are about 1.2e20 operations; 16 cards need days."""
    large = (
        *("model.hidden_size=1024", "model.num_hidden_layers=24", "model.num_attention_heads=16"),
        *("model.intermediate_size=4096", "model.vocab_size=30522", "prepare.max_sequence_length=128"),
        *("training.global_batch_sequences=65536", "training.updates=7038", "resources.cards=8", "resources.workers=2"),
    )
    seconds = ahead(tmp_path, *large)["train"].seconds
    assert seconds is not None
    assert 2 * 86_400 < seconds < 4 * 86_400
    plan = tmp_path / "work" / "demo" / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text(json.dumps(plan_content([{(4, 4): 1}], 8)))
    assert ahead(tmp_path, *large)["train"].seconds == pytest.approx(5 + (seconds - 5) / 2)
