"""Weights from three kinds of files, to the bit; the one rule of what fits; folders of models that are served."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.engines.protocol import Model
from gaudi_bert.engines.tensorflow.stored_models import write_google_checkpoint
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.huggingface import to_hugging_face
from gaudi_bert.rows.packs import BatchShape, Packs, lay_out_packs
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import TextRow
from gaudi_bert.tasks.models.export import export
from gaudi_bert.training.checkpoint import Checkpoint, is_checkpoint, write_checkpoint
from gaudi_bert.training.weights import load_weights, read_weights
from tests.builders.agree import agree, identical
from tests.builders.engine_models import pretraining_model
from tests.builders.reporters import QUIET
from tests.tasks.test_predict import TEXTS, logits_alone, write_model

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
    checkpoint = Checkpoint(4, model.values(), settings={"model": model.spec.config.to_json()})
    return write_checkpoint(folder / "checkpoints", checkpoint)


def save_hugging_face(folder, model):
    folder.mkdir(parents=True)
    save_file(to_hugging_face(model.values()), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**model.spec.config.to_json(), "model_type": "bert"}))
    return folder


def save_google(folder, model):
    folder.mkdir(parents=True)
    write_google_checkpoint(folder / "bert_model.ckpt", model.values())
    (folder / "bert_config.json").write_text(json.dumps(model.spec.config.to_json()))
    return folder


SAVERS = {"gaudi-bert": save_ours, "huggingface": save_hugging_face, "google": save_google}


@pytest.mark.parametrize("kind", SAVERS)
def test_weights_come_back_to_the_bit_and_dropout_may_differ(tmp_path, kind) -> None:
    model = make_model()
    SAVERS[kind](tmp_path / "there", model)
    other = make_model(seed=8, hidden_dropout_prob=0.5)
    weights = load_weights(tmp_path / "there", other, other.spec.config)
    assert (weights.kind, weights.config, weights.missing) == (kind, model.spec.config, [])
    identical(other.values(), model.values())


@pytest.mark.parametrize("kind", SAVERS)
@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("max_position_embeddings", 9, "is 7 there, 9 here; positions cannot be cut off or added; set model.max_pos"),
        ("max_position_embeddings", 5, "is 7 there, 5 here; positions cannot be cut off or added"),
        ("num_attention_heads", 3, "num_attention_heads is 2 there, 3 here; set model.num_attention_heads to 2"),
        ("hidden_act", "relu", "hidden_act is gelu there, relu here"),
    ],
)
def test_another_function_is_refused_and_nothing_is_changed(tmp_path, kind, setting, value, said) -> None:
    SAVERS[kind](tmp_path / "there", make_model())
    other = make_model(seed=8, **{setting: value})
    before = other.values()
    with pytest.raises(InputError, match=said):
        load_weights(tmp_path / "there", other, other.spec.config)
    identical(other.values(), before)


def test_a_bare_encoder_leaves_the_heads_as_they_are(tmp_path) -> None:
    model, other = make_model(), make_model(seed=8)
    folder = save_hugging_face(tmp_path / "there", model)
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if name.startswith("bert.")}
    save_file({name: value for name, value in tensors.items() if "pooler" not in name}, folder / "model.safetensors")
    heads = {name: value for name, value in other.values().items() if name.startswith(("cls/", "bert/pooler/"))}
    weights = load_weights(folder, other, other.spec.config)
    assert set(weights.missing) == set(heads)
    after = other.values()
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
    identical(dict(read_weights(folder).variables), model.values())


def test_what_tf1_saver_writes_while_training_is_read_without_the_optimiser(tmp_path) -> None:
    """The names of a training checkpoint: moments below each variable, counters beside them; written by TF1's own saver."""
    values = make_model().values()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, value in values.items():
            for variable in (name, f"{name}/adam_m", f"{name}/adam_v"):
                tf.compat.v1.get_variable(variable, initializer=value, use_resource=False)
        tf.compat.v1.get_variable("global_step", initializer=np.int64(28252), use_resource=False)
        session.run(tf.compat.v1.global_variables_initializer())
        prefix = tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"), global_step=28252)
    for path in (prefix, tmp_path, tmp_path / "model.ckpt-28252.index"):
        weights = read_weights(path)
        assert (weights.kind, weights.config) == ("google", None)
        identical(weights.variables, values)
    other = make_model(seed=8)
    load_weights(prefix, other, other.spec.config)
    identical(other.values(), values)
    with pytest.raises(InputError, match=r"word_embeddings is \[11, 6\] there, \[12, 6\] here"):
        load_weights(prefix, (wider := make_model(vocab_size=12)), wider.spec.config)


