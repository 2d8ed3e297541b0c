"""Evaluation: exact over the whole set, the same packed and unpacked; the baselines."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.engines.protocol import Communicator, Model
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import Loss
from gaudi_bert.training.evaluate import PretrainingEvaluator, majority_share
from gaudi_bert.training.input.source import open_source
from tests.builders import training_data as data
from tests.builders.agree import agree
from tests.builders.engine_models import pretraining_model

PACKS = data.make_packs(29)
CONFIG = BertConfig(**data.MODEL, vocab_size=data.VOCABULARY, max_position_embeddings=data.LENGTH, initializer_range=0.3)


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model("token")


def make_model(loss: Loss) -> Model:
    return pretraining_model(CONFIG, 5, loss)


def run(model, folder, batch_packs=8, communicator=None):
    source = open_source(folder)
    return PretrainingEvaluator(model, CONFIG, source, communicator or Communicator(), batch_packs=batch_packs).run()


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_packed_and_unpacked_figures_are_the_same(tmp_path, loss) -> None:
    model = make_model(loss)
    packed = run(model, data.write_packed(tmp_path / "packed", PACKS)).as_json()
    unpacked = run(model, data.write_unpacked(tmp_path / "unpacked", PACKS), batch_packs=7).as_json()
    assert packed.keys() == unpacked.keys()
    for name, value in packed.items():
        agree(value, unpacked[name], 1e-5, scale=1.0)
    assert packed["sequences"] == sum(len(pack) for pack in PACKS)
    assert packed["masked_tokens"] == sum(len(sequence.masked_ids) for pack in PACKS for sequence in pack)


def test_the_size_of_the_batch_changes_nothing(model, tmp_path) -> None:
    folder = data.write_packed(tmp_path / "packed", PACKS)
    figures = [run(model, folder, batch_packs=size).as_json() for size in (1, 29, 64)]
    for other in figures[1:]:
        agree(other, figures[0], 1e-5, scale=1.0)


def test_the_baselines_are_the_best_constant_answer(model, tmp_path) -> None:
    labels = np.concatenate([sequence.masked_ids for pack in PACKS for sequence in pack])
    best = max((labels == token).mean() for token in range(data.VOCABULARY))
    found = run(model, data.write_packed(tmp_path / "packed", PACKS))
    agree(found.unigram_baseline, best)
    share_of_ones = np.mean([sequence.next_sentence_label for pack in PACKS for sequence in pack])
    agree(found.next_sentence_baseline, max(share_of_ones, 1 - share_of_ones))
    assert found.as_json()["next_sentence_baseline"] == found.next_sentence_baseline
    assert f"(baseline {found.next_sentence_baseline:.4f})" in found.line()
    assert majority_share(np.array([1.0, 3.0, 0.0])) == 0.75
    assert majority_share(np.zeros(3)) == 0.0
