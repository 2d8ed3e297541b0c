"""Weights from three kinds of files, to the bit; the one rule of what fits; folders of models that are served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
from gaudi_bert.training.model_files import SentenceFolder, read_sentence_folder
from gaudi_bert.training.weights import load_weights, read_weights
from tests.builders.agree import agree
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


def values_of(model: Model) -> dict[str, np.ndarray]:
    return model.values()


def assert_equal(values, others) -> None:
    assert values.keys() == others.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(value, others[name], err_msg=name)


def save_ours(folder, model):
    checkpoint = Checkpoint(4, values_of(model), settings={"model": model.spec.config.to_json()})
    return write_checkpoint(folder / "checkpoints", checkpoint)


def save_hugging_face(folder, model):
    folder.mkdir(parents=True)
    save_file(to_hugging_face(values_of(model)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**model.spec.config.to_json(), "model_type": "bert"}))
    return folder


def save_google(folder, model):
    folder.mkdir(parents=True)
    write_google_checkpoint(folder / "bert_model.ckpt", values_of(model))
    (folder / "bert_config.json").write_text(json.dumps(model.spec.config.to_json()))
    return folder


SAVERS = {"gaudi-bert": save_ours, "huggingface": save_hugging_face, "google": save_google}


@pytest.mark.parametrize("kind", SAVERS)
def test_weights_come_back_to_the_bit(tmp_path, kind) -> None:
    model = make_model()
    SAVERS[kind](tmp_path / "there", model)
    other = make_model(seed=8)
    weights = load_weights(tmp_path / "there", other, other.spec.config)
    assert (weights.kind, weights.config, weights.missing) == (kind, model.spec.config, [])
    assert_equal(values_of(other), values_of(model))


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
    before = values_of(other)
    with pytest.raises(InputError, match=said):
        load_weights(tmp_path / "there", other, other.spec.config)
    assert_equal(values_of(other), before)


def test_dropout_may_differ(tmp_path) -> None:
    model, other = make_model(), make_model(seed=8, hidden_dropout_prob=0.5)
    save_google(tmp_path / "there", model)
    load_weights(tmp_path / "there", other, other.spec.config)
    assert_equal(values_of(other), values_of(model))


def test_a_bare_encoder_leaves_the_heads_as_they_are(tmp_path) -> None:
    model, other = make_model(), make_model(seed=8)
    folder = save_hugging_face(tmp_path / "there", model)
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if name.startswith("bert.")}
    save_file({name: value for name, value in tensors.items() if "pooler" not in name}, folder / "model.safetensors")
    heads = {name: value for name, value in values_of(other).items() if name.startswith(("cls/", "bert/pooler/"))}
    weights = load_weights(folder, other, other.spec.config)
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
    for path in (prefix, tmp_path, tmp_path / "model.ckpt-28252.index"):
        weights = read_weights(path)
        assert (weights.kind, weights.config) == ("google", None)
        assert_equal(weights.variables, values)
    other = make_model(seed=8)
    load_weights(prefix, other, other.spec.config)
    assert_equal(values_of(other), values)
    with pytest.raises(InputError, match=r"word_embeddings is \[11, 6\] there, \[12, 6\] here"):
        load_weights(prefix, (wider := make_model(vocab_size=12)), wider.spec.config)


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
    with pytest.raises(InputError, match=r"config\.json is missing next to it; copy the complete folder"):
        read_weights(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin only; save it with"):
        read_weights(folder)
    google = save_google(tmp_path / "google", model)
    (google / "bert_model.ckpt.index").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="not a complete TF1 checkpoint"):
        read_weights(google)
    write_google_checkpoint(tmp_path / "other.ckpt", {"dense/kernel": np.zeros(3, np.float32)})
    with pytest.raises(InputError, match="holds no variable below bert/"):
        read_weights(tmp_path / "other.ckpt")
    write_google_checkpoint(google / "second.ckpt", values_of(model))
    with pytest.raises(InputError, match="holds 2 TF1 checkpoints; name one"):
        read_weights(google)
    with pytest.raises(InputError, match="no such folder"):
        read_weights(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no checkpoint there"):
        read_weights(tmp_path / "empty")


def test_our_files_are_told_from_others(tmp_path) -> None:
    ours = save_ours(tmp_path / "run", make_model())
    theirs = save_hugging_face(tmp_path / "theirs", make_model()) / "model.safetensors"
    assert (is_checkpoint(ours), is_checkpoint(theirs)) == (True, False)
    ours.rename(tmp_path / "renamed.safetensors")
    assert read_weights(tmp_path / "renamed.safetensors").kind == "gaudi-bert"


# --- a fine-tuned model as a SavedModel: rows alone and packs get the logits that transformers gives

pytestmark = pytest.mark.slow


def test_packs_are_served(tmp_path: Path) -> None:
    import tensorflow as tf

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


# --- what folders of sentence-transformers say, in its older and newer forms


def write(folder: Path, modules: list[str], pooling: dict[str, Any], transformer: dict[str, Any] | None = None) -> Path:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}
    listed = [
        {"idx": n, "type": f"sentence_transformers.models.{kind}", "path": paths[kind]} for n, kind in enumerate(modules)
    ]
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    if transformer is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps(transformer), encoding="utf-8")
    return folder


def test_a_folder_like_minilm(tmp_path: Path) -> None:
    pooling = {"word_embedding_dimension": 384, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    settings = {"max_seq_length": 256, "do_lower_case": False}
    folder = write(tmp_path / "a", ["Transformer", "Pooling", "Normalize"], pooling, settings)
    assert read_sentence_folder(folder) == SentenceFolder("mean", True, 256, prompts={"query": None, "document": None})


@pytest.mark.parametrize("mode", ["cls", "mean", "max"])
def test_the_newer_form(tmp_path: Path, mode: str) -> None:
    folder = write(tmp_path / "a", ["Transformer", "Pooling"], {"embedding_dimension": 3, "pooling_mode": mode})
    found = read_sentence_folder(folder)
    assert found is not None
    assert (found.pooling, found.normalize, found.max_sequence_length) == (mode, False, None)


def test_what_cannot_be_done(tmp_path: Path) -> None:
    assert read_sentence_folder(tmp_path) is None
    mean = {"pooling_mode_mean_tokens": True}
    with pytest.raises(InputError, match="has a module Dense"):
        read_sentence_folder(write(tmp_path / "dense", ["Transformer", "Pooling", "Dense"], mean))
    with pytest.raises(InputError, match="only one of cls, mean and max"):
        read_sentence_folder(write(tmp_path / "two", ["Transformer", "Pooling"], {**mean, "pooling_mode_max_tokens": True}))
    with pytest.raises(InputError, match="pools by pooling_mode_lasttoken"):
        read_sentence_folder(write(tmp_path / "last", ["Transformer", "Pooling"], {"pooling_mode_lasttoken": True}))


def test_version_6_stores_the_cut_with_the_tokenizer_and_prompts_by_name(tmp_path: Path) -> None:
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings = {"transformer_task": "feature-extraction", "modality_config": {"text": text}, "module_output_name": "x"}
    folder = write(tmp_path / "a", ["Transformer", "Pooling"], {"pooling_mode": "mean", "include_prompt": False}, settings)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}', encoding="utf-8")
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts), encoding="utf-8")
    found = read_sentence_folder(folder)
    assert found is not None
    assert (found.max_sequence_length, found.pools_prompt) == (128, False)
    assert [found.prompt(name) for name in (None, "passage", "document")] == ["query: ", "passage: ", ""]
    with pytest.raises(InputError, match="prompt 'other': the model's folder has query, passage"):
        found.prompt("other")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}', encoding="utf-8")
    chosen = read_sentence_folder(folder, "cls")
    assert chosen is not None
    assert (chosen.pooling, chosen.max_sequence_length) == ("cls", 64)


@pytest.mark.parametrize(
    "settings",
    [
        {"transformer_task": "fill-mask"},
        {"processing_kwargs": {"text": {"max_length": 7}}},
        {"modality_config": {"text": {"method": "get_text_features", "method_output_name": None}}},
    ],
)
def test_transformers_that_are_run_in_another_way(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = write(tmp_path / "a", ["Transformer", "Pooling"], {"pooling_mode": "mean"}, settings)
    with pytest.raises(InputError, match=r"sentence_bert_config\.json: its texts do not become vectors in the usual way"):
        read_sentence_folder(folder)
    listed = [{"type": "x.Transformer", "path": "0_Transformer"}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    with pytest.raises(InputError, match=r"its transformer is in .*0_Transformer; give --model .*0_Transformer --pooling"):
        read_sentence_folder(folder)
