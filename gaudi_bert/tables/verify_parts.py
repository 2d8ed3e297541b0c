"""The stage `verify` of a packed table in parts: `tfrecords.packed_proof` has the flow, `verify` the same for all groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gaudi_bert.artefacts.packed import GroupVerification, TableGroupManifest, TableMetadata, TableVerification
from gaudi_bert.artefacts.references import NOTES_NAME, manifest_path
from gaudi_bert.artefacts.results import GroupsResult, StageOutput
from gaudi_bert.artefacts.store.objects import in_store, shown_location
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.tables.groups import TableSums
from gaudi_bert.tables.sources import table_files
from gaudi_bert.tables.verify import open_packed_rows
from gaudi_bert.tfrecords import packed_proof as proof
from gaudi_bert.tfrecords.packed_proof import PartlyVerified, Take


def verify_table_shard(
    source: str | Path,
    packed: Path,
    shard: tuple[int, int],
    *,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
) -> StageOutput[TableVerification] | GroupsResult:
    """Verify the groups K, K + N, ... of a packed table, for `shard` (K, N); `finish_table` afterwards, once."""
    parts = _opened(source, packed, reporter)

    def prove(numbers: Sequence[int], take: Take) -> None:
        def take_group(manifest: TableGroupManifest, _: int) -> None:
            take(manifest.group, {key: getattr(manifest, key) for key in ("sequences", "packs", "tokens", "lower_bound")})

        if numbers:
            rows = open_packed_rows(source, packed, TableMetadata.read(packed), reporter)
            rows.prove(numbers, take_group, reporter, workers)

    return parts.prove_shard(shard, prove, overwrite)


def finish_table(source: str | Path, packed: Path, *, reporter: Reporter) -> StageOutput[TableVerification]:
    """Write verification.json of a packed table whose groups are all verified by `verify_table_shard`."""

    def add_up(groups: Iterable[GroupVerification]) -> proof.Proof[TableVerification]:
        sums = TableSums()
        for group in groups:
            sums.add(*proof.read_manifest(TableGroupManifest, packed / NOTES_NAME, group.group))
        return open_packed_rows(source, packed, TableMetadata.read(packed), reporter).proof_of(sums)

    return _opened(source, packed, reporter).finish(add_up)


def _opened(source: str | Path, packed: Path, reporter: Reporter) -> PartlyVerified[TableVerification]:
    for side in (source, packed):
        if in_store(side):
            raise InputError(
                f"{shown_location(side)}: parts of a table are not verified in a store, where each part would copy the "
                "complete table; verify it at once, without --shard and --finish"
            )
    metadata = TableMetadata.read(packed)
    proof.check_shards(packed, metadata)
    files = table_files(source)
    sizes = {file: file.stat().st_size for file in files}
    verified = proof.VerifiedFolder(packed, metadata, sizes, TableVerification, reporter)
    shards = metadata.shard_table

    def files_of(group: int) -> Iterator[Path]:
        first = int(shards.group_firsts[group])
        yield from (packed / shards.name(number) for number in range(first, first + int(shards.group_sizes[group])))
        yield manifest_path(packed / NOTES_NAME, group)
        yield from files  # a group has rows of any of them

    return PartlyVerified(verified, files_of)
