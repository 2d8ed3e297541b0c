"""A PyTorch data set of packs whose position can be saved, and restored by any number of processes and workers.

An iteration yields the rest of one epoch. Process r of W yields the packs whose number in the global order
(`reading/global_order.py`) is r modulo W, and all processes yield equally many packs. The packs at the end of an epoch that
do not fill a complete update are not read. A position consists of the epoch and the number of packs that all
processes together have read in this epoch.

The workers of a `DataLoader` read ahead, so they cannot tell which of their batches were used. Therefore `PackedLoader`
counts the batches that it yields. Worker w of K reads the batches w, w + K, ... of its process, so that the order is the
same as without workers.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gaudi_bert.artefacts.packed import RecordMetadata, check_no_row_tables, detect_pack_format
from gaudi_bert.common.arrays import AnyArray, check_integer
from gaudi_bert.common.errors import InputError, short_repr
from gaudi_bert.common.files import format_location, is_in_store
from gaudi_bert.encoders.trial import Pack
from gaudi_bert.reading.global_order import ORDER_VERSION, check_rank, first_pack_number_of_rank
from gaudi_bert.reading.streams import StoredPacks
from gaudi_bert.tables.packed_files import open_packed_tables
from gaudi_bert.tfrecords.random_access import check_shards_exist, open_packs
from gaudi_bert.tfrecords.wire.values import compute_packed_table_columns

_FIRST_ROWS, _ROWS_AT_ONCE = 16, 128
_ROWS_OF_SMALL_SHARDS = 32  # fewer, because each row may be in another shard, and all shards of a read are open at once
_MOST_OPEN_SHARDS = 256
_FINGERPRINT_DIGITS = 16
_REMEDY = "read PackedDataset(folder, rank, world_size) with PackedLoader, or train with PackedTrainerMixin"


# --- Opening the packs of a folder


class _MappedPacks(Dataset[Pack]):
    """A map-style data set of all packs in a folder. The packs are numbered in the order of the shards.

    The data set keeps at most 256 shards open, and closes the least recently used ones.
    """

    def __init__(self, shards: Any, rows_of: Callable[[Any], Sequence[Pack]]) -> None:
        self._shards, self._convert_to_rows = shards, rows_of
        self._ends = np.cumsum(shards.record_counts)
        self._open_shards: dict[int, None] = {}  # in the order of their last use

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs to open the same shards in another process."""
        return _MappedPacks, (self._shards, self._convert_to_rows)

    def __len__(self) -> int:
        """Return the number of packs in the folder."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> Pack:
        """Return the row of one pack. A negative number counts from the end."""
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Pack]:
        """Return the rows of several packs. A `DataLoader` calls this method once per batch."""
        packs = np.asarray(numbers, np.int64)
        packs = np.where(packs < 0, packs + len(self), packs)
        if packs.size and not 0 <= packs.min() <= packs.max() < len(self):
            raise IndexError(f"packs {list(numbers)}: one of these numbers is out of range; there are {len(self):,} packs")
        shards = np.searchsorted(self._ends, packs, side="right")
        records = packs - (self._ends - self._shards.record_counts)[shards]
        rows, used = list(self._convert_to_rows(self._shards.read_records(shards, records))), np.unique(shards).tolist()
        for shard in used:
            self._open_shards.pop(shard, None)
            self._open_shards[shard] = None
        while len(self._open_shards) > max(_MOST_OPEN_SHARDS, len(used)):
            oldest = next(iter(self._open_shards))
            del self._open_shards[oldest]
            self._shards.close_shard(oldest)
        return rows


class _OpenedFolder(NamedTuple):
    """The packs in a folder.

    Attributes:
        packs: The packs.
        fingerprint: A hexadecimal number that differs between different packs.
        convert_to_rows: Converts the result of `read_records` to rows.
    """

    packs: StoredPacks
    fingerprint: str
    convert_to_rows: Callable[[Any], Sequence[Pack]]


def _open_packs(folder: Path) -> _OpenedFolder:
    """Open the packed table or the packed TFRecords in a folder.

    Raises:
        InputError: The folder is a URL, is missing, or contains no packs.
    """
    if is_in_store(folder):
        raise InputError(
            f"{format_location(folder)}: PackedDataset can only read a local folder; copy the packs to this machine, or "
            "train with `gaudi-bert train`, which reads URLs"
        )
    kind = detect_pack_format(folder)
    tables = sorted(folder.glob("packed-*.parquet")) or ([] if kind else sorted(folder.glob("*.parquet")))
    if tables:
        sizes = [[path.name, path.stat().st_size] for path in tables]
        fingerprint = hashlib.sha256(repr(sizes).encode("utf-8")).hexdigest()[:_FINGERPRINT_DIGITS]
        return _OpenedFolder(open_packed_tables(folder, tables), fingerprint, list)
    if kind is not None:
        metadata = RecordMetadata.read(folder)
        check_shards_exist(folder, metadata.shard_table)
        fingerprint = metadata.compute_packs_sha256()[:_FINGERPRINT_DIGITS]
        return _OpenedFolder(open_packs(folder, metadata), fingerprint, _convert_record_arrays_to_rows)
    check_no_row_tables(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder}: the folder contains no packs; pack its data with `gaudi-bert pack`")
    raise InputError(f"{folder}: the folder does not exist or is empty; check the path")


def _convert_record_arrays_to_rows(packs: Mapping[str, AnyArray]) -> list[Pack]:
    """Convert B packs from TFRecords to rows, with the column names of packed tables.

    The arrays of a row are views. The positions of padding count from 0, as in a sequence. Labels are -100 where no token
    was masked.
    """
    columns = compute_packed_table_columns(packs)
    of_tokens = {
        "input_ids": packs["input_ids"],
        "token_type_ids": packs["segment_ids"],
        "position_ids": columns["position_ids"],
        "sequence_ids": packs["input_mask"],
        "labels": columns["labels"],
    }
    of_sequences = {"seq_lens": columns["seq_lens"], "next_sentence_labels": packs["next_sentence_labels"]}
    return [
        {
            **{name: values[number] for name, values in of_tokens.items()},
            **{name: values[number, :count] for name, values in of_sequences.items()},
        }
        for number, count in enumerate(columns["sequences"].tolist())
    ]


# --- The data set and the loader


class PackedDataset(IterableDataset[Pack]):
    """Iterates over the packs that one process reads from a folder. Each row is a pack, and the seed and the epoch determine
    the order.

    A row maps column names to numpy arrays. Iterating yields the rest of the current epoch. `state_dict` and
    `load_state_dict` save and restore the position.

    Example:
        ```python
        dataset = PackedDataset("packed/", rank=0, world_size=1, seed=12345)
        row = next(iter(dataset))
        print(row["input_ids"].shape, row["seq_lens"])
        ```

    Args:
        folder: A folder of packed TFRecords or a packed table.
        rank: The number of this process, from 0.
        world_size: The number of processes. Each pack is read by one of them.
        seed: The seed, which determines the order of the packs together with the epoch.
        batch_packs: The number of packs in a batch of this process, which is the `batch_size` of the `DataLoader`. Pass it
            if the loader has several workers. `PackedLoader` sets it.

    Attributes:
        packs: The number of packs in an epoch, over all processes.
        update_batches: The number of batches that are accumulated into one update. An epoch ends with a complete update.
        loader_is_ours: Whether a `PackedLoader` is just beginning to read the data set.

    Raises:
        InputError: The folder cannot be read, has too few packs for one batch on every process, or `rank` or `batch_packs`
            is out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 12345,
        *,
        batch_packs: int | None = None,
    ) -> None:
        check_rank(rank, world_size)
        self.batch_packs = None if batch_packs is None else check_integer("batch_packs", batch_packs, 1)
        self.folder, self.rank, self.world_size = Path(folder), rank, world_size
        self.seed = check_integer("seed", seed)
        self._stored, self._fingerprint, self._convert_to_rows = _open_packs(self.folder)
        order = self._stored.make_order(seed)
        self._reader = self._stored.open_reader(order, rank, world_size)
        self.packs = order.packs
        if self.packs < world_size * (batch_packs or 1):
            raise InputError(
                f"{folder}: too few packs ({self.packs:,}) for a batch of {batch_packs or 1} on each of {world_size} "
                "processes; use fewer processes, smaller batches, or more data"
            )
        self.update_batches = 1
        self.loader_is_ours = False
        self._epoch, self._done = 0, 0

    def as_map(self) -> _MappedPacks:
        """Return the packs of all processes as a map-style data set, for tools that require one.

        `shuffle=True` is allowed with this data set.
        """
        return _MappedPacks(self._stored.files, self._convert_to_rows)

    @property
    def dropped_packs(self) -> int:
        """The number of packs per epoch that no process reads, because they are too few for a complete update of the
        weights.
        """
        return self.packs - len(self) * self.world_size

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch. Do nothing if the epoch is the current one."""
        if check_integer("epoch", epoch, 0) != self._epoch:
            self._epoch, self._done = int(epoch), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data. Any number of processes can continue from it.

        Raises:
            InputError: The caller is a worker of a `DataLoader`, which cannot tell which of its packs were used.
        """
        if torch.utils.data.get_worker_info() is not None:
            raise InputError(
                "state_dict: a DataLoader worker cannot determine which of its packs were used; call PackedLoader.state_dict"
            )
        return {
            "epoch": self._epoch,
            "packs_done": self._done,
            "order": ORDER_VERSION,
            "seed": self.seed,
            "data": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a position that `state_dict` returned.

        Raises:
            InputError: The state belongs to other packs, another seed or another reading order, or contains no position.
        """
        state = state if isinstance(state, Mapping) else {}
        if state.get("data") != self._fingerprint or state.get("seed") != self.seed:
            raise InputError(
                f"{self.folder}: the state was saved for other packs or another seed; use the folder and seed of that run"
            )
        if state.get("order") != ORDER_VERSION:
            raise InputError(
                f"{self.folder}: the state was saved for reading order {short_repr(state.get('order'))}, but "
                f"this version reads in order {ORDER_VERSION}; train again from the beginning"
            )
        done = check_integer("packs_done", state.get("packs_done"), 0, self.packs)
        self._epoch, self._done = check_integer("epoch", state.get("epoch"), 0), done

    def __len__(self) -> int:
        """Return the number of rows that this process reads in a complete epoch."""
        return self._count_batches_after(0) * self.batch_size

    @property
    def batch_size(self) -> int:
        """The number of packs in a batch of this process."""
        return self.batch_packs or 1

    @property
    def remaining_batches(self) -> int:
        """The number of batches that this process has not yet read in the current epoch."""
        return self._count_batches_after(self._done)

    def _count_batches_after(self, done: int) -> int:
        """Return how many batches of an epoch remain for this process once all processes have read `done` packs in total."""
        updates = (self.packs - done) // (self.world_size * self.batch_size * self.update_batches)
        return updates * self.update_batches

    def advance_by_one_batch(self, is_last_of_epoch: bool) -> None:
        """Move the position by one batch on every process. After the last batch of an epoch, move to the next epoch."""
        if is_last_of_epoch:
            self._epoch, self._done = self._epoch + 1, 0
        else:
            self._done += self.world_size * self.batch_size

    def skip_incomplete_epoch_end(self) -> None:
        """Move to the next epoch if the remaining packs of the current epoch are too few for a complete update of the
        weights.
        """
        if self._done and self.remaining_batches == 0:
            self._epoch, self._done = self._epoch + 1, 0

    def __iter__(self) -> Iterator[Pack]:
        """Return an iterator over the rows that this process, or this worker of its loader, has not yet read in the current
        epoch.

        Raises:
            InputError: Accelerate would shard the packs a second time, or there are several workers and no `batch_packs`.
        """
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1 and self.batch_packs is None:
            raise InputError(
                f"{worker.num_workers} workers would change the order of the packs; use PackedLoader, or pass the "
                "batch_size of the DataLoader to PackedDataset as batch_packs"
            )
        accelerate: Any = sys.modules.get("accelerate.state")
        if not self.loader_is_ours and accelerate is not None and accelerate.is_initialized():
            processes = accelerate.PartialState().num_processes
            if processes > 1:
                raise InputError(f"with {processes} processes, Accelerate would shard the packs a second time; {_REMEDY}")
        return self._iterate_rows(worker)

    def _iterate_rows(self, worker: Any) -> Iterator[Pack]:
        """Yield the remaining rows of the current epoch that this process, or one worker of its loader, reads."""
        self.skip_incomplete_epoch_end()
        epoch, batch = self._epoch, self.batch_size
        first = first_pack_number_of_rank(self._done, self.rank, self.world_size)
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rows = len(range(number, self.remaining_batches, workers)) * batch
        stored = self._stored
        most = _ROWS_OF_SMALL_SHARDS if self.packs < _ROWS_AT_ONCE * len(stored.files.record_counts) else _ROWS_AT_ONCE
        done = 0
        while done < rows:
            at_once = min(most, _FIRST_ROWS + 3 * done)  # few rows at first, so that the first batch is available soon
            at_once = -(-at_once // batch) * batch  # round up to complete batches
            batches, in_batch = np.divmod(np.arange(done, min(done + at_once, rows), dtype=np.int64), batch)
            numbers = first + self.world_size * ((number + workers * batches) * batch + in_batch)
            for row in self._convert_to_rows(stored.files.read_records(*self._reader.locate_and_open(epoch, numbers))):
                done += 1
                # The caller may save the position as soon as it receives the last row of a batch, so count the batch before
                # yielding this row.
                if worker is None and done % batch == 0:
                    self.advance_by_one_batch(done == rows)
                yield row


class PackedLoader(DataLoader[Any]):
    """A `DataLoader` of a `PackedDataset` that can save its exact position with any number of workers.

    Accelerate's `prepare` does not change this loader, because each process already reads its own packs. Accelerate's
    `save_state` and `load_state` include its position.

    Args:
        dataset: The packs of this process.
        batch_packs: The number of packs in a batch.
        collate: Makes a batch from a list of rows, as a `PackCollator` does.
        **options: Other options of the `DataLoader`, such as `num_workers`.

    Raises:
        InputError: `persistent_workers` is set, or the data set has too few packs for an update on every process.
    """

    _is_accelerate_prepared = True
    use_stateful_dataloader = True  # makes Accelerate save and restore the position

    def __init__(
        self, dataset: PackedDataset, batch_packs: int, collate: Callable[[list[Pack]], Any], **options: Any
    ) -> None:
        if options.get("persistent_workers"):
            raise InputError("persistent_workers: persistent workers would repeat the first epoch; omit the option")
        dataset.batch_packs = check_integer("batch_packs", batch_packs, 1)
        if len(dataset) == 0:
            raise InputError(
                f"{dataset.folder}: too few packs ({dataset.packs:,}) for {dataset.update_batches} batches of {batch_packs} "
                f"on each of {dataset.world_size} processes; use fewer processes, smaller batches, or more data"
            )
        self._packs = dataset
        # By default, a loader draws the seeds of its workers from the global random generator, which dropout also uses.
        # Dropout would then differ after a run is resumed, so the loader gets a generator of its own.
        options.setdefault("generator", torch.Generator())
        super().__init__(dataset, batch_size=batch_packs, collate_fn=collate, drop_last=True, **options)

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch.

        Raises:
            InputError: The data set was made for another process than this one.
        """
        packs = self._packs
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
            reads_all = packs.world_size == 1 and processes > 1
            if reads_all or (packs.world_size == processes and packs.rank != rank):
                raise InputError(
                    f"PackedDataset was made for process {packs.rank} of {packs.world_size}, but this is process {rank} of "
                    f"{processes}; {_REMEDY}"
                )
        packs.skip_incomplete_epoch_end()
        batches = packs.remaining_batches
        packs.loader_is_ours = True
        try:
            iterator = super().__iter__()
        finally:
            packs.loader_is_ours = False
        for number, batch in enumerate(iterator, 1):
            if self.num_workers > 0:
                packs.advance_by_one_batch(number == batches)
            yield batch

    def __len__(self) -> int:
        """Return the number of batches in a complete epoch."""
        return len(self._packs) // self._packs.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that this loader yielded."""
        return self._packs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a position that `state_dict` returned. See `PackedDataset.load_state_dict`."""
        self._packs.load_state_dict(state)
