"""The global order of packs, dealt one by one."""

from __future__ import annotations

from collections.abc import Sequence

from gaudi_bert.common.arrays import draw_random_uint64, permutation

FEWEST_STREAMS, MAX_STREAM_SETS, TURN_ROUNDS = 32, 4, 32
Record = tuple[int, int]


def dealt_epoch(
    sizes: list[int],
    seed: int,
    epoch: int,
    window: int | list[int],
    streams: int = FEWEST_STREAMS,
    sets: int = MAX_STREAM_SETS,
    regions: Sequence[int] | None = None,
) -> list[Record]:
    """(shard, record) of every pack of an epoch, in its order; `window` of all shards, or of each.

    Sets of streams take turns: a block of rounds ends after 32, and where a stream ends.
    """
    shards = sum(1 for size in sizes if size)
    streams = min(streams, shards)
    sets = max(1, min(sets, shards // max(1, streams)))
    hands = []
    for shards_of_stream in dealt_shards(sizes, seed, epoch, streams, sets, regions):
        packs = []
        for shard in shards_of_stream:
            its_window = window if isinstance(window, int) else window[shard]
            packs += [(shard, record) for record in shuffled_shard(sizes[shard], seed, epoch, shard, its_window)]
        hands.append(packs)
    dealt = []
    while hands := [packs for packs in hands if packs]:
        rounds = min(TURN_ROUNDS, *map(len, hands))
        for first in range(0, len(hands), streams):
            dealt += [packs.pop(0) for _ in range(rounds) for packs in hands[first : first + streams]]
    return dealt


def dealt_shards(
    sizes: list[int], seed: int, epoch: int, streams: int, sets: int, regions: Sequence[int] | None
) -> list[list[int]]:
    """The shards of each stream, as `reading/global_order.py` describes them."""
    held = [shard for shard, size in enumerate(sizes) if size]
    if not held:
        return []
    words = permutation(len(held), seed, "shard order", epoch).tolist()
    region = {shard: (regions[shard] if regions is not None else shard) for shard in held}
    ring = [shard for _, _, shard in sorted((region[shard], word, shard) for shard, word in zip(held, words, strict=True))]
    cut = permutation(len(held), seed, "ring", epoch).tolist()[0]
    ring = ring[cut:] + ring[:cut]
    total, before, blocks = sum(sizes[shard] for shard in ring), 0, streams * sets
    begin, *jitter = [int(word) % total for word in draw_random_uint64(len(held) + 1, seed, "jitter", epoch)]
    hands: list[list[tuple[int, int]]] = [[] for _ in range(blocks)]
    for place, shard in enumerate(ring):
        before += sizes[shard]
        block, within = divmod((before - (sizes[shard] + 1) // 2) * blocks, total)
        hands[block].append(((within - begin) % total + jitter[place] // 8, place))
    in_set = permutation(streams, seed, "turns", epoch).tolist()
    turns = [stream * sets + tooth for tooth in (0, 2, 1, 3) if tooth < sets for stream in in_set]
    return [[ring[place] for _, place in sorted(hands[block])] for block in turns if hands[block]]


def shuffled_shard(size: int, seed: int, epoch: int, shard: int, window: int) -> list[int]:
    words = draw_random_uint64(size, seed, "pack order", epoch, shard).tolist()
    windows = [list(range(first, min(first + window, size))) for first in range(0, size, window)]
    order = permutation(len(windows), seed, "window order", epoch, shard).tolist()
    return [record for number in order for record in sorted(windows[number], key=lambda record: (words[record], record))]
