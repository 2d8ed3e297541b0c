"""Windows of long texts, found by looking at every window for every token."""

from __future__ import annotations

from collections.abc import Sequence


def best_windows(tokens: Sequence[int], bounds: Sequence[tuple[int, int]]) -> list[int]:
    """For each token, the first window in which its poorer side has most tokens."""
    sides = [[min(token - start, end - 1 - token) for start, end in bounds] for token in tokens]
    return [each.index(max(each)) for each in sides]
