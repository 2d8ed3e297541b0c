"""Batches of a file of rows: shares of any number of processes are the whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.config.sections import FineTuneSettings, TaskSettings
from gaudi_bert.packing.row_lengths import choose_row_lengths
from gaudi_bert.rows.types import Sequences
from gaudi_bert.runs.rows import make_run_settings
from gaudi_bert.tasks.task import import_task_class
from gaudi_bert.tasks.task_data import TaskData, TaskEvaluation, iterate_training_batches
from gaudi_bert.training.batches import Batch, TrainingOrder
from gaudi_bert.training.run_plan import RunPlan

# --- batches of a task: every sequence once an epoch, the same packs whatever the number of processes, and resumed anywhere

LENGTHS = np.random.default_rng(2).integers(2, 12, 53)


ROW_LENGTHS = pytest.mark.parametrize("lengths", [(23,), (5, 9, 23)])


def make_data(lengths: tuple[int, ...], depth: int | str = 4) -> TaskData:
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    ids = np.repeat(np.arange(len(LENGTHS)), LENGTHS).astype(np.int32) + 5
    sequences = Sequences(
        np.arange(len(LENGTHS)), offsets, ids, np.zeros(len(ids), np.int8), target=np.arange(len(LENGTHS)).astype(np.int32)
    )
    packings = choose_row_lengths(np.bincount(LENGTHS)[1:], float, row_lengths=lengths, depth=depth).packings
    return TaskData(Path("x"), "x", (), sequences, packings)


def plan_of(data: TaskData, batch_packs: int, size: int = 1, epochs: int = 3) -> RunPlan:
    """Of four updates, or a few more."""
    settings = make_run_settings(FineTuneSettings(batch_sequences=epochs * 53 // 4), batch_packs, 4, 1)
    return RunPlan(settings, data.packing_factor, size, 23, data.packs, packs_by_row_length=data.packs_by_row_length)


def batches_of(data: TaskData, plan: RunPlan, epochs: int = 3, **order: int) -> list[Batch]:
    """The batches that remain, and the next one."""
    stream = iterate_training_batches(data, task(), plan, epochs, TrainingOrder(7, 0, size=plan.processes, **order))
    updates = range(order.get("updates_done", 0) + 1, plan.count_updates(epochs) + 1)
    return list(islice(stream, sum(len(plan.list_micro_batches(update)) for update in updates) + 1))


def task():
    return import_task_class("classification")(TaskSettings(), [str(number) for number in range(53)])


def packs_in(batches) -> list[tuple[int, ...]]:
    """The targets of each pack, in order; () for an empty one."""
    return [
        tuple(targets[weights > 0].tolist())
        for batch in batches
        for targets, weights in zip(batch["targets"], batch["target_weights"], strict=True)
    ]


@ROW_LENGTHS
def test_every_epoch_holds_every_sequence_once_in_other_packs(lengths: tuple[int, ...]) -> None:
    data = make_data(lengths)
    batches, epochs = batches_of(data, plan_of(data, 3, epochs=2), epochs=2), ([], [])
    for length, packing in zip(lengths, data.packings, strict=True):
        found = packs_in(batch for batch in batches if batch["input_ids"].shape[1] == length)
        epochs[0].extend(found[: packing.packs])
        epochs[1].extend(found[packing.packs : 2 * packing.packs])
        assert all(pack == () for pack in found[2 * packing.packs :])
        assert max(LENGTHS[number] for pack in found for number in pack) <= length
    for epoch in epochs:
        assert sorted(number for pack in epoch for number in pack) == list(range(53))
    assert {tuple(sorted(pack)) for pack in epochs[0]} != {tuple(sorted(pack)) for pack in epochs[1]}


@ROW_LENGTHS
@pytest.mark.parametrize("size", [1, 3, 7])
def test_an_evaluation_has_every_sequence_once_whoever_shares_it(size: int, lengths: tuple[int, ...]) -> None:
    """What a model makes of a sequence comes to its place, here its own number."""
    held_out, found = TaskEvaluation(task(), make_data(lengths), 2, seed=3, best_metric="accuracy"), np.zeros((53, 1))
    for rank in range(size):
        for batch, scatter in held_out.read_batches(rank, size):
            assert scatter is not None
            of_process = np.zeros((53, 1), np.float32)
            scatter((batch["targets"] + 1.0)[..., np.newaxis].astype(np.float32), of_process)
            found += of_process
    assert found[:, 0].tolist() == [number + 1 for number in range(53)]


@ROW_LENGTHS
@pytest.mark.parametrize("size", [2, 3])
def test_processes_share_the_packs_of_one(size: int, lengths: tuple[int, ...]) -> None:
    """All are at the same length at the same time, in a run that began by one process or by as many."""
    data = make_data(lengths)
    one = plan_of(data, 2 * size)
    several = replace(one, processes=size, initial_processes=1) if len(lengths) > 1 else plan_of(data, 2, size)
    streams = [iter(batches_of(data, several, rank=rank)) for rank in range(size)]
    alone = iter(batches_of(data, one))
    for update in range(1, one.count_updates(3) + 1):
        packs = packs_in(islice(alone, len(one.list_micro_batches(update))))
        shared = [list(islice(stream, len(several.list_micro_batches(update)))) for stream in streams]
        assert sorted(filter(None, packs_in(chain(*shared)))) == sorted(filter(None, packs))
        for at_once in zip(*shared, strict=True):
            assert len({batch["input_ids"].shape for batch in at_once}) == 1


@ROW_LENGTHS
def test_a_stream_is_taken_up_after_any_update(lengths: tuple[int, ...]) -> None:
    data = make_data(lengths, "max")
    plan = plan_of(data, 3)
    every = batches_of(data, plan)
    for update in range(plan.count_updates(3) + 1):
        later = batches_of(data, plan, updates_done=update, packs_done=plan.count_packs_read(update))
        for one, other in zip(every[len(every) - len(later) :], later, strict=True):
            assert {name: values.tobytes() for name, values in one.items()} == {
                name: v.tobytes() for name, v in other.items()
            }
