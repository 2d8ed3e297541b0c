"""How packs are dealt to shards; where a shard's records begin, or nothing where the sizes do not tell it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.shards import count_shards, divide_packs, index_path, read_index, write_index
from gaudi_bert.common.crc32c import crc32c


@pytest.mark.parametrize("packs", [0, 1, 3, 31, 32, 33, 1000])
@pytest.mark.parametrize("before", [0, 1, 17, 64])
def test_shard_bounds(packs: int, before: int) -> None:
    sizes = np.diff(divide_packs(packs, 32, before))
    assert sizes.sum() == packs
    assert sizes.max() - sizes.min() <= 1
    for workers in (2, 4, 8, 16, 32):
        earlier = [len(range(rank, before, workers)) for rank in range(workers)]
        shares = [earlier[rank] + sizes[rank::workers].sum() for rank in range(workers)]
        assert max(shares) - min(shares) <= 1


def test_count_shards_keeps_within_the_size() -> None:
    assert count_shards(1000, 10**6, 32, 10**9) == 32
    assert count_shards(1000, 10**6, 32, 10**4) == 128
    assert count_shards(5, 10**6, 32, 1) == 32
    assert count_shards(100, 10**6, 32, 1) == 128


@pytest.fixture
def index(tmp_path: Path) -> Path:
    path = index_path(tmp_path, 7)
    entries = np.array([[20, 7], [30, 2**32 - 1], [40, 8], [50, 9], [60, 10]], np.uint32)
    crc = write_index(path, [entries[:2], entries[:0], entries[2:]])
    assert crc == crc32c(path.read_bytes())
    return path


def test_the_records_of_a_shard_begin_where_its_sizes_say(index: Path) -> None:
    assert index.name == "group-00007.index"
    for (first, packs, size), starts, checksums in (
        ((0, 2, 50), [0, 20, 50], [7, 2**32 - 1]),
        ((2, 0, 0), [0], []),
        ((2, 3, 150), [0, 40, 90, 150], [8, 9, 10]),
    ):
        indexed = read_index(index, first, packs, size)
        assert [each.tolist() for each in indexed] == [starts, checksums]


def test_what_does_not_belong_to_the_shard_is_not_believed(index: Path) -> None:
    assert read_index(index, 0, 2, 51) is None  # other bytes
    assert read_index(index, 3, 3, 150) is None  # too few entries
    assert read_index(index.with_name("group-00008.index"), 0, 2, 50) is None
