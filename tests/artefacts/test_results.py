"""Results print themselves: their facts for `--json`, lines for people; those of a part are no complete work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gaudi_bert.artefacts.results import ByRowLength, PlainResult, StageOutput, require_complete, result_of_part, to_json
from gaudi_bert.common.errors import InputError


def test_a_part_of_the_groups_says_what_they_hold_and_is_not_all() -> None:
    part = result_of_part(2, 0, SimpleNamespace(sequences=1, packs=3, tokens=9))
    assert to_json({"a": [part]})["a"][0] == {"groups": 2, "groups_written": 0, "sequences": 1, "packs": 3, "tokens": 9}
    assert part.lines()[0].startswith("2 groups: 1 sequence in 3 packs (already there, nothing to do); --finish")
    with pytest.raises(InputError, match="leave out --shard"):
        require_complete(part)
    whole = StageOutput(part, seconds=1.5)
    assert require_complete(whole) is whole


def test_lines_that_are_of_all_lengths_come_once_at_the_end() -> None:
    several = ByRowLength({128: PlainResult(["a", "all"], {}), 2048: PlainResult(["b", "all"], {})})
    assert several.lines() == ["rows of 128: a", "rows of 2,048: b", "all"]
