"""What a folder of packs holds, behind one interface: packed TFRecords, packed tables, or unpacked records and their plan.

A source knows how many packs an epoch has, and gives the packs of an epoch by their numbers in the one global order
(`records/read/global_order.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from gaudi_bert.artefacts.names import METADATA_NAME
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.pytorch.rows import Row, rows_of_packs
from gaudi_bert.records.packed_folder import read_metadata
from gaudi_bert.records.predecessor import predecessor_metadata_path
from gaudi_bert.records.read.global_order import WINDOW_PACKS, GlobalOrder
from gaudi_bert.records.read.on_the_fly import OnTheFlyPacking
from gaudi_bert.records.read.planned import planned_groups
from gaudi_bert.records.read.random_access import RecordFiles
from gaudi_bert.records.schema import PackedSchema
from gaudi_bert.records.tables.packed_rows import TableFiles

__all__ = ["PackSource", "open_packs"]


class PackSource(Protocol):
    """Packs by their numbers.

    Attributes:
        packs: of an epoch.
        identity: what distinguishes these packs from others.
    """

    packs: int
    identity: str

    def rows(self, epoch: int, numbers: IntArray) -> Sequence[Row]:
        """The packs of an epoch with these numbers, int64 [n]."""


def open_packs(folder: str | Path, seed: int, plan: Path | None = None) -> PackSource:
    """Find out what lies in `folder`, and open it.

    Raises:
        InputError: nothing that can be read lies there, or unpacked records come without a plan.
    """
    folder = Path(folder)
    if plan is not None:
        return _PlannedPacks(folder, plan, seed)
    if (folder / METADATA_NAME).exists() or predecessor_metadata_path(folder).exists():
        tables = sorted(folder.glob("packed-*.parquet"))
        return _TablePacks(tables, seed) if tables else _RecordPacks(folder, seed)
    tables = sorted(folder.glob("packed-*.parquet")) or sorted(folder.glob("*.parquet"))
    if tables:
        return _TablePacks(tables, seed)
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(
            f"{folder}: holds no packs; pack it with `gaudi-bert pack`, or give unpacked records their plan.json (plan=)"
        )
    raise InputError(f"{folder}: no packed folder; check the path")


class _RecordPacks:
    def __init__(self, folder: Path, seed: int) -> None:
        metadata = read_metadata(folder)
        for shard in metadata.shards:
            path = folder / shard.name
            if not path.is_file() or path.stat().st_size != shard.bytes:
                raise InputError(
                    f"{path}: is missing or not of {shard.bytes:,} bytes, as the metadata says; write the packs again"
                )
        paths = [folder / shard.name for shard in metadata.shards]
        counts = [shard.packs for shard in metadata.shards]
        self._files = RecordFiles(paths, PackedSchema.of(metadata), counts)
        self._order = GlobalOrder(counts, seed, WINDOW_PACKS)
        self.packs = self._order.packs
        self.identity = _digest([shard.model_dump() for shard in metadata.shards])

    def rows(self, epoch: int, numbers: IntArray) -> Sequence[Row]:
        return rows_of_packs(self._files.read(*self._order.places(epoch, numbers)))


class _TablePacks:
    def __init__(self, paths: Sequence[Path], seed: int) -> None:
        self._files = TableFiles(paths)
        self._order = GlobalOrder(self._files.sizes, seed, self._files.window_rows)
        self.packs = self._order.packs
        self.identity = _digest([[path.name, path.stat().st_size] for path in paths])

    def rows(self, epoch: int, numbers: IntArray) -> Sequence[Row]:
        return self._files.read(*self._order.places(epoch, numbers))


class _PlannedPacks:
    def __init__(self, records: Path, plan: Path, seed: int) -> None:
        content, self._groups = planned_groups(records, plan)
        self._schema, self._seed = PackedSchema.of(content), seed
        self._packing: tuple[int, OnTheFlyPacking] | None = None
        self.packs = sum(group.packs for group in self._groups)
        self.identity = content.sha256

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packing": None}

    def rows(self, epoch: int, numbers: IntArray) -> Sequence[Row]:
        if self._packing is None or self._packing[0] != os.getpid():  # its thread does not live on in a forked worker
            packing = OnTheFlyPacking(self._groups, self._schema, batch_packs=1, seed=self._seed)
            self._packing = os.getpid(), packing
        return rows_of_packs(self._packing[1].rows(epoch, numbers))


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode("utf-8")).hexdigest()[:16]
