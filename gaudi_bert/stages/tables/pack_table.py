"""The stage `pack` for a table: rows of Parquet, Arrow or JSON lines to packs in Parquet, group by group.

Each group is read once, packed within itself and written (`pack_table_group`); its manifest comes after its shards, and
metadata.json after all groups. A run that was killed is continued by the same command: groups with a manifest are skipped.
Bad input leaves nothing behind: what was written before the row at fault was found is of no use to a mended table.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished, remove_artefact, settings_path
from gaudi_bert.artefacts.names import METADATA_NAME, manifest_path
from gaudi_bert.artefacts.store.location import in_store
from gaudi_bert.artefacts.tables import (
    InputTable,
    TableGroupManifest,
    TableMetadata,
    TooLongRows,
    read_table_manifest,
    read_table_metadata,
    write_table_manifest,
    write_table_metadata,
)
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import check_name, exclusive_lock
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import TableSettings
from gaudi_bert.stages.results import GroupsResult, PackTableResult
from gaudi_bert.stages.tables.table_groups import GroupedTable, open_table

if TYPE_CHECKING:
    from gaudi_bert.stages.results import VerifyTableResult

__all__ = ["pack_table", "pack_table_shard"]


def pack_table(
    source: str | Path,
    out: Path,
    settings: TableSettings,
    *,
    finish: bool = False,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
    verified: bool = False,
) -> PackTableResult:
    """Pack the rows of a table.

    Args:
        source: a .parquet, .arrow or .jsonl[.gz] file, a folder or a glob of them, or one that `Dataset.save_to_disk` wrote.
        out: the folder of the packed shards.
        settings: how to pack.
        finish: write no group, but check that all are there (see `pack_table_shard`) and write metadata.json.
        reporter: where progress goes.
        overwrite: replace what other settings or tables made.
        workers: threads; None for all cores.
        verified: prove afterwards that every row is there.

    Raises:
        InputError: the table, a row, or a setting for it is at fault; or the folder was made from something else.
        FailedError: disk full, another writer, a group missing at `finish`, or the proof failed.
    """
    started = time.monotonic()
    signature = _signature(source, out, settings)
    if _begin(source, out, signature, overwrite, reporter):
        metadata, skipped = read_table_metadata(out), True
    else:
        metadata, skipped = _pack_groups(source, out, settings, signature, finish, reporter, workers), False
    proof = _proof(source, out, reporter, workers) if verified else None
    seconds = None if skipped else round(time.monotonic() - started, 3)
    return PackTableResult(metadata, proof, seconds, skipped)


def pack_table_shard(
    source: str | Path,
    out: Path,
    settings: TableSettings,
    shard: tuple[int, int],
    *,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
) -> PackTableResult | GroupsResult:
    """Write the groups K, K + N, ... of a table, for `shard` (K, N); `pack_table` with `finish` afterwards, once.

    Returns:
        The totals of these groups, or the whole folder where it was finished already.

    Raises:
        InputError, FailedError: as `pack_table`.
    """
    signature = _signature(source, out, settings)
    if _begin(source, out, signature, overwrite, reporter):
        return PackTableResult(read_table_metadata(out), skipped=True)
    table = open_table(source, settings, reporter)
    numbers = range(len(table.groups))[shard[0] :: shard[1]]
    written = _write_groups(out, table, numbers, settings, _sha256(signature), reporter, workers)
    manifests = [read_table_manifest(out, number) for number in numbers]
    return GroupsResult(
        groups=len(numbers),
        groups_written=written,
        sequences=sum(manifest.sequences for manifest in manifests),
        packs=sum(manifest.packs for manifest in manifests),
        tokens=sum(manifest.tokens for manifest in manifests),
    )


def _pack_groups(
    source: str | Path,
    out: Path,
    settings: TableSettings,
    signature: Signature,
    finish: bool,
    reporter: Reporter,
    workers: int | None,
) -> TableMetadata:
    try:
        table = open_table(source, settings, reporter)
        if not finish:
            _write_groups(out, table, range(len(table.groups)), settings, _sha256(signature), reporter, workers)
    except InputError:
        _remove(out)
        raise
    return _finish(out, table, settings, signature)


def _signature(source: str | Path, out: Path, settings: TableSettings) -> Signature:
    """What the packs are a function of: the settings, and name, size and CRC-32C of every input file."""
    from gaudi_bert.records.tables.arrow import require_pyarrow
    from gaudi_bert.records.tables.sources import file_identity, table_files

    require_pyarrow()
    if in_store(out):
        raise InputError(f"{out}: packed tables are written to folders, not to an object store; copy them there afterwards")
    check_name(out)
    files = table_files(source).files
    if out.resolve() in {file.resolve().parent for file in files}:
        raise InputError(f"{out}: the output folder is the folder of the table; choose another one")
    inputs = {file.name: file_identity(file) for file in files}
    return Signature("pack-table", settings.model_dump(mode="json"), inputs)


def _sha256(signature: Signature) -> str:
    return hashlib.sha256(json.dumps(signature.as_json(), sort_keys=True).encode("utf-8")).hexdigest()


def _begin(source: str | Path, out: Path, signature: Signature, overwrite: bool, reporter: Reporter) -> bool:
    """Make the folder ready; say whether it is finished already, which a read-only folder may be."""
    final = out / METADATA_NAME
    done = is_finished(out, final, signature)
    if not done:
        with exclusive_lock(settings_path(out), str(out), wait=True):
            done = begin_artefact(out, final, signature, overwrite)
    if done:
        reporter.say(f"{out}: already there, nothing to do")
    return done


def _remove(out: Path) -> None:
    """Nothing half-written stays of a table that cannot be packed; what a lock file holds open may."""
    remove_artefact(out, settings_path(out))
    for path in out.glob(".*.lock"):
        path.unlink(missing_ok=True)
    if not any(out.iterdir()):
        out.rmdir()


def _write_groups(
    out: Path,
    table: GroupedTable,
    numbers: Sequence[int],
    settings: TableSettings,
    sha256: str,
    reporter: Reporter,
    workers: int | None,
) -> int:
    """Write the groups that have no manifest yet; how many that were."""
    from gaudi_bert.stages.tables.pack_table_group import write_table_group

    pending = [number for number in numbers if _finished_group(out, number, sha256) is None]
    if len(pending) < len(numbers):
        reporter.say(f"{out}: {len(numbers) - len(pending)} of {len(numbers)} groups are there already")
    rows = sum(share.part.rows for number in pending for share in table.groups[number])
    with reporter.task("pack", rows, "rows") as task:
        for number in pending:
            with exclusive_lock(manifest_path(out, number), f"{out}: group {number}"):
                if _finished_group(out, number, sha256) is None:
                    manifest = write_table_group(out, table, number, settings, sha256, workers, task.advance)
                    write_table_manifest(out, manifest)
    return len(pending)


def _finished_group(out: Path, number: int, sha256: str) -> TableGroupManifest | None:
    """The manifest of a group, if it is there, of these inputs and settings, and its shards have their sizes."""
    if not manifest_path(out, number).exists():
        return None
    manifest = read_table_manifest(out, number)
    if manifest.signature_sha256 != sha256:
        return None
    sizes = {shard.name: shard.bytes for shard in manifest.shards}
    whole = all((out / name).is_file() and (out / name).stat().st_size == size for name, size in sizes.items())
    return manifest if whole else None


def _finish(out: Path, table: GroupedTable, settings: TableSettings, signature: Signature) -> TableMetadata:
    """Check that all groups are there and hold all rows, and write metadata.json."""
    found = [_finished_group(out, number, _sha256(signature)) for number in range(len(table.groups))]
    missing = [number for number, manifest in enumerate(found) if manifest is None]
    if missing:
        raise FailedError(
            f"{out}: {len(missing)} of {len(found)} groups are not written, the first is group {missing[0]};"
            " run `gaudi-bert pack` for them (without --finish) and then finish again"
        )
    groups = [manifest for manifest in found if manifest is not None]
    rows = sum(group.rows for group in groups)
    if rows != table.rows:
        raise FailedError(f"{out}: the groups hold {rows} rows, the table has {table.rows}; pack it again with --overwrite")
    if not sum(group.packs for group in groups):
        _remove(out)
        raise InputError(
            f"{table.files[0].parent}: every row is longer than {settings.max_sequence_length} tokens, so none is left; "
            "raise --max-sequence-length"
        )
    metadata = _metadata(table, settings, signature, groups)
    with exclusive_lock(out / METADATA_NAME, str(out), wait=True):
        write_table_metadata(out, metadata)
    return metadata


def _metadata(
    table: GroupedTable, settings: TableSettings, signature: Signature, groups: Sequence[TableGroupManifest]
) -> TableMetadata:
    from gaudi_bert import __version__

    sequences, packs = sum(group.sequences for group in groups), sum(group.packs for group in groups)
    tokens, slots = sum(group.tokens for group in groups), packs * settings.max_sequence_length
    lower_bound = sum(group.lower_bound for group in groups)
    effects = [group.too_long for group in groups]
    return TableMetadata(
        tool_version=__version__,
        max_sequence_length=settings.max_sequence_length,
        depth=None if settings.depth == "max" else settings.depth,
        deepest_pack=max(group.deepest_pack for group in groups),
        seed=settings.seed,
        algorithm=settings.algorithm,
        algorithms_used=tuple(sorted({group.algorithm_used for group in groups})),
        index_only=settings.index_only,
        keep_together=settings.keep_together,
        aligned_columns={name: str(kind) for name, kind in table.columns.aligned.items()},
        scalar_columns={name: str(kind) for name, kind in table.columns.scalars.items()},
        rows=table.rows,
        sequences=sequences,
        packs=packs,
        tokens=tokens,
        padding_tokens=slots - tokens,
        efficiency=tokens / slots,
        packing_factor=sequences / packs,
        lower_bound=lower_bound,
        gap=packs - lower_bound,
        too_long=TooLongRows(
            policy=settings.too_long,
            rows=sum(effect.rows for effect in effects),
            dropped_rows=sum(effect.dropped_rows for effect in effects),
            dropped_tokens=sum(effect.dropped_tokens for effect in effects),
            added_sequences=sum(effect.added_sequences for effect in effects),
        ),
        shard_multiple=settings.shard_multiple,
        group_sequences=settings.group_sequences,
        group_bytes=settings.group_bytes,
        groups=len(groups),
        inputs=tuple(
            InputTable(name=file.name, rows=rows, **signature.inputs[file.name])
            for file, rows in zip(table.files, table.file_rows, strict=True)
        ),
        shards=tuple(shard for group in groups for shard in group.shards),
        histogram=tuple(sum(column) for column in zip(*(group.counts for group in groups), strict=True)),
    )


def _proof(source: str | Path, out: Path, reporter: Reporter, workers: int | None) -> VerifyTableResult:
    from gaudi_bert.stages.tables.verify_table import verify_table

    return verify_table(source, out, reporter=reporter, workers=workers)
