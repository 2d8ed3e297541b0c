"""Model folders, also damaged or hostile ones: one line that names the file, before anything is built."""

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
from gaudi_bert.model.heads import Pooling
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.tasks.task import import_task_class
from gaudi_bert.tasks.task_models import load_initial_weights, read_task_description
from gaudi_bert.training.model_files import SentenceSettings, read_sentence_settings
from gaudi_bert.training.weights import read_weights
from tests.builders.bert_folder import good_folder

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
    read_task_description(folder)
    read_sentence_settings(folder)
    weights = load_initial_weights(folder, import_task_class("classification")(TaskSettings(), ("a", "b")))
    open_tokenizer(folder).check_fits(weights.config.vocab_size, weights.config.type_vocab_size)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hidden_size", value) for value in (True, "2", 10**4000)),
        ("num_attention_heads", 7),
        ("initializer_range", float("inf")),
        ("model_type", "x" * 10**6),
        ("architectures", ["BertModel"]),
        ("problem_type", "unknown"),
        ("id2label", {"0": "a", "2": "c"}),
        ("gaudi_bert", {"settings": {"name": "classification", "unknown": 1}}),
        ("gaudi_bert", {"max_sequence_length": -5}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_config_with_a_wrong_value_is_one_line(folder: Path, key: str, value: object) -> None:
    rewrite(folder / "config.json", lambda config: {**config, "problem_type": None, key: value})
    with pytest.raises(InputError, match=rf"\A[^\n]*({key}|architecture)[^\n]*\Z") as caught:
        read_all(folder)
    assert len(str(caught.value)) < 600


def test_modules_and_an_index_lead_nowhere_else(folder: Path) -> None:
    for module in (
        *({"type": "sentence_transformers.models.Pooling", "path": path} for path in ("../../etc", 5)),
        {"path": ""},
    ):
        (folder / "modules.json").write_text(json.dumps([module]))
        with pytest.raises(InputError, match=r"modules\.json: the file is not a list of modules"):
            read_all(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    for index in (*({"weight_map": {"a": name}} for name in (5, "../outside")), {"weight_map": {}}, []):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(InputError, match=r"index\.json.*weight_map|index\.json.*the content"):
            read_weights(folder)


def test_weights_that_are_not_finite_are_refused_by_name(folder: Path) -> None:
    tensors = {name: tensor.copy() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["pooler.dense.bias"][3] = np.inf
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"bert/pooler/dense/bias is not finite"):
        read_weights(folder)


# --- tokenizers


def test_an_empty_vocabulary_is_refused(folder: Path) -> None:
    rewrite(
        folder / "tokenizer.json",
        lambda content: {
            **content,
            "model": {**content["model"], "vocab": {}},
            "added_tokens": [],
            "post_processor": None,
        },
    )
    with pytest.raises(InputError, match=r"(its vocabulary is empty|not a valid tokenizer|not a tokenizer)"):
        read_all(folder)


@pytest.mark.parametrize(
    ("token", "segment", "vocabulary", "message"),
    [
        (10**6, 1, None, r"token id 1000000, but the ids of the model are 0 to"),
        (2, 5, None, r"segment id 5, but the ids of the model are 0 to 1"),
        (2, 1, 11, "must have the shape"),
    ],
)
def test_numbers_that_the_model_does_not_have_are_refused(folder: Path, token, segment, vocabulary, message) -> None:
    read_all(folder)
    cls, first = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [cls, first],
        "pair": [cls, first, {"Sequence": {"id": "B", "type_id": segment}}],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [token], "tokens": ["[CLS]"]}},
    }
    rewrite(folder / "tokenizer.json", lambda content: {**content, "post_processor": template})
    # The class that takes the template as it is; BertTokenizer has its own.
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "model_input_names": inputs}
    rewrite(folder / "tokenizer_config.json", lambda _: settings)
    if vocabulary is not None:
        rewrite(folder / "config.json", lambda config: {**config, "vocab_size": vocabulary})
    with pytest.raises(InputError, match=message):
        read_all(folder)


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


