"""Which stream reads which shards, and when: shards that are read together come from all parts of the input.

An input is often sorted: by topic, by source, by length. Shards of a group hold the same files, and groups whose files are
neighbours hold similar text. So the streams are spread over the input like the teeth of a comb, which moves along it:

1. The input is a ring, cut at a random shard. Its shards, in the order of their regions, are dealt row by row, one to each
   stream, the largest of a row to the stream with the fewest packs so far. So every stream has shards of all parts of the
   input, and streams are of nearly equal length: they differ by no more than a shard.
2. Stream c of C begins c/C of the way around the ring, in packs, and goes around once. Shards change their turn with near
   ones, differently in each stream and epoch. The streams of further sets begin between those of the first.

All of it follows from (seed, epoch) and the sizes, in integers, so it is the same on every machine.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import IntArray, permutation, random_words

MOST_SETS = 4
_TEETH_OF_SETS = (0, 2, 1, 3)
_JITTER_OF_A_TOOTH = 8


def regions_of_groups(group_sizes: IntArray, input_files: int, seed: int) -> IntArray:
    """From which part of the input each shard comes: int64 [shards], equal in a group, ascending along the input.

    Groups of one file each are the sorted files in the permutation by which `packing.groups` dealt them. A group of several
    files is a sample of the input already; its number stands for its region.

    Args:
        group_sizes: shards of each group, int64 [groups].
        input_files: how many files were packed.
        seed: of the plan.
    """
    groups = len(group_sizes)
    regions = permutation(groups, seed, "groups") if input_files == groups else np.arange(groups)
    return np.repeat(regions, group_sizes)


def deal_shards(sizes: IntArray, regions: IntArray, streams: int, sets: int, seed: int, epoch: int) -> list[IntArray]:
    """The shards of each stream in the order in which it reads them; no stream has more packs than the one before it.

    Args:
        sizes: packs of each shard, int64 [shards]; shards without packs are not dealt.
        regions: of each shard, int64 [shards].
        streams: in a set; `streams * sets` are at most as many as there are shards with packs.
    """
    shards = np.flatnonzero(sizes)
    if not len(shards):
        return []
    shards = shards[np.lexsort((permutation(len(shards), seed, "shard order", epoch), regions[shards]))]
    shards = np.roll(shards, -int(permutation(len(shards), seed, "ring", epoch)[0]))
    dealt, lengths = _deal_rows(sizes[shards], streams * sets)
    total = int(lengths.sum())
    middles = np.cumsum(sizes[shards]) - (sizes[shards] + 1) // 2
    jitter = random_words(len(shards), seed, "jitter", epoch) % np.uint64(max(1, total // (streams * _JITTER_OF_A_TOOTH)))
    offsets = [tooth for tooth in _TEETH_OF_SETS if tooth < sets]
    in_turn = []
    for number, stream in enumerate(np.argsort(-lengths, kind="stable").tolist()):
        set_number, of_set = divmod(number, streams)
        begin = total * (of_set * sets + offsets[set_number]) // (streams * sets)
        ahead = (middles[dealt[stream]] - begin) % total + jitter[dealt[stream]].astype(np.int64)
        in_turn.append(shards[dealt[stream][np.argsort(ahead, kind="stable")]])
    return in_turn


def _deal_rows(sizes: IntArray, count: int) -> tuple[list[IntArray], IntArray]:
    """Deal shards row by row to `count` streams: the numbers of each, ascending, and the packs of each, int64 [count]."""
    lengths, stream_of = np.zeros(count, np.int64), np.empty(len(sizes), np.int64)
    for first in range(0, len(sizes), count):
        row = first + np.argsort(-sizes[first : first + count], kind="stable")
        shortest = np.argsort(lengths, kind="stable")[: len(row)]
        stream_of[row] = shortest
        lengths[shortest] += sizes[row]
    by_stream = np.argsort(stream_of, kind="stable")
    return np.split(by_stream, np.cumsum(np.bincount(stream_of, minlength=count))[:-1]), lengths
