"""Training on records that are packed as they are read: resumed runs end with the same bits."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

from gaudi_bert.common.errors import InputError, StoppedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import pipeline_from_mapping
from gaudi_bert.stages.training.train import train
from tests.builders.packing_case import make_case
from tests.builders.stop_after import StopAfter

QUIET = Reporter(quiet=True)
SETTINGS = pipeline_from_mapping(
    {
        "model": {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20},
        "training": {
            "updates": 12,
            "warmup_updates": 2,
            "global_batch_sequences": 24,
            "micro_batch_packs": 4,
            "save_every_updates": 4,
            "log_every_updates": 2,
        },
    },
    "test",
)


def last_checkpoint(out: Path) -> str:
    return hashlib.sha256(max((out / "checkpoints").iterdir()).read_bytes()).hexdigest()


def test_a_stopped_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    case = make_case(tmp_path, seed=5)
    plan = {"data": case.records, "evaluation_data": None, "on_the_fly": case.plan}
    whole = train(SETTINGS, out=tmp_path / "whole", reporter=QUIET, **plan)
    assert whole.training.sequences > len(case.sequences)
    with pytest.raises(StoppedError):
        train(SETTINGS, out=tmp_path / "stopped", reporter=StopAfter(6), **plan)
    resumed = train(SETTINGS, out=tmp_path / "stopped", reporter=QUIET, resume=True, **plan)
    assert resumed.training.sequences == whole.training.sequences
    assert last_checkpoint(tmp_path / "stopped") == last_checkpoint(tmp_path / "whole")


def test_records_that_are_not_the_plans_are_refused(tmp_path: Path) -> None:
    case = make_case(tmp_path / "one", files=2)
    other = make_case(tmp_path / "two", files=3)
    with pytest.raises(InputError, match="plan"):
        train(SETTINGS, other.records, None, tmp_path / "out", reporter=QUIET, on_the_fly=case.plan)
    assert not (tmp_path / "out").exists()
