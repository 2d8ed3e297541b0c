"""The stage `verify` for a packed table: proof that every row is there once, value for value.

Group by group, the rows of the table are read again and compared with its shards (`group_proof`). The flow is that of
`packs.verify`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from gaudi_bert.artefacts.completion import Signature, first_difference, read_signature, settings_path
from gaudi_bert.artefacts.packed import GroupManifest, PackedSums, RowTables, TableMetadata, Verification, row_table_path
from gaudi_bert.artefacts.results import ByRowLength, GroupsResult, StageOutput
from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.artefacts.store.mirrored_folder import exists, fetch, local_copy, mirrored, names_in
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import in_store, shown_location
from gaudi_bert.config.pipeline import section_from_mapping
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.packs.folder import PackedFolder, check_inputs
from gaudi_bert.packs.verify import ReadGroup, verify
from gaudi_bert.tables.group_proof import prove_group
from gaudi_bert.tables.groups import GroupedTable, open_table, table_metadata
from gaudi_bert.tables.sources import table_files
from gaudi_bert.tfrecords.files import input_file

_VerifiedTable: TypeAlias = StageOutput[Verification] | GroupsResult


def verify_table(source: str | Path, packed: Path, run: StageRun) -> _VerifiedTable | ByRowLength[_VerifiedTable]:
    """Verify a packed table against its table; of rows of several lengths, the packed table of each."""
    if exists(RowTables.path_in(packed), run.store):
        # Each is proven to hold the sequences between two lengths; all are of one packing, so each length is in one of them.
        with local_copy(source, run.store) as table, mirrored(packed, run.store) as folder:
            lengths = _checked_lengths(folder)
            return ByRowLength({length: verify_rows(table, row_table_path(folder, length), run) for length in lengths})
    return verify_rows(source, packed, run)


def verify_rows(source: str | Path, packed: Path, run: StageRun) -> _VerifiedTable:
    """Verify the packed table of one length."""
    if not run.does_all:
        for side in (source, packed):
            if in_store(side):
                raise InputError(
                    f"{shown_location(side)}: parts of a table are not verified in a store, where each part would copy the "
                    "complete table; verify it at once, without --shard and --finish"
                )
    with local_copy(source, run.store) as table, mirrored(packed, run.store) as here:
        fetch(*(here / name for name in names_in(here)))
        metadata = TableMetadata.read(here)
        return verify(_TableReader(table, here, metadata, run), run)


def _checked_lengths(folder: Path) -> tuple[int, ...]:
    """The lengths of rows, once their packed tables are known to be of one packing, and no other is there."""
    path = RowTables.path_in(folder)
    packing = settings_path(folder, path)
    fetch(path, packing, *(folder / name for name in names_in(folder)))
    lengths, common = RowTables.read(folder).row_lengths, read_signature(packing)
    known = {row_table_path(folder, length): length for length in lengths}
    settings = {**common.settings, "row_lengths": lengths, "max_sequence_length": max(lengths)}
    _check_signature(packing, Signature("pack-rows", settings, common.inputs), path)
    foreign = {folder / name.split("/")[0] for name in names_in(folder) if name.startswith("rows-")} - known.keys()
    if foreign:
        raise FailedError(f"{min(foreign)}: is not in {path}; remove it, or {RowTables.remedy}")
    for table, length in known.items():
        right = Signature("pack-table", {**settings, "max_sequence_length": length}, common.inputs)
        _check_signature(settings_path(table, TableMetadata.path_in(table)), right, packing)
    return lengths


def _check_signature(path: Path, right: Signature, source: Path) -> None:
    difference = first_difference(read_signature(path).as_json(), right.as_json(), f"by {source}")
    if difference is not None:
        raise FailedError(f"{path}: {difference}; {RowTables.remedy}")


@dataclass(frozen=True)
class _TableReader:
    """Reads the rows of a table and the shards of its packs; a `GroupReader`."""

    source: str | Path
    packed: Path
    packed_metadata: TableMetadata
    run: StageRun

    @property
    def folder(self) -> PackedFolder:
        """The packed folder."""
        return PackedFolder(self.packed, self.packed_metadata)

    @cached_property
    def _signature(self) -> Signature:
        """The settings and inputs by which it was packed; the inputs are those that are there."""
        path = settings_path(self.packed, TableMetadata.path_in(self.packed))
        signature, metadata = read_signature(path), self.packed_metadata
        present = [input_file(file) for file in table_files(self.source)]
        check_inputs(self.packed, metadata.inputs, present, metadata.remedy)
        if signature.inputs != {file.name: file.identity for file in present}:
            raise FailedError(f"{path}: its inputs are not those of metadata.json; {metadata.remedy}")
        return signature

    @cached_property
    def _settings(self) -> TableSettings:
        path = settings_path(self.packed, TableMetadata.path_in(self.packed))
        return section_from_mapping(TableSettings, self._signature.settings, str(path))

    @cached_property
    def _table(self) -> GroupedTable:
        table, groups = open_table(self.source, self._settings, self.run.reporter), len(self.folder.groups)
        if groups != len(table.groups):
            raise FailedError(
                f"{self.packed}: {groups} groups, the table gives {len(table.groups)}; {self.packed_metadata.remedy}"
            )
        return table

    def read(self, manifests: Iterable[GroupManifest]) -> Iterator[ReadGroup]:
        """Read groups, and compare each with its rows; every group has its own bound."""
        table, settings, sha256 = self._table, self._settings, self._signature.sha256
        rows = sum(part.rows for group in self.run.share_of(table.groups) for part in group)
        with self.run.reporter.task("verify", rows, "rows") as task:
            for stored in manifests:
                names = [path.name for path in self.folder.shards_of(stored.group)]
                right = prove_group(self.packed, table, stored, names, settings, sha256, self.run.workers)
                yield ReadGroup(stored, right, right.lower_bound)
                task.advance(right.rows)

    def metadata(self, sums: PackedSums) -> TableMetadata:
        """Return what metadata.json must state by the manifests of all groups."""
        inputs, version = self._signature.inputs, self.packed_metadata.tool_version
        return table_metadata(self._table, self._settings, sums, inputs, version)
