"""Windows cover a text, overlap as asked for, and every word is carried by one of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.tasks.rows.windows import best_windows, window_bounds
from tests.builders.properties import examples


def test_windows_of_eleven_tokens() -> None:
    assert window_bounds(11, 5, 2, "x").tolist() == [[0, 5], [3, 8], [6, 11]]
    assert window_bounds(12, 5, 2, "x").tolist() == [[0, 5], [3, 8], [6, 11], [9, 12]]
    assert window_bounds(5, 5, 9, "x").tolist() == [[0, 5]]
    assert window_bounds(0, 5, 0, "x").tolist() == [[0, 0]]


@pytest.mark.parametrize(("room", "shared"), [(1, 0), (13, 6), (116, 58), (255, 127), (256, 128), (381, 128)])
def test_how_much_windows_share_when_nobody_says_it(room: int, shared: int) -> None:
    assert window_bounds(1000, room, None, "x").tolist() == window_bounds(1000, room, shared, "x").tolist()


def test_windows_that_would_not_go_on() -> None:
    with pytest.raises(InputError, match="x: row 3: has 9 tokens for windows of 4"):
        window_bounds(9, 4, 4, "x: row 3")


@examples(100)
@given(st.integers(0, 200), st.integers(1, 40), st.data())
def test_windows_cover_the_text(tokens: int, room: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(0, room - 1))
    bounds = window_bounds(tokens, room, stride, "x")
    assert bounds[0, 0] == 0
    assert bounds[-1, 1] == tokens
    assert (bounds[:, 1] - bounds[:, 0] <= room).all()
    assert (bounds[:-1, 1] - bounds[1:, 0] == stride).all()
    chosen = best_windows(np.arange(tokens), bounds)
    for token, window in enumerate(chosen):
        sides = [min(token - start, end - 1 - token) for start, end in bounds]
        assert sides[window] == max(sides) >= 0
