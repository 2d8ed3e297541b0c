"""The page of all settings is made from the types, and docs/settings.md is that page."""

from __future__ import annotations

import functools
from pathlib import Path

from gaudi_bert.cli.settings_reference import settings_page
from gaudi_bert.config import PipelineSettings, load_pipeline


def keys() -> list[str]:
    return [line.split("`")[1] for line in settings_page() if line.startswith("| `")]


def test_the_page_in_docs_is_the_types(repository: Path) -> None:
    written = (repository / "docs" / "settings.md").read_text(encoding="utf-8").splitlines()
    assert written == settings_page(), "write it again: gaudi-bert settings > docs/settings.md"


def test_every_key_is_there_once_and_can_be_set_to_its_default() -> None:
    listed = keys()
    assert len(set(listed)) == len(listed)
    for key in listed:
        default = setting(PipelineSettings(), key)
        if isinstance(default, str | int | float) or default is None:
            shown = "null" if default is None else f"'{default}'" if isinstance(default, str) else str(default)
            assert setting(load_pipeline(None, [f"{key}={shown}"]), key) == default


def setting(settings: PipelineSettings, key: str) -> object:
    return functools.reduce(getattr, key.split("."), settings)


def test_limits_and_choices_are_shown() -> None:
    rows = {line.split("`")[1]: line for line in settings_page() if line.startswith("| `")}
    assert "whole number, >= 1 and <= 1,024 | `1` |" in rows["resources.workers"]
    assert "`job`" in rows["kubernetes.training"]
    assert "`max`" in rows["packing.depth"]
    assert "`2Gi`" in rows["resources.data.memory_limit"]
