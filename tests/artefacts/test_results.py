"""The parts of many machines are all of the work; results print themselves, and those of a part are no complete work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gaudi_bert.artefacts.results import (
    PlainResult,
    ResultsByRowLength,
    StageOutput,
    build_partial_run_result,
    require_complete,
    to_json,
)
from gaudi_bert.common.errors import InputError
from tests.builders.reporters import a_run


def test_a_part_of_the_groups_says_what_they_hold_and_is_not_all() -> None:
    part = build_partial_run_result(2, 0, SimpleNamespace(sequences=1, packs=3, tokens=9))
    assert to_json({"a": [part]})["a"][0] == {"groups": 2, "groups_written": 0, "sequences": 1, "packs": 3, "tokens": 9}
    assert part.format_lines()[0].startswith(
        "2 groups: 1 sequence in 3 packs (exists already, nothing to do); when all parts are done"
    )
    with pytest.raises(InputError, match="omit --shard"):
        require_complete(part)
    whole = StageOutput(part, seconds=1.5)
    assert require_complete(whole) is whole


def test_lines_that_are_of_all_lengths_come_once_at_the_end() -> None:
    several = ResultsByRowLength({128: PlainResult(["a", "all"], {}), 2048: PlainResult(["b", "all"], {})})
    assert several.format_lines() == ["rows of 128: a", "rows of 2,048: b", "all"]


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_each_group_belongs_to_one_part(parts: int) -> None:
    shares = [a_run(part=(number, parts)).select_items_of_this_run(range(5)) for number in range(parts)]
    assert sorted(group for share in shares for group in share) == list(range(5))
    assert a_run().select_items_of_this_run("abc") == "abc"


def test_a_part_is_not_finished_in_the_same_run() -> None:
    assert [a_run(**how).runs_whole_stage for how in ({}, {"part": (0, 1)}, {"finish": True})] == [True, False, False]
    with pytest.raises(InputError, match="--shard cannot be combined with --finish"):
        a_run(part=(0, 2), finish=True)
