"""The one order of packs: that of a dealer, every pack once, equal for any number of processes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.reading.global_order import GlobalOrder, check_rank, numbers_of_rank, streams_of
from tests.builders.properties import examples
from tests.oracles.global_order import dealt_epoch, dealt_rounds

WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64, 3, 5)
UNEQUAL = [0, 97, 3, 0, 41, 41, 1, 260, 13, 5, 5, 5, 88, 2, 150, 31, 0, 7]

some_sizes = st.lists(st.integers(0, 13) | st.sampled_from([0, 1, 60]), min_size=1, max_size=23)
some_streams = st.integers(1, 9)


def epoch_records(order: GlobalOrder, epoch: int) -> list[tuple[int, int]]:
    return records_at(order, epoch, np.arange(order.packs))


def records_at(order: GlobalOrder, epoch: int, numbers: IntArray) -> list[tuple[int, int]]:
    """(shard, record) of these packs."""
    located = order.locate(epoch, numbers)
    orders = [order.shard_order(epoch, shard).records.tolist() for shard in range(len(order.sizes))]
    pairs = zip(located.shards.tolist(), located.positions.tolist(), strict=True)
    return [(shard, orders[shard][position]) for shard, position in pairs]


@given(some_sizes, st.integers(0, 2**40), st.integers(0, 5), st.integers(1, 16), some_streams)
@examples(150)
def test_packs_are_dealt_as_by_hand(sizes: list[int], seed: int, epoch: int, window: int, streams: int) -> None:
    order = GlobalOrder(sizes, seed, window, streams)
    assert order.packs == sum(sizes)
    assert epoch_records(order, epoch) == dealt_epoch(sizes, seed, epoch, window, streams)
    assert sorted(epoch_records(order, epoch)) == [
        (shard, record) for shard, size in enumerate(sizes) for record in range(size)
    ]


@given(some_sizes, st.integers(0, 99), some_streams, st.integers(1, 7), st.data())
@examples(150)
def test_visits_are_the_shards_of_a_process(sizes: list[int], seed: int, streams: int, world_size: int, data) -> None:
    """In the order in which it may read them; some more that are too short for its turn to come."""
    order, rank = GlobalOrder(sizes, seed, 4, streams), data.draw(st.integers(0, world_size - 1))
    done = data.draw(st.integers(0, order.packs))
    visits = order.visits(2, done, rank, world_size)
    assert len(set(visits.shards.tolist())) == len(visits.shards)
    assert (np.diff(visits.begins) >= 0).all()
    spans = {shard: (begin, end) for shard, _, begin, end in zip(*(each.tolist() for each in visits), strict=True)}
    numbers = numbers_of_rank(done, order.packs, rank, world_size)
    located = order.locate(2, numbers)
    for round_, shard, end in zip(located.rounds.tolist(), located.shards.tolist(), located.ends.tolist(), strict=True):
        begin, last = spans[shard]
        assert begin <= round_ < last == end
    rounds = dealt_rounds(sizes, seed, 2, 4, streams)
    of_pack = [(round_, record) for round_, records in enumerate(rounds) for record in records]
    assert [of_pack[number][0] for number in numbers] == located.rounds.tolist()
    for shard, (_, end) in spans.items():
        assert end == 1 + max(round_ for round_, (other, _) in of_pack if other == shard)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sizes", [UNEQUAL, [9] * 70, [50, 49] * 16 + [7] * 32, [5, 0, 3]])
def test_any_number_of_processes_makes_the_same_updates(sizes: list[int], world_size: int) -> None:
    """Of 64 packs (66 of three, 65 of five); each pack is read once, but for a remainder of fewer than one for each."""
    dealt = dealt_epoch(sizes, 3, 1, 8)
    each = len(dealt) // world_size
    complete = dealt[: world_size * each]
    shares = [numbers_of_rank(0, world_size * each, rank, world_size) for rank in range(world_size)]
    read = [records_at(GlobalOrder(sizes, 3, 8), 1, share) for share in shares]
    batch = -(-64 // world_size)
    for first in range(0, each, batch):
        update = [record for share in read for record in share[first : first + batch]]
        assert sorted(update) == sorted(complete[first * world_size : (first + batch) * world_size])
    assert {record for share in read for record in share} == set(complete)
    assert len(set(dealt)) == sum(sizes) == len(complete) + sum(sizes) % world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_process_reads_few_shards_at_once(world_size: int) -> None:
    """C / gcd(C, W) until the first stream ends, then at most as many as streams remain."""
    sizes = UNEQUAL * 9
    order = GlobalOrder(sizes, 7)
    ends = np.unique(order.locate(0, np.arange(order.packs)).rounds, return_counts=True)[1]
    for rank in range(min(world_size, 3)):
        visits = order.visits(0, 0, rank, world_size)
        for round_ in range(len(ends)):
            at_once = int(((visits.begins <= round_) & (visits.ends > round_)).sum())
            assert at_once <= (order.shards_at_once(world_size) if round_ < order.full_rounds(0) else ends[round_])
    assert order.shards_at_once(world_size) == 32 // np.gcd(32, world_size)


def test_streams_are_as_many_as_the_shards_of_a_group_within_bounds() -> None:
    assert [streams_of(multiple) for multiple in (1, 32, 48, 512, 1000)] == [32, 32, 48, 512, 512]


def test_shards_of_very_unequal_groups_end_together() -> None:
    order = GlobalOrder([1000] * 32 + [10] * 32, seed=1)
    assert order.full_rounds(0) == 1010


def test_a_pack_stays_in_its_window() -> None:
    records = order_of_one_shard(1000, window=10)
    assert all(len({record // 10 for record in records[first : first + 10]}) == 1 for first in range(0, 1000, 10))
    assert records != sorted(records)
    windows = GlobalOrder([1003], 9, 10).shard_order(0, 0).windows
    records = order_of_one_shard(1003, window=10)
    for (first, begin, end), behind in zip(windows.tolist(), [*windows[1:, 0].tolist(), 1003], strict=True):
        assert sorted(records[first:behind]) == list(range(begin, end))


def order_of_one_shard(size: int, window: int) -> list[int]:
    return [record for _, record in epoch_records(GlobalOrder([size], 9, window), 0)]


def test_a_window_may_be_that_of_the_shard() -> None:
    sizes, windows = [17, 9, 30], [4, 100, 7]
    assert epoch_records(GlobalOrder(sizes, 5, windows.__getitem__), 1) == dealt_epoch(sizes, 5, 1, windows)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("done", [0, 1, 13])
def test_processes_share_what_remains(world_size: int, done: int) -> None:
    shares = [numbers_of_rank(done, done + 5 * world_size, rank, world_size) for rank in range(world_size)]
    assert [len(share) for share in shares] == [5] * world_size
    assert all((share % world_size == rank).all() for rank, share in enumerate(shares))
    assert sorted(np.concatenate(shares).tolist()) == list(range(done, done + 5 * world_size))


def test_another_process_has_the_same_order() -> None:
    order = GlobalOrder((5, 0, 3), seed=2)
    records = epoch_records(order, 1)
    other = pickle.loads(pickle.dumps(order))
    assert epoch_records(other, 1) == records
    assert epoch_records(other, 0) == epoch_records(order, 0) != records


def test_a_rank_that_nobody_has_is_refused() -> None:
    with pytest.raises(InputError, match="rank = 3: 0 to 2 is allowed"):
        check_rank(3, 3)
