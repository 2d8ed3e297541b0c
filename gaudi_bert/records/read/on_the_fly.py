"""Packing while training: batches of packs from unpacked records and a plan, without a packed folder.

The plan stays what it is (so does its proven efficiency); what changes from epoch to epoch is the order of
the groups, which sequences share a pack, and the order of the packs. All three are seeded permutations of
(seed, epoch), so epoch e is the same whoever reads it, and a position is two numbers: the epoch, and how many
batches of it are done. A group is read once per epoch, scanned and assigned as `write` does it, and its packs
are decoded straight into batches. Memory is one group, or two while the next one is read ahead.

World size W: the packs of an epoch are numbered through all its groups; rank r takes those whose number mod W
is r, and what does not fill a batch on every rank is left out (it is another remainder each epoch).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gaudi_bert.artefacts.plan import WritablePlan
from gaudi_bert.artefacts.references import InputFile
from gaudi_bert.common.arrays import AnyArray, IntArray, permutation, random_words
from gaudi_bert.common.dealing import Assignment, deal_sequences
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.files import list_record_files
from gaudi_bert.records.read.arrays import dense_packs
from gaudi_bert.records.read.global_order import check_rank, numbers_of_rank
from gaudi_bert.records.read.group import buffer_bytes, match_files, planned_files, read_group
from gaudi_bert.records.read.unpacked_index import IndexedSequences
from gaudi_bert.records.schema import PackedSchema


@dataclass(frozen=True)
class OnTheFlyGroup:
    """A group of the plan: its files by where they are, and pairs (lengths of a pack, how many such packs)."""

    files: Mapping[Path, InputFile]
    strategies: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def packs(self) -> int:
        """Packs that the group gives each epoch."""
        return sum(count for _, count in self.strategies)


def planned_groups(records: str | Path, plan: Path) -> tuple[WritablePlan, list[OnTheFlyGroup]]:
    """A plan, and its groups with their files."""
    content = WritablePlan.read(plan)
    paths = match_files(records, list_record_files(records), content)
    groups = [
        OnTheFlyGroup(planned_files(paths, content, number), group.strategies)
        for number, group in enumerate(content.each_group())
    ]
    return content, groups


class _Loaded(NamedTuple):
    group: IndexedSequences
    assignment: Assignment


class OnTheFlyPacking:
    """Batches of packs from unpacked records.

    Args:
        batch_packs: packs of one batch on one rank (B).
        seed: decides, with the number of the epoch, all pairings and orders.
        rank, world_size: which share of the packs this process takes.
        workers: threads that read a group; None for all cores.

    Attributes:
        packs: of an epoch, over all ranks.
        batches: batches of an epoch, on every rank.
        dropped_packs: packs of an epoch that no rank gets.
    """

    def __init__(
        self,
        groups: Sequence[OnTheFlyGroup],
        schema: PackedSchema,
        *,
        batch_packs: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int | None = None,
    ) -> None:
        check_rank(rank, world_size)
        if batch_packs < 1:
            raise InputError(f"batch_packs = {batch_packs}: at least 1 is needed")
        self.groups, self.schema, self.batch_packs, self.seed = tuple(groups), schema, batch_packs, seed
        self.rank, self.world_size, self.workers = rank, world_size, workers
        self.packs = packs = sum(group.packs for group in self.groups)
        self.batches = packs // (batch_packs * world_size)
        self.dropped_packs = packs - self.batches * batch_packs * world_size
        self._loads: dict[tuple[int, int], Future[_Loaded]] = {}
        self._pool = ThreadPoolExecutor(1)
        if self.batches == 0:
            raise InputError(
                f"the plan has {packs} packs, which do not fill one batch of {batch_packs} on {world_size} workers; "
                "take a smaller batch"
            )

    def epoch(self, number: int, first_batch: int = 0) -> Iterator[dict[str, AnyArray]]:
        """The batches of epoch `number` from `first_batch` on; groups that lie before it are not read.

        Each is the ten packed features as int32 and float32 matrices [B, L], [B, Q] or [B, S].
        """
        if not 0 <= first_batch <= self.batches:
            raise InputError(f"batch {first_batch}: an epoch has {self.batches} batches; 0 to {self.batches} is allowed")
        for batch in range(first_batch, self.batches):
            first, end = (each * self.batch_packs * self.world_size for each in (batch, batch + 1))
            yield self.rows(number, numbers_of_rank(first, end, self.rank, self.world_size))

    def rows(self, epoch: int, numbers: IntArray) -> dict[str, AnyArray]:
        """The packs of an epoch with these numbers (int64 [n], 0 .. packs - 1), whatever the rank, as `epoch` gives them.

        A group is kept until another is needed, so numbers that ascend from call to call read each group once.
        """
        order = permutation(len(self.groups), self.seed, "on-the-fly groups", epoch)
        ends = np.cumsum([self.groups[group].packs for group in order])
        positions = np.searchsorted(ends, numbers, side="right")
        parts, rows = [], []
        for position in np.unique(positions):
            loaded, chosen = self._loaded(epoch, order, int(position)), np.flatnonzero(positions == position)
            first = ends[position] - self.groups[order[position]].packs
            parts.append(dense_packs(self.schema, loaded.group, loaded.assignment, numbers[chosen] - first))
            rows.append(chosen)
        back = np.argsort(np.concatenate(rows))
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts])[back] for name in parts[0]}

    def stream(self, batches_done: int = 0) -> Iterator[dict[str, AnyArray]]:
        """Epoch after epoch without end, from the batch after the first `batches_done` ones of all."""
        first_epoch, first_batch = divmod(batches_done, self.batches)
        for number in itertools.count(first_epoch):
            yield from self.epoch(number, first_batch if number == first_epoch else 0)

    def _loaded(self, epoch: int, order: IntArray, position: int) -> _Loaded:
        """The group at a position of an epoch's order; the next one is then read ahead, and all others are forgotten."""
        needed = {(epoch, each): int(order[each]) for each in range(position, min(position + 2, len(order)))}
        self._loads = {key: load for key, load in self._loads.items() if key in needed}
        for key, group in needed.items():
            if key not in self._loads:
                self._loads[key] = self._pool.submit(self._load, epoch, group)
        return self._loads[(epoch, position)].result()

    def _load(self, epoch: int, number: int) -> _Loaded:
        """Read a group and deal its sequences to packs, in this epoch's way."""
        planned = self.groups[number]
        buffer = np.empty(buffer_bytes(planned.files), np.uint8)
        group = read_group(planned.files, self.schema.unpacked, buffer, self.workers, lambda _bytes: None)
        epoch_seed = int(random_words(1, self.seed, "on-the-fly epoch", epoch)[0])
        return _Loaded(group, deal_sequences(group.lengths, planned.strategies, epoch_seed, number))
