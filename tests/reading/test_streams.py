"""Shards opened before they are read and closed when they are read: a bounded number, whatever the number of shards."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.reading.global_order import WINDOW_PACKS, GlobalOrder, pack_numbers_of_rank
from gaudi_bert.reading.streams import ShardFiles, StoredPacks, StreamReader
from tests.builders.agree import identical
from tests.builders.properties import examples
from tests.oracles.global_order import dealt_epoch


class CountedShards(ShardFiles[int]):
    """Shards without content, which note what is open, and which records are prefetched."""

    threads = 2

    def __init__(self, damaged: int = -1) -> None:
        self.damaged, self.lock = damaged, threading.Lock()
        self.prepared: list[int] = []
        self.discarded: list[int] = []
        self.opened: set[int] = set()
        self.prefetched: list[tuple[int, int]] = []

    def prepare_shard_for_opening(self, shard: int) -> int:
        if shard == self.damaged:
            raise InputError(f"shard {shard} is damaged")
        with self.lock:
            self.prepared.append(shard)
        return shard

    def open_shard(self, shard: int, prepared: int) -> None:
        assert shard == prepared
        assert shard not in self.opened
        self.opened.add(shard)

    def close_shard(self, shard: int) -> None:
        self.opened.remove(shard)
        self.discard_shard(shard)

    def discard_shard(self, shard: int) -> None:
        with self.lock:
            self.discarded.append(shard)

    def prefetch_records(self, shard: int, first: int, last: int) -> None:
        assert shard in self.opened
        self.prefetched.append((shard, first))

    def drop_pages(self, shard: int, first: int, last: int) -> None:
        assert shard in self.opened
        assert first < last

    def here(self) -> int:
        with self.lock:
            return len(self.prepared) - len(self.discarded)


@given(
    st.lists(st.integers(0, 13) | st.sampled_from([0, 1, 60]), min_size=1, max_size=30).filter(any),
    st.integers(1, 8),
    st.integers(1, 7),
    st.integers(1, 9),
    st.data(),
)
@examples(60)
def test_records_are_those_of_the_order_and_few_shards_are_open(
    sizes: list[int], streams: int, world_size: int, at_once: int, data
) -> None:
    """From any pack of an epoch on, through the next one, in steps of any size."""
    rank, order = data.draw(st.integers(0, world_size - 1)), GlobalOrder(sizes, 5, 7, streams)
    start = data.draw(st.integers(0, order.packs))
    files = CountedShards()
    reader = StreamReader(files, order, rank, world_size)
    for epoch, done in ((1, start), (2, 0)):
        dealt = dealt_epoch(sizes, 5, epoch, 7, streams)
        numbers = pack_numbers_of_rank(done, order.packs, rank, world_size)
        for first in range(0, len(numbers), at_once):
            now = numbers[first : first + at_once]
            shards, records = reader.locate_and_open(epoch, now)
            assert list(zip(shards.tolist(), records.tolist(), strict=True)) == [dealt[number] for number in now]
            if order.locate_packs(epoch, now).rounds[-1] < order.count_rounds_with_all_streams(epoch):
                assert len(files.opened - set(shards.tolist())) <= order.count_open_shards_per_process(world_size)
            assert len(files.opened - set(shards.tolist())) <= order.streams
            assert set(shards.tolist()) <= files.opened
            assert files.here() <= max(
                order.streams + order.count_open_shards_per_process(world_size), len(files.opened) + files.threads
            )
    reader.close()
    assert not files.opened
    while files.here():  # a thread may still be at one
        pass


def test_going_back_opens_the_shards_again() -> None:
    order, files = GlobalOrder([40] * 6, 1, 8, 3), CountedShards()
    reader = StreamReader(files, order)
    later, earlier = np.arange(100, 130), np.arange(10, 40)
    dealt = dealt_epoch([40] * 6, 1, 0, 8, 3)
    for numbers in (later, earlier, later):
        assert list(zip(*(each.tolist() for each in reader.locate_and_open(0, numbers)), strict=True)) == [
            dealt[n] for n in numbers
        ]
        assert files.opened == {dealt[n][0] for n in numbers}, "and closes all others"


def test_each_window_is_prefetched_once_but_not_before_hundreds_of_packs_are_read() -> None:
    order, files = GlobalOrder([2000] * 4, 1, 100, 2), CountedShards()
    reader = StreamReader(files, order)
    for first in range(0, 8000, 40):
        reader.locate_and_open(0, np.arange(first, first + 40))
        if first < 400:
            assert not files.prefetched
    every = {(shard, 100 * window) for shard in range(4) for window in range(20)}
    skipped = {(shard, first) for shard in range(4) for first in order.compute_shard_order(0, shard).windows[:2, 1].tolist()}
    assert every - skipped <= set(files.prefetched) <= every
    assert len(set(files.prefetched)) == len(files.prefetched)


def test_a_shard_that_cannot_be_opened_is_reported_when_it_is_read() -> None:
    order = GlobalOrder([5] * 4, 1, 8, 1)
    last = int(order.locate_packs(0, np.array([19])).shards[0])
    reader = StreamReader(CountedShards(damaged=last), order)
    reader.locate_and_open(0, np.arange(15))
    with pytest.raises(InputError, match="is damaged"):
        reader.locate_and_open(0, np.arange(15, 20))


# --- what every reader of a packed folder begins with: the one order, with windows that cost no more than they must

SIZES = np.array([31, 0, 53, 17, 29])
ROW_GROUPS = [7, 1, 11, 5, 13]


@pytest.mark.parametrize(
    ("window_rows", "shuffle_packs", "expected"),
    [
        (None, None, WINDOW_PACKS),
        (None, 3, 3),
        (ROW_GROUPS.__getitem__, None, ROW_GROUPS.__getitem__),
        (ROW_GROUPS.__getitem__, 9, [7, 1, 9, 5, 9].__getitem__),
    ],
)
def test_packs_move_within_what_is_asked_for_and_what_files_allow(window_rows, shuffle_packs, expected) -> None:
    regions = np.array([2, 2, 0, 1, 1])
    stored = StoredPacks(SimpleNamespace(record_counts=SIZES), 2, 2, regions, window_rows)
    order, by_hand = stored.make_order(7, shuffle_packs), GlobalOrder(SIZES, 7, expected, 2, 2, regions)
    numbers = np.arange(order.packs)
    identical(order.locate_packs(2, numbers)._asdict(), by_hand.locate_packs(2, numbers)._asdict())
    for shard in range(len(SIZES)):
        identical(order.compute_shard_order(2, shard)._asdict(), by_hand.compute_shard_order(2, shard)._asdict())


def test_a_rank_that_no_process_has_is_refused() -> None:
    stored = StoredPacks(SimpleNamespace(record_counts=SIZES), 2)
    with pytest.raises(InputError, match=r"rank = 2: .*0 to 1"):
        stored.open_reader(stored.make_order(7), 2, 2)
