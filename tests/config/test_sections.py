"""Sections by themselves: options are their keys."""

from __future__ import annotations

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import (
    section_from_options,
)
from gaudi_bert.config.sections import (
    PrepareSettings,
)


def test_options_are_keys_and_those_that_were_not_given_keep_the_default() -> None:
    settings = section_from_options(PrepareSettings, evaluation_fraction=0.0, whole_word_masking=False, vocab=None)
    assert settings.model_dump(exclude_unset=True) == {"evaluation_fraction": 0.0, "whole_word_masking": False}
    with pytest.raises(InputError, match=r"unknown key `vocabulary`; did you mean `vocab`"):
        section_from_options(PrepareSettings, vocabulary="words.txt")
