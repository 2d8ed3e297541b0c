"""Long texts in windows that overlap, and which of them shows most around a word.

Windows of `room` tokens start every `room - stride` tokens, the last one where the text is covered, as in Hugging Face's
scripts for question answering.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError

__all__ = ["best_windows", "window_bounds"]

USUAL_STRIDE = 128
"""As in BERT's own script for SQuAD (Devlin et al., 2019), which has windows of 384."""


def window_bounds(tokens: int, room: int, stride: int | None, place: str) -> IntArray:
    """First token of each window and the one after its last, int64 [windows, 2]; one window where all fits.

    Args:
        tokens: of the text.
        room: tokens of a window.
        stride: tokens that two neighbouring windows share; None for `USUAL_STRIDE`, or half of a window that is too short.
        place: how errors call the row.

    Raises:
        InputError: windows that share so much would not go on.
    """
    if tokens <= room:
        return np.array([[0, tokens]], np.int64)
    if stride is None:
        stride = min(USUAL_STRIDE, max(room, 0) // 2)
    if stride >= room:
        raise InputError(
            f"{place}: has {tokens:,} tokens for windows of {max(room, 0)}, which cannot share task.stride = {stride}; "
            "set a smaller stride or a larger max_sequence_length"
        )
    count = -(-(tokens - room) // (room - stride)) + 1
    starts = np.arange(count, dtype=np.int64) * (room - stride)
    return np.stack([starts, np.minimum(starts + room, tokens)], axis=1)


def best_windows(places: IntArray, bounds: IntArray) -> IntArray:
    """For each token of `places`, the window in which it has most tokens on its poorer side; the first of equals.

    Args:
        places: int64 [P], tokens of the text.
        bounds: int64 [W, 2], from `window_bounds`.
    """
    before_WP = places - bounds[:, :1]
    after_WP = bounds[:, 1:] - 1 - places
    best: IntArray = np.argmax(np.minimum(before_WP, after_WP), axis=0)
    return best
