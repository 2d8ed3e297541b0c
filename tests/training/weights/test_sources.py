"""Weights from three kinds of files, to the bit; and the one rule of what fits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

from gaudi_bert.common.errors import InputError
from gaudi_bert.model.bert import BertForPretraining
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.huggingface import to_hugging_face
from gaudi_bert.training.checkpoint import Checkpoint, is_checkpoint, write_checkpoint
from gaudi_bert.training.weights.google_checkpoint import (
    find_google_checkpoint,
    read_google_checkpoint,
    write_google_checkpoint,
)
from gaudi_bert.training.weights.sources import load_weights, read_weights

SIZES = {
    "vocab_size": 11,
    "hidden_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 5,
    "max_position_embeddings": 7,
}


def make_model(seed: int = 3, **changes) -> BertForPretraining:
    return BertForPretraining(BertConfig(**{**SIZES, **changes}), seed=seed)


def values_of(model: BertForPretraining) -> dict[str, np.ndarray]:
    return {name: variable.numpy() for name, variable in model.variables_by_name.items()}


def assert_equal(values, others) -> None:
    assert values.keys() == others.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(value, others[name], err_msg=name)


def save_ours(folder, model):
    checkpoint = Checkpoint(4, values_of(model), settings={"model": model.config.to_json()})
    return write_checkpoint(folder / "checkpoints", checkpoint)


def save_hugging_face(folder, model):
    folder.mkdir(parents=True)
    save_file(to_hugging_face(values_of(model)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**model.config.to_json(), "model_type": "bert"}))
    return folder


def save_google(folder, model):
    folder.mkdir(parents=True)
    write_google_checkpoint(folder / "bert_model.ckpt", values_of(model))
    (folder / "bert_config.json").write_text(json.dumps(model.config.to_json()))
    return folder


SAVERS = {"gaudi-bert": save_ours, "huggingface": save_hugging_face, "google": save_google}


@pytest.mark.parametrize("kind", SAVERS)
def test_weights_come_back_to_the_bit(tmp_path, kind) -> None:
    model = make_model()
    SAVERS[kind](tmp_path / "there", model)
    other = make_model(seed=8)
    weights = load_weights(tmp_path / "there", other)
    assert (weights.kind, weights.config, weights.missing) == (kind, model.config, [])
    assert_equal(values_of(other), values_of(model))


@pytest.mark.parametrize("kind", SAVERS)
@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("max_position_embeddings", 9, "is 7 there, 9 here; positions are neither cut off nor made up; set model.max_pos"),
        ("max_position_embeddings", 5, "is 7 there, 5 here; positions are neither cut off nor made up"),
        ("num_attention_heads", 3, "num_attention_heads is 2 there, 3 here; set model.num_attention_heads to 2"),
        ("hidden_act", "relu", "hidden_act is gelu there, relu here"),
    ],
)
def test_another_function_is_refused_and_nothing_is_changed(tmp_path, kind, setting, value, said) -> None:
    SAVERS[kind](tmp_path / "there", make_model())
    other = make_model(seed=8, **{setting: value})
    before = values_of(other)
    with pytest.raises(InputError, match=said):
        load_weights(tmp_path / "there", other)
    assert_equal(values_of(other), before)


def test_dropout_may_differ(tmp_path) -> None:
    model, other = make_model(), make_model(seed=8, hidden_dropout_prob=0.5)
    save_google(tmp_path / "there", model)
    load_weights(tmp_path / "there", other)
    assert_equal(values_of(other), values_of(model))


def test_a_bare_encoder_leaves_the_heads_as_they_are(tmp_path) -> None:
    model, other = make_model(), make_model(seed=8)
    folder = save_hugging_face(tmp_path / "there", model)
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if name.startswith("bert.")}
    save_file({name: value for name, value in tensors.items() if "pooler" not in name}, folder / "model.safetensors")
    heads = {name: value for name, value in values_of(other).items() if name.startswith(("cls/", "bert/pooler/"))}
    weights = load_weights(folder, other)
    assert set(weights.missing) == set(heads)
    after = values_of(other)
    assert_equal({name: after[name] for name in heads}, heads)
    assert_equal({name: value for name, value in after.items() if name not in heads}, weights.variables)


def test_a_model_in_several_files_is_read_as_one(tmp_path) -> None:
    model = make_model()
    folder = save_hugging_face(tmp_path / "there", model)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: value for name, value in tensors.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert_equal(dict(read_weights(folder).variables), values_of(model))


def test_what_tf1_saver_writes_while_training_is_read_without_the_optimiser(tmp_path) -> None:
    """The names of a training checkpoint: moments below each variable, counters beside them; written by TF1's own saver."""
    values = values_of(make_model())
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, value in values.items():
            for variable in (name, f"{name}/adam_m", f"{name}/adam_v"):
                tf.compat.v1.get_variable(variable, initializer=value, use_resource=False)
        tf.compat.v1.get_variable("global_step", initializer=np.int64(28252), use_resource=False)
        session.run(tf.compat.v1.global_variables_initializer())
        prefix = tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"), global_step=28252)
    assert find_google_checkpoint(tmp_path) == find_google_checkpoint(tmp_path / "model.ckpt-28252.index")
    for path in (prefix, tmp_path):
        weights = read_weights(path)
        assert (weights.kind, weights.config) == ("google", None)
        assert_equal(weights.variables, values)
    other = make_model(seed=8)
    load_weights(prefix, other)
    assert_equal(values_of(other), values)
    with pytest.raises(InputError, match=r"word_embeddings is \[11, 6\] there, \[12, 6\] here"):
        load_weights(prefix, make_model(vocab_size=12))


def test_tf1_saver_restores_what_we_write(tmp_path) -> None:
    values = values_of(make_model())
    write_google_checkpoint(tmp_path / "bert_model.ckpt", values)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = {
            name: tf.compat.v1.get_variable(name, shape=value.shape, use_resource=False) for name, value in values.items()
        }
        tf.compat.v1.train.Saver().restore(session, str(tmp_path / "bert_model.ckpt"))
        assert_equal(session.run(variables), values)


def test_damage_is_one_line_with_its_remedy(tmp_path) -> None:
    model = make_model()
    folder = save_hugging_face(tmp_path / "theirs", model)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-10])
    with pytest.raises(InputError, match=r"cannot be read \(.*\); copy it again"):
        read_weights(folder)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json beside it; copy the whole folder"):
        read_weights(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin only; save it with"):
        read_weights(folder)
    google = save_google(tmp_path / "google", model)
    (google / "bert_model.ckpt.index").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="not a whole TF1 checkpoint"):
        read_weights(google)
    write_google_checkpoint(tmp_path / "other.ckpt", {"dense/kernel": np.zeros(3, np.float32)})
    with pytest.raises(InputError, match="holds no variable below bert/"):
        read_google_checkpoint(tmp_path / "other.ckpt")
    write_google_checkpoint(google / "second.ckpt", values_of(model))
    with pytest.raises(InputError, match="holds 2 TF1 checkpoints; name one"):
        read_weights(google)
    with pytest.raises(InputError, match="no checkpoint there"):
        read_weights(tmp_path / "nothing")


def test_our_files_are_told_from_others(tmp_path) -> None:
    ours = save_ours(tmp_path / "run", make_model())
    theirs = save_hugging_face(tmp_path / "theirs", make_model()) / "model.safetensors"
    assert (is_checkpoint(ours), is_checkpoint(theirs)) == (True, False)
    ours.rename(tmp_path / "renamed.safetensors")
    assert read_weights(tmp_path / "renamed.safetensors").kind == "gaudi-bert"
