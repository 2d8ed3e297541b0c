"""The stage `verify` for a packed table: proof that every row is there once, value for value, and in order where it must be.

Group by group, the rows of the table are read again and what the packs must hold follows from them and the settings; each
shard is read, its CRC compared with metadata.json, and every slot of it with the row that it claims to be of.
Every sequence must be there exactly once, and metadata.json and the manifests must agree with what was read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished, read_signature, settings_path
from gaudi_bert.artefacts.packed import (
    METADATA_NAME,
    VERIFICATION_NAME,
    TableGroupManifest,
    TableMetadata,
    TableVerification,
    TooLongRows,
    manifest_path,
)
from gaudi_bert.artefacts.store.copies import local_copy
from gaudi_bert.artefacts.store.mirrored_folder import fetch, is_mirrored, mirrored, names_in, remove
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.files import read_file
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import section_from_mapping
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.records.tables.compare import StoredPacks, check_scalars, check_tokens, stored_packs
from gaudi_bert.records.tables.rows import GroupRows, RowSequences, read_rows, value_codes
from gaudi_bert.records.tables.sources import file_identity, table_files
from gaudi_bert.stages.results import Made
from gaudi_bert.stages.tables.table_groups import GroupedTable, layout_of, open_table, sequences_of


def verify_table(
    source: str | Path,
    packed: Path,
    *,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
    store: StoreSettings | None = None,
) -> Made[TableVerification]:
    """Verify a packed table against the table that it was made from.

    Args:
        packed: the packed folder, whole.
    """
    with local_copy(source, store) as table, mirrored(packed, store) as folder:
        if is_mirrored(folder):
            fetch(*(folder / name for name in names_in(folder)))
        return _verify(table, folder, reporter, overwrite or is_mirrored(folder), workers)


def _verify(
    source: str | Path, packed: Path, reporter: Reporter, overwrite: bool, workers: int | None
) -> Made[TableVerification]:
    metadata = TableMetadata.read(packed)
    _check_folder(packed, metadata)
    out, files = packed / VERIFICATION_NAME, table_files(source).files
    sha256 = hashlib.sha256(read_file(packed / METADATA_NAME)).hexdigest()
    sizes = {file.name: file.stat().st_size for file in files}
    signature = Signature("verify", {}, {"metadata_sha256": sha256, "files": sizes})
    if not overwrite and is_finished(out, out, signature, [*files, *(packed / shard.name for shard in metadata.shards)]):
        reporter.say(f"{packed}: already verified, nothing to do")
        return Made(TableVerification.read(packed), skipped=True)
    is_writable = os.access(packed, os.W_OK)
    if is_writable:
        remove(out, settings_path(out))
        begin_artefact(out, out, signature)
    verification = _prove(source, packed, metadata, reporter, workers)
    if is_writable:
        verification.write(out)
    return Made(verification)


def _check_folder(packed: Path, metadata: TableMetadata) -> None:
    """The folder holds the shards of the metadata, and no other that a reader might take for its own."""
    for shard in metadata.shards:
        if not (packed / shard.name).is_file():
            raise FailedError(f"{packed / shard.name}: the shard is missing; pack the table again")
    for path in sorted(packed.glob("packed-*")):
        if path.name not in {shard.name for shard in metadata.shards}:
            raise FailedError(f"{path}: is not in metadata.json; remove it, or pack the table again")


def _prove(
    source: str | Path, packed: Path, metadata: TableMetadata, reporter: Reporter, workers: int | None
) -> TableVerification:
    path = settings_path(packed)
    settings = section_from_mapping(TableSettings, read_signature(path).settings, str(path))
    inputs = {entry.name: {"bytes": entry.bytes, "crc32c": entry.crc32c} for entry in metadata.inputs}
    for file in table_files(source).files:
        if inputs.pop(file.name, None) != file_identity(file):
            raise FailedError(f"{file}: is not the file that was packed, or has changed since; pack the table again")
    if inputs:
        raise FailedError(f"{source}: file {next(iter(inputs))} was packed but is missing now; bring it back")
    table = open_table(source, settings, reporter)
    shards: list[list[Path]] = [[] for _ in table.groups]
    for shard in metadata.shards:
        if file_identity(packed / shard.name) != {"bytes": shard.bytes, "crc32c": shard.crc32c}:
            raise FailedError(f"{packed / shard.name}: its CRC-32C differs from metadata.json; pack the table again")
        shards[int(shard.name.split("-")[1])].append(packed / shard.name)
    with reporter.task("verify", table.rows, "rows") as task:
        groups = []
        for number in range(len(table.groups)):
            groups.append(_prove_group(table, number, packed, shards[number], settings, workers))
            task.advance(groups[-1].rows)
    return _verification(packed, metadata, groups, table)


def _prove_group(
    table: GroupedTable, number: int, packed: Path, shards: Sequence[Path], settings: TableSettings, workers: int | None
) -> TableVerification:
    """Hold the shards of a group to its rows, and its manifest to what was found."""
    keep_values = not settings.index_only
    rows = read_rows(table.groups[number], table.read_columns, keep_values=keep_values, threads=workers != 1)
    sequences, effect = sequences_of(table, rows, settings)
    layout = layout_of(table, settings)
    positions = np.full(sequences.rows.size, -1, np.int64)
    of_pack = np.full(sequences.rows.size, -1, np.int64)
    packs = seen = 0
    for path in shards:
        for stored in stored_packs(path, layout):
            members = _members(stored, rows, sequences, settings, positions)
            positions[members] = seen + np.arange(members.size)
            of_pack[members] = packs + np.repeat(np.arange(stored.offsets.size - 1), np.diff(stored.offsets))
            packs, seen = packs + stored.offsets.size - 1, seen + members.size
            _check_pack_numbers(stored, settings, packs)
            if keep_values:
                check_tokens(stored, layout, rows, sequences.rows[members])
                check_scalars(stored, layout, rows, sequences.rows[members])
    if (positions < 0).any():
        row = int(rows.numbers[sequences.rows[np.argmax(positions < 0)]])
        raise FailedError(f"{packed}: row {row} of the table is in no pack; pack the table again")
    if settings.keep_together is not None:
        _check_together(packed, rows, sequences, settings.keep_together, positions, of_pack)
    proven = TableVerification(
        rows=rows.lengths.size,
        sequences=seen,
        tokens=int(sequences.lengths.sum(dtype=np.int64)),
        packs=packs,
        shards=len(shards),
        groups=1,
        columns=tuple(table.columns.names) if keep_values else (),
        index_only=settings.index_only,
        too_long=TooLongRows(policy=settings.too_long, **effect._asdict()),
    )
    manifest = TableGroupManifest.read(manifest_path(packed, number))
    _compare_figures(manifest, proven, f"the manifest of group {number}", packed)
    return proven


def _members(
    stored: StoredPacks,
    rows: GroupRows,
    sequences: RowSequences,
    settings: TableSettings,
    positions: IntArray,
) -> IntArray:
    """Which sequences of the group these packs hold; none may have been found before."""
    of_row = np.searchsorted(rows.numbers, stored.indices)
    known = rows.numbers[np.minimum(of_row, rows.numbers.size - 1)] == stored.indices
    first_of_row = np.searchsorted(sequences.rows, of_row)
    members = first_of_row + stored.starts // settings.max_sequence_length
    inside = np.minimum(members, sequences.rows.size - 1)
    right = known & (members == inside) & (sequences.rows[inside] == of_row)
    right &= (sequences.starts[inside] == stored.starts) & (sequences.lengths[inside] == stored.lengths)
    if not right.all():
        wrong = int(np.argmin(right))
        raise FailedError(f"{stored.place}: row {stored.indices[wrong]} is not what the table has; pack the table again")
    if (positions[members] >= 0).any() or np.unique(members).size < members.size:
        raise FailedError(f"{stored.place}: holds a row that is in another pack too; pack the table again")
    return members


def _check_pack_numbers(stored: StoredPacks, settings: TableSettings, packs: int) -> None:
    """The depth holds, and an index numbers its packs."""
    deepest = int(np.diff(stored.offsets).max(initial=0))
    if settings.depth != "max" and deepest > settings.depth:
        raise FailedError(f"{stored.place}: a pack holds {deepest} sequences, the depth is {settings.depth}; pack again")
    if settings.index_only:
        numbers = stored.table.column("row").to_numpy()
        if not np.array_equal(numbers, np.arange(packs - numbers.size, packs)):
            raise FailedError(f"{stored.place}: row does not number the packs of the group; pack the table again")


def _check_together(
    packed: Path,
    rows: GroupRows,
    sequences: RowSequences,
    column: str,
    positions: IntArray,
    of_pack: IntArray,
) -> None:
    """Rows with one value are in one pack, side by side and in their order."""
    codes = value_codes(rows.scalars.column(column), column)[sequences.rows]
    order = np.argsort(codes, kind="stable")
    same = np.diff(codes[order]) == 0
    parted = same & ((np.diff(of_pack[order]) != 0) | (np.diff(positions[order]) != 1))
    if parted.any():
        row = int(rows.numbers[sequences.rows[order[np.argmax(parted)]]])
        raise FailedError(f"{packed}: row {row} of the table is not beside the next of its {column}; pack the table again")


def _compare_figures(stored: object, proven: TableVerification, what: str, packed: Path) -> None:
    for key in ("rows", "sequences", "tokens", "packs", "too_long"):
        claimed, actual = getattr(stored, key), getattr(proven, key)
        if claimed != actual:
            raise FailedError(f"{packed}: {what} says {key} {claimed}, found were {actual}; pack the table again")


def _verification(
    packed: Path, metadata: TableMetadata, groups: Sequence[TableVerification], table: GroupedTable
) -> TableVerification:
    totals = {
        key: sum(getattr(group, key) for group in groups) for key in ("rows", "sequences", "tokens", "packs", "shards")
    }
    proven = TableVerification(
        **totals,
        groups=len(groups),
        columns=groups[0].columns,
        index_only=metadata.index_only,
        too_long=TooLongRows.total(metadata.too_long.policy, [group.too_long for group in groups]),
    )
    if proven.rows != table.rows:
        raise FailedError(f"{packed}: {proven.rows} rows were found, the table has {table.rows}; pack the table again")
    _compare_figures(metadata, proven, "metadata.json", packed)
    return proven