def test_the_older_form_like_minilm_and_the_newer_one(tmp_path: Path) -> None:
    pooling = {"word_embedding_dimension": 384, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    settings = {"max_seq_length": 256, "do_lower_case": False}
    folder = write(tmp_path / "older", ["Transformer", "Pooling", "Normalize"], pooling, settings)
    prompts = {"query": None, "document": None}
    assert read_sentence_settings(folder) == SentenceSettings("mean", True, 256, prompts=prompts)
    for mode, given in (("cls", "cls"), ("mean", "mean"), ("max", ["max"]), ("last", "lasttoken")):
        newer = {"embedding_dimension": 3, "pooling_mode": given}
        folder = write(tmp_path / mode, ["Transformer", "Pooling"], newer)
        assert read_sentence_settings(folder) == SentenceSettings(mode, prompts=prompts)  # type: ignore[arg-type]


def test_a_folder_of_another_library_has_no_such_settings(tmp_path: Path) -> None:
    assert read_sentence_settings(tmp_path) is None


BOTH = ["Transformer", "Pooling"]
MEAN = {"pooling_mode_mean_tokens": True}


@pytest.mark.parametrize("chosen", [None, "mean"])
@pytest.mark.parametrize("modules", [[*BOTH, "Dense"], ["Transformer", "Normalize", "Pooling"]])
def test_other_modules_are_rejected_by_name(tmp_path: Path, modules: list[str], chosen: Pooling | None) -> None:
    with pytest.raises(InputError, match=re.escape(", ".join(modules))):
        read_sentence_settings(write(tmp_path / "m", modules, MEAN), chosen)


@pytest.mark.parametrize(
    ("pooling", "transformer", "prompts", "message"),
    [
        ({**MEAN, "pooling_mode_max_tokens": True}, {}, {}, "only one of cls, mean, max and last"),
        ({"pooling_mode": ["mean", "max"]}, {}, {}, "only one of cls, mean, max and last"),
        ({"pooling_mode": [7]}, {}, {}, "only one of cls, mean, max and last"),
        ({**MEAN, "temperature": 2}, {}, {}, r"1_Pooling/config\.json: 'temperature' is not supported"),
        (MEAN, {"new_in_version_7": 1}, {}, "the key `new_in_version_7` is unknown"),
        (MEAN, {}, {"model_type": "SparseEncoder"}, "model_type"),
    ],
)
def test_values_that_are_rejected_by_name(tmp_path: Path, pooling: Json, transformer: Json, prompts: Json, message) -> None:
    folder = write(tmp_path / "m", BOTH, pooling, transformer)
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_sentence_settings(folder)


def test_version_6_stores_the_cut_with_the_tokenizer_and_prompts_by_name(tmp_path: Path) -> None:
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": text},
        "module_output_name": "token_embeddings",
    }
    folder = write(tmp_path / "a", ["Transformer", "Pooling"], {"pooling_mode": "mean", "include_prompt": False}, settings)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}', encoding="utf-8")
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts), encoding="utf-8")
    found = read_sentence_settings(folder)
    assert (found.max_sequence_length, found.pools_prompt) == (128, False)
    assert [found.find_prompt(name) for name in (None, "passage", "document")] == ["query: ", "passage: ", ""]
    with pytest.raises(InputError, match=r"prompt 'other': .* defines query, passage"):
        found.find_prompt("other")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}', encoding="utf-8")
    chosen = read_sentence_settings(folder, "cls")
    assert (chosen.pooling, chosen.max_sequence_length) == ("cls", 64)


