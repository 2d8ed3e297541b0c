"""Sections by themselves: options are their keys."""

from __future__ import annotations

from typing import Any

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.options import TypedValue
from gaudi_bert.config.pipeline import section_from_options
from gaudi_bert.config.sections import PrepareSettings, TaskSettings, TokenizeSettings


def test_options_are_keys_and_those_that_were_not_given_keep_the_default() -> None:
    settings = section_from_options(PrepareSettings, {"seed": TypedValue("--seed 1", "1")}, evaluation_fraction=0.0)
    assert settings.model_dump(exclude_unset=True) == {"seed": 1, "evaluation_fraction": 0.0}
    with pytest.raises(InputError, match=r"unknown key `vocabulary`; did you mean `vocab`"):
        section_from_options(PrepareSettings, {}, vocabulary="words.txt")


def test_settings_of_tokenize_read_a_pair_only_where_it_is_named() -> None:
    def reading(**given: Any) -> TaskSettings:
        return TokenizeSettings(max_sequence_length=9, **given).row_reading_settings

    assert (reading().text_pair, reading().keys_set_by_user) == ("text", set())
    assert (reading(text_column="a").text_pair, reading(text_column="a").keys_set_by_user) == ("a", {"text"})
    assert reading(text_pair_column="b").keys_set_by_user == {"text_pair"}
    tabs = reading(files={"delimiter": "tab", "columns": ["a", "b"]})
    assert (tabs.delimiter, tabs.columns, tabs.keys_set_by_user) == ("\t", ("a", "b"), {"delimiter", "columns"})
