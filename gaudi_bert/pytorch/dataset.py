"""Packs as a PyTorch data set whose position can be stored, and resumed by any number of processes and workers.

An iteration is the rest of one epoch: process r of W yields the packs whose number mod W is r in the one global order
(`reading/global_order.py`), from the position of the data set on, and as many as every other process; the remainder (fewer
than a batch of all processes) is not read in this epoch. A position is (epoch, packs that all processes have read in it).

Workers of a `DataLoader` do not know how much was used of what they have read ahead. So the loader counts what it yields
(`PackedLoader`), and worker w of K reads the batches w, w + K, ... of its process, which is the order without workers.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gaudi_bert.artefacts.packed import Metadata, pack_kind, refuse_row_tables
from gaudi_bert.common.arrays import AnyArray, check_integer
from gaudi_bert.common.errors import InputError, short_repr
from gaudi_bert.common.files import format_location, is_in_store
from gaudi_bert.encoders.trial import Row
from gaudi_bert.reading.global_order import ORDER_VERSION, check_rank, first_pack_number_of_rank
from gaudi_bert.reading.streams import StoredPacks
from gaudi_bert.tables.packed_parquet import open_tables
from gaudi_bert.tfrecords.random_access import check_before_reading, open_packs
from gaudi_bert.tfrecords.wire.values import pack_rows

_FIRST_ROWS, _ROWS_AT_ONCE = 16, 128
_ROWS_OF_SMALL_SHARDS = 32  # all shards of one read are open at once, and each row may be of another shard
_MOST_OPEN_SHARDS = 256
_IDENTITY_DIGITS = 16
_THE_WAY = "read PackedDataset(folder, rank, world_size) with PackedLoader, or train with PackedTrainerMixin"


# --- sources of packs


class _MappedPacks(Dataset[Row]):
    """Packs by their numbers, shard after shard, for tools that need a map-style data set; few shards are open at a time."""

    def __init__(self, shards: Any, rows_of: Callable[[Any], Sequence[Row]]) -> None:
        self._shards, self._rows_of = shards, rows_of
        self._ends = np.cumsum(shards.sizes)
        self._open: dict[int, None] = {}  # the one that was used longest ago comes first

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which opens the shards itself."""
        return _MappedPacks, (self._shards, self._rows_of)

    def __len__(self) -> int:
        """All packs, whatever the number of processes: a sampler deals them."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> Row:
        """One pack; a negative number counts from the end."""
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Row]:
        """Several packs at once, which is how a `DataLoader` asks for a batch."""
        packs = np.asarray(numbers, np.int64)
        packs = np.where(packs < 0, packs + len(self), packs)
        if packs.size and not 0 <= packs.min() <= packs.max() < len(self):
            raise IndexError(f"pack {list(numbers)}: there are {len(self):,} packs")
        shards = np.searchsorted(self._ends, packs, side="right")
        records = packs - (self._ends - self._shards.sizes)[shards]
        rows, used = list(self._rows_of(self._shards.read(shards, records))), np.unique(shards).tolist()
        for shard in used:
            self._open.pop(shard, None)
            self._open[shard] = None
        while len(self._open) > max(_MOST_OPEN_SHARDS, len(used)):
            oldest = next(iter(self._open))
            del self._open[oldest]
            self._shards.close(oldest)
        return rows


def _open(folder: Path) -> tuple[StoredPacks, str, Callable[[Any], Sequence[Row]]]:
    """The packs of a folder, what distinguishes them from others, and what makes rows of what their files read."""
    if is_in_store(folder):
        raise InputError(
            f"{format_location(folder)}: PackedDataset reads folders of this machine; copy it here, or train with "
            "`gaudi-bert train`, which reads URLs"
        )
    kind = pack_kind(folder)
    tables = sorted(folder.glob("packed-*.parquet")) or ([] if kind else sorted(folder.glob("*.parquet")))
    if tables:
        sizes = [[path.name, path.stat().st_size] for path in tables]
        identity = hashlib.sha256(repr(sizes).encode("utf-8")).hexdigest()[:_IDENTITY_DIGITS]
        return open_tables(folder, tables), identity, list
    if kind is not None:
        metadata = Metadata.read(folder)
        check_before_reading(folder, metadata.shard_table)
        return open_packs(folder, metadata), metadata.identity(repr)[:_IDENTITY_DIGITS], _rows_of_packs
    refuse_row_tables(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder}: holds no packs; pack it with `gaudi-bert pack`")
    raise InputError(f"{folder}: no packed folder; check the path")


def _rows_of_packs(packs: Mapping[str, AnyArray]) -> list[Row]:
    """Rows, views of the ten packed features of B packs, under the names of packed tables.

    Positions of trailing pads count from 0, as if they were one more sequence; labels are -100 where no token was masked.
    """
    columns = pack_rows(packs)
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


# --- data set and loader


class PackedDataset(IterableDataset[Row]):
    """The packs of a folder, one row per pack.

    Args:
        folder: packed TFRecords or packed tables.
        rank, world_size: which share of the packs this process takes.
        seed: decides, with the number of the epoch, the order.
        batch_packs: packs of one batch of this process: the `batch_size` of the `DataLoader`. Needed with several
            workers; `PackedLoader` sets it.

    Attributes:
        packs: of an epoch, over all processes.
        update_batches: batches that are accumulated to one update; an epoch ends with a complete one.
        loader_is_ours: whether a `PackedLoader` begins to read it.

    Raises:
        InputError: the folder cannot be read, or `rank` or `batch_packs` is out of its range.
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
        self._stored, self._identity, self._rows_of = _open(self.folder)
        order = self._stored.order(seed)
        self._reader = self._stored.reader(order, rank, world_size)
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
        """The packs of all processes as a map-style data set, for tools that want one: `shuffle=True` is allowed there."""
        return _MappedPacks(self._stored.files, self._rows_of)

    @property
    def dropped_packs(self) -> int:
        """Packs of an epoch that no process gets, because they do not fill a batch on all of them."""
        return self.packs - len(self) * self.world_size

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; within it, the position stays."""
        if check_integer("epoch", epoch, 0) != self._epoch:
            self._epoch, self._done = int(epoch), 0

    def state_dict(self) -> dict[str, Any]:
        """The position, for any number of processes; a worker does not know what was used: take that of the loader."""
        if torch.utils.data.get_worker_info() is not None:
            raise InputError("a worker does not know which of its packs were used; take state_dict of the PackedLoader")
        position = {"epoch": self._epoch, "packs_done": self._done, "order": ORDER_VERSION}
        return {**position, "seed": self.seed, "data": self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken; one of other packs, of another seed or order, or without a position is refused."""
        state = state if isinstance(state, Mapping) else {}
        if state.get("data") != self._identity or state.get("seed") != self.seed:
            raise InputError(f"{self.folder}: the state was taken of other packs, or with another seed; give the same ones")
        if state.get("order") != ORDER_VERSION:
            raise InputError(
                f"{self.folder}: the state is a position in the order {short_repr(state.get('order'))}, this edition "
                f"reads in the order {ORDER_VERSION}; train again"
            )
        done = check_integer("packs_done", state.get("packs_done"), 0, self.packs)
        self._epoch, self._done = check_integer("epoch", state.get("epoch"), 0), done

    def __len__(self) -> int:
        """Rows of this process in a complete epoch."""
        return self._batches_after(0) * self.batch

    @property
    def batch(self) -> int:
        """Packs of one batch of this process."""
        return self.batch_packs or 1

    @property
    def remaining_batches(self) -> int:
        """Batches of this process in the rest of the epoch."""
        return self._batches_after(self._done)

    def _batches_after(self, done: int) -> int:
        updates = (self.packs - done) // (self.world_size * self.batch * self.update_batches)
        return updates * self.update_batches

    def note_batch(self, is_last: bool) -> None:
        """Count a batch that every process used; after the last one of an epoch the next epoch begins."""
        if is_last:
            self._epoch, self._done = self._epoch + 1, 0
        else:
            self._done += self.world_size * self.batch

    def begin(self) -> None:
        """Go to the next epoch where the rest of this one fills no batch of these processes."""
        if self._done and self.remaining_batches == 0:
            self._epoch, self._done = self._epoch + 1, 0

    def __iter__(self) -> Iterator[Row]:
        """Rows of this process (of this worker) to the end of the epoch; refused where something would shard them again."""
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1 and self.batch_packs is None:
            raise InputError(
                f"{worker.num_workers} workers would change the order of the packs: use PackedLoader, or give PackedDataset "
                "the batch_size of the DataLoader as batch_packs"
            )
        accelerate: Any = sys.modules.get("accelerate.state")
        if not self.loader_is_ours and accelerate is not None and accelerate.is_initialized():
            processes = accelerate.PartialState().num_processes
            if processes > 1:
                raise InputError(f"{processes} processes: Accelerate would shard the packs a second time; {_THE_WAY}")
        return self._rows(worker)

    def _rows(self, worker: Any) -> Iterator[Row]:
        self.begin()
        epoch, batch = self._epoch, self.batch
        first = first_pack_number_of_rank(self._done, self.rank, self.world_size)
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rows = len(range(number, self.remaining_batches, workers)) * batch
        stored = self._stored
        most = _ROWS_OF_SMALL_SHARDS if self.packs < _ROWS_AT_ONCE * len(stored.files.sizes) else _ROWS_AT_ONCE
        done = 0
        while done < rows:
            at_once = min(most, _FIRST_ROWS + 3 * done)  # few at first, so that the first rows come soon
            at_once = -(-at_once // batch) * batch  # complete batches
            batches, in_batch = np.divmod(np.arange(done, min(done + at_once, rows), dtype=np.int64), batch)
            numbers = first + self.world_size * ((number + workers * batches) * batch + in_batch)
            for row in self._rows_of(stored.files.read(*self._reader.locate(epoch, numbers))):
                done += 1
                if worker is None and done % batch == 0:  # before the last row of a batch is yielded, so that it counts
                    self.note_batch(done == rows)
                yield row


class PackedLoader(DataLoader[Any]):
    """A `DataLoader` of a `PackedDataset` whose position is exact with any number of workers.

    `collate` makes a batch of rows, as a `PackCollator` does, and `options` are those of the `DataLoader`; persistent
    workers are refused. `accelerator.prepare` leaves it as it is: each process has its share already. `save_state` and
    `load_state` of Accelerate keep its position.
    """

    _is_accelerate_prepared = True
    use_stateful_dataloader = True  # so Accelerate asks it for its state

    def __init__(
        self, dataset: PackedDataset, batch_packs: int, collate: Callable[[list[Row]], Any], **options: Any
    ) -> None:
        if options.get("persistent_workers"):
            raise InputError("persistent_workers: they would read the first epoch again and again; omit it")
        dataset.batch_packs = check_integer("batch_packs", batch_packs, 1)
        if len(dataset) == 0:
            raise InputError(
                f"{dataset.folder}: too few packs ({dataset.packs:,}) for {dataset.update_batches} batches of {batch_packs} "
                f"on each of {dataset.world_size} processes; use fewer processes, smaller batches, or more data"
            )
        self._packs = dataset
        options.setdefault("generator", torch.Generator())  # seeds of workers: dropout draws the same when a run is taken up
        super().__init__(dataset, batch_size=batch_packs, collate_fn=collate, drop_last=True, **options)

    def __iter__(self) -> Iterator[Any]:
        """Batches to the end of the epoch; a data set that is the share of another process is refused."""
        packs = self._packs
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
            reads_all = packs.world_size == 1 and processes > 1
            if reads_all or (packs.world_size == processes and packs.rank != rank):
                raise InputError(
                    f"PackedDataset is the share of process {packs.rank} of {packs.world_size}, and this is process {rank} "
                    f"of {processes}; {_THE_WAY}"
                )
        packs.begin()
        batches = packs.remaining_batches
        packs.loader_is_ours = True
        try:
            iterator = super().__iter__()
        finally:
            packs.loader_is_ours = False
        for number, batch in enumerate(iterator, 1):
            if self.num_workers > 0:
                packs.note_batch(number == batches)
            yield batch

    def __len__(self) -> int:
        """Batches of a complete epoch."""
        return len(self._packs) // self._packs.batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that the loader yielded."""
        return self._packs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken; as of `PackedDataset`."""
        self._packs.load_state_dict(state)
