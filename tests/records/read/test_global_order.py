"""The one order of packs: that of a dealer, every pack once, equal for any number of processes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.records.read.global_order import GlobalOrder, check_rank, numbers_of_rank
from tests.builders.properties import examples
from tests.oracles.global_order import dealt_epoch


def epoch_places(order: GlobalOrder, epoch: int) -> list[tuple[int, int]]:
    shards, records = order.places(epoch, np.arange(order.packs))
    return list(zip(shards.tolist(), records.tolist(), strict=True))


@given(st.lists(st.integers(0, 13), min_size=1, max_size=7), st.integers(0, 2**40), st.integers(0, 5), st.integers(1, 16))
@examples(100)
def test_packs_are_dealt_as_by_hand(sizes: list[int], seed: int, epoch: int, window: int) -> None:
    order = GlobalOrder(sizes, seed, window)
    assert order.packs == sum(sizes)
    assert epoch_places(order, epoch) == dealt_epoch(sizes, seed, epoch, window)
    assert sorted(epoch_places(order, epoch)) == [
        (shard, record) for shard, size in enumerate(sizes) for record in range(size)
    ]


def test_with_equal_shards_pack_i_is_record_i_div_n_of_shard_i_mod_n() -> None:
    order = GlobalOrder([11] * 6, seed=3)
    for epoch in (0, 4):
        shards, records = order.places(epoch, np.arange(66))
        by_row = shards.reshape(11, 6)
        assert (by_row == by_row[0]).all()
        for shard in range(6):
            assert sorted(records[shards == shard].tolist()) == list(range(11))
    assert epoch_places(order, 0) != epoch_places(order, 1)


def test_a_process_reads_whole_shards_where_the_processes_divide_them() -> None:
    order = GlobalOrder([7] * 6, seed=1)
    shards, _ = order.places(2, numbers_of_rank(0, 42, 1, 3))
    assert np.unique(shards).size == 2


def test_a_pack_stays_in_its_window() -> None:
    records = order_of_one_shard(1000, window=10)
    assert all(len({record // 10 for record in records[first : first + 10]}) == 1 for first in range(0, 1000, 10))
    assert records != sorted(records)


def order_of_one_shard(size: int, window: int) -> list[int]:
    return [record for _, record in epoch_places(GlobalOrder([size], 9, window), 0)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("done", [0, 1, 13])
def test_processes_share_what_is_left(world_size: int, done: int) -> None:
    shares = [numbers_of_rank(done, done + 5 * world_size, rank, world_size) for rank in range(world_size)]
    assert [len(share) for share in shares] == [5] * world_size
    assert all((share % world_size == rank).all() for rank, share in enumerate(shares))
    assert sorted(np.concatenate(shares).tolist()) == list(range(done, done + 5 * world_size))


def test_another_process_has_the_same_order() -> None:
    order = GlobalOrder((5, 0, 3), seed=2)
    places = epoch_places(order, 1)
    other = pickle.loads(pickle.dumps(order))
    assert epoch_places(other, 1) == places
    assert epoch_places(other, 0) == epoch_places(order, 0) != places


def test_a_rank_that_nobody_has_is_refused() -> None:
    with pytest.raises(InputError, match="rank = 3: 0 to 2 is allowed"):
        check_rank(3, 3)
