"""Model folders that are damaged or hostile: one line that names the file, before anything is built."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.tasks.kinds.task import task_named
from gaudi_bert.tasks.models.task_models import read_task_folder, start_weights
from gaudi_bert.training.model_files import read_sentence_folder
from gaudi_bert.training.weights import read_weights
from tests.builders.model_mutations import good_folder

Json = Any


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of a model's folder, to be spoilt."""
    return shutil.copytree(model_folder, tmp_path / "m")


def rewrite(file: Path, change: Callable[[Json], Json]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text(encoding="utf-8")))), encoding="utf-8")


def read_all(folder: Path) -> None:
    """What `predict`, `embed` and `finetune` read of a folder before they build anything."""
    read_task_folder(folder)
    read_sentence_folder(folder)
    weights = start_weights(folder, task_named("classification")(TaskSettings(), ("a", "b")))
    open_tokenizer(folder).check_fits(weights.config.vocab_size, weights.config.type_vocab_size)


def test_a_good_folder_is_read(folder: Path) -> None:
    read_all(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hidden_size", value) for value in (0, -1, 1.5, True, "2", [], None)),
        ("vocab_size", "many"),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**4000),
        ("max_position_embeddings", 2**40),
        ("num_attention_heads", 7),
        ("layer_norm_eps", [1e-12]),
        ("hidden_dropout_prob", None),
        ("initializer_range", float("inf")),
        ("hidden_act", {}),
        ("model_type", ["bert"]),
        ("model_type", "x" * 10**6),
        ("architectures", 5),
        ("architectures", ["BertModel"]),
        ("problem_type", "unknown"),
        ("id2label", ["a", "b", "c"]),
        ("id2label", {"0": "a", "2": "c"}),
        ("gaudi_bert", ["task"]),
        ("gaudi_bert", {"task": "cooking"}),
        ("gaudi_bert", {"settings": {"name": "classification", "unknown": 1}}),
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


@pytest.mark.parametrize("content", ["[]", "3", "{", "[" * 100_000, "\x00"])
@pytest.mark.parametrize("name", ["config.json", "modules.json", "sentence_bert_config.json", "tokenizer.json"])
def test_a_file_that_holds_something_else_is_one_line(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
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
