"""Records to batches: a seeded, deterministic order that can be taken up again anywhere, by any number of processes.

The order of an epoch is that of `reading/global_order.py`. Packs are counted on from epoch to epoch: pack number g is
pack g mod N of epoch g div N, where N is the packs of an epoch, and process r of W reads those whose number mod W is r. So a
batch may hold the last packs of one epoch and the first of the next, nothing is dropped where they join, and what a run has
read is one number of packs, whichever process read them: a run continues there with any number of processes. Of rows of
several lengths, the packs of each are counted by themselves (`training/run_plan.py`).

Batches are decoded a few ahead by a thread. Values are checked on the host (`_check_values`); an error names the file and
the record.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BatchArrays, Float32Array, Int32Array, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.features import as_packed
from gaudi_bert.reading.global_order import numbers_of_rank
from gaudi_bert.reading.streams import StoredPacks
from gaudi_bert.tfrecords.random_access import RecordFiles
from gaudi_bert.training.input.source import DataSource
from gaudi_bert.training.run_plan import MicroBatch

Batch = dict[str, Int32Array | Float32Array]
_ValueLimits = Mapping[str, int]

_BATCHES_AHEAD = 4


@dataclass(frozen=True)
class TrainingOrder:
    """Which packs this process reads, and in which order.

    Packs of a file are shuffled within a window of `shuffle_packs`; `packs_done` were read already by all processes
    together, in `updates_done` updates.
    """

    seed: int
    shuffle_packs: int
    rank: int = 0
    size: int = 1
    packs_done: int = 0
    updates_done: int = 0


_Features = Callable[[int, IntArray, IntArray, int], Batch]
"""Packs of rows of one of the lengths by their shards, their numbers there, and the epoch."""


def training_batches(source: DataSource, limits: _ValueLimits, batch_packs: int, order: TrainingOrder) -> Iterator[Batch]:
    """Batches of packed features without end, each int32 or float32 [batch_packs, ...]."""
    packs = source.open_packs()

    def features(which: int, shards: IntArray, records: IntArray, epoch: int) -> Batch:
        return _checked(source, packs.files, shards, records, limits)

    return batches_in_order([packs], features, _even_micro_batches(batch_packs, order), order, source.path)


def _even_micro_batches(batch_packs: int, order: TrainingOrder) -> Iterator[MicroBatch]:
    """Rows of one length, so many packs on each process, without end."""
    for first in itertools.count(order.packs_done, batch_packs * order.size):
        yield MicroBatch(0, first, first + batch_packs * order.size, batch_packs)


def batches_in_order(
    lengths: Sequence[StoredPacks],
    features: _Features,
    micro_batches: Iterable[MicroBatch],
    order: TrainingOrder,
    path: Path,
) -> Iterator[Batch]:
    """The share of one process in these micro-batches, the packs of each length of rows in the one global order."""
    orders = [packs.order(order.seed, order.shuffle_packs) for packs in lengths]
    readers = [packs.reader(each, order.rank, order.size) for packs, each in zip(lengths, orders, strict=True)]
    if not all(each.packs for each in orders):
        raise InputError(f"{path}: no records in it; give data that has some")

    def close() -> None:
        for reader in readers:
            reader.close()

    def batches() -> Iterator[Batch]:
        for which, begin, end, batch_packs in micro_batches:
            # At least one pack, which is emptied if it is of the next micro-batch.
            of_rank = numbers_of_rank(begin, max(end, begin + order.size), order.rank, order.size)
            epochs, numbers = np.divmod(of_rank, orders[which].packs)
            parts = [
                features(which, *readers[which].locate(epoch, numbers[epochs == epoch]), epoch)
                for epoch in np.unique(epochs).tolist()
            ]
            batch = (
                parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            )
            yield _filled(batch, int(np.count_nonzero(of_rank < end)), batch_packs)

    return _ahead(batches(), close)


def _filled(batch: Batch, packs: int, batch_packs: int) -> Batch:
    """The first packs of a batch, filled up with empty ones."""
    missing = batch_packs - packs
    if not missing:
        return batch
    return cast(Batch, {name: np.pad(values[:packs], [(0, missing), (0, 0)]) for name, values in batch.items()})


class _NumberedFiles(Protocol):
    """Files whose records are read by their numbers; `sizes`: records of each."""

    @property
    def sizes(self) -> IntArray: ...

    def close_except(self, numbers: Iterable[int]) -> None: ...


def evaluation_batches(
    source: DataSource, limits: _ValueLimits, batch_packs: int, rank: int = 0, size: int = 1, take_packs: int | None = None
) -> Iterator[Batch]:
    """Every record of a source once; its values are checked."""
    files = source.open_packs().files
    return each_pack_once(files, partial(_checked, source, files, limits=limits), batch_packs, rank, size, take_packs)


def each_pack_once(
    files: _NumberedFiles,
    read: Callable[[IntArray, IntArray], Batch],
    batch_packs: int,
    rank: int,
    size: int,
    take_packs: int | None,
) -> Iterator[Batch]:
    """Every pack once, in the order of the files; the last batch is filled up with empty packs.

    `read` gives packs by file and number. Process `rank` gets the batches whose number mod `size` is `rank`; shapes are the
    same for all. `take_packs` limits it to the first packs. The files of one batch are open at a time.
    """
    ends = np.cumsum(files.sizes)
    packs = int(ends[-1]) if take_packs is None else min(int(ends[-1]), take_packs)

    def batches() -> Iterator[Batch]:
        for first in range(rank * batch_packs, packs, size * batch_packs):
            numbers = np.arange(first, min(first + batch_packs, packs))
            shards = np.searchsorted(ends, numbers, side="right")
            files.close_except(shards.tolist())
            yield _filled(read(shards, numbers - (ends - files.sizes)[shards]), len(numbers), batch_packs)

    return _ahead(batches(), lambda: files.close_except(()))


def _checked(source: DataSource, files: RecordFiles, shards: IntArray, records: IntArray, limits: _ValueLimits) -> Batch:
    """Records as packs, their values checked."""
    batch: dict[str, AnyArray] = files.read(shards, records)
    if not source.is_packed:
        batch = as_packed(batch)
    _check_values(batch, limits, lambda row: files.location(int(shards[row]), int(records[row])))
    return batch


def _ahead(batches: Iterator[Batch], close: Callable[[], None]) -> Iterator[Batch]:
    """Yield the batches, a few of them decoded ahead by a thread; at the end, or when nobody wants more, close all files."""
    with ExitStack() as stack:
        stack.callback(close)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        waiting: deque[Future[Batch | None]] = deque(pool.submit(next, batches, None) for _ in range(_BATCHES_AHEAD))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, batches, None))
            yield batch


# --- The check of every batch as it is read, before the model sees it
#
# A token id beyond the vocabulary is silently read as zeros by some devices, and a wrong position gathers another token: the
# run would continue on garbage. The check costs a few minima and maxima over small integers on the host.


def value_limits(source: DataSource, config: BertConfig) -> dict[str, int]:
    """The largest value of each feature that the data's sizes and the model allow; the smallest is 0."""
    last = source.schema.max_sequence_length - 1
    return {
        "input_ids": config.vocab_size - 1,
        "input_mask": source.depth,
        "segment_ids": config.type_vocab_size - 1,
        "positions": last,
        "masked_lm_positions": last,
        "masked_lm_ids": config.vocab_size - 1,
        "masked_lm_weights": source.depth,
        "next_sentence_positions": last,
        "next_sentence_labels": 1,
        "next_sentence_weights": 1,
    }


def _check_values(batch: BatchArrays, limits: _ValueLimits, name_of: Callable[[int], str]) -> None:
    """Check one packed batch, whose rows `name_of` names in errors."""
    for name, largest in limits.items():
        values = batch[name]
        if values.min() < 0 or values.max() > largest or not np.isfinite(values).all():
            row, slot = np.argwhere(~((values >= 0) & (values <= largest)))[0]
            raise InputError(
                f"{name_of(row)}: {name}[{slot}] = {values[row, slot]:g}, allowed are 0 .. {largest}; "
                "the records do not belong to this model, or are damaged"
            )
    mask_BL = batch["input_mask"]
    before, after = mask_BL[:, :-1], mask_BL[:, 1:]
    allowed = (after == before) | (after == 0) | ((after == before + 1) & (before > 0))
    allowed[:, 0] &= mask_BL[:, 0] == 1
    if not allowed.all():
        row, slot = np.argwhere(~allowed)[0]
        raise InputError(
            f"{name_of(row)}: input_mask is {mask_BL[row, slot]} at {slot} and {mask_BL[row, slot + 1]} at {slot + 1}; "
            "it must be 1..1, then 2..2 and so on, then 0..0; write the records again"
        )
