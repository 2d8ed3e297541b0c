"""Stage evaluate: figures of a checkpoint, packed beside unpacked."""

from __future__ import annotations

import json

import pytest

from gaudi_bert.cli.results import to_json
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import pipeline_from_mapping
from gaudi_bert.stages.training.evaluate import evaluate
from gaudi_bert.stages.training.model_results import EvaluateResult
from gaudi_bert.stages.training.train import train
from tests.builders import training_data as data

QUIET = Reporter(quiet=True)
MODEL = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}
PACKS = data.make_packs(11, seed=8)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run, and its summary."""
    folder = tmp_path_factory.mktemp("evaluate")
    settings = pipeline_from_mapping(
        {"model": MODEL, "training": {"updates": 3, "micro_batch_packs": 4, "global_batch_sequences": 8}}, "test"
    )
    packed = data.write_packed(folder / "packed", PACKS)
    return folder, train(
        settings, data.write_packed(folder / "data", data.make_packs(29)), packed, folder / "train", reporter=QUIET
    )


def test_packed_and_unpacked_figures_are_those_of_the_end_of_training(run, tmp_path) -> None:
    folder, summary = run
    unpacked = data.write_unpacked(tmp_path / "unpacked", PACKS)
    out = tmp_path / "evaluation.json"
    result = evaluate(folder / "packed", folder / "train", unpacked=str(unpacked), out=out, reporter=QUIET)
    assert json.loads(out.read_text()) == to_json(result)
    again = evaluate(folder / "packed", folder / "train", unpacked=str(unpacked), out=out, reporter=QUIET)
    assert again == EvaluateResult(result.evaluation, skipped=True)
    assert to_json(again) == {**to_json(result), "skipped": True}
    packed_alone = evaluate(folder / "packed", folder / "train", out=out, reporter=QUIET)
    assert "unpacked" not in to_json(packed_alone)
    found = result.evaluation
    assert found.update == 3
    assert found.largest_difference < 1e-5
    for name, value in summary.training.evaluation.as_json().items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-6)
        assert getattr(found.unpacked, name) == pytest.approx(value, abs=1e-5)


def test_other_sequences_are_not_the_same_figures(run, tmp_path) -> None:
    folder, _ = run
    other = data.write_unpacked(tmp_path / "unpacked", PACKS[1:])
    with pytest.raises(FailedError, match="their figures differ by"):
        evaluate(folder / "packed", folder / "train", unpacked=other, out=tmp_path / "evaluation.json", reporter=QUIET)
    assert not (tmp_path / "evaluation.json").exists()


def test_no_checkpoint_is_one_line(run, tmp_path) -> None:
    folder, _ = run
    with pytest.raises(InputError, match="no checkpoint there"):
        evaluate(folder / "packed", tmp_path, reporter=QUIET)
