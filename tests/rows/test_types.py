"""Sequences of several windows are joined."""

from __future__ import annotations

import numpy as np

from gaudi_bert.rows.types import Sequences, concatenate_sequences


def made(target: object) -> Sequences:
    return Sequences(
        row=np.array([0, 0, 1]),
        offsets=np.array([0, 2, 3, 6]),
        input_ids=np.arange(6, dtype=np.int32),
        segment_ids=np.array([0, 1, 0, 0, 1, 1], np.int8),
        target=target,  # type: ignore[arg-type]
        cut_rows=1,
    )


def test_sequences_of_several_windows_are_joined() -> None:
    joined = concatenate_sequences([made(np.array([1, 2, 3])), made(np.array([4, 5, 6]))], [2, 3])
    assert joined.row.tolist() == [0, 0, 1, 2, 2, 3]
    assert joined.offsets.tolist() == [0, 2, 3, 6, 8, 9, 12]
    assert joined.lengths.tolist() == [2, 1, 3, 2, 1, 3]
    assert joined.target.tolist() == [1, 2, 3, 4, 5, 6]  # type: ignore[union-attr]
    assert (joined.cut_rows, joined.words) == (2, None)
