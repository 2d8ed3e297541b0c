"""Dealing sequences to packs, one at a time: what the fast dealing must equal."""

from __future__ import annotations

from collections.abc import Sequence

from gaudi_bert.common.arrays import permutation


def deal(lengths: Sequence[int], strategies: Sequence[tuple[Sequence[int], int]], seed: int, group: int) -> list[list[int]]:
    waiting: dict[int, list[int]] = {}
    for sequence in permutation(len(lengths), seed, "sequences", group):
        waiting.setdefault(lengths[sequence], []).append(int(sequence))
    planned = [strategy for strategy, count in strategies for _ in range(count)]
    order = permutation(len(planned), seed, "packs", group)
    return [[waiting[length].pop(0) for length in planned[place]] for place in order]
