"""Weights from three kinds of files, to the bit; the one rule of what fits; and the files that export writes for others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.protocol import Model
from gaudi_bert.model.config import BertConfig
from gaudi_bert.tasks.export import export
from gaudi_bert.training.checkpoint import Checkpoint, find_checkpoint, is_checkpoint, read_checkpoint, write_checkpoint
from gaudi_bert.training.verify_model import collate_packs
from gaudi_bert.training.weights import _convert_from_hugging_face, convert_to_hugging_face, load_weights, read_weights
from tests.builders import training_data as data
from tests.builders.agree import agree, identical
from tests.builders.model_packs import pretraining_model, small_config, small_model
from tests.builders.reporters import QUIET

SIZES = {
    "vocab_size": 11,
    "hidden_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 5,
    "max_position_embeddings": 7,
}


def make_model(seed: int = 3, **changes) -> Model:
    return pretraining_model(BertConfig(**{**SIZES, **changes}), seed)


def save_ours(folder, model):
    checkpoint = Checkpoint(4, model.copy_variables(), settings={"model": model.spec.config.to_json()})
    return write_checkpoint(folder / "checkpoints", checkpoint)


def save_hugging_face(folder, model):
    folder.mkdir(parents=True)
    save_file(convert_to_hugging_face(model.copy_variables()), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**model.spec.config.to_json(), "model_type": "bert"}))
    return folder


def write_google_checkpoint(prefix: Path, values) -> None:
    """A TF1 checkpoint with the names of google-research/bert, by TF1's own saver."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, value in values.items():
            tf.compat.v1.get_variable(name, initializer=value, use_resource=False)
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(prefix))


def save_google(folder, model):
    folder.mkdir(parents=True)
    write_google_checkpoint(folder / "bert_model.ckpt", model.copy_variables())
    (folder / "bert_config.json").write_text(json.dumps(model.spec.config.to_json()))
    return folder


SAVERS = {"gaudi-bert": save_ours, "huggingface": save_hugging_face, "google": save_google}


@pytest.mark.parametrize("kind", SAVERS)
def test_weights_come_back_to_the_bit_and_dropout_may_differ(tmp_path, kind) -> None:
    model = make_model()
    SAVERS[kind](tmp_path / "there", model)
    other = make_model(seed=8, hidden_dropout_prob=0.5)
    weights = load_weights(tmp_path / "there", other, other.spec.config)
    assert (weights.kind, weights.config, weights.missing_variables) == (kind, model.spec.config, [])
    identical(other.copy_variables(), model.copy_variables())


@pytest.mark.parametrize("kind", SAVERS)
def test_another_function_is_refused_and_nothing_is_changed(tmp_path, kind) -> None:
    SAVERS[kind](tmp_path / "there", make_model())
    for setting, value in (("max_position_embeddings", 9), ("num_attention_heads", 3), ("hidden_act", "relu")):
        other = make_model(seed=8, **{setting: value})
        before = other.copy_variables()
        with pytest.raises(InputError, match=f"{setting} is .* there, but {value} here"):
            load_weights(tmp_path / "there", other, other.spec.config)
        identical(other.copy_variables(), before)


def test_a_bare_encoder_leaves_the_heads_as_they_are(tmp_path) -> None:
    model, other = make_model(), make_model(seed=8)
    folder = save_hugging_face(tmp_path / "there", model)
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if name.startswith("bert.")}
    save_file({name: value for name, value in tensors.items() if "pooler" not in name}, folder / "model.safetensors")
    heads = {name: value for name, value in other.copy_variables().items() if name.startswith(("cls/", "bert/pooler/"))}
    weights = load_weights(folder, other, other.spec.config)
    assert set(weights.missing_variables) == set(heads)
    after = other.copy_variables()
    identical({name: after[name] for name in heads}, heads)
    identical({name: value for name, value in after.items() if name not in heads}, weights.variables)


def test_a_model_in_several_files_is_read_as_one(tmp_path) -> None:
    model = make_model()
    folder = save_hugging_face(tmp_path / "there", model)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: value for name, value in tensors.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    identical(dict(read_weights(folder).variables), model.copy_variables())


def test_what_tf1_saver_writes_while_training_is_read_without_the_optimiser(tmp_path) -> None:
    """The names of a training checkpoint: moments below each variable, counters beside them."""
    values, prefix = make_model().copy_variables(), tmp_path / "model.ckpt-28252"
    moments = {f"{name}/adam_{moment}": value for name, value in values.items() for moment in "mv"}
    write_google_checkpoint(prefix, {**values, **moments, "global_step": np.int64(28252)})
    for path in (prefix, tmp_path, tmp_path / "model.ckpt-28252.index"):
        weights = read_weights(path)
        assert (weights.kind, weights.config) == ("google", None)
        identical(weights.variables, values)
    other = make_model(seed=8)
    load_weights(prefix, other, other.spec.config)
    identical(other.copy_variables(), values)
    with pytest.raises(InputError, match=r"word_embeddings: .*\[12, 6\].*\[11, 6\]"):
        load_weights(prefix, (wider := make_model(vocab_size=12)), wider.spec.config)


