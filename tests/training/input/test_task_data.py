"""Batches of a task: every sequence once an epoch, the same packs whatever the number of processes, and resumed anywhere."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.config.tasks import TaskSettings
from gaudi_bert.tasks.registry import task_named
from gaudi_bert.tasks.rows.types import Sequences
from gaudi_bert.training.input.batches import TrainingOrder
from gaudi_bert.training.input.task_data import TaskData, task_batches

LENGTHS = np.random.default_rng(2).integers(2, 12, 53)


def make_data(depth: int | str = 4) -> TaskData:
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    ids = np.repeat(np.arange(len(LENGTHS)), LENGTHS).astype(np.int32) + 5
    sequences = Sequences(
        np.arange(len(LENGTHS)), offsets, ids, np.zeros(len(ids), np.int8), target=np.arange(len(LENGTHS)).astype(np.int32)
    )
    return TaskData.planned(Path("x"), "x", (), sequences, max_sequence_length=23, algorithm="optimal", depth=depth)


def task():
    return task_named("classification")(TaskSettings(), [str(number) for number in range(53)])


def packs_in(batches) -> list[tuple[int, ...]]:
    """The targets of each pack, in order; () for an empty one."""
    return [
        tuple(targets[weights > 0].tolist())
        for batch in batches
        for targets, weights in zip(batch["targets"], batch["target_weights"], strict=True)
    ]


def test_every_epoch_holds_every_sequence_once_in_other_packs() -> None:
    data = make_data()
    each = data.packing.packs
    found = packs_in(islice(task_batches(data, task(), 3, 2, TrainingOrder(7, 0)), -(-2 * each // 3) + 1))
    first, second, after = found[:each], found[each : 2 * each], found[2 * each :]
    for epoch in (first, second):
        assert sorted(number for pack in epoch for number in pack) == list(range(53))
    assert {tuple(sorted(pack)) for pack in first} != {tuple(sorted(pack)) for pack in second}
    assert all(pack == () for pack in after)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_share_the_packs_of_one(size: int) -> None:
    data, batches = make_data(), 5
    alone = packs_in(islice(task_batches(data, task(), 3 * size, 3, TrainingOrder(7, 0)), batches))
    shares = [
        packs_in(islice(task_batches(data, task(), 3, 3, TrainingOrder(7, 0, rank, size)), batches)) for rank in range(size)
    ]
    assert [shares[number % size][number // size] for number in range(len(alone))] == alone


def test_a_stream_is_taken_up_after_any_batch() -> None:
    data = make_data("max")
    whole = list(islice(task_batches(data, task(), 3, 3, TrainingOrder(7, 0)), 12))
    later = list(islice(task_batches(data, task(), 3, 3, TrainingOrder(7, 0, packs_done=21)), 5))
    for one, other in zip(whole[7:], later, strict=True):
        assert {name: values.tobytes() for name, values in one.items()} == {name: v.tobytes() for name, v in other.items()}
