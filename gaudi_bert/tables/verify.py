"""The stage `verify` for a packed table: proof that every row is there once, value for value.

Group by group, the rows of the table are read again. Each shard is read, its CRC compared with metadata.json, and every slot
with the row that it claims to be of. Every sequence must be there exactly once. The other steps are those of `packed_proof`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.completion import read_signature, settings_path
from gaudi_bert.artefacts.packed import TableGroupManifest, TableMetadata, TableVerification
from gaudi_bert.artefacts.references import NOTES_NAME, manifest_path
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.shards import Shard
from gaudi_bert.artefacts.store.copies import local_copy
from gaudi_bert.artefacts.store.mirrored_folder import fetch, is_mirrored, mirrored, names_in
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import section_from_mapping
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.packing.algorithms import depth_of
from gaudi_bert.tables.compare import StoredPacks, check_scalars, check_tokens, stored_packs
from gaudi_bert.tables.groups import (
    GroupedTable,
    TableSums,
    layout_of,
    open_table,
    row_figures,
    sequences_of,
    table_metadata,
)
from gaudi_bert.tables.rows import GroupRows, RowSequences, read_rows
from gaudi_bert.tables.sources import input_file, table_files
from gaudi_bert.tfrecords import packed_proof as proof


def verify_table(
    source: str | Path,
    packed: Path,
    *,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
    store: StoreSettings | None = None,
) -> StageOutput[TableVerification]:
    """Verify a packed table against its table."""
    with local_copy(source, store) as table, mirrored(packed, store) as folder:
        fetch(*(folder / name for name in names_in(folder)))
        metadata = TableMetadata.read(folder)
        proof.check_shards(folder, metadata)
        sizes = {file: file.stat().st_size for file in table_files(table)}
        prove = partial(_prove, table, folder, metadata, reporter, workers)
        again = overwrite or is_mirrored(folder)  # a store counts in seconds, and a copied table is always new
        return proof.verify_folder(folder, metadata, sizes, TableVerification, prove, reporter=reporter, overwrite=again)


def _prove(
    source: str | Path, packed: Path, metadata: TableMetadata, reporter: Reporter, workers: int | None
) -> proof.Proof[TableVerification]:
    """Compare both sides group by group, and compute the manifests and the metadata again from what was read."""
    notes, path = packed / NOTES_NAME, settings_path(packed, TableMetadata.path_in(packed))
    signature = read_signature(path)
    settings = section_from_mapping(TableSettings, signature.settings, str(path))
    present = [input_file(file) for file in table_files(source)]
    inputs = {file.name: file.identity for file in present}
    proof.check_inputs(packed, metadata.inputs, present, metadata.remedy)
    if signature.inputs != inputs:
        raise FailedError(f"{path}: its inputs are not those of metadata.json; {metadata.remedy}")
    proof.check_numbers(packed, metadata)
    table, shards = open_table(source, settings, reporter), metadata.shard_table
    if len(shards.group_firsts) != len(table.groups):
        raise FailedError(
            f"{packed}: {len(shards.group_firsts)} groups, the table gives {len(table.groups)}; {metadata.remedy}"
        )
    groups = TableSums()
    with reporter.task("verify", table.rows, "rows") as task:
        for number, (first, count) in enumerate(zip(shards.group_firsts, shards.group_sizes, strict=True)):
            names = [shards.name(shard) for shard in range(first, first + count)]
            stored, crc32c = proof.read_manifest(TableGroupManifest, notes, number)
            manifest = _prove_group(packed, table, stored, number, names, settings, signature.sha256, workers)
            proof.check_same(manifest_path(notes, number), stored, manifest)
            groups.add(manifest, crc32c)
            task.advance(manifest.rows)
    right = table_metadata(table, settings, groups, inputs, metadata.tool_version)
    return proof.Proof(right, TableVerification.of(right))


def _prove_group(
    packed: Path,
    table: GroupedTable,
    claimed: TableGroupManifest,
    number: int,
    shards: Sequence[str],
    settings: TableSettings,
    signature_sha256: str,
    workers: int | None,
) -> TableGroupManifest:
    """Compare the shards of a group with its rows; its manifest, computed again, with what only the stored one claims."""
    keep_values = not settings.index_only
    rows = read_rows(table.groups[number], table.read_columns, keep_values=keep_values, threads=workers != 1)
    sequences, too_long = sequences_of(table, rows, settings)
    layout = layout_of(table, settings)
    positions = np.full(sequences.rows.size, -1, np.int64)
    of_pack = np.full(sequences.rows.size, -1, np.int64)
    packs = seen = 0
    present = []
    for name in shards:
        path, before = packed / name, packs
        identity = input_file(path).identity
        claims = [shard for shard in claimed.shards if shard.name == name]
        proof.check_crc32c(packed, claims, [Shard(name=name, packs=0, **identity)], TableMetadata.remedy)
        for stored in stored_packs(path, layout):
            members = _members(stored, rows, sequences, settings, positions)
            positions[members] = seen + np.arange(members.size)
            of_pack[members] = packs + np.repeat(np.arange(stored.offsets.size - 1), np.diff(stored.offsets))
            packs, seen = packs + stored.offsets.size - 1, seen + members.size
            _check_pack_numbers(stored, settings, packs)
            if keep_values:
                check_tokens(stored, layout, rows, sequences.rows[members])
                check_scalars(stored, layout, rows, sequences.rows[members])
        present.append(Shard(name=name, packs=packs - before, **identity))
    if (positions < 0).any():
        row = int(rows.numbers[sequences.rows[np.argmax(positions < 0)]])
        raise FailedError(f"{packed}: row {row} of the table is in no pack; pack the table again")
    length = settings.max_sequence_length
    counts = np.bincount(sequences.lengths, minlength=length + 1)[1:]
    path, depth = manifest_path(packed / NOTES_NAME, number), depth_of(settings.depth, length)
    proof.check_bound(path, claimed.lower_bound, packs, lambda: [counts], depth, TableMetadata.remedy)
    return TableGroupManifest(
        **row_figures(rows, sequences, too_long, settings.max_sequence_length),
        signature_sha256=signature_sha256,
        group=number,
        packs=packs,
        lower_bound=claimed.lower_bound,
        deepest_pack=int(np.bincount(of_pack).max(initial=0)),
        algorithm_used=claimed.algorithm_used,  # nothing else states it
        shards=tuple(present),
    )


def _members(
    stored: StoredPacks, rows: GroupRows, sequences: RowSequences, settings: TableSettings, positions: IntArray
) -> IntArray:
    """Which sequences of the group these packs hold; each must be new."""
    of_row = np.searchsorted(rows.numbers, stored.indices)
    known = rows.numbers[np.minimum(of_row, rows.numbers.size - 1)] == stored.indices
    first_of_row = np.searchsorted(sequences.rows, of_row)
    members = first_of_row + stored.starts // settings.max_sequence_length
    inside = np.minimum(members, sequences.rows.size - 1)
    right = known & (members == inside) & (sequences.rows[inside] == of_row)
    right &= (sequences.starts[inside] == stored.starts) & (sequences.lengths[inside] == stored.lengths)
    if not right.all():
        wrong = int(np.argmin(right))
        raise FailedError(f"{stored.location}: row {stored.indices[wrong]} is not what the table has; pack the table again")
    if (positions[members] >= 0).any() or np.unique(members).size < members.size:
        raise FailedError(f"{stored.location}: holds a row that is in another pack too; pack the table again")
    return members


def _check_pack_numbers(stored: StoredPacks, settings: TableSettings, packs: int) -> None:
    """The depth holds, and an index numbers its packs."""
    deepest = int(np.diff(stored.offsets).max(initial=0))
    if settings.depth != "max" and deepest > settings.depth:
        raise FailedError(f"{stored.location}: a pack holds {deepest} sequences, the depth is {settings.depth}; pack again")
    if settings.index_only:
        numbers = stored.table.column("row").to_numpy()
        if not np.array_equal(numbers, np.arange(packs - numbers.size, packs)):
            raise FailedError(f"{stored.location}: row does not number the packs of the group; pack the table again")
