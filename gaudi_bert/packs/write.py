"""Packs are written group by group: shards first, then the manifest of the group; at last metadata.json.

See `artefacts.completion` for kills and several writers. From an object store, the files of a group are fetched while
the group before it is packed; to one, every shard goes up as soon as it is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gaudi_bert.artefacts.completion import GroupedOutput
from gaudi_bert.artefacts.mirrored_folder import is_mirrored, read_ahead
from gaudi_bert.artefacts.packed import GroupManifest, PackedMetadata, PackedSums
from gaudi_bert.artefacts.results import PlainResult, StageOutput, StageRun, result_of_part
from gaudi_bert.artefacts.shards import index_bytes, index_path
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.files import read_file
from gaudi_bert.common.progress import Task


class GroupWriter(Protocol):
    """Reads the groups of one source, and packs each: a group is a function of the source and the settings alone."""

    unit: str
    """What progress counts."""

    @property
    def groups(self) -> int:
        """Number of groups."""
        ...

    def prepare(self, numbers: Sequence[int]) -> tuple[Sequence[Sequence[Path]], float]:
        """Check these groups before any is written; return the files that each is read from, and the units of all."""
        ...

    def write_group(self, number: int, task: Task) -> GroupManifest:
        """Write the shards of a group; the manifest of what was written."""
        ...

    def check_manifest(self, manifest: GroupManifest) -> None:
        """Refuse the manifest of a group that is not the one that was planned."""
        ...

    def metadata(self, sums: PackedSums) -> PackedMetadata:
        """Return the metadata of the folder, by the manifests of all its groups."""
        ...


@dataclass(frozen=True)
class PackedOutput(GroupedOutput[int, GroupManifest]):
    """A packed folder: groups of shards, whose manifests know the identity of their source."""

    source_sha256: str
    command: str  # what writes the groups, as users type it
    metadata: type[PackedMetadata]
    keeps_nothing_of_bad_input: bool = False  # remove all packs after bad input: a corrected source has no use for them

    def is_complete(self, summary: GroupManifest) -> bool:
        """Whether the manifest is of this source, and its shards have their sizes; in a store it was put after them."""
        if summary.source_sha256 != self.source_sha256:
            return False
        if is_mirrored(self.folder):
            return True
        paths = [(self.folder / shard.name, shard.bytes) for shard in summary.shards]
        if summary.index_crc32c is not None:
            paths.append((index_path(self.folder, summary.group), index_bytes(summary.packs)))
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def write(
    output: PackedOutput, open_writer: Callable[[], GroupWriter], run: StageRun
) -> StageOutput[PackedMetadata] | PlainResult:
    """Write the packed folder of a source, or part K of N, or finish it.

    Returns:
        The metadata; of a part the totals of its groups, or the metadata where the folder is finished already.
    """
    started = time.monotonic()
    if output.begin(run.overwrite):
        return StageOutput(output.metadata.read(output.final), skipped=True)
    removing = output.keeps_nothing_of_bad_input and run.part is None
    with output.removed_on_bad_input() if removing else nullcontext():
        writer = open_writer()
        numbers = run.share_of(range(writer.groups))
        pending = [] if run.finish else output.missing(numbers)
        paths, amount = writer.prepare(pending)
        with output.reporter.task("write", amount, writer.unit) as task, read_ahead(paths) as batches:
            for batch, number in enumerate(pending):
                with batches.batch(batch), output.writing(number, f"{output.folder}: group {number}") as needed:
                    if needed:
                        writer.write_group(number, task).write(output.summary_path(number))
        if run.part is not None:
            sums = PackedSums()
            for _, manifest in output.completed(numbers):
                sums.add(manifest)
            return result_of_part(len(numbers), len(pending), sums)
    metadata = _finish(output, writer)
    return StageOutput(metadata, seconds=round(time.monotonic() - started, 3))


def _finish(output: PackedOutput, writer: GroupWriter) -> PackedMetadata:
    """Check that all groups are there, and write metadata.json."""
    numbers, sums = range(writer.groups), PackedSums()
    missing = set(numbers)
    for number, manifest in output.completed(numbers):
        missing.discard(number)
        writer.check_manifest(manifest)
        sums.add(manifest, crc32c(read_file(output.summary_path(number))))
    if missing:
        raise FailedError(
            f"{output.folder}: {len(missing)} of {len(numbers)} groups are not written, the first is"
            f" group {min(missing)}; run `{output.command}` for them (without --finish) and then finish again"
        )
    metadata = writer.metadata(sums)
    output.write_final(metadata)
    return metadata
