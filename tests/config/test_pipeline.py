"""The pipeline file: what is accepted, and that what is refused is refused with the way out."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.options import TypedValue
from gaudi_bert.config.pipeline import (
    PipelineSettings,
    format_settings_page,
    load_pipeline,
    parse_yaml,
    section_from_mapping,
)
from gaudi_bert.config.sections import TableSettings, TokenizeSettings
from gaudi_bert.config.values import iterate_full_keys
from tests.builders.command_line import foreign_prose


def test_defaults_need_no_file_and_are_frozen(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert load_pipeline(None) == load_pipeline(tmp_path / "empty.yaml") == PipelineSettings()
    with pytest.raises(ValidationError):
        load_pipeline(None).packing.depth = 4  # type: ignore[misc]


def test_set_changes_one_value_and_nothing_else(tmp_path: Path) -> None:
    for given in ("512,2048", "[512, 2048]", "512, 2048"):
        assert load_pipeline(None, [f"finetune.row_lengths={given}"]).finetune.row_lengths == (512, 2048)
    (tmp_path / "mine.yaml").write_text("name: mine\npacking: {depth: 7, seed: 1}\n")
    changed = load_pipeline(tmp_path / "mine.yaml", ["packing.depth=max"])
    packing = PipelineSettings().packing.model_copy(update={"depth": "max", "seed": 1})
    assert changed == PipelineSettings().model_copy(update={"name": "mine", "packing": packing})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("packing.dept=4", "--set packing.dept=4: unknown key `packing.dept`; did you mean `packing.depth`?"),
        ("packing.algorithm=nnl", "ffd or none; did you mean nnls?"),
        ("training.device=gpu", "--set training.device=gpu: must be auto, cpu, cuda or hpu"),
        *(
            (f"packing.depth={wrong}", "must be an integer ")
            for wrong in ("0", "1025", "true", "3.5", "-1", "'3 '", "minimum", "[3]", "{a: 1}", "0x" + "f" * 6000)
        ),
        *(
            (f"finetune.row_lengths={wrong}", "must be auto, or 1 to 3 ")
            for wrong in ("[512, 256]", "8,16,32,64", "[7, 9]", "[8.5]", "all", "[]")
        ),
        ("packing.group_bytes=1XB", "kB, MB, GB, KiB, MiB or GiB"),
        ("model.hidden_size=7", "does not divide model.hidden_size 7"),
        ("resources.workers=many", "must be an integer, >= 1 and <= 1,024"),
        ("prepare.text={a: 1}", "must be text or a list"),
        ("resources.environment={1A: x}", "`resources.environment.1A`: must be the name of a variable"),
        ("training.learning_rate=.inf", "finite"),
        ("packing.depth", "key.path=value"),
        ("name.first=x", "`name`"),
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b\n", "key: value"),
        ("a: [1\n", "line 2, column 1: the settings are not valid YAML"),
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


def test_keys_that_disagree_are_named_without_all_the_others() -> None:
    with pytest.raises(InputError) as caught:
        section_from_mapping(PipelineSettings, {"name": "mine", "finetune": {"data": "rows.jsonl"}}, "mine.yaml")
    assert re.fullmatch(r"mine\.yaml: finetune\.data .*task\.name.*", str(caught.value))


# --- the page of all settings is made from the types, and docs/settings.md is that page


def test_the_page_in_docs_is_the_types(repository: Path) -> None:
    written = (repository / "docs" / "settings.md").read_text(encoding="utf-8").splitlines()
    assert written == format_settings_page(), "write it again: gaudi-bert settings > docs/settings.md"


def test_every_key_is_there_once_and_can_be_set_to_its_default() -> None:
    listed = [line.split("`")[1] for line in format_settings_page() if line.startswith("| `")]
    assert len(set(listed)) == len(listed)
    for key in listed:
        default = setting(PipelineSettings(), key)
        if isinstance(default, str | int | float) or default is None:
            shown = "null" if default is None else f"'{default}'" if isinstance(default, str) else str(default)
            assert setting(load_pipeline(None, [f"{key}={shown}"]), key) == default


def setting(settings: PipelineSettings, key: str) -> object:
    return functools.reduce(getattr, key.split("."), settings)


@pytest.mark.parametrize(
    ("engine", "cards", "expected"),
    [("auto", 0, "tensorflow"), ("auto", 8, "pytorch"), ("pytorch", 0, "pytorch"), ("tensorflow", 8, "tensorflow")],
)
def test_the_engine_of_the_image_is_the_chosen_one_or_that_of_the_cards(engine: str, cards: int, expected: str) -> None:
    settings = load_pipeline(None, [f"training.engine={engine}", f"resources.cards={cards}"])
    assert settings.training_image_engine == expected


# --- wrong values of every key, and keys that do not exist: one line in plain words, with the key that can be typed


KEYS = tuple(iterate_full_keys(PipelineSettings))
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
        message = refusal(section_from_mapping, PipelineSettings, nested(key, value), "mine.yaml")
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
        ("training.steps", "did you mean `training.updates`?"),
        ("training.max_steps", "did you mean `training.updates`?"),
        ("training.num_train_epochs", "did you mean `finetune.epochs`?"),
        ("finetune.num_train_epochs", "did you mean `finetune.epochs`?"),
        ("training.batch_size", "did you mean `training.global_batch_sequences`?"),
        ("finetune.lr", "did you mean `finetune.learning_rate`?"),
        ("training.attempts", "did you mean `store.attempts`?"),
        ("training.attempt", "`gaudi-bert settings training` lists the keys"),
        ("kubernetes.training_pods.node_selecter", "did you mean `kubernetes.training_pods.node_selector`?"),
        ("mlperf.zzzz", "`gaudi-bert settings mlperf` lists the keys"),
        ("zzzz", "`gaudi-bert settings` lists the keys"),
    ],
)
def test_an_unknown_key_is_looked_for_in_all_sections(key: str, nearest: str) -> None:
    message = refusal(section_from_mapping, PipelineSettings, nested(key, 1), "mine.yaml")
    assert message.startswith(f"mine.yaml: unknown key `{key}`; {nearest}")


def test_every_known_key_can_be_suggested() -> None:
    for key in KEYS:
        assert "did you mean `" in (refusal(load_pipeline, None, [f"{key}x=1"]) or "")


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("--columns", "task.columns", "[a: 1]"),
        ("--task", "task.name", "clasification"),
        ("--row-lengths", "finetune.row_lengths", ""),
    ],
)
def test_a_wrong_option_is_named_as_it_was_typed(option: str, key: str, value: str) -> None:
    message = refusal(load_pipeline, None, [], {key: TypedValue(f"{option} {value}", value)})
    assert message.startswith(f"{option} {value}".strip() + ": ")


# --- YAML that is deep, large, or holds impossible numbers ends in one short line; what repeats itself is not written out


def test_aliases_of_aliases_take_no_time() -> None:
    """A million million values, in a few lines, and a list that holds itself."""
    names = "abcdefghijkl"
    lines = [f"{name}: &{name} [{', '.join(['*' + before] * 9)}]" for before, name in itertools.pairwise(names)]
    bomb = parse_yaml("\n".join(["a: &a [x, x, x, x, x, x, x, x, x]", *lines]), "a.yaml")[names[-1]]
    for key, value in itertools.product(KEYS[::13], (bomb, parse_yaml("&a [*a]", "a.yaml"))):
        assert refusal(section_from_mapping, PipelineSettings, nested(key, value), "mine.yaml")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deep"),
        ("a: " + "9" * 6_000, "the settings are not valid YAML"),
        ("a: 2020-13-45", "month must be in 1..12"),
        ("packing: {depth: 3}\nname: x\npacking: {depth: 4}", "`packing` .*lines 1 and 3"),
        ("x" * 300_000, "300,000 characters.* 262,144"),
        ("a: !!python/object:os.system x", "line 1, column 4: the settings are not valid YAML"),
    ],
)
def test_what_takes_for_ever_or_cannot_be_is_refused_in_a_line(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        parse_yaml(text, "pipeline.yaml")
    assert str(caught.value).startswith("pipeline.yaml: ")
    assert len(str(caught.value)) < 500


def test_aliases_and_merges_work_as_ever() -> None:
    text = "base: &base {x: 1, y: 2}\nmore: &more {<<: *base, y: 3}\nmost: {<<: *more, x: 4}\nlist: [*base, *base]"
    assert parse_yaml(text, "a.yaml") == {
        "base": {"x": 1, "y": 2},
        "more": {"x": 1, "y": 3},
        "most": {"x": 4, "y": 3},
        "list": [{"x": 1, "y": 2}, {"x": 1, "y": 2}],
    }
    assert parse_yaml("", "a.yaml") is None
