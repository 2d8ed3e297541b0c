"""Model folders that are damaged or hostile: one line that names the file, before anything is built."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import write_text
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.tasks.rows.tokenizer import open_tokenizer
from gaudi_bert.tasks.task import task_named
from gaudi_bert.training.weights.model_files import read_sentence_folder
from gaudi_bert.training.weights.sources import read_weights
from gaudi_bert.training.weights.task_models import read_task_folder, start_weights
from tests.builders.bert_folder import write_bert

Json = Any
HEAD = "BertForSequenceClassification"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that says it is a classifier: all that is read before the head is looked for."""
    folder = write_bert(tmp_path_factory.mktemp("model") / "m", layers=1)
    labels = {"0": "a", "1": "b", "2": "c"}
    rewrite(folder / "config.json", lambda config: {**config, "architectures": [HEAD], "id2label": labels})
    write_text(folder / "tokenizer.json", open_tokenizer(folder).tokenizer.to_str())
    return folder


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of a model's folder, to be spoilt."""
    copy = tmp_path / "m"
    copy.mkdir()
    for file in model_folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def rewrite(file: Path, change: Callable[[Json], Json]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text(encoding="utf-8")))), encoding="utf-8")


def read_all(folder: Path) -> None:
    """What `predict`, `embed` and `finetune` read of a folder before they build anything."""
    read_task_folder(folder)
    read_sentence_folder(folder)
    weights = start_weights(folder, task_named("classification")(TaskSettings(), ("a", "b", "c")))
    open_tokenizer(folder).check_fits(weights.config.vocab_size, weights.config.type_vocab_size)


def test_a_good_folder_is_read(folder: Path) -> None:
    read_all(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hidden_size", value) for value in (0, -1, 1.5, True, "2", [], None)),
        ("vocab_size", "many"),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 100_000),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 10**4000),
        ("max_position_embeddings", 2**40),
        ("num_attention_heads", 7),
        ("layer_norm_eps", "1e-12"),
        ("layer_norm_eps", [1e-12]),
        ("hidden_dropout_prob", "none"),
        ("hidden_dropout_prob", None),
        ("attention_probs_dropout_prob", float("nan")),
        ("initializer_range", float("inf")),
        ("hidden_act", ["gelu"]),
        ("hidden_act", {}),
        ("model_type", ["bert"]),
        ("model_type", "x" * 10**6),
        ("position_embedding_type", {"a": 1}),
        ("architectures", 5),
        ("architectures", "BertModel"),
        ("architectures", [5]),
        ("architectures", ["BertModel"]),
        ("problem_type", "unknown"),
        ("problem_type", 3),
        ("id2label", ["a", "b", "c"]),
        ("id2label", {"0": "a", "2": "c"}),
        ("id2label", {"0": ["a"]}),
        ("gaudi_bert", ["task"]),
        ("gaudi_bert", {"task": "cooking"}),
        ("gaudi_bert", {"settings": {"name": "classification", "unknown": 1}}),
        ("gaudi_bert", {"max_sequence_length": "long"}),
        ("gaudi_bert", {"max_sequence_length": -5}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_config_with_a_wrong_value_is_one_line(folder: Path, key: str, value: object) -> None:
    rewrite(folder / "config.json", lambda config: {**config, "problem_type": None, key: value})
    with pytest.raises(InputError) as caught:
        read_all(folder)
    assert key in str(caught.value) or "architecture" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("content", ["[]", "null", "3", '"text"', "{", "[" * 100_000, "\x00", '{"hidden_size": 1e999}'])
@pytest.mark.parametrize("name", ["config.json", "modules.json", "sentence_bert_config.json", "tokenizer.json"])
def test_a_file_that_holds_something_else_is_one_line(folder: Path, name: str, content: str) -> None:
    if name == "sentence_bert_config.json":
        modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / name).write_text(content)
    if name == "sentence_bert_config.json" and "hidden" in content:
        read_all(folder)  # a key of no interest
        return
    with pytest.raises(InputError, match=f"{re.escape(name)}|has no Pooling"):
        read_all(folder)


@pytest.mark.parametrize(
    "modules",
    [
        [{"type": "x.Pooling", "path": "../../etc"}],
        [{"type": "x.Pooling", "path": "/etc"}],
        [{"type": "x.Pooling", "path": 5}],
        [{"type": ["Pooling"], "path": "1_Pooling"}],
        [{"path": "1_Pooling"}],
    ],
)
def test_modules_lead_nowhere_else(folder: Path, modules: Json) -> None:
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match=r"modules\.json: is not a list of modules"):
        read_all(folder)


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": 5}},
        {"weight_map": {"a": "../outside.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": ".."}},
        {"weight_map": {}},
        {"weight_map": [1]},
        {},
        [],
    ],
)
def test_an_index_names_files_of_its_folder(folder: Path, index: Json) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"index\.json.*weight_map|index\.json.*its content"):
        read_weights(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(folder: Path, value: float) -> None:
    tensors = {name: tensor.copy() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["pooler.dense.bias"][3] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"bert/pooler/dense/bias is not finite"):
        read_weights(folder)


# --- tokenizers


def with_normalizer(content: Json, steps: list[Json]) -> Json:
    return {**content, "normalizer": {"type": "Sequence", "normalizers": steps}}


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def test_a_normalizer_that_multiplies_text_is_refused_before_it_is_used(folder: Path) -> None:
    rewrite(folder / "tokenizer.json", lambda content: with_normalizer(content, [DOUBLE] * 9))
    read_all(folder)
    rewrite(folder / "tokenizer.json", lambda content: with_normalizer(content, [DOUBLE] * 60))
    with pytest.raises(InputError, match=r"tokenizer\.json: its normalizer may make texts 1\.15e\+18 times as long"):
        read_all(folder)
    shorten = {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}
    rewrite(folder / "tokenizer.json", lambda content: with_normalizer(content, [shorten] * 60))
    read_all(folder)


def test_an_empty_vocabulary_is_refused(folder: Path) -> None:
    def empty(content: Json) -> Json:
        return {**content, "model": {**content["model"], "vocab": {}}, "added_tokens": [], "post_processor": None}

    rewrite(folder / "tokenizer.json", empty)
    with pytest.raises(InputError, match=r"tokenizer\.json: (its vocabulary is empty|not a tokenizer)"):
        read_all(folder)


def test_numbers_that_the_model_does_not_have_are_refused(folder: Path) -> None:
    def template(token: int, segment: int) -> Json:
        cls = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
        first = {"Sequence": {"id": "A", "type_id": 0}}
        second = {"Sequence": {"id": "B", "type_id": segment}}
        special = {"[CLS]": {"id": "[CLS]", "ids": [token], "tokens": ["[CLS]"]}}
        return {
            "type": "TemplateProcessing",
            "single": [cls, first],
            "pair": [cls, first, second],
            "special_tokens": special,
        }

    rewrite(folder / "tokenizer.json", lambda content: {**content, "post_processor": template(2, 1)})
    read_all(folder)
    rewrite(folder / "tokenizer.json", lambda content: {**content, "post_processor": template(10**6, 1)})
    with pytest.raises(InputError, match=r"its template gives the token 1000000, the model's are 0 to"):
        read_all(folder)
    rewrite(folder / "tokenizer.json", lambda content: {**content, "post_processor": template(2, 5)})
    with pytest.raises(InputError, match=r"its template gives the segment 5, the model's are 0 to 1"):
        read_all(folder)
    rewrite(folder / "config.json", lambda config: {**config, "vocab_size": 11})
    with pytest.raises(InputError, match="the config wants"):
        read_all(folder)
