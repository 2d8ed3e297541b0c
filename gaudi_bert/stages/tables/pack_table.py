"""The stage `pack` for a table: rows of Parquet, Arrow or JSON lines to packs in Parquet, group by group.

Each group is read once, packed within itself and written (`pack_table_group`); its manifest comes after its shards, and
metadata.json after all groups. A run that was killed is continued by the same command: groups with a manifest are skipped.
From an object store the table is copied to scratch whole; to one, each group is put when it is written, its manifest last.
Bad input leaves nothing behind: what was written before the row at fault was found is of no use to a mended table.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.artefacts.completion import Signature, is_finished, remove_artefact, settings_path
from gaudi_bert.artefacts.names import METADATA_NAME, manifest_path
from gaudi_bert.artefacts.store.location import in_store
from gaudi_bert.artefacts.store.mirror import mirror
from gaudi_bert.artefacts.store.workplace import Workplace, begin_in, workplace
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
from gaudi_bert.config import StoreSettings, TableSettings
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
    store: StoreSettings | None = None,
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
        store: how object stores are reached, where a path is a URL.

    Raises:
        InputError: the table, a row, or a setting for it is at fault; or the folder was made from something else.
        FailedError: disk full, another writer, a group missing at `finish`, or the proof failed.
    """
    started = time.monotonic()
    with _at_hand(source, out, store) as (table, place):
        signature = _signature(table, place, settings)
        if _begin(place, signature, overwrite, reporter):
            metadata, skipped = read_table_metadata(place.folder), True
        else:
            metadata, skipped = _pack_groups(table, place, settings, signature, finish, reporter, workers), False
        proof = _proof(table, out, reporter, workers, store) if verified else None
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
    store: StoreSettings | None = None,
) -> PackTableResult | GroupsResult:
    """Write the groups K, K + N, ... of a table, for `shard` (K, N); `pack_table` with `finish` afterwards, once.

    Returns:
        The totals of these groups, or the whole folder where it was finished already.

    Raises:
        InputError, FailedError: as `pack_table`.
    """
    with _at_hand(source, out, store) as (here, place):
        signature = _signature(here, place, settings)
        if _begin(place, signature, overwrite, reporter):
            return PackTableResult(read_table_metadata(place.folder), skipped=True)
        table = open_table(here, settings, reporter)
        numbers = range(len(table.groups))[shard[0] :: shard[1]]
        written = _write_groups(place, table, numbers, settings, _sha256(signature), reporter, workers)
        manifests = [read_table_manifest(place.folder, number) for number in numbers]
    return GroupsResult(
        groups=len(numbers),
        groups_written=written,
        sequences=sum(manifest.sequences for manifest in manifests),
        packs=sum(manifest.packs for manifest in manifests),
        tokens=sum(manifest.tokens for manifest in manifests),
    )


@contextmanager
def _at_hand(source: str | Path, out: Path, store: StoreSettings | None) -> Iterator[tuple[str | Path, Workplace]]:
    """The table on this machine, and where its packs are written."""
    from gaudi_bert.records.tables.arrow import require_pyarrow

    require_pyarrow()
    check_name(out)
    with mirror(store, [source]) as copies, workplace(out, store) as place:
        yield copies.fetch(source) if in_store(source) else source, place


def _pack_groups(
    source: str | Path,
    place: Workplace,
    settings: TableSettings,
    signature: Signature,
    finish: bool,
    reporter: Reporter,
    workers: int | None,
) -> TableMetadata:
    try:
        table = open_table(source, settings, reporter)
        if not finish:
            _write_groups(place, table, range(len(table.groups)), settings, _sha256(signature), reporter, workers)
    except InputError:
        _remove(place)
        raise
    return _finish(place, table, settings, signature)


def _signature(source: str | Path, place: Workplace, settings: TableSettings) -> Signature:
    """What the packs are a function of: the settings, and name, size and CRC-32C of every input file."""
    from gaudi_bert.records.tables.sources import file_identity, table_files

    files = table_files(source).files
    if place.folder.resolve() in {file.resolve().parent for file in files}:
        raise InputError(f"{place.folder}: the output folder is the folder of the table; choose another one")
    inputs = {file.name: file_identity(file) for file in files}
    return Signature("pack-table", settings.model_dump(mode="json"), inputs)


