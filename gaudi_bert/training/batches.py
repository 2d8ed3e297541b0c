"""Read packs as batches, in a seeded order that can be resumed for training, or every pack once for evaluation.

`reading/global_order.py` defines the order of the packs in an epoch. Pack numbers continue from one epoch to the next: with
N packs in an epoch, pack number g is pack g mod N of epoch g div N. Process r of W reads the packs whose number mod W is r.
The position of a run is therefore a single number of packs, from which any number of processes can continue. If rows have
several lengths, the packs of each length are counted separately (`training/run_plan.py`).

An unpacked sequence is passed to the model as a pack of one sequence, so that the same graph computes packed and unpacked
records. A thread decodes a few batches ahead. `_check_values` checks all values on the host, and its errors name the file
and the record.
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
from typing import cast

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BatchArrays, Float32Array, Int32Array, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import UnpackedFeature
from gaudi_bert.model.config import BertConfig
from gaudi_bert.reading.global_order import pack_numbers_of_rank
from gaudi_bert.reading.streams import StoredPacks
from gaudi_bert.tfrecords.random_access import (
    RecordFiles,
)
from gaudi_bert.training.run_plan import MicroBatch
from gaudi_bert.training.sources import RecordSource

Batch = dict[str, Int32Array | Float32Array]

_BATCHES_AHEAD = 4


@dataclass(frozen=True)
class TrainingOrder:
    """The order of a run's packs, and the position where this process continues reading.

    Attributes:
        seed: Determines the order of the packs, together with the epoch.
        shuffle_packs: The size of the shuffle window, in packs.
        rank: The number of this process, from 0.
        size: The number of processes.
        packs_done: The number of packs that all processes together have already read.
        updates_done: The number of updates in which they were read.
    """

    seed: int
    shuffle_packs: int
    rank: int = 0
    size: int = 1
    packs_done: int = 0
    updates_done: int = 0


# A function that reads packs and returns them as a batch. Its arguments are the index of the row length, the shards, the
# numbers of the packs within the shards, and the epoch.
_ReadFeatures = Callable[[int, IntArray, IntArray, int], Batch]


def read_training_batches(
    source: RecordSource, config: BertConfig, batch_packs: int, order: TrainingOrder
) -> Iterator[Batch]:
    """Read pretraining records in training order, and yield an endless stream of batches for one process.

    Args:
        source: The records. Unpacked records are returned as packs of one sequence.
        config: The model for which the values are checked.
        batch_packs: The number of packs in a batch.
        order: The order of the packs, and the position to begin at.

    Yields:
        The packed features by name, int32 or float32 [batch_packs, ...].

    Raises:
        InputError: There are no records, or a value is out of range.
    """
    packs, max_values = source.open_packs(), _compute_max_values(source, config)

    def read_features(row_length_index: int, shards: IntArray, records: IntArray, epoch: int) -> Batch:
        return _read_checked_packs(source, packs.files, max_values, shards, records)

    packs_of_all = batch_packs * order.size
    micro_batches = (
        MicroBatch(0, first, first + packs_of_all, batch_packs) for first in itertools.count(order.packs_done, packs_of_all)
    )
    return read_batches_in_order([packs], read_features, micro_batches, order, source.path)


def read_batches_in_order(
    packs_by_row_length: Sequence[StoredPacks],
    read_features: _ReadFeatures,
    micro_batches: Iterable[MicroBatch],
    order: TrainingOrder,
    path: Path,
) -> Iterator[Batch]:
    """For each micro-batch, yield a batch of the packs that belong to this process.

    Args:
        packs_by_row_length: The packs of each row length.
        read_features: Reads packs as a batch.
        micro_batches: The micro-batches, each with rows of one length.
        order: The seed, and which process this is. Each row length has its own global order of packs.
        path: The data, for error messages.

    Yields:
        Batches, each padded with empty packs to the size of its micro-batch.

    Raises:
        InputError: A row length has no packs.
    """
    orders = [packs.make_order(order.seed, order.shuffle_packs) for packs in packs_by_row_length]
    readers = [
        packs.open_reader(each, order.rank, order.size) for packs, each in zip(packs_by_row_length, orders, strict=True)
    ]
    if not all(each.packs for each in orders):
        raise InputError(f"{path}: the data contains no records; pass data with at least one record")

    def close() -> None:
        for reader in readers:
            reader.close()

    def batches() -> Iterator[Batch]:
        for index, begin, end, batch_packs in micro_batches:
            # A process must know the shapes of its batch even if it has no pack in the micro-batch. So read at least one
            # pack, which may belong to the next micro-batch. `_pad_with_empty_packs` then replaces it with an empty pack.
            of_rank = pack_numbers_of_rank(begin, max(end, begin + order.size), order.rank, order.size)
            epochs, numbers = np.divmod(of_rank, orders[index].packs)
            parts = [
                read_features(index, *readers[index].locate_and_open(epoch, numbers[epochs == epoch]), epoch)
                for epoch in np.unique(epochs).tolist()
            ]
            batch = (
                parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            )
            yield _pad_with_empty_packs(batch, int(np.count_nonzero(of_rank < end)), batch_packs)

    return _prefetch_batches(batches(), close)


def _pad_with_empty_packs(batch: Batch, kept_packs: int, batch_packs: int) -> Batch:
    """Return the first `kept_packs` packs of a batch, followed by empty packs until the batch has `batch_packs` packs."""
    missing = batch_packs - kept_packs
    if not missing:
        return batch
    return cast(Batch, {name: np.pad(values[:kept_packs], [(0, missing), (0, 0)]) for name, values in batch.items()})


def read_evaluation_batches(
    source: RecordSource,
    config: BertConfig,
    batch_packs: int,
    rank: int = 0,
    world_size: int = 1,
    max_packs: int | None = None,
) -> Iterator[Batch]:
    """Yield the batches that process `rank` of `world_size` evaluates. Together, the processes read every record once.

    The values of the records are checked against the config of the model. If `max_packs` is given, only the first
    `max_packs` records are read.
    """
    packs = source.open_packs()
    read_packs = partial(_read_checked_packs, source, packs.files, _compute_max_values(source, config))
    return read_each_pack_once(packs, read_packs, batch_packs, rank, world_size, max_packs)


def read_each_pack_once(
    stored_packs: StoredPacks,
    read_packs: Callable[[IntArray, IntArray], Batch],
    batch_packs: int,
    rank: int,
    world_size: int,
    max_packs: int | None,
) -> Iterator[Batch]:
    """Yield the batches of one process. Together, the processes read every pack once, in the order of the files.

    Args:
        stored_packs: The packs.
        read_packs: Reads packs as a batch, from their file numbers and their numbers within the files.
        batch_packs: The number of packs in a batch. The last batch is padded with empty packs.
        rank: The number of this process, which reads the batches whose number mod `world_size` is `rank`.
        world_size: The number of processes.
        max_packs: Read only this many packs from the beginning, or all packs if None.
    """
    files = stored_packs.files
    ends = np.cumsum(files.record_counts)
    packs = int(ends[-1]) if max_packs is None else min(int(ends[-1]), max_packs)

    def batches() -> Iterator[Batch]:
        for first in range(rank * batch_packs, packs, world_size * batch_packs):
            numbers = np.arange(first, min(first + batch_packs, packs))
            shards = np.searchsorted(ends, numbers, side="right")
            files.close_shards_except(shards.tolist())
            yield _pad_with_empty_packs(
                read_packs(shards, numbers - (ends - files.record_counts)[shards]), len(numbers), batch_packs
            )

    return _prefetch_batches(batches(), lambda: files.close_shards_except(()))


def _read_checked_packs(
    source: RecordSource, files: RecordFiles, max_values: dict[str, int], shards: IntArray, records: IntArray
) -> Batch:
    """Read records, convert them to packs if necessary, and check that every value is in its allowed range.

    Raises:
        InputError: A value is out of range.
    """
    batch: dict[str, AnyArray] = files.read_records(shards, records)
    if not source.is_packed:
        batch = _convert_to_packs(batch)
    _check_values(batch, max_values, lambda row: files.format_location(int(shards[row]), int(records[row])))
    return batch


def _convert_to_packs(unpacked: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """Convert a batch of unpacked records to packs that contain one sequence each.

    A record that contains only padding becomes a pack without sequences.
    """
    mask_BL = unpacked["input_mask"]
    packs, length = mask_BL.shape
    return {
        **{feature.key: unpacked[feature.key] for feature in UnpackedFeature},
        "positions": np.arange(length, dtype=np.int32)[np.newaxis, :] * mask_BL,
        "next_sentence_positions": np.zeros((packs, 1), np.int32),
        "next_sentence_labels": unpacked["next_sentence_labels"].reshape(packs, 1),
        "next_sentence_weights": mask_BL[:, :1].astype(np.float32),
    }


def _prefetch_batches(batches: Iterator[Batch], close: Callable[[], None]) -> Iterator[Batch]:
    """Prefetch the next few batches on a background thread, and yield them in order. Call `close` at the end, even if the
    caller stops early.
    """
    with ExitStack() as stack:
        stack.callback(close)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        waiting: deque[Future[Batch | None]] = deque(pool.submit(next, batches, None) for _ in range(_BATCHES_AHEAD))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, batches, None))
            yield batch


# --- The check of every batch as it is read, before the model sees it
#
# On some devices, the embedding of a token id beyond the vocabulary is silently zero, and a wrong position gathers another
# token. Without this check, a run would train on garbage and report no error.


def _compute_max_values(source: RecordSource, config: BertConfig) -> dict[str, int]:
    """Return the largest allowed value of each feature, derived from the sizes of the data and the model.

    The smallest allowed value is 0.
    """
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


def _check_values(batch: BatchArrays, max_values: dict[str, int], locate_row: Callable[[int], str]) -> None:
    """Check that all values of a batch are in range. Also check that the input mask numbers the sequences of each pack 1, 2
    and so on.

    Args:
        batch: The packed features.
        max_values: The largest allowed value of each feature.
        locate_row: Returns the file and record of a row, for error messages.

    Raises:
        InputError: A value is out of range, or the input mask does not number the sequences 1, 2, ... from the first slot.
    """
    for name, largest in max_values.items():
        values = batch[name]
        if values.min() < 0 or values.max() > largest or not np.isfinite(values).all():
            row, slot = np.argwhere(~((values >= 0) & (values <= largest)))[0]
            raise InputError(
                f"{locate_row(row)}: {name}[{slot}] must be between 0 and {largest}, but is {values[row, slot]:g}; use the "
                "model for which the records were written, or write the records again"
            )
    mask_BL = batch["input_mask"]
    before, after = mask_BL[:, :-1], mask_BL[:, 1:]
    allowed = (after == before) | (after == 0) | ((after == before + 1) & (before > 0))
    allowed[:, 0] &= mask_BL[:, 0] == 1
    if not allowed.all():
        row, slot = np.argwhere(~allowed)[0]
        raise InputError(
            f"{locate_row(row)}: input_mask must number the sequences 1, 2, ... and then contain zeros, but is "
            f"{mask_BL[row, slot]} at position {slot} and {mask_BL[row, slot + 1]} at position {slot + 1}; write the "
            "records again"
        )
