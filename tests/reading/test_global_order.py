"""The one order of packs: that of a dealer, every pack once, equal for any number of processes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.histogram import divide_files_into_groups
from gaudi_bert.reading.global_order import (
    GlobalOrder,
    choose_shard_stream_count,
    find_input_region_of_shards,
    pack_numbers_of_rank,
)
from tests.builders.properties import examples
from tests.oracles.global_order import dealt_epoch

some_sizes = st.lists(st.integers(0, 13) | st.sampled_from([0, 1, 60]), min_size=1, max_size=23)
some_streams = st.integers(1, 9)
some_sets = st.integers(1, 4)


def epoch_records(order: GlobalOrder, epoch: int) -> list[tuple[int, int]]:
    return records_at(order, epoch, np.arange(order.packs))


def records_at(order: GlobalOrder, epoch: int, numbers: IntArray) -> list[tuple[int, int]]:
    """(shard, record) of these packs."""
    located = order.locate_packs(epoch, numbers)
    orders = [order.compute_shard_order(epoch, shard).records.tolist() for shard in range(len(order.sizes))]
    pairs = zip(located.shards.tolist(), located.positions.tolist(), strict=True)
    return [(shard, orders[shard][position]) for shard, position in pairs]


@given(some_sizes, st.integers(0, 2**40), st.integers(0, 5), st.integers(1, 16), some_streams, some_sets, st.data())
@examples(150)
def test_packs_are_dealt_as_by_hand(
    sizes: list[int], seed: int, epoch: int, window: int, streams: int, sets: int, data
) -> None:
    regions = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    order = GlobalOrder(sizes, seed, window, streams, sets, None if regions is None else np.array(regions))
    assert order.packs == sum(sizes)
    assert epoch_records(order, epoch) == dealt_epoch(sizes, seed, epoch, window, streams, sets, regions)
    assert sorted(epoch_records(order, epoch)) == [
        (shard, record) for shard, size in enumerate(sizes) for record in range(size)
    ]


@given(some_sizes, st.integers(0, 99), some_streams, some_sets, st.integers(1, 7), st.data())
@examples(150)
def test_visits_are_the_shards_of_a_process(
    sizes: list[int], seed: int, streams: int, sets: int, world_size: int, data
) -> None:
    """In the order in which it reads them, each once a turn; and time goes on with the numbers."""
    order, rank = GlobalOrder(sizes, seed, 4, streams, sets), data.draw(st.integers(0, world_size - 1))
    done = data.draw(st.integers(0, order.packs))
    visits = [visit for epoch, visit in order.iterate_shard_visits(2, done, rank, world_size) if epoch == 2]
    following = [visit for epoch, visit in order.iterate_shard_visits(2, done, rank, world_size) if epoch == 3]
    assert following == [visit for epoch, visit in order.iterate_shard_visits(3, 0, rank, world_size) if epoch == 3]
    located = order.locate_packs(2, pack_numbers_of_rank(done, order.packs, rank, world_size))
    times = list(zip(located.turns.tolist(), located.rounds.tolist(), strict=True))
    assert times == sorted(times)
    first_reads: dict[tuple[int, int], int] = {}
    for turn, shard, round_ in zip(located.turns.tolist(), located.shards.tolist(), located.rounds.tolist(), strict=True):
        first_reads.setdefault((turn, shard), round_)
    assert [((visit.turn, visit.shard), visit.begin) for visit in visits] == list(first_reads.items())
    ends = dict(zip(located.shards.tolist(), located.ends.tolist(), strict=True))
    assert all(visit.begin < visit.end == ends[visit.shard] for visit in visits)


def test_streams_are_as_many_as_the_shards_of_a_group_within_bounds() -> None:
    assert [choose_shard_stream_count(multiple) for multiple in (1, 32, 48, 512, 1000)] == [32, 32, 48, 512, 512]
    assert [GlobalOrder([5] * 99, 7).count_open_shards_per_process(size) for size in (1, 3, 8, 48, 64)] == [32, 32, 4, 2, 1]


def test_regions_are_the_positions_of_the_files_of_groups() -> None:
    files = [SimpleNamespace(name=f"part-{number:02d}", bytes=1, sequences=100) for number in range(40)]
    groups = divide_files_into_groups(files, group_sequences=100, group_bytes=1000, seed=9)
    positions = [int(group[0].name[5:]) for group in groups]
    assert find_input_region_of_shards(np.full(40, 3), 40, 9).tolist() == np.repeat(positions, 3).tolist()
    assert find_input_region_of_shards(np.array([2, 1]), 5, 9).tolist() == [0, 0, 1]


def test_a_window_may_be_that_of_the_shard() -> None:
    sizes, windows = [17, 9, 30], [4, 100, 7]
    assert epoch_records(GlobalOrder(sizes, 5, windows.__getitem__), 1) == dealt_epoch(sizes, 5, 1, windows)
