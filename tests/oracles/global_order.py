"""The global order of packs, dealt one by one."""

from __future__ import annotations

from gaudi_bert.common.arrays import permutation, random_words


def dealt_epoch(sizes: list[int], seed: int, epoch: int, window: int) -> list[tuple[int, int]]:
    """(shard, record) of every pack of an epoch, in its order."""
    hands = [
        [(shard, record) for record in shuffled_shard(size, seed, epoch, shard, window)] for shard, size in enumerate(sizes)
    ]
    order = permutation(len(sizes), seed, "shard order", epoch).tolist()
    dealt = []
    while any(hands):
        for shard in order:
            if hands[shard]:
                dealt.append(hands[shard].pop(0))
    return dealt


def shuffled_shard(size: int, seed: int, epoch: int, shard: int, window: int) -> list[int]:
    words = random_words(size, seed, "pack order", epoch, shard).tolist()
    windows = [list(range(first, min(first + window, size))) for first in range(0, size, window)]
    order = permutation(len(windows), seed, "window order", epoch, shard).tolist()
    return [record for number in order for record in sorted(windows[number], key=lambda record: (words[record], record))]
