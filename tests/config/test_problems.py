"""Wrong values of every key, and keys that do not exist: one line in plain words, with the key that can be typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline, pipeline_from_mapping, section_from_mapping
from gaudi_bert.config.problems import full_keys
from gaudi_bert.config.sections import TableSettings, TokenizeSettings
from tests.builders.prose import foreign_prose

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
        mapping: Any = value
        for part in reversed(key.split(".")):
            mapping = {part: mapping}
        message = refusal(pipeline_from_mapping, mapping, "mine.yaml")
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
        ("mlperf.zzzz", "known: mlperf.log, mlperf.organization, mlperf.platform, mlperf.division"),
        ("zzzz", "known: name, prepare, packing, "),
    ],
)
def test_an_unknown_key_is_looked_for_in_all_sections(key: str, nearest: str) -> None:
    mapping: Any = 1
    for part in reversed(key.split(".")):
        mapping = {part: mapping}
    message = refusal(pipeline_from_mapping, mapping, "mine.yaml")
    assert message is not None
    assert message.startswith(f"mine.yaml: unknown key `{key}`; {nearest}")


def test_only_the_first_of_several_problems_is_shown_in_full() -> None:
    wrong = {"packing": {"depth": 0, "seed": "x"}, "prepare": {"text": 7}}
    assert refusal(pipeline_from_mapping, wrong, "p.yaml") == (
        "p.yaml: `prepare.text` = 7: must be text or a list (and 2 more)"
    )


def test_every_known_key_can_be_suggested() -> None:
    for key in KEYS:
        section, _, name = key.rpartition(".")
        message = refusal(load_pipeline, None, [f"{section}.{name}x=1" if section else f"{name}x=1"])
        assert message is not None
        assert "did you mean `" in message, message


@pytest.mark.parametrize(
    ("option", "value"), [("--labels", "[a"), ("--labels", "{a: 1}"), ("--columns", "[a: 1]"), ("--task", "clasification")]
)
def test_a_wrong_option_is_named_as_it_was_typed(option: str, value: str) -> None:
    key = {"--labels": "task.labels", "--columns": "task.columns", "--task": "task.name"}[option]
    message = refusal(load_pipeline, None, [], {key: (option, value)})
    assert message is not None
    assert message.startswith(f"{option} {value}: ")


def test_errors_of_yaml_name_the_file_and_the_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\npacking: depth: 3\n")
    assert refusal(load_pipeline, file) == f"{file}: line 2, column 15: not valid YAML: mapping values are not allowed here"
