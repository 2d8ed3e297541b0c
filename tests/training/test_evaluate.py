"""What looks at a model: its evaluation, exact and the same packed and unpacked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.results import StageOutput, to_json
from gaudi_bert.artefacts.training import EvaluationMetrics, TrainingResult
from gaudi_bert.common.errors import FailedError
from gaudi_bert.engines.protocol import Communicator
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import Loss
from gaudi_bert.training.evaluate import RecordsEvaluation, compute_majority_baseline, evaluate
from gaudi_bert.training.sources import open_local_records
from tests.builders import training_data as data
from tests.builders.agree import agree
from tests.builders.effort import sampled
from tests.builders.model_packs import pretraining_model
from tests.builders.reporters import QUIET
from tests.training.conftest import HELD_OUT

PACKS = data.make_packs(29)
CONFIG = BertConfig(**data.MODEL, vocab_size=data.VOCABULARY, max_position_embeddings=data.LENGTH, initializer_range=0.3)


def run(folder: Path, batch_packs: int = 8, loss: Loss = "token") -> EvaluationMetrics:
    model, source = pretraining_model(CONFIG, 5, loss), open_local_records(folder)
    return RecordsEvaluation(source, CONFIG, batch_packs).evaluate_model(model, Communicator())


@pytest.mark.parametrize("loss", sampled(["token", "sequence"], 2))
def test_packed_and_unpacked_figures_are_the_same_whatever_the_size_of_the_batch(tmp_path, loss) -> None:
    folder = data.write_packed(tmp_path / "packed", PACKS)
    packed = run(folder, loss=loss).as_json()
    agree(packed, run(data.write_unpacked(tmp_path / "unpacked", PACKS), 7, loss).as_json(), 1e-5, scale=1.0)
    for size in (1, 29, 64):
        agree(packed, run(folder, size, loss).as_json(), 1e-5, scale=1.0)
    assert packed["sequences"] == sum(len(pack) for pack in PACKS)
    assert packed["masked_tokens"] == sum(len(sequence.masked_ids) for pack in PACKS for sequence in pack)


def test_the_baselines_are_the_best_constant_answer(tmp_path) -> None:
    labels = np.concatenate([sequence.masked_ids for pack in PACKS for sequence in pack])
    best = max((labels == token).mean() for token in range(data.VOCABULARY))
    found = run(data.write_packed(tmp_path / "packed", PACKS))
    agree(found.unigram_baseline, best)
    share_of_ones = np.mean([sequence.next_sentence_label for pack in PACKS for sequence in pack])
    agree(found.next_sentence_baseline, max(share_of_ones, 1 - share_of_ones))
    assert found.as_json()["next_sentence_baseline"] == found.next_sentence_baseline
    assert compute_majority_baseline(np.array([1.0, 3.0, 0.0])) == 0.75
    assert compute_majority_baseline(np.zeros(3)) == 0.0


# --- the stage: the figures of a checkpoint, packed beside unpacked


def test_packed_and_unpacked_figures_are_those_of_the_end_of_training(held_out, whole_run, tmp_path) -> None:
    unpacked = data.write_unpacked(tmp_path / "unpacked", HELD_OUT)
    out = tmp_path / "evaluation.json"
    result = evaluate(held_out, whole_run, unpacked=str(unpacked), out=out, reporter=QUIET)
    assert json.loads(out.read_text()) == to_json(result)
    again = evaluate(held_out, whole_run, unpacked=str(unpacked), out=out, reporter=QUIET)
    assert again == StageOutput(result.content, skipped=True)
    assert to_json(again) == {**to_json(result), "skipped": True}
    packed_alone = evaluate(held_out, whole_run, out=out, reporter=QUIET)
    assert "unpacked" not in to_json(packed_alone)
    found = result.content
    assert found.update == 20
    assert found.largest_difference < 1e-5
    for name, value in TrainingResult.read(whole_run / "training.json").evaluation.as_json().items():
        agree(getattr(found, name), value, 1e-6, scale=1.0)
        agree(getattr(found.unpacked, name), value, 1e-5, scale=1.0)


def test_other_sequences_are_not_the_same_figures(held_out, whole_run, tmp_path) -> None:
    other = data.write_unpacked(tmp_path / "unpacked", HELD_OUT[1:])
    with pytest.raises(FailedError, match="the metrics differ by"):
        evaluate(held_out, whole_run, unpacked=other, out=tmp_path / "evaluation.json", reporter=QUIET)
    assert not (tmp_path / "evaluation.json").exists()
