"""The stage `write` for packs of any format, which writes the shards and the manifest of each group, and metadata.json at
the end.

`artefacts.completion` describes what happens if a process is killed or several processes write the same folder. If the
source is in an object store, the files of a group are downloaded while the previous group is packed. If the output is in an
object store, each shard is uploaded as soon as it is complete.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from gaudi_bert.artefacts.base import manifest_path
from gaudi_bert.artefacts.completion import GroupedOutput, Signature
from gaudi_bert.artefacts.mirrored_folder import is_mirrored, prefetch_batches
from gaudi_bert.artefacts.packed import GroupManifest, PackedMetadata, PackedTotals, RecordManifest
from gaudi_bert.artefacts.results import PlainResult, StageOutput, StageRun, build_partial_run_result
from gaudi_bert.artefacts.shards import index_file_bytes, index_path
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.files import read_file
from gaudi_bert.common.progress import Task

Inputs = TypeVar("Inputs")


class GroupFilesAndSize(NamedTuple):
    """The input files of each of several groups of packs, and the total size of these groups.

    Attributes:
        paths: The input files of each group, which are downloaded before the group is written.
        amount: The total size of the groups, in the unit of the progress display.
    """

    paths: Sequence[Sequence[Path]]
    amount: float


@dataclass(frozen=True)
class PackingJob(ABC, Generic[Inputs]):
    """A job that packs one source into one folder. Each format of the source has its own subclass.

    `write_packs` calls the methods in the order of their definition. A group depends only on the source and the
    settings, so any process may write it.

    Attributes:
        folder: The output folder of the packs.
        run: The options of the run, which may select only some of the groups.
        signature: The settings and the inputs that determine the packs.
        metadata_type: The type of the folder's metadata.
        command: The command that writes the groups, as users type it.
        unit: The unit of the progress display, in the plural.
        removes_packs_of_bad_input: Whether to remove all packs if the input is invalid, because they cannot be used after
            the input has been corrected.
    """

    folder: Path
    run: StageRun
    signature: Signature
    metadata_type: ClassVar[type[PackedMetadata]]
    command: ClassVar[str]
    unit: ClassVar[str]
    removes_packs_of_bad_input: ClassVar[bool] = False

    @property
    @abstractmethod
    def source_sha256(self) -> str:
        """The checksum that identifies the source. Every group manifest contains it."""

    @abstractmethod
    def open_inputs(self) -> AbstractContextManager[Inputs]:
        """List the input files, and keep them available while the `with` block runs.

        Listing the files takes time, and a finished folder does not need them. Therefore this method is only called for an
        unfinished folder, after the folder was prepared under its lock.

        Raises:
            InputError: The input is missing or invalid.
        """

    @abstractmethod
    def count_groups(self, inputs: Inputs) -> int:
        """Return the number of groups that the source is divided into."""

    @abstractmethod
    def check_and_list_group_files(self, inputs: Inputs, group_numbers: Sequence[int]) -> GroupFilesAndSize:
        """Check that all of the given groups can be written, and return their input files and total size.

        Raises:
            InputError: A group cannot be written.
        """

    @abstractmethod
    def write_group(self, inputs: Inputs, group_number: int, task: Task) -> GroupManifest:
        """Write the shards of a group, and return the content of its manifest. The caller writes the manifest to its
        file.
        """

    def check_manifest(self, manifest: GroupManifest) -> None:
        """Check that a stored manifest describes the planned group. A job without a plan has nothing to check.

        Raises:
            FailedError: The manifest describes another group.
        """

    @abstractmethod
    def build_metadata(self, inputs: Inputs, totals: PackedTotals) -> PackedMetadata:
        """Return the content of metadata.json, given the totals over the manifests of all groups.

        Raises:
            InputError: No pack was written.
        """


def write_packs(job: PackingJob[Any]) -> StageOutput[PackedMetadata] | PlainResult:
    """Write the packs of a job. The options of the run decide whether to write all groups, the groups of one part, or only
    metadata.json.

    1. Prepare the folder under its lock. If it is already finished, return its metadata at once.
    2. List the inputs.
    3. Check all missing groups, and then write them one after the other.
    4. Write metadata.json, unless the run does only one part.

    Returns:
        The metadata of the folder. If the run does only one part of an unfinished folder, return the totals of its groups.

    Raises:
        InputError: The source is invalid, or the folder was written from another source.
        FailedError: Groups are missing although all parts should be done.
    """
    started, run, final = time.monotonic(), job.run, job.folder / job.metadata_type.file_name
    output = _PackedOutput(
        job.folder,
        final,
        job.signature,
        job.metadata_type.manifest_type,
        partial(manifest_path, final.parent),
        run.reporter,
        source_sha256=job.source_sha256,
    )
    if output.begin_unless_finished(run.overwrite):
        return StageOutput(job.metadata_type.read(output.final), skipped=True)
    with ExitStack() as stack:
        removes_packs = job.removes_packs_of_bad_input and run.part is None
        with output.remove_files_on_bad_input() if removes_packs else nullcontext():
            inputs = stack.enter_context(job.open_inputs())
            numbers = run.select_items_of_this_run(range(job.count_groups(inputs)))
            missing = [] if run.finish else output.find_missing_groups(numbers)
            _write_groups(job, inputs, output, missing)
            if run.part is not None:
                sums = PackedTotals()
                for _, manifest in output.read_complete_groups(numbers):
                    sums.add_group(manifest)
                return build_partial_run_result(len(numbers), len(missing), sums)
        metadata = _write_metadata(job, inputs, output)
    return StageOutput(metadata, seconds=round(time.monotonic() - started, 3))


def _write_groups(job: PackingJob[Inputs], inputs: Inputs, output: _PackedOutput, group_numbers: Sequence[int]) -> None:
    """Check that the given groups can be written. Then write the shards and the manifest of each group."""
    paths, amount = job.check_and_list_group_files(inputs, group_numbers)
    with output.reporter.task("write", amount, job.unit) as task, prefetch_batches(paths) as batches:
        for batch, number in enumerate(group_numbers):
            with (
                batches.keep_batch_local_during(batch),
                output.lock_group(number, f"{output.folder}: group {number}") as is_missing,
            ):
                if is_missing:
                    job.write_group(inputs, number, task).write(output.summary_path(number))


def _write_metadata(job: PackingJob[Inputs], inputs: Inputs, output: _PackedOutput) -> PackedMetadata:
    """Check that every group of a job was written. Then write metadata.json, and return its content."""
    numbers, sums = range(job.count_groups(inputs)), PackedTotals()
    missing = set(numbers)
    for number, manifest in output.read_complete_groups(numbers):
        missing.discard(number)
        job.check_manifest(manifest)
        sums.add_group(manifest, crc32c(read_file(output.summary_path(number))))
    if missing:
        raise FailedError(
            f"{output.folder}: {len(missing)} of {len(numbers)} groups have not been packed yet"
            f" (the first is group {min(missing)}); run `{job.command}` without --finish, and then with --finish again"
        )
    if not sums.packs:  # `build_metadata` rejects this input, and a corrected input cannot use the groups that were written
        output.remove_files()
    metadata = job.build_metadata(inputs, sums)
    output.write_final_file(metadata)
    return metadata


@dataclass(frozen=True)
class _PackedOutput(GroupedOutput[int, GroupManifest]):
    """The output folder of a packing job. Each group has a manifest, which is its summary, and metadata.json is the final
    file.

    Attributes:
        source_sha256: The checksum that identifies the source. Every manifest contains it.
    """

    source_sha256: str

    def is_group_complete(self, summary: GroupManifest) -> bool:
        """Return whether a manifest belongs to this source, and whether the shards that it lists exist with the listed
        sizes.

        In an object store, shards were uploaded before the manifest, so their sizes are not checked.
        """
        if summary.source_sha256 != self.source_sha256:
            return False
        if is_mirrored(self.folder):
            return True
        paths = [(self.folder / shard.name, shard.bytes) for shard in summary.shards]
        if isinstance(summary, RecordManifest):
            paths.append((index_path(self.folder, summary.group), index_file_bytes(summary.packs)))
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)
