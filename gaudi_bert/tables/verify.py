"""The stage `verify` for a packed table: proof that every row is there once, value for value.

Group by group, the rows of the table are read again and compared with its shards (`group_proof`). The rest is described in
`proof.folder`, and for parts in `proof.parts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from gaudi_bert.artefacts.base import NOTES_NAME, manifest_path
from gaudi_bert.artefacts.completion import Signature, first_difference, read_signature, settings_path
from gaudi_bert.artefacts.pack_kinds import RowTables, row_table_path
from gaudi_bert.artefacts.packed import TableGroupManifest, TableMetadata, TableVerification
from gaudi_bert.artefacts.results import ByRowLength, GroupsResult, StageOutput
from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.artefacts.store.mirrored_folder import exists, fetch, is_mirrored, local_copy, mirrored, names_in
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import in_store, shown_location
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import section_from_mapping
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.proof.folder import (
    Proof,
    ProvenGroup,
    VerifiedFolder,
    check_inputs,
    check_numbers,
    check_same,
    check_shards,
    read_manifest,
)
from gaudi_bert.proof.parts import verify_packs
from gaudi_bert.tables.group_proof import prove_group
from gaudi_bert.tables.groups import GroupedTable, TableSums, open_table, table_metadata
from gaudi_bert.tables.sources import table_files
from gaudi_bert.tfrecords.files import input_file

_VerifiedTable: TypeAlias = StageOutput[TableVerification] | GroupsResult


def verify_table(source: str | Path, packed: Path, run: StageRun) -> _VerifiedTable | ByRowLength[_VerifiedTable]:
    """Verify a packed table against its table; of rows of several lengths, the packed table of each."""
    if exists(RowTables.path_in(packed), run.store):
        return _verify_row_lengths(source, packed, run)
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
        check_shards(here, metadata)
        again = run.does_all and is_mirrored(here)  # a store counts in seconds, and a copied table is always new
        return verify_packs(_Folder(table, here, metadata, run), replace(run, overwrite=run.overwrite or again))


def _verify_row_lengths(source: str | Path, packed: Path, run: StageRun) -> ByRowLength[_VerifiedTable]:
    """Each is proven to hold the sequences between two lengths; all are of one packing, so each length is in one of them."""
    with local_copy(source, run.store) as table, mirrored(packed, run.store) as folder:
        lengths = _checked_lengths(folder)
        return ByRowLength({length: verify_rows(table, row_table_path(folder, length), run) for length in lengths})


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
class _Folder:
    """A packed table and the table that it is held to."""

    source: str | Path
    packed: Path
    metadata: TableMetadata
    run: StageRun

    @cached_property
    def verified(self) -> VerifiedFolder[TableVerification]:
        """Where the result is stored."""
        sizes = {file: file.stat().st_size for file in table_files(self.source)}
        return VerifiedFolder(self.packed, self.metadata, sizes, TableVerification, self.run.reporter)

    def files_of(self, group: int) -> Iterator[Path]:
        """The files that are read for a group, which has rows of any of the table."""
        yield from (self.packed / name for name in self._shards_of(group))
        yield manifest_path(self.packed / NOTES_NAME, group)
        yield from self.verified.inputs

    def _shards_of(self, group: int) -> list[str]:
        table = self.metadata.shard_table
        first = int(table.group_firsts[group])
        return [table.name(shard) for shard in range(first, first + int(table.group_sizes[group]))]

    @cached_property
    def _rows(self) -> _OpenedRows:
        return _open_rows(self.source, self.packed, self.metadata, self.run.reporter)

    def prove(self, groups: Sequence[int], in_parts: bool = False) -> Iterator[ProvenGroup]:
        """Read groups, compare each with its rows, and hold it to its manifest; every group has its own bound."""
        if not groups:
            return
        rows, notes = self._rows, self.packed / NOTES_NAME
        total = sum(share.part.rows for group in groups for share in rows.table.groups[group])
        with self.run.reporter.task("verify", total, "rows") as task:
            for group in groups:
                stored, _ = read_manifest(TableGroupManifest, notes, group)
                names = self._shards_of(group)
                right = prove_group(
                    self.packed, rows.table, stored, group, names, rows.settings, rows.signature_sha256, self.run.workers
                )
                check_same(manifest_path(notes, group), stored, right)
                yield ProvenGroup(group, right.sequences, right.packs, right.tokens, right.lower_bound)
                task.advance(right.rows)

    def add_up(self, groups: Iterable[ProvenGroup]) -> Proof[TableVerification]:
        """What the folder must state, by the manifests of all groups."""
        sums = TableSums()
        for proven in groups:
            sums.add(*read_manifest(TableGroupManifest, self.packed / NOTES_NAME, proven.group))
        rows = self._rows
        right = table_metadata(rows.table, rows.settings, sums, rows.inputs, self.metadata.tool_version)
        return Proof(right, TableVerification.of(right))


@dataclass(frozen=True)
class _OpenedRows:
    """The table, with the settings by which it was packed.

    Attributes:
        inputs: bytes and CRC-32C of its files.
        signature_sha256: of the settings and inputs that it was packed from.
    """

    table: GroupedTable
    settings: TableSettings
    inputs: dict[str, dict[str, int]]
    signature_sha256: str


def _open_rows(source: str | Path, packed: Path, metadata: TableMetadata, reporter: Reporter) -> _OpenedRows:
    """Open both sides, and check what needs no reading of rows."""
    path = settings_path(packed, TableMetadata.path_in(packed))
    signature = read_signature(path)
    settings = section_from_mapping(TableSettings, signature.settings, str(path))
    present = [input_file(file) for file in table_files(source)]
    inputs = {file.name: file.identity for file in present}
    check_inputs(packed, metadata.inputs, present, metadata.remedy)
    if signature.inputs != inputs:
        raise FailedError(f"{path}: its inputs are not those of metadata.json; {metadata.remedy}")
    check_numbers(packed, metadata)
    table, groups = open_table(source, settings, reporter), len(metadata.shard_table.group_firsts)
    if groups != len(table.groups):
        raise FailedError(f"{packed}: {groups} groups, the table gives {len(table.groups)}; {metadata.remedy}")
    return _OpenedRows(table, settings, inputs, signature.sha256)
