"""How a stage runs: the parts of many machines are all of the work, each piece of it once."""

from __future__ import annotations

import pytest

from gaudi_bert.common.errors import InputError
from tests.builders.reporters import a_run


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_each_group_belongs_to_one_part(parts: int) -> None:
    shares = [a_run(part=(number, parts)).share_of(range(5)) for number in range(parts)]
    assert sorted(group for share in shares for group in share) == list(range(5))
    assert a_run().share_of("abc") == "abc"


def test_a_part_is_not_finished_in_the_same_run() -> None:
    assert [a_run(**how).does_all for how in ({}, {"part": (0, 1)}, {"finish": True})] == [True, False, False]
    with pytest.raises(InputError, match="--finish and --shard exclude each other"):
        a_run(part=(0, 2), finish=True)
