"""The global order of packs, dealt one by one."""

from __future__ import annotations

from gaudi_bert.common.arrays import permutation, random_words

FEWEST_STREAMS = 32


def dealt_epoch(
    sizes: list[int], seed: int, epoch: int, window: int | list[int], streams: int = FEWEST_STREAMS
) -> list[tuple[int, int]]:
    """(shard, record) of every pack of an epoch, in its order; `window` of all shards, or of each."""
    rounds = dealt_rounds(sizes, seed, epoch, window, streams)
    return [record for records in rounds for record in records]


def dealt_rounds(
    sizes: list[int], seed: int, epoch: int, window: int | list[int], streams: int = FEWEST_STREAMS
) -> list[list[tuple[int, int]]]:
    rank_of = {shard: rank for rank, shard in enumerate(permutation(len(sizes), seed, "shard order", epoch).tolist())}
    shards = sorted(
        (shard for shard in range(len(sizes)) if sizes[shard]), key=lambda shard: (-sizes[shard], rank_of[shard])
    )
    dealt: list[list[int]] = [[] for _ in range(min(streams, len(shards)))]
    for number, shard in enumerate(shards):
        dealt[number % len(dealt)].append(shard)
    read = []
    for stream, its_shards in enumerate(dealt):
        packs = []
        for chosen in permutation(len(its_shards), seed, "stream order", epoch, stream).tolist():
            shard = its_shards[chosen]
            its_window = window if isinstance(window, int) else window[shard]
            packs += [(shard, record) for record in shuffled_shard(sizes[shard], seed, epoch, shard, its_window)]
        read.append(packs)
    rounds = []
    while any(read):
        rounds.append([packs.pop(0) for packs in read if packs])
    return rounds


def shuffled_shard(size: int, seed: int, epoch: int, shard: int, window: int) -> list[int]:
    words = random_words(size, seed, "pack order", epoch, shard).tolist()
    windows = [list(range(first, min(first + window, size))) for first in range(0, size, window)]
    order = permutation(len(windows), seed, "window order", epoch, shard).tolist()
    return [record for number in order for record in sorted(windows[number], key=lambda record: (words[record], record))]
