"""Models and pipelines of the package, and options that cannot be combined: each pair is named with its remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.options import (
    EXCLUSIVE,
    MODELS,
    REQUIRED,
    check_option_combination,
    find_preset_name,
    get_model_size_overrides,
    option_combination_error,
)
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.config.sections import ModelSettings


def test_each_pair_is_rejected_with_its_remedy_only_if_both_options_were_passed() -> None:
    for (first, second), remedy in EXCLUSIVE.items():
        assert (
            option_combination_error({first: "x", second: (0, 1)}) == f"{first} cannot be combined with {second}; {remedy}"
        )
        assert (
            option_combination_error({first: None, second: True})
            is option_combination_error({first: 0, second: False})
            is None
        )
    for (first, second), remedy in REQUIRED.items():
        assert option_combination_error({first: "x", second: None}) == f"{first} requires {second}; {remedy}"
        assert option_combination_error({first: None, second: None}) is None
        assert f"{first} requires" not in str(option_combination_error({first: "x", second: "y"}))
    with pytest.raises(InputError, match="--resume cannot be combined with --overwrite"):
        check_option_combination({"--resume": True, "--overwrite": True})


def test_every_committed_pipeline_is_valid(repository: Path) -> None:
    files = sorted((repository / "pipelines").glob("*.yaml"))
    assert repository / "pipelines" / "demo.yaml" in files
    for file in files:
        # The demo's task goes on in the demo's work folder.
        assert load_pipeline(file).name == file.stem.removeprefix("finetune-")


def test_a_model_by_its_name(tmp_path: Path) -> None:
    assert load_pipeline(None, get_model_size_overrides("tiny")).model == ModelSettings()
    large = load_pipeline(None, [*get_model_size_overrides("bert-large"), "model.num_hidden_layers=3"]).model
    assert (large.hidden_size, large.num_attention_heads, large.num_hidden_layers) == (1024, 16, 3)
    assert [find_preset_name(load_pipeline(None, get_model_size_overrides(name)).model) for name in MODELS] == list(MODELS)
    assert find_preset_name(large) is None
    config = {"model_type": "bert", "hidden_size": 48, "num_attention_heads": 3, "hidden_act": "relu", "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": 0, "max_position_embeddings": None}))
    model = load_pipeline(None, get_model_size_overrides(str(tmp_path / "config.json"))).model
    assert (model.hidden_size, model.hidden_act, model.vocab_size, model.max_position_embeddings) == (48, "relu", 99, None)
    for name, message in (
        ("bert-bse", r"did you mean bert-base\?"),
        ("x", "tiny, bert-base, bert-large or a config.json"),
    ):
        with pytest.raises(InputError, match=message):
            get_model_size_overrides(name)
    (tmp_path / "config.json").write_text('{"model_type": "roberta"}')
    with pytest.raises(InputError, match="type is roberta"):
        get_model_size_overrides(str(tmp_path / "config.json"))
