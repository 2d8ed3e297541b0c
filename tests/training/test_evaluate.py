"""What looks at a model: its evaluation, exact and the same packed and unpacked; `verify-model`."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.artefacts.results import StageOutput, to_json
from gaudi_bert.artefacts.training import EvaluationFigures, TrainingResult
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.engines.protocol import Communicator
from gaudi_bert.engines.tensorflow import bert
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import Loss
from gaudi_bert.training.checkpoint import Checkpoint, write_checkpoint
from gaudi_bert.training.evaluate import RecordsEvaluation, evaluate, majority_share
from gaudi_bert.training.input.source import open_source
from gaudi_bert.training.verify_model import verify_model
from tests.builders import training_data
from tests.builders import training_data as data
from tests.builders.agree import agree
from tests.builders.effort import sampled
from tests.builders.model_packs import pretraining_model
from tests.builders.reporters import QUIET
from tests.training.conftest import HELD_OUT

PACKS = data.make_packs(29)
CONFIG = BertConfig(**data.MODEL, vocab_size=data.VOCABULARY, max_position_embeddings=data.LENGTH, initializer_range=0.3)


def run(folder: Path, batch_packs: int = 8, loss: Loss = "token") -> EvaluationFigures:
    model, source = pretraining_model(CONFIG, 5, loss), open_source(folder)
    return RecordsEvaluation(source, CONFIG, batch_packs).evaluate(model, Communicator())


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
    assert f"(baseline {found.next_sentence_baseline:.4f})" in found.line()
    assert majority_share(np.array([1.0, 3.0, 0.0])) == 0.75
    assert majority_share(np.zeros(3)) == 0.0


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


def test_other_sequences_are_not_the_same_figures_and_no_checkpoint_is_one_line(held_out, whole_run, tmp_path) -> None:
    other = data.write_unpacked(tmp_path / "unpacked", HELD_OUT[1:])
    with pytest.raises(FailedError, match="their figures differ by"):
        evaluate(held_out, whole_run, unpacked=other, out=tmp_path / "evaluation.json", reporter=QUIET)
    assert not (tmp_path / "evaluation.json").exists()
    with pytest.raises(InputError, match="no checkpoint there"):
        evaluate(held_out, tmp_path, reporter=QUIET)
    foreign = data.write_packed(tmp_path / "foreign", data.make_packs(3), vocabulary=10**6)
    with pytest.raises(InputError, match="vocab_size"):
        evaluate(foreign, whole_run, reporter=QUIET)


# --- verify-model: the proof for a user's checkpoint and data, and that it fails when packing does change something


@pytest.fixture
def checkpoint(tmp_path):
    config = BertConfig(
        vocab_size=training_data.VOCABULARY,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
        max_position_embeddings=64,
        initializer_range=0.15,
        attention="causal",
    )
    values = pretraining_model(config, 3).values()
    write_checkpoint(tmp_path / "checkpoints", Checkpoint(7, values, settings={"model": config.to_json()}))
    return tmp_path


def test_random_weights_on_random_sequences():
    stream = io.StringIO()
    result = verify_model(checkpoint=None, data=None, reporter=Reporter(stream))
    assert result.sequences > result.packs
    assert result.leak_comparisons > result.sequences
    assert result.hidden_states < 1e-5
    assert result.gradient < 1e-5
    printed = to_json(result)
    assert json.loads(json.dumps(printed)) == printed
    assert printed["leaks"] == 0
    assert "leak probe" in stream.getvalue()
    assert verify_model(checkpoint=None, data=None, reporter=QUIET) == result


@pytest.mark.parametrize("kind", ["packed", "unpacked"])
def test_checkpoint_on_data(tmp_path, checkpoint, kind):
    write = training_data.write_packed if kind == "packed" else training_data.write_unpacked
    data = write(tmp_path / "data", training_data.make_packs(13))
    result = verify_model(checkpoint=checkpoint, data=data, reporter=QUIET, packs=6)
    assert result.sequences > result.packs > 1
    assert result.masked_lm_logits < 1e-4
    assert result.gradient < 1e-5
    assert result.leaks == 0


def test_packs_of_several_sequences_are_looked_for(tmp_path, checkpoint):
    packs = [pack for pack in training_data.make_packs(60) if len(pack) == 1] + training_data.make_packs(7)
    data = training_data.write_packed(tmp_path / "data", packs, shards=1)
    result = verify_model(checkpoint=checkpoint, data=data, reporter=QUIET, packs=4)
    assert result.packs == 4
    assert result.leak_comparisons > 0


def test_where_no_pack_holds_two_sequences_the_probe_says_so(tmp_path, checkpoint):
    packs = [pack for pack in training_data.make_packs(30) if len(pack) == 1]
    stream = io.StringIO()
    data = training_data.write_packed(tmp_path / "data", packs, shards=1)
    result = verify_model(checkpoint=checkpoint, data=data, reporter=Reporter(stream), packs=4)
    assert result.leak_comparisons == 0
    assert "leak probe: nothing to compare" in stream.getvalue()


def test_a_leaking_mask_is_found(monkeypatch):
    right = bert.attention_bias
    monkeypatch.setattr(bert, "attention_bias", lambda mask, *rest: right(tf.minimum(mask, 1), *rest))
    with pytest.raises(FailedError, match="packed and unpacked differ by"):
        verify_model(checkpoint=None, data=None, reporter=QUIET)


def test_a_wrong_gradient_is_found(monkeypatch):
    """Gradients of the encoder that depend on how many rows there are: outputs agree, gradients do not."""
    right = bert.encode_packs

    def damaged(network, batch, *positions):
        share = 1.0 / len(batch["input_ids"])
        damped = {
            name: share * value + (1 - share) * tf.stop_gradient(value) if "/layer_" in name else value
            for name, value in network.parameters.items()
        }
        return right(replace(network, parameters=damped), batch, *positions)

    monkeypatch.setattr(bert, "encode_packs", damaged)
    with pytest.raises(FailedError, match="gradient of bert/encoder"):
        verify_model(checkpoint=None, data=None, reporter=QUIET)


def test_what_cannot_be_verified_is_refused(tmp_path, checkpoint):
    data = training_data.write_packed(tmp_path / "data", training_data.make_packs(3), vocabulary=10**6)
    write_checkpoint(tmp_path / "bare", Checkpoint(1, {"bert/pooler/dense/bias": np.zeros(3, np.float32)}))
    for model, records, reason in (
        (checkpoint, data, "vocab_size"),
        (tmp_path / "data", None, "no checkpoint there"),
        (tmp_path / "bare", None, "no model settings"),
    ):
        with pytest.raises(InputError, match=reason):
            verify_model(checkpoint=model, data=records, reporter=QUIET)