def _sha256(signature: Signature) -> str:
    return hashlib.sha256(json.dumps(signature.as_json(), sort_keys=True).encode("utf-8")).hexdigest()


def _begin(place: Workplace, signature: Signature, overwrite: bool, reporter: Reporter) -> bool:
    """Make the folder ready; say whether it is finished already, which a read-only folder may be."""
    out, final = place.folder, place.folder / METADATA_NAME
    done = not place.is_store and is_finished(out, final, signature)
    if not done:
        with exclusive_lock(settings_path(out), str(out), wait=True):
            done = begin_in(place, out, final, signature, overwrite)
    if done:
        reporter.say(f"{place.url or out}: already there, nothing to do")
    return done


def _remove(place: Workplace) -> None:
    """Nothing half-written stays of a table that cannot be packed; what a lock file holds open may."""
    out = place.folder
    if place.is_store:
        place.remove(out / name for name in place.listed(out))
        return
    remove_artefact(out, settings_path(out))
    for path in out.glob(".*.lock"):
        path.unlink(missing_ok=True)
    if not any(out.iterdir()):
        out.rmdir()


def _write_groups(
    place: Workplace,
    table: GroupedTable,
    numbers: Sequence[int],
    settings: TableSettings,
    sha256: str,
    reporter: Reporter,
    workers: int | None,
) -> int:
    """Write the groups that have no manifest yet; how many that were."""
    from gaudi_bert.stages.tables.pack_table_group import write_table_group

    out = place.folder
    place.fetch(*(manifest_path(out, number) for number in numbers))
    pending = [number for number in numbers if _finished_group(place, number, sha256) is None]
    if len(pending) < len(numbers):
        reporter.say(f"{place.url or out}: {len(numbers) - len(pending)} of {len(numbers)} groups are there already")
    rows = sum(share.part.rows for number in pending for share in table.groups[number])
    with reporter.task("pack", rows, "rows") as task:
        for number in pending:
            with exclusive_lock(manifest_path(out, number), f"{out}: group {number}"):
                if place.is_store or _finished_group(place, number, sha256) is None:
                    manifest = write_table_group(out, table, number, settings, sha256, workers, task.advance)
                    for shard in manifest.shards:
                        place.move(out / shard.name)
                    write_table_manifest(out, manifest)
                    place.put_once(manifest_path(out, number))
    return len(pending)


def _finished_group(place: Workplace, number: int, sha256: str) -> TableGroupManifest | None:
    """The manifest of a group, if it is there, of these inputs and settings, and its shards have their sizes; in a store it
    was put last."""
    out = place.folder
    if not manifest_path(out, number).exists():
        return None
    manifest = read_table_manifest(out, number)
    if manifest.signature_sha256 != sha256:
        return None
    sizes = {} if place.is_store else {shard.name: shard.bytes for shard in manifest.shards}
    whole = all((out / name).is_file() and (out / name).stat().st_size == size for name, size in sizes.items())
    return manifest if whole else None


def _finish(place: Workplace, table: GroupedTable, settings: TableSettings, signature: Signature) -> TableMetadata:
    """Check that all groups are there and hold all rows, and write metadata.json."""
    out, numbers = place.folder, range(len(table.groups))
    place.fetch(*(path for path in (manifest_path(out, number) for number in numbers) if not path.exists()))
    found = [_finished_group(place, number, _sha256(signature)) for number in numbers]
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
        _remove(place)
        raise InputError(
            f"{table.files[0].parent}: every row is longer than {settings.max_sequence_length} tokens, so none is left; "
            "raise --max-sequence-length"
        )
    metadata = _metadata(table, settings, signature, groups)
    with exclusive_lock(out / METADATA_NAME, str(out), wait=True):
        write_table_metadata(out, metadata)
        place.put(out / METADATA_NAME)
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


def _proof(
    source: str | Path, out: Path, reporter: Reporter, workers: int | None, store: StoreSettings | None
) -> VerifyTableResult:
    from gaudi_bert.stages.tables.verify_table import verify_table

    return verify_table(source, out, reporter=reporter, workers=workers, store=store)
