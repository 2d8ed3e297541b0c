"""Sequences taken and joined."""

from __future__ import annotations

import numpy as np

from gaudi_bert.tasks.rows.types import Sequences, join_sequences


def made(target: object, words: object = None) -> Sequences:
    return Sequences(
        row=np.array([0, 0, 1]),
        offsets=np.array([0, 2, 3, 6]),
        input_ids=np.arange(6, dtype=np.int32),
        segment_ids=np.array([0, 1, 0, 0, 1, 1], np.int8),
        words=words,  # type: ignore[arg-type]
        target=target,  # type: ignore[arg-type]
        cut_rows=1,
    )


def test_take_reorders_what_is_by_token_and_by_sequence() -> None:
    taken = made(np.array([7, 8, 9])).take(np.array([2, 0]))
    assert taken.input_ids.tolist() == [3, 4, 5, 0, 1]
    assert taken.offsets.tolist() == [0, 3, 5]
    assert (taken.row.tolist(), taken.target.tolist()) == ([1, 0], [9, 7])  # type: ignore[union-attr]
    tags = made(np.arange(6) * 10, words=np.array([0, -1, -1, 1, 0, -1], np.int32)).take(np.array([1, 2]))
    assert tags.target.tolist() == [20, 30, 40, 50]  # type: ignore[union-attr]
    assert tags.counted.tolist() == [False, True, True, False]  # type: ignore[union-attr]


def test_join() -> None:
    joined = join_sequences([made(np.array([1, 2, 3])), made(np.array([4, 5, 6]))], [2, 3])
    assert joined.row.tolist() == [0, 0, 1, 2, 2, 3]
    assert joined.offsets.tolist() == [0, 2, 3, 6, 8, 9, 12]
    assert joined.lengths.tolist() == [2, 1, 3, 2, 1, 3]
    assert joined.target.tolist() == [1, 2, 3, 4, 5, 6]  # type: ignore[union-attr]
    assert (joined.cut_rows, joined.words) == (2, None)