def test_tf1_saver_restores_what_we_write(tmp_path) -> None:
    values = make_model().values()
    write_google_checkpoint(tmp_path / "bert_model.ckpt", values)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = {
            name: tf.compat.v1.get_variable(name, shape=value.shape, use_resource=False) for name, value in values.items()
        }
        tf.compat.v1.train.Saver().restore(session, str(tmp_path / "bert_model.ckpt"))
        identical(session.run(variables), values)


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
    refused(folder / "model.safetensors", r"config\.json is missing next to it; copy the complete folder")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"pytorch_model\.bin only; save it with")
    google = save_google(tmp_path / "google", model)
    (google / "bert_model.ckpt.index").write_bytes(b"nonsense")
    refused(google, "not a complete TF1 checkpoint")
    write_google_checkpoint(tmp_path / "other.ckpt", {"dense/kernel": np.zeros(3, np.float32)})
    refused(tmp_path / "other.ckpt", "holds no variable below bert/")
    write_google_checkpoint(google / "second.ckpt", model.values())
    refused(google, "holds 2 TF1 checkpoints; name one")
    refused(tmp_path / "nothing", "no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no checkpoint there")


def test_our_files_are_told_from_others(tmp_path) -> None:
    ours = save_ours(tmp_path / "run", make_model())
    theirs = save_hugging_face(tmp_path / "theirs", make_model()) / "model.safetensors"
    assert (is_checkpoint(ours), is_checkpoint(theirs)) == (True, False)
    ours.rename(tmp_path / "renamed.safetensors")
    assert read_weights(tmp_path / "renamed.safetensors").kind == "gaudi-bert"


# --- a fine-tuned model as a SavedModel: rows alone and packs get the logits that transformers gives

pytestmark = pytest.mark.slow


def test_packs_are_served(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "BertForSequenceClassification", num_labels=3)
    out = tmp_path / "served"
    sizes = export(tmp_path / "m", out, kind="savedmodel", rows=2, reporter=QUIET).sizes
    assert sizes == {"B": 2, "L": 64, "S": 16}
    assert (out / "assets" / "vocab.txt").is_file()
    texts = TEXTS[:5]
    rows = [TextRow(number, text) for number, text in enumerate(texts, 1)]
    tokenizer = open_tokenizer(tmp_path / "m")
    sequences = tokenize_rows(rows, tokenizer, task=None, settings=TaskSettings(), max_sequence_length=64)
    packs = Packs(np.array([4, 1, 0, 3, 2]), np.array([0, 3, 5]))
    placed = lay_out_packs(sequences, packs, np.arange(2), BatchShape(2, 64, 16))
    features = {name: tf.constant(value) for name, value in placed.features(sequences).items() if name != "sequence_weights"}
    signatures = tf.saved_model.load(str(out)).signatures
    found = np.zeros((5, 3), np.float32)
    placed.scatter_sequences(signatures["packed"](**features)["logits"].numpy(), found)
    expected = np.concatenate([logits_alone(model, tmp_path / "m", text).logits.numpy() for text in texts])
    agree(found, expected, 1e-5, scale=1.0)
    alone = lay_out_packs(sequences, Packs(np.arange(2), np.arange(3)), np.arange(2), BatchShape(2, 64, 1)).features(
        sequences
    )
    row_inputs = {name: tf.constant(alone[name]) for name in ("input_ids", "input_mask", "segment_ids")}
    served = signatures["serving_default"](**row_inputs)["logits"].numpy()[:, 0]
    agree(served, expected[:2], 1e-5, scale=1.0)
