"""Options and settings that cannot be combined: each pair is named in one line with its remedy."""

from __future__ import annotations

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.options import EXCLUSIVE, REQUIRED, check_option_combination, option_combination_error


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
