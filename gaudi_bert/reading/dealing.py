"""Which stream reads which shards, and when: shards that are read together come from all parts of the input.

An input is often sorted: by topic, by source, by length. Shards of a group hold the same files, and groups whose files are
neighbours hold similar text. So the streams are spread over the input like the teeth of a comb, which moves along it:

1. The input is a ring, cut at a random shard: its shards in the order of their regions. It falls into as many blocks of
   equal packs as there are streams, and each stream reads one of them. So a part of the input has its share of the streams,
   at any time, and streams are of nearly equal length: a shard belongs to the block in which its middle is.
2. All streams begin in the same part of their blocks, read to the end of these, and then from their beginning. Shards change
   their turn with near ones, differently in each block and epoch.
3. The blocks of a set are at equal distances, those of further sets between them. In a round, the streams of a set have a
   random sequence, so that few packs in a row come from all parts of the input, too.

All of it follows from (seed, epoch) and the sizes, in integers, so it is the same on every machine.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import IntArray, permutation, random_words

MOST_SETS = 4
_TEETH_OF_SETS = (0, 2, 1, 3)
_JITTERS_OF_A_BLOCK = 8


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
    """The shards of each stream in the order in which it reads them; the streams of one set after those of the other.

    Args:
        sizes: packs of each shard, int64 [shards]; shards without packs are not dealt.
        regions: of each shard, int64 [shards].
        streams: in a set; `streams * sets` are at most as many as there are shards with packs. There are fewer where a block
            has no shard.
    """
    shards, blocks = np.flatnonzero(sizes), streams * sets
    shards = shards[np.lexsort((permutation(len(shards), seed, "shard order", epoch), regions[shards]))]
    if not len(shards):
        return []
    shards = np.roll(shards, -int(permutation(len(shards), seed, "ring", epoch)[0]))
    total = int(sizes.sum())
    middles = (np.cumsum(sizes[shards]) - (sizes[shards] + 1) // 2) * blocks
    block_of, in_block = np.divmod(middles, total)
    begin, *jitter = (random_words(len(shards) + 1, seed, "jitter", epoch) % np.uint64(total)).tolist()
    ahead = (in_block - begin) % total + np.array(jitter, np.int64) // _JITTERS_OF_A_BLOCK
    in_turn = np.lexsort((ahead, block_of))
    of_blocks = np.split(shards[in_turn], np.searchsorted(block_of[in_turn], np.arange(1, blocks)))
    in_set = permutation(streams, seed, "turns", epoch) * sets
    turns = np.concatenate([in_set + tooth for tooth in _TEETH_OF_SETS if tooth < sets])
    return [of_blocks[block] for block in turns.tolist() if len(of_blocks[block])]
