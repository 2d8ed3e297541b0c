"""The page of all settings is made from the types, and docs/settings.md is that page."""

from __future__ import annotations

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
    settings = PipelineSettings()
    for key in listed:
        value: object = settings
        for part in key.split("."):
            value = getattr(value, part)
        if isinstance(value, str | int | float) or value is None:
            shown = "null" if value is None else f"'{value}'" if isinstance(value, str) else str(value)
            assert load_pipeline(None, [f"{key}={shown}"]) is not None


def test_limits_and_choices_are_shown() -> None:
    rows = {line.split("`")[1]: line for line in settings_page() if line.startswith("| `")}
    assert "whole number, >= 1 and <= 1,024 | `1` |" in rows["resources.workers"]
    assert "`job`" in rows["kubernetes.training"]
    assert "`max`" in rows["packing.depth"]
    assert "`2Gi`" in rows["resources.data.memory_limit"]