IMAGES = {"method": "get_text_features", "method_output_name": None}
USUAL = {"method": "forward", "method_output_name": "last_hidden_state"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"transformer_task": "fill-mask"}, "transformer_task 'fill-mask'"),
        ({"processing_kwargs": {"text": {"max_length": 7}}}, "processing_kwargs"),
        ({"modality_config": {"text": IMAGES}}, r"modality_config\.text"),
        ({"modality_config": {"image": IMAGES}}, r"modality_config\.text"),
        ({"modality_config": {"text": USUAL, "message": USUAL}}, r"modality_config\.message"),
        ({"module_output_name": "sentence_embedding"}, "module_output_name 'sentence_embedding'"),
        ({"query_length": 4, "query_expansion": {"length": 8}}, "query_length and query_expansion"),
        ({"tokenizer_name_or_path": "other"}, "tokenizer_name_or_path"),
        ({"model_args": {"torch_dtype": "float16"}}, r"model_kwargs\.torch_dtype"),
        ({"model_kwargs": {"quantization_config": {}}}, r"model_kwargs\.quantization_config"),
        ({"config_args": {"num_hidden_layers": 1}}, r"config_kwargs\.num_hidden_layers"),
        ({"config_kwargs": {"hidden_act": "relu"}}, r"config_kwargs\.hidden_act"),
        ({"tokenizer_args": {"use_fast": False}}, r"processor_kwargs\.use_fast"),
    ],
)
def test_settings_of_the_transformer_are_rejected_by_name(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    folder = write(tmp_path / "a", ["Transformer", "Pooling"], {"pooling_mode": "mean"}, settings)
    (folder / "config.json").write_text('{"num_hidden_layers": 2, "hidden_act": "gelu"}', encoding="utf-8")
    with pytest.raises(
        InputError, match=rf"sentence_bert_config\.json: settings that are not supported .*: {named}.*; remove them"
    ):
        read_sentence_settings(folder)


def test_settings_that_are_applied_and_settings_that_change_nothing(tmp_path: Path) -> None:
    settings = {
        "max_seq_length": 64,
        "do_lower_case": True,
        "unpad_inputs": True,
        "query_length": None,
        "model_args": {"attn_implementation": "sdpa", "torch_dtype": "float32", "trust_remote_code": True},
        "processor_kwargs": {"model_max_length": 7, "do_lower_case": False, "revision": "main", "use_fast": True},
        "config_args": {"num_hidden_layers": 2, "use_cache": False},
        "modality_config": {"text": USUAL, "image": IMAGES},
    }
    folder = write(tmp_path / "a", ["Transformer", "Pooling"], {"pooling_mode_mean_tokens": 1}, settings)
    (folder / "config.json").write_text('{"num_hidden_layers": 2}', encoding="utf-8")
    found = read_sentence_settings(folder)
    assert (found.max_sequence_length, found.lower_case, found.tokenizer_settings) == (7, True, {"do_lower_case": False})


@pytest.mark.parametrize("value", [False, None, 0])
def test_values_that_count_as_false(tmp_path: Path, value: object) -> None:
    folder = write(tmp_path / "a", ["Transformer", "Pooling"], {"pooling_mode": "mean", "include_prompt": value})
    assert not read_sentence_settings(folder).pools_prompt


def test_modules_elsewhere_and_of_others(tmp_path: Path) -> None:
    folder, kinds = write(tmp_path / "a", ["Transformer", "Pooling"], {"pooling_mode": "mean"}), ("Transformer", "Pooling")
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": f"{n}_{kind}"} for n, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    with pytest.raises(InputError, match=r"the transformer is in .*0_Transformer; pass --model .*0_Transformer, and choose"):
        read_sentence_settings(folder)
    listed[0]["type"] = "custom_st.Transformer"
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    with pytest.raises(InputError, match=r"'custom_st\.Transformer' is not a class of sentence-transformers"):
        read_sentence_settings(folder)


# --- classes with a head: what their outputs are


def classifier(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    content = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **config}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_labels_without_names(tmp_path: Path) -> None:
    for config, labels in (({"num_labels": 3}, 3), ({}, 2)):
        found = read_task_description(classifier(tmp_path / str(labels), **config))
        assert (found.task, found.labels) == ("classification", tuple(f"LABEL_{number}" for number in range(labels)))
    assert read_task_description(classifier(tmp_path / "1", num_labels=1)).task == "regression"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id2label": {"0": "A", "1": "A", "2": "B"}}, "labels 0 and 1 are both called 'A'"),
        (
            {"id2label": {"0": "1", "1": 1}, "problem_type": "multi_label_classification"},
            "labels 0 and 1 are both called '1'",
        ),
        ({"id2label": {"0": "A", "1": "A"}, "architectures": ["BertForTokenClassification"]}, "are both called 'A'"),
        (
            {"id2label": {"0": "A"}, "problem_type": "single_label_classification"},
            "'A' .*every text.*problem_type",
        ),
        ({"num_labels": 2, "problem_type": "regression"}, "predicts 2 values"),
        ({"num_labels": 3, "id2label": {"0": "A", "1": "B"}}, "num_labels is 3, but id2label has 2 labels"),
    ],
)
def test_labels_that_cannot_be_told_apart(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_task_description(classifier(tmp_path / "m", **config))


def cross_encoder(
    folder: Path, config: dict[str, Any], stored: dict[str, Any], kinds: tuple[str, ...] = ("Transformer",)
) -> Path:
    """A folder as sentence-transformers 6 writes it."""
    text = {"method": "forward", "method_output_name": "logits"}
    files = {
        "modules.json": [{"type": f"sentence_transformers.base.modules.transformer.{kind}", "path": ""} for kind in kinds],
        "sentence_bert_config.json": {
            "transformer_task": "sequence-classification",
            "modality_config": {"text": text},
            "module_output_name": "scores",
        },
        "config_sentence_transformers.json": {"model_type": "CrossEncoder", **stored},
    }
    for name, content in files.items():
        (classifier(folder, **config) / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


SIGMOID, TANH, IDENTITY = (
    f"torch.nn.modules.{name}" for name in ("activation.Sigmoid", "activation.Tanh", "linear.Identity")
)


@pytest.mark.parametrize(
    ("config", "stored", "activation"),
    [
        ({}, {"activation_fn": SIGMOID}, "Sigmoid"),
        ({}, {"activation_fn": TANH}, "Tanh"),
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, {"activation_fn": IDENTITY}, "Identity"),
        ({"sentence_transformers": {"activation_fn": TANH}}, {}, "Tanh"),
        ({}, {}, "Sigmoid"),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, None, "Identity"),
        ({"sbert_ce_default_activation_function": SIGMOID}, None, "Sigmoid"),
    ],
)
def test_activations_of_a_cross_encoder(tmp_path: Path, config: Any, stored: Any, activation: str) -> None:
    config = {"id2label": {"0": "LABEL_0"}, **config}
    folder = classifier(tmp_path / "m", **config) if stored is None else cross_encoder(tmp_path / "m", config, stored)
    found = read_task_description(folder)
    assert (found.task, found.make_task().activation) == ("reranking", activation)


