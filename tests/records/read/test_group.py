"""Packing on the fly: every sequence once an epoch, other partners the next, and the same again from any position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.records.packed_folder import read_metadata
from gaudi_bert.records.wire.example import decode_example
from gaudi_bert.records.wire.framing import read_records
from gaudi_bert.stages.training.on_the_fly import open_on_the_fly
from tests.builders.packing_case import PackingCase, make_case, packed_keys, unpacked_key
from tests.builders.shards import shards_of


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    return make_case(tmp_path_factory.mktemp("case"))


def rows_of(batches) -> list[dict]:
    return [
        {name: values[row].tolist() for name, values in batch.items()}
        for batch in batches
        for row in range(len(batch["input_ids"]))
    ]


@pytest.mark.parametrize("batch_packs", [1, 7])
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_epoch_holds_every_sequence_once_but_for_the_dropped_packs(
    case: PackingCase, batch_packs: int, world_size: int
) -> None:
    packs, dropped = [], 0
    for rank in range(world_size):
        source = open_on_the_fly(case.records, case.plan, batch_packs=batch_packs, rank=rank, world_size=world_size)
        batches = list(source.epoch(4))
        assert len(batches) == source.batches
        assert all(len(batch["input_ids"]) == batch_packs for batch in batches)
        packs += rows_of(batches)
        dropped = source.dropped_packs
    assert 0 <= dropped < batch_packs * world_size
    found = sorted(key for row in packs for key in packed_keys(row))
    wanted = sorted(unpacked_key(features) for features in case.sequences)
    if dropped == 0:
        assert found == wanted
    else:
        missing = list(wanted)
        for key in found:
            missing.remove(key)
        assert len(missing) <= 3 * dropped
    assert len(packs) + dropped == read_metadata(case.packed).packs


def test_batches_are_what_the_packed_records_would_decode_to(case: PackingCase) -> None:
    batch = next(open_on_the_fly(case.records, case.plan, batch_packs=3).epoch(0))
    written = decode_example(
        next(read_records(case.packed / next(shard.name for shard in shards_of(case.packed) if shard.packs)))
    )
    assert set(batch) == set(written)
    for name, values in written.items():
        assert batch[name].shape == (3, values.size)
        assert batch[name].dtype == (np.float32 if values.dtype == np.float32 else np.int32)


def test_epochs_pair_differently_and_seeds_too(case: PackingCase) -> None:
    source = open_on_the_fly(case.records, case.plan, batch_packs=1)
    other = open_on_the_fly(case.records, case.plan, batch_packs=1, seed=99)
    partners = [
        {tuple(sorted(packed_keys(row))) for row in rows_of(epoch)}
        for epoch in (source.epoch(0), source.epoch(1), other.epoch(0))
    ]
    for one, two in ((0, 1), (0, 2)):
        assert len(partners[one] & partners[two]) < 0.8 * len(partners[one])  # packs of one length have no choice
    again = {tuple(sorted(packed_keys(row))) for row in rows_of(source.epoch(0))}
    assert again == partners[0]


def test_resuming_at_any_batch_gives_the_rest_of_the_epoch(case: PackingCase) -> None:
    source = open_on_the_fly(case.records, case.plan, batch_packs=4, rank=1, world_size=2)
    whole = list(source.epoch(2))
    for first in range(source.batches + 1):
        rest = list(source.epoch(2, first))
        assert len(rest) == source.batches - first
        for one, two in zip(whole[first:], rest, strict=True):
            assert all(np.array_equal(one[name], two[name]) for name in one)
    with pytest.raises(InputError, match="0 to"):
        next(source.epoch(2, source.batches + 1))


def test_the_stream_goes_on_from_epoch_to_epoch(case: PackingCase) -> None:
    source = open_on_the_fly(case.records, case.plan, batch_packs=5)
    wanted = [*source.epoch(0), *source.epoch(1), *source.epoch(2)]
    for done in (0, 1, source.batches, source.batches + 3):
        stream = source.stream(done)
        for batch in wanted[done : done + source.batches + 2]:
            found = next(stream)
            assert all(np.array_equal(batch[name], found[name]) for name in batch)


def test_what_cannot_work_is_refused(case: PackingCase) -> None:
    with pytest.raises(InputError, match="do not fill one batch of 1000"):
        open_on_the_fly(case.records, case.plan, batch_packs=1000)
    with pytest.raises(InputError, match="rank = 2"):
        open_on_the_fly(case.records, case.plan, batch_packs=1, rank=2, world_size=2)


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    case = make_case(tmp_path, files=2)
    path = case.records / "part-1"
    frames = path.read_bytes()
    half = len(frames) // 2
    path.write_bytes(frames[:half] + bytes([frames[half] ^ 1]) + frames[half + 1 :])
    source = open_on_the_fly(case.records, case.plan, batch_packs=1)
    with pytest.raises(InputError, match="part-1: record"):
        list(source.epoch(0))