def test_damage_is_one_line_with_its_remedy(tmp_path) -> None:
    model = make_model()

    def refused(path: Path, message: str) -> None:
        with pytest.raises(InputError, match=message):
            read_weights(path)

    folder = save_hugging_face(tmp_path / "theirs", model)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-10])
    refused(folder, r"cannot be read \(.*\); copy it again")
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").unlink()
    refused(folder / "model.safetensors", r"config\.json is missing in the same folder; copy the complete folder")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"only pytorch_model\.bin, .*; save the model again with")
    google = save_google(tmp_path / "google", model)
    (google / "bert_model.ckpt.index").write_bytes(b"nonsense")
    refused(google, "is not a complete TF1 checkpoint")
    write_google_checkpoint(tmp_path / "other.ckpt", {"dense/kernel": np.zeros(3, np.float32)})
    refused(tmp_path / "other.ckpt", "contains no variable whose name begins with bert/")
    write_google_checkpoint(google / "second.ckpt", model.copy_variables())
    refused(google, "contains 2 TF1 checkpoints; pass one")
    refused(tmp_path / "nothing", "no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "contains no checkpoint")


def test_our_files_are_told_from_others(tmp_path) -> None:
    ours = save_ours(tmp_path / "run", make_model())
    theirs = save_hugging_face(tmp_path / "theirs", make_model()) / "model.safetensors"
    assert (is_checkpoint(ours), is_checkpoint(theirs)) == (True, False)
    ours.rename(tmp_path / "renamed.safetensors")
    assert read_weights(tmp_path / "renamed.safetensors").kind == "gaudi-bert"


# --- export: others load what we write and compute what we compute; and what is refused


@pytest.fixture
def causal(whole_run, tmp_path) -> Path:
    """The weights of the run in a model of another attention."""
    stored = read_checkpoint(find_checkpoint(whole_run))
    settings = {**stored.settings, "model": {**stored.settings["model"], "attention": "causal"}}
    write_checkpoint(tmp_path / "causal", Checkpoint(1, stored.variables, settings=settings))
    return tmp_path / "causal"


def test_there_and_back_again_to_the_bit(whole_run, tmp_path) -> None:
    result = export(whole_run, tmp_path / "out", reporter=QUIET)
    assert result.facts["vocabulary"].endswith("train/vocab.txt")
    assert "vocab.txt" in result.facts["files"]
    ours, theirs = read_weights(whole_run), read_weights(tmp_path / "out")
    assert (theirs.kind, theirs.config) == ("huggingface", ours.config)
    identical(dict(theirs.variables), dict(ours.variables))
    export(tmp_path / "out", tmp_path / "other", reporter=QUIET)
    identical(dict(read_weights(tmp_path / "other").variables), dict(ours.variables))
    with pytest.raises(InputError, match="--overwrite"):
        export(whole_run, tmp_path / "other", reporter=QUIET)
    export(whole_run, tmp_path / "other", reporter=QUIET, overwrite=True)
    assert sorted(file.name for file in (tmp_path / "other").iterdir()) == [
        *("config.json", "model.safetensors", "settings.json", "tokenizer_config.json", "vocab.txt")
    ]


def test_transformers_loads_it_and_computes_the_same(whole_run, tmp_path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    export(whole_run, tmp_path / "out", reporter=QUIET)
    theirs, loading = transformers.BertForPreTraining.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys"))
    tokenizer = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert tokenizer == {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "model_max_length": 40}
    ours = pretraining_model(read_weights(whole_run).config, 3)
    load_weights(whole_run, ours, ours.spec.config)
    (sequence,) = data.make_packs(1)[0]  # it fills its row
    outputs = ours.compute_losses_and_gradients(
        collate_packs([[sequence]], data.LENGTH, data.MASKED_SLOTS, 1), "token"
    ).outputs
    with torch.no_grad():
        ids, types = (torch.from_numpy(each[None]).long() for each in (sequence.input_ids, sequence.segment_ids))
        found = theirs.eval()(ids, token_type_ids=types)
    agree(found.seq_relationship_logits[0].numpy(), outputs["next_sentence_logits"][0, 0], 1e-5)
    masked = found.prediction_logits[0, torch.from_numpy(sequence.masked_positions).long()].numpy()
    agree(masked, outputs["masked_lm_logits"][0, : len(masked)], 1e-5)


def test_what_cannot_be_exported_is_refused(whole_run, causal, tmp_path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        export(tmp_path / "nothing", tmp_path / "out", reporter=QUIET)
    with pytest.raises(InputError, match="causal"):
        export(causal, tmp_path / "out", reporter=QUIET)
    (tmp_path / "vocab.txt").write_text("word\n" * (data.VOCABULARY + 1))
    with pytest.raises(InputError, match="has 62 tokens, but the model has only 61; pass the vocabulary"):
        export(whole_run, tmp_path / "out", vocabulary=tmp_path / "vocab.txt", reporter=QUIET)
    assert not (tmp_path / "out").exists()


# --- the names that `transformers` has


def test_names_and_back_to_the_bit_also_by_old_names_with_tied_copies():
    values = small_model().copy_variables()
    state = convert_to_hugging_face(values)
    assert len(state) == len(values)
    identical(_convert_from_hugging_face(state, small_config()), values)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in state.items()
    }
    old["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    identical(_convert_from_hugging_face(old, small_config()), values)


OLD = "bert.encoder.layer.0.output.LayerNorm.gamma"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("bert.encoder.layer.1.output.dense.bias"), "output.dense.bias is missing"),
        (lambda state: state.update({"cls.predictions.bias": np.zeros(3)}), r"must have the shape .* has \(3,\)"),
        (
            lambda state: state.update({OLD: np.zeros(24)}),
            "LayerNorm.weight and .*LayerNorm.gamma are two names of the same tensor",
        ),
        (lambda state: state.update({"pooler.dense.bias": np.zeros(24)}), "two names of the same tensor"),
        (lambda state: state.update({"bert.extra": np.zeros(3)}), "bert.extra is not supported"),
        (lambda state: state.update({"cls.predictions.decoder.weight": np.zeros((53, 21))}), "only tied"),
    ],
)
def test_other_weights_are_refused(change, message):
    state = convert_to_hugging_face(small_model().copy_variables())
    change(state)
    with pytest.raises(InputError, match=message):
        _convert_from_hugging_face(state, small_config())
