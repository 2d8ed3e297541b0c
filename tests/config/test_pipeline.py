"""The pipeline file: what is accepted, and that what is refused is refused with the way out."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import (
    PipelineSettings,
    load_pipeline,
    pipeline_from_mapping,
    section_from_mapping,
    section_from_options,
    settings_page,
)
from gaudi_bert.config.sections import (
    FineTuneSettings,
    ModelSettings,
    PrepareSettings,
    TableSettings,
    TokenizeSettings,
    TrainingSettings,
)
from gaudi_bert.config.shipped import MODELS, model_overrides, name_of_sizes
from gaudi_bert.config.values import allowed_values, free_settings, full_keys, parse_bytes
from tests.builders.command_line import foreign_prose


def test_every_committed_pipeline_is_valid(repository: Path) -> None:
    files = sorted((repository / "pipelines").glob("*.yaml"))
    assert repository / "pipelines" / "demo.yaml" in files
    for file in files:
        # The demo's task goes on in the demo's work folder.
        assert load_pipeline(file).name == file.stem.removeprefix("finetune-")


def test_defaults_need_no_file_and_are_frozen(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert load_pipeline(None) == load_pipeline(tmp_path / "empty.yaml") == PipelineSettings()
    with pytest.raises(ValidationError):
        load_pipeline(None).packing.depth = 4  # type: ignore[misc]


def test_a_model_by_its_name(tmp_path: Path) -> None:
    assert load_pipeline(None, model_overrides("tiny")).model == ModelSettings()
    large = load_pipeline(None, [*model_overrides("bert-large"), "model.num_hidden_layers=3"]).model
    assert (large.hidden_size, large.num_attention_heads, large.num_hidden_layers) == (1024, 16, 3)
    assert [name_of_sizes(load_pipeline(None, model_overrides(name)).model) for name in MODELS] == list(MODELS)
    assert name_of_sizes(large) is None
    config = {"model_type": "bert", "hidden_size": 48, "num_attention_heads": 3, "hidden_act": "relu", "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": 0, "max_position_embeddings": None}))
    model = load_pipeline(None, model_overrides(str(tmp_path / "config.json"))).model
    assert (model.hidden_size, model.hidden_act, model.vocab_size, model.max_position_embeddings) == (48, "relu", 99, None)
    for name, message in (("bert-bse", r"did you mean bert-base\?"), ("x", "choose tiny, bert-base, bert-large, or give a")):
        with pytest.raises(InputError, match=message):
            model_overrides(name)
    (tmp_path / "config.json").write_text('{"model_type": "roberta"}')
    with pytest.raises(InputError, match=r"is not of a BERT"):
        model_overrides(str(tmp_path / "config.json"))


def test_set_changes_one_value_and_nothing_else() -> None:
    for given in ("512,2048", "[512, 2048]", "512, 2048"):
        assert load_pipeline(None, [f"finetune.row_lengths={given}"]).finetune.row_lengths == (512, 2048)
    changed = load_pipeline(None, ["packing.depth=5"])
    assert changed.packing.depth == 5
    assert changed.packing.model_copy(update={"depth": 3}) == PipelineSettings().packing
    assert changed.training == PipelineSettings().training


def test_set_works_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\npacking: {depth: 7, seed: 1}\n")
    settings = load_pipeline(file, ["packing.depth=max", "training.learning_rate=3e-4"])
    assert (settings.packing.depth, settings.packing.seed, settings.training.learning_rate) == ("max", 1, 3e-4)


@pytest.mark.parametrize(("text", "count"), [("1GiB", 2**30), ("128MB", 128_000_000), ("0.5 kB", 500), ("7", 7), ("3B", 3)])
def test_sizes_in_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("packing.dept=4", "--set packing.dept=4: unknown key `packing.dept`; did you mean `packing.depth`?"),
        ("pakcing.depth=4", "unknown key `pakcing`; did you mean `packing`?"),
        ("packing.algorithm=nnl", "ffd or none; did you mean nnls?"),
        ("training.device=gpu", "--set training.device=gpu: must be auto, cpu, cuda or hpu"),
        *(
            (f"packing.depth={wrong}", "must be an integer ")
            for wrong in ("0", "1025", "true", "3.5", "-1", "'3 '", "minimum", "[3]", "{a: 1}", "0x" + "f" * 6000)
        ),
        *(
            (f"finetune.row_lengths={wrong}", "must be auto, or 1 to 3 lengths from 8, ascending, as in 512,2048,8192")
            for wrong in ("[512, 256]", "8,16,32,64", "[7, 9]", "[8.5]", "all", "[]")
        ),
        ("packing=3", "--set packing=3: must hold `key: value` pairs"),
        ("packing.group_bytes=1XB", "kB, MB, GB, KiB, MiB or GiB"),
        ("model.hidden_size=7", "choose a number of heads that divides it"),
        ("training.learning_rate=-1", "must be a number, > 0"),
        ("resources.workers=many", "must be an integer, >= 1 and <= 1,024"),
        ("kubernetes.failure_policy=7", "must be true or false or `auto`"),
        ("prepare.text={a: 1}", "must be text or a list"),
        ("resources.environment={1A: x}", "`resources.environment.1A`: must be the name of a variable"),
        ("training.learning_rate=.inf", "finite"),
        ("packing.depth", "key.path=value"),
        ("name.first=x", "`name`"),
        ("name=Not A Name", "--set name=Not A Name: must be at most 42 of a to z"),
    ],
)
def test_what_is_refused_says_what_is_right(override: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        load_pipeline(None, [override])
    message = str(caught.value)
    assert said in message
    assert message.startswith((f"--set {override}"[:30], "the settings: "))
    assert "more)" not in message
    assert len(message) < 500
    assert "\n" not in message


def test_of_two_lower_limits_the_higher_one_is_named() -> None:
    assert allowed_values(TableSettings.model_fields["group_bytes"]) == "integer, >= 1,048,576"
    assert allowed_values(TokenizeSettings.model_fields["part_bytes"]) == "integer, >= 1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b\n", "key: value"),
        ("a: [1\n", "line 2, column 1: not valid YAML"),
        ("packing: 3\n", "packing"),
        ("images: {tag: 9.9}", "`images.tag` = 9.9: .*put it in quotes"),
        (None, "check the path"),
    ],
)
def test_a_file_that_is_no_pipeline_is_refused_with_its_name(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(InputError, match=rf"wrong\.yaml.*{said}"):
        load_pipeline(tmp_path / "wrong.yaml")


def test_options_are_keys_and_those_that_were_not_given_keep_the_default() -> None:
    settings = section_from_options(PrepareSettings, evaluation_fraction=0.0, whole_word_masking=False, vocab=None)
    assert settings.model_dump(exclude_unset=True) == {"evaluation_fraction": 0.0, "whole_word_masking": False}
    with pytest.raises(InputError, match=r"unknown key `vocabulary`; did you mean `vocab`"):
        section_from_options(PrepareSettings, vocabulary="words.txt")


def test_settings_survive_yaml() -> None:
    settings = load_pipeline(None, ["packing.depth=max"])
    assert PipelineSettings.model_validate(yaml.safe_load(yaml.safe_dump(settings.model_dump(mode="json")))) == settings


def test_depths_within_the_limits() -> None:
    for value, depth in (("1", 1), ("1024", 1024), ("'7'", 7), ("max", "max")):
        assert load_pipeline(None, [f"packing.depth={value}"]).packing.depth == depth


def test_true_is_not_a_number() -> None:
    for key in ("packing.seed", "training.updates", "training.learning_rate", "packing.masked_slots"):
        with pytest.raises(InputError, match=rf"--set {key}=true: must be an? "):
            load_pipeline(None, [f"{key}=true"])
    assert load_pipeline(None, ["prepare.whole_word_masking=true"]).prepare.whole_word_masking


@pytest.mark.parametrize("tag", ["9.9", "9.90", "1e3", "2024-01-01", "0x10", "017", "20241121", "v1"])
def test_a_tag_is_the_text_that_was_given(tag: str) -> None:
    assert load_pipeline(None, [f"images.tag={tag}"]).images.tag == tag


def test_only_texts_are_kept_as_they_are_written() -> None:
    changes = ["packing.depth=4", "images.tag=null", "kubernetes.scratch=2", "resources.data.cpu=0.5"]
    settings = load_pipeline(None, [*changes, "training.epsilon=1.0e-6"])
    assert (settings.packing.depth, settings.images.tag, settings.training.epsilon) == (4, None, 1e-6)
    assert (settings.kubernetes.scratch, settings.resources.data.cpu) == ("2", "0.5")


def test_one_resource_of_a_pod_leaves_the_others_as_they_are() -> None:
    asked = load_pipeline(None, ["resources.data.cpu=2", "resources.training.memory=9Gi"]).resources
    assert (asked.data.cpu, asked.data.memory, asked.data.memory_limit) == ("2", "256Mi", "2Gi")
    assert (asked.training.cpu, asked.training.memory, asked.training.memory_limit) == ("200m", "9Gi", "9Gi")
    assert load_pipeline(None, []).resources.training.memory_limit == "4Gi"


def test_keys_that_disagree_are_named_without_all_the_others() -> None:
    with pytest.raises(InputError) as caught:
        pipeline_from_mapping({"name": "mine", "finetune": {"data": "rows.jsonl"}}, "mine.yaml")
    assert str(caught.value) == "mine.yaml: finetune.data is set, but no task; set task.name, for example to classification"


# --- the page of all settings is made from the types, and docs/settings.md is that page


def test_the_page_in_docs_is_the_types(repository: Path) -> None:
    written = (repository / "docs" / "settings.md").read_text(encoding="utf-8").splitlines()
    assert written == settings_page(), "write it again: gaudi-bert settings > docs/settings.md"


def test_every_key_is_there_once_and_can_be_set_to_its_default() -> None:
    listed = [line.split("`")[1] for line in settings_page() if line.startswith("| `")]
    assert len(set(listed)) == len(listed)
    for key in listed:
        default = setting(PipelineSettings(), key)
        if isinstance(default, str | int | float) or default is None:
            shown = "null" if default is None else f"'{default}'" if isinstance(default, str) else str(default)
            assert setting(load_pipeline(None, [f"{key}={shown}"]), key) == default


def setting(settings: PipelineSettings, key: str) -> object:
    return functools.reduce(getattr, key.split("."), settings)


# --- settings that may change between two runs in one training folder


def test_what_is_free_is_no_part_of_a_run() -> None:
    both = {"device", "threads", "keep_checkpoints", "log_every_updates", "save_every_updates"}
    both |= {"fusion_bytes", "meeting_seconds", "stall_seconds", "engine", "compile"}
    both |= {"recompute", "deterministic", "gaudi_fused_attention"}
    assert free_settings(FineTuneSettings) == both
    assert free_settings(TrainingSettings) == both | {"evaluate_every_updates", "evaluate_packs", "measure_speedup"}


# --- wrong values of every key, and keys that do not exist: one line in plain words, with the key that can be typed


KEYS = tuple(full_keys(PipelineSettings))
# As YAML; each is wrong for most keys.
VALUES = (
    "true", "-1", "0.5", "1e400", ".nan", "''", "gpu", "x y/../Ä", "2024-01-01", "[1, 2]", "[{a: 1}]", "{a: 1}", "{1A: []}",
    "9" * 400, f"{'9' * 400}GiB", "[]", "{}",
)  # fmt: skip
ODD: tuple[Any, ...] = (None, 10**400, "\ud800", {1: 2}, [[]], ("a", 1), float("-inf"), b"bytes", object())


def refusal(settings: Any, *arguments: Any) -> str | None:
    """The message where a value is refused, which is one line in plain words."""
    try:
        settings(*arguments)
    except InputError as error:
        message = str(error)
        assert foreign_prose(message) is None, message
        assert "\n" not in message
        return message
    return None


def nested(key: str, value: Any) -> Any:
    """The value as a file has it: each part of its key in a mapping of its own."""
    return functools.reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), value)


@pytest.mark.parametrize("key", KEYS)
def test_wrong_values_of_every_key_are_refused_in_plain_words(key: str) -> None:
    refused = 0
    for value in VALUES:
        message = refusal(load_pipeline, None, [f"{key}={value}"])
        if message is not None:
            refused += 1
            assert message.startswith((f"--set {key}="[:30], f"the settings: {key} ")), message
    assert refused, "no value is wrong for it"
    for value in ODD:
        message = refusal(pipeline_from_mapping, nested(key, value), "mine.yaml")
        assert message is None or (message.startswith("mine.yaml: ") and key in message), message


@pytest.mark.parametrize("section", [TableSettings, TokenizeSettings])
def test_wrong_values_of_options(section: Any) -> None:
    for name in section.model_fields:
        for value in (*ODD, *VALUES):
            refusal(section_from_mapping, section, {"max_sequence_length": 8, name: value}, "the options")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("task.txt", "did you mean `task.text`?"),
        ("max_sequence_length", "did you mean `prepare.max_sequence_length` or `finetune.max_sequence_length` or `predict."),
        ("training.epochs", "did you mean `finetune.epochs`?"),
        ("learning_rat", "did you mean `finetune.learning_rate`?"),
        ("kubernetes.training_pods.node_selecter", "did you mean `kubernetes.training_pods.node_selector`?"),
        ("data_workers", "did you mean `resources.data_workers`?"),
        ("mlperf.zzzz", "`gaudi-bert settings mlperf` lists the keys"),
        ("zzzz", "`gaudi-bert settings` lists the keys"),
    ],
)
def test_an_unknown_key_is_looked_for_in_all_sections(key: str, nearest: str) -> None:
    message = refusal(pipeline_from_mapping, nested(key, 1), "mine.yaml")
    assert message is not None
    assert message.startswith(f"mine.yaml: unknown key `{key}`; {nearest}")


def test_only_the_first_of_several_problems_is_shown_in_full() -> None:
    wrong = {"packing": {"depth": 0, "seed": "x"}, "prepare": {"text": 7}}
    said = "p.yaml: `prepare.text` = 7: must be text or a list (and 2 more)"
    assert refusal(pipeline_from_mapping, wrong, "p.yaml") == said


def test_every_known_key_can_be_suggested() -> None:
    for key in KEYS:
        section, _, name = key.rpartition(".")
        message = refusal(load_pipeline, None, [f"{section}.{name}x=1" if section else f"{name}x=1"])
        assert message is not None
        assert "did you mean `" in message, message


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("--labels", "task.labels", "[a"),
        ("--labels", "task.labels", "{a: 1}"),
        ("--columns", "task.columns", "[a: 1]"),
        ("--task", "task.name", "clasification"),
        ("--row-lengths", "finetune.row_lengths", ""),
        ("--labels", "task.labels", ""),
    ],
)
def test_a_wrong_option_is_named_as_it_was_typed(option: str, key: str, value: str) -> None:
    message = refusal(load_pipeline, None, [], {key: (option, value)})
    assert message is not None
    assert message.startswith(f"{option} {value}".strip() + ": ")
