"""The stage `write` for packs of any format: for each group its shards, then its manifest; at the end metadata.json.

`artefacts.completion` describes what happens after a kill and with several writers. If the source is in an object store, the
files of a group are fetched while the previous group is packed. If the output is in an object store, each shard is uploaded
as soon as it is complete.
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
    """Reads the groups of a source and packs them. Each file format has its own writer.

    A group depends only on the source and the settings, so any process may write it.
    """

    unit: str
    """The unit of the progress, in the plural."""

    @property
    def groups(self) -> int:
        """The number of groups."""
        ...

    def check_groups(self, numbers: Sequence[int]) -> tuple[Sequence[Sequence[Path]], float]:
        """Check that these groups can be written, before any of them is.

        Returns:
            The files from which each group is read, and the size of all groups in units of the progress.
        """
        ...

    def write_group(self, number: int, task: Task) -> GroupManifest:
        """Write the shards of a group, and return its manifest."""
        ...

    def check_manifest(self, manifest: GroupManifest) -> None:
        """Check that a manifest belongs to the group that was planned.

        Raises:
            FailedError: it belongs to another group.
        """
        ...

    def build_metadata(self, sums: PackedSums) -> PackedMetadata:
        """Return the metadata of the folder, given the sums of the manifests of all groups."""
        ...


@dataclass(frozen=True)
class PackedOutput(GroupedOutput[int, GroupManifest]):
    """The packed folder that is being written.

    Attributes:
        source_sha256: the identity of the source, which every manifest repeats.
        command: the command that writes the groups, as users type it.
        metadata: the type of the folder's metadata.
        keeps_nothing_of_bad_input: remove all packs if the input turns out to be bad, because a corrected source cannot use
            them.
    """

    source_sha256: str
    command: str
    metadata: type[PackedMetadata]
    keeps_nothing_of_bad_input: bool = False

    def is_complete(self, summary: GroupManifest) -> bool:
        """Return whether a manifest belongs to this source and its shards have the right sizes.

        In an object store, shards were uploaded before the manifest, so their sizes are not checked.
        """
        if summary.source_sha256 != self.source_sha256:
            return False
        if is_mirrored(self.folder):
            return True
        paths = [(self.folder / shard.name, shard.bytes) for shard in summary.shards]
        if summary.index_crc32c is not None:
            paths.append((index_path(self.folder, summary.group), index_bytes(summary.packs)))
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def write_packs(
    output: PackedOutput, open_writer: Callable[[], GroupWriter], run: StageRun
) -> StageOutput[PackedMetadata] | PlainResult:
    """Write the packed folder of a source: all groups, a part, or only the metadata after all parts.

    First the folder is prepared under its lock. If it is finished already, its metadata is returned at once. Otherwise the
    missing groups are written one after the other, and then metadata.json.

    Args:
        output: the folder.
        open_writer: opens the source and returns its writer. It is called after the folder was prepared, and not at all for
            a finished folder: listing the inputs takes time, and a finished folder does not need them.
        run: how to run the stage, and for which part.

    Returns:
        The metadata of the folder. For a part, the totals of its groups, unless the folder is already finished.

    Raises:
        InputError: the source is bad, or the folder was written from another source.
        FailedError: groups are missing when the folder is to be finished.
    """
    started = time.monotonic()
    if output.begin(run.overwrite):
        return StageOutput(output.metadata.read(output.final), skipped=True)
    removing = output.keeps_nothing_of_bad_input and run.part is None
    with output.removed_on_bad_input() if removing else nullcontext():
        writer = open_writer()
        numbers = run.share_of(range(writer.groups))
        pending = [] if run.finish else output.missing(numbers)
        paths, amount = writer.check_groups(pending)
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
    metadata = _finish_folder(output, writer)
    return StageOutput(metadata, seconds=round(time.monotonic() - started, 3))


def _finish_folder(output: PackedOutput, writer: GroupWriter) -> PackedMetadata:
    """Check that all groups are complete, and write metadata.json."""
    numbers, sums = range(writer.groups), PackedSums()
    missing = set(numbers)
    for number, manifest in output.completed(numbers):
        missing.discard(number)
        writer.check_manifest(manifest)
        sums.add(manifest, crc32c(read_file(output.summary_path(number))))
    if missing:
        raise FailedError(
            f"{output.folder}: {len(missing)} of {len(numbers)} groups are missing, the first of them"
            f" group {min(missing)}; run `{output.command}` for them (without --finish), then finish again"
        )
    metadata = writer.build_metadata(sums)
    output.write_final(metadata)
    return metadata