@pytest.mark.parametrize(
    ("labels", "stored", "message"),
    [
        (
            1,
            {"activation_fn": "torch.nn.modules.activation.Softplus"},
            "Softplus' is not supported; for a model with 1 label, gaudi-bert supports only Sigmoid",
        ),
        (1, {"activation_fn": "mine.Sigmoid"}, "'mine.Sigmoid' is not supported"),
        (2, {"activation_fn": SIGMOID}, "is not supported; for a model with 2 labels, gaudi-bert supports only Identity"),
    ],
)
def test_activations_that_are_rejected_by_name(tmp_path: Path, labels: int, stored: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"activation_fn .*{message}"):
        read_task_description(cross_encoder(tmp_path / "m", {"num_labels": labels}, stored))


def test_a_cross_encoder_with_classes_and_one_with_other_modules(tmp_path: Path) -> None:
    prompts = {"prompts": {"q": "ask: "}, "default_prompt_name": "q"}
    found = read_task_description(cross_encoder(tmp_path / "m", {"num_labels": 3}, prompts))
    assert (found.task, found.texts.find_prompt(None)) == ("classification", "ask: ")
    with pytest.raises(InputError, match=r"lists Transformer, LogitScore, but .* one Transformer"):
        read_task_description(cross_encoder(tmp_path / "n", {"num_labels": 1}, {}, ("Transformer", "LogitScore")))
    (tmp_path / "m" / "sentence_bert_config.json").write_text('{"max_seq_length": 9}', encoding="utf-8")
    with pytest.raises(InputError, match="transformer_task 'feature-extraction'"):
        read_task_description(tmp_path / "m")
