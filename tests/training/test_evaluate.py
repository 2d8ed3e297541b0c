"""What looks at a model: its evaluation, exact and the same packed and unpacked; `verify-model`; `doctor --graph`."""

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
from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.engines.graph_report import CardFit, GraphProblem, GraphReport
from gaudi_bert.engines.protocol import Communicator
from gaudi_bert.engines.tensorflow import bert
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.features import BatchSizes
from gaudi_bert.model.heads import Loss
from gaudi_bert.training.check_graph import describe_graph
from gaudi_bert.training.checkpoint import Checkpoint, write_checkpoint
from gaudi_bert.training.evaluate import Evaluator, RecordsEvaluation, evaluate, majority_share
from gaudi_bert.training.input.source import open_source
from gaudi_bert.training.results import GraphResult
from gaudi_bert.training.verify_model import verify_model
from tests.builders import training_data
from tests.builders import training_data as data
from tests.builders.agree import agree
from tests.builders.command_line import Done, run_command
from tests.builders.effort import sampled
from tests.builders.model_packs import pretraining_model
from tests.builders.reporters import QUIET
from tests.training.conftest import HELD_OUT

PACKS = data.make_packs(29)
CONFIG = BertConfig(**data.MODEL, vocab_size=data.VOCABULARY, max_position_embeddings=data.LENGTH, initializer_range=0.3)


def run(folder: Path, batch_packs: int = 8, loss: Loss = "token") -> EvaluationFigures:
    model, source = pretraining_model(CONFIG, 5, loss), open_source(folder)
    return Evaluator(model, RecordsEvaluation(source, CONFIG, batch_packs), Communicator()).run()


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


# --- `doctor --graph`: sizes from the data or from the settings, lines for people, an exit code for scripts


SMALL = ["model.num_hidden_layers=1", "model.hidden_size=8", "model.intermediate_size=6", "training.micro_batch_packs=2"]


def test_what_does_not_fit_is_shown_and_too_much_is_cut_short() -> None:
    report = GraphReport(
        problems=(GraphProblem(kind="string", graph="update", operation="a", type="AsString", found="a:0 is a string"),)
        * 25,
        **dict.fromkeys(
            [
                *("operations", "flops_per_micro_batch", "flops_per_update", "parameters", "parameter_bytes"),
                *("optimizer_bytes", "gradient_bytes", "activation_bytes", "peak_bytes"),
            ],
            1,
        ),
        cards=(CardFit("Gaudi", 0), CardFit("Gaudi2", 8)),
    )
    result = GraphResult("demo", "tensorflow", "x", BatchSizes(9, 1, 1, 1), 1, "float32", 1, report)
    lines = describe_graph(result)
    assert lines[-1] == "not fit for Gaudi"
    assert lines[-2] == "... and 5 more"
    assert lines[-3].endswith("string: AsString a in update: a:0 is a string")
    assert "Gaudi: not even one pack fits" in lines
    assert "Gaudi2: up to about 8 packs per micro-batch; 9 does not fit" in lines
    good = replace(result, sizes=BatchSizes(8, 1, 1, 1), report=replace(report, problems=()))
    lines = describe_graph(good)
    assert lines[-1].startswith("fit for Gaudi")
    assert "Gaudi2: up to about 8 packs per micro-batch; 8 fits" in lines


@pytest.mark.slow
def test_before_packing_the_settings_give_the_sizes_and_an_impossible_model_is_refused(tmp_path) -> None:
    (tmp_path / "pipeline.yaml").write_text("name: small\n")

    def doctor(*more: str) -> Done:
        overrides = [part for each in SMALL for part in ("--set", each)]
        return run_command("doctor", "--graph", "pipeline.yaml", *overrides, *more, folder=tmp_path)

    done = doctor("--json", "--set", "packing.depth=5", "--set", "training.global_batch_sequences=10")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["sizes"] == {"packs": 2, "positions": 128, "masked_slots": 25, "depth": 5, "vocabulary": 8192}
    assert (printed["fit"], printed["accumulation_steps"], printed["problems"]) == (True, 5, [])
    assert {"cards", "peak_bytes", "sizes_from"} <= printed.keys()
    refused = doctor("--set", "model.max_position_embeddings=64")
    assert refused.returncode == 2
    assert "the model's max_position_embeddings is 64" in refused.stderr
    too_many = doctor("--set", "training.micro_batch_packs=20000")
    assert too_many.returncode == 2
    assert "at most 2,147,483,647 can be numbered by int32; make micro-batches smaller" in too_many.stderr


@pytest.mark.slow
def test_after_packing_the_metadata_gives_them_and_a_graph_that_is_not_fit_is_exit_code_1(monkeypatch, tmp_path) -> None:
    """A model that calls back to Python in its forward pass, from the command line."""
    encode_packs = bert.encode_packs

    def talkative(*inputs):
        hidden_RH = encode_packs(*inputs)
        heard_RH = tf.numpy_function(lambda hidden: hidden, [hidden_RH], tf.float32)
        return tf.ensure_shape(heard_RH, hidden_RH.shape)

    monkeypatch.setattr(bert, "encode_packs", talkative)
    (tmp_path / "pipeline.yaml").write_text("name: small\n")
    chosen = [*SMALL, "training.global_batch_sequences=8"]
    settings = load_pipeline(tmp_path / "pipeline.yaml", chosen)
    packed = WorkFolder.of(settings, tmp_path / "work", tmp_path).split("train").packed
    data.write_packed(packed, data.make_packs(8))
    overrides = [part for each in chosen for part in ("--set", each)]
    done = run_command("doctor", "--graph", "pipeline.yaml", "--work", tmp_path / "work", *overrides, folder=tmp_path)
    assert done.returncode == 1
    sizes = f"2 packs x {data.LENGTH} positions, {data.MASKED_SLOTS} masked slots, depth 3, vocabulary {data.VOCABULARY}"
    assert done.stdout.startswith(f"small: micro-batches of {sizes} (from {packed})")
    assert "(2 micro-batches per card)" in done.stdout
    assert "host call: PyFunc" in done.stdout
    assert done.stdout.endswith("not fit for Gaudi\n")
    assert done.stderr.splitlines()[-1].endswith("not fit for Gaudi: 4 problems, the first: PyFunc, host call")
