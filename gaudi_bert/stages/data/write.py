"""The stage `write`: the packed shards of a plan, group by group, and metadata.json when all groups are there.

A group is a pure function of its files and the plan: whoever writes it, on whatever machine and with however
many threads, writes the same bytes. Its shards come first and its manifest `group-GGGGG.json` last, all of
them whole or absent, so a killed run is continued by running it again: groups with a manifest are skipped. A
kernel lock keeps two writers of one group apart. In an object store there is no lock: they put equal bytes. There the files
of a group are fetched while the group before it is packed, and every shard is put as soon as it is whole.

A group with fewer packs than shards still has them all, some of them empty files: then every reader may count
on a multiple of `shard_multiple` shards per group, and rank r of W reads the shards whose index mod W is r.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.artefacts.completion import Signature, is_finished, settings_path
from gaudi_bert.artefacts.manifest import GroupManifest, read_manifest, write_manifest
from gaudi_bert.artefacts.metadata import InputFile, Metadata, Shard, read_own_metadata, write_metadata
from gaudi_bert.artefacts.names import METADATA_NAME, manifest_path
from gaudi_bert.artefacts.plan import WritablePlan, read_writable_plan
from gaudi_bert.artefacts.store.location import in_store, shown_place, url_of
from gaudi_bert.artefacts.store.workplace import Workplace, begin_in, local_copy, workplace
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import exclusive_lock
from gaudi_bert.common.progress import Reporter, Task
from gaudi_bert.config import StoreSettings
from gaudi_bert.stages.data.plan_proof import prove_plan
from gaudi_bert.stages.results import GroupsResult, WriteResult

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gaudi_bert.records.inputs import RecordInputs
    from gaudi_bert.records.read.group import GroupFile

__all__ = ["write", "write_shard"]


def write(
    records: str | Path,
    plan: Path,
    out: Path,
    *,
    finish: bool = False,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
    store: StoreSettings | None = None,
) -> WriteResult:
    """Write the packed records of a plan.

    Args:
        records: the RECORDS that the plan was made for.
        plan: plan.json.
        out: the folder of the packed shards.
        finish: write no group, but check that all are there (see `write_shard`) and write metadata.json.
        reporter: where progress goes.
        overwrite: replace what another plan made.
        workers: threads; None for all cores.
        store: how object stores are reached, where a path is a URL.

    Returns:
        The totals of the packed folder.

    Raises:
        InputError: bad records, records that are not the plan's, or a folder made by another plan.
        FailedError: disk full, another writer, or a group missing at `finish`.
    """
    started = time.monotonic()
    with local_copy(plan, store) as path, workplace(out, store) as place:
        content = read_writable_plan(path)
        if _begin(records, content, place, overwrite, reporter):
            return _result(read_own_metadata(place.folder), skipped=True)
        prove_plan(path, content, range(len(content.groups)))
        if not finish:
            _write_groups(records, place, content, range(len(content.groups)), reporter, workers)
        metadata = _finish(place, content)
    return _result(metadata, seconds=round(time.monotonic() - started, 3))


def write_shard(
    records: str | Path,
    plan: Path,
    out: Path,
    shard: tuple[int, int],
    *,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
    store: StoreSettings | None = None,
) -> WriteResult | GroupsResult:
    """Write the groups K, K + N, ... of a plan, for `shard` (K, N); `write` with `finish` afterwards, once.

    Args:
        records, plan, out, reporter, overwrite, workers, store: as in `write`.

    Returns:
        The totals of these groups, or of the whole folder where it was finished already.

    Raises:
        InputError, FailedError: as `write`.
    """
    with local_copy(plan, store) as path, workplace(out, store) as place:
        content = read_writable_plan(path)
        if _begin(records, content, place, overwrite, reporter):
            return _result(read_own_metadata(place.folder), skipped=True)
        numbers = range(len(content.groups))[shard[0] :: shard[1]]
        prove_plan(path, content, numbers)
        written = _write_groups(records, place, content, numbers, reporter, workers)
        return _groups_result(place.folder, numbers, written)


def _begin(records: str | Path, plan: WritablePlan, place: Workplace, overwrite: bool, reporter: Reporter) -> bool:
    """Make the folder ready; say whether it is finished already, which a read-only folder may be."""
    _check_apart(records, place)
    out = place.folder
    final, signature = out / METADATA_NAME, Signature("write", {}, {"plan_sha256": plan.sha256})
    done = not place.is_store and is_finished(out, final, signature)
    if not done:
        with exclusive_lock(settings_path(out), str(out), wait=True):
            done = begin_in(place, out, final, signature, overwrite)
    if done:
        reporter.say(f"{place.url or out}: already there, nothing to do")
    return done


def _check_apart(records: str | Path, place: Workplace) -> None:
    """Refuse to write into the folder of the records."""
    from gaudi_bert.records.files import records_folder

    if in_store(records):
        same = url_of(records) == place.url
    else:
        same = not place.is_store and records_folder(records).resolve() == place.folder.resolve()
    if same:
        raise InputError(f"{shown_place(records)}: the output folder is the folder of the records; choose another one")


def _write_groups(
    records: str | Path,
    place: Workplace,
    plan: WritablePlan,
    numbers: Sequence[int],
    reporter: Reporter,
    workers: int | None,
) -> int:
    """Write the groups that have no manifest yet; how many that were."""
    from gaudi_bert.records.inputs import open_inputs
    from gaudi_bert.records.read.planned import match_files

    with open_inputs(records, place.objects) as inputs:
        files = match_files(inputs.shown, inputs.files, plan)
        place.fetch(*(manifest_path(place.folder, number) for number in numbers))
        pending = [number for number in numbers if _finished_group(place, number, plan) is None]
        if len(pending) < len(numbers):
            done = len(numbers) - len(pending)
            reporter.say(f"{place.url or place.folder}: {done} of {len(numbers)} groups are there already")
        if pending:
            _write_pending(inputs, files, place, plan, pending, reporter, workers)
    return len(pending)


def _write_pending(
    inputs: RecordInputs,
    files: dict[str, GroupFile],
    place: Workplace,
    plan: WritablePlan,
    pending: Sequence[int],
    reporter: Reporter,
    workers: int | None,
) -> None:
    """Write one group after the other; where files are fetched, those of the next group meanwhile."""
    from gaudi_bert.records.read.group import buffer_bytes, group_buffer

    buffer = group_buffer(0)
    members = [[files[name] for name in plan.groups[number].files] for number in pending]
    total = sum(file.bytes for group in members for file in group)
    with (
        reporter.task("write", total, "bytes") as task,
        inputs.turns([plan.groups[number].files for number in pending]) as turns,
    ):
        for turn, number in enumerate(pending):
            with turns.batch(turn), exclusive_lock(manifest_path(place.folder, number), f"{place.folder}: group {number}"):
                if not place.is_store and _finished_group(place, number, plan) is not None:
                    continue
                needed = buffer_bytes(members[turn])
                if buffer.size < needed:
                    buffer = group_buffer(needed)
                _write_group(place, plan, number, members[turn], buffer, task, workers)


def _write_group(
    place: Workplace,
    plan: WritablePlan,
    number: int,
    files: Sequence[GroupFile],
    buffer: NDArray[np.uint8],
    task: Task,
    workers: int | None,
) -> None:
    """Read, pack and write one group; half of its bytes count as progress when read, half when packed."""
    from gaudi_bert.records.assign import assign_sequences, shard_bounds
    from gaudi_bert.records.read.group import read_group
    from gaudi_bert.records.read.threads import map_in_threads, worker_count
    from gaudi_bert.records.schema import PackedSchema, UnpackedSchema
    from gaudi_bert.records.write.encoder import PackEncoder
    from gaudi_bert.records.write.shards import WRITERS_PER_CORE, count_group_shards, output_buffer, shard_name, write_shard

    planned = plan.groups[number]
    group = read_group(files, UnpackedSchema.of(plan), buffer, workers, lambda count: task.advance(count / 2))
    assignment = assign_sequences(group.lengths, planned.strategies, plan.seed, number)
    schema = PackedSchema.of(plan)
    shards = count_group_shards(schema, group, assignment, plan.shard_multiple, plan.shard_bytes)
    bounds = shard_bounds(planned.packs, shards, sum(earlier.packs for earlier in plan.groups[:number]))
    encoder = PackEncoder(schema, group, assignment)
    share = sum(file.bytes for file in files) / planned.packs / 2
    cores = worker_count(workers, shards)
    slots = threading.Semaphore(cores)

    def make(shard: int, output: NDArray[np.uint8]) -> Shard:
        path, first, last = place.folder / shard_name(number, shard), int(bounds[shard]), int(bounds[shard + 1])
        written = write_shard(path, encoder, first, last, output, slots, lambda packs: task.advance(packs * share))
        place.move(path)
        return written

    made = map_in_threads(make, range(shards), WRITERS_PER_CORE * cores, lambda: output_buffer(schema))
    write_manifest(place.folder, _manifest(plan, number, group.lengths, made))
    place.put_once(manifest_path(place.folder, number))


def _manifest(plan: WritablePlan, number: int, lengths: NDArray[np.int32], shards: Sequence[Shard]) -> GroupManifest:
    import numpy as np

    return GroupManifest(
        plan_sha256=plan.sha256,
        group=number,
        sequences=lengths.size,
        packs=plan.groups[number].packs,
        tokens=int(lengths.sum(dtype=np.int64)),
        counts=tuple(np.bincount(lengths, minlength=plan.max_sequence_length + 1)[1:].tolist()),
        shards=tuple(shards),
    )


def _finished_group(place: Workplace, number: int, plan: WritablePlan) -> GroupManifest | None:
    """The manifest of a group, if it is there, of this plan, and its shards have their sizes; in a store it was put last."""
    out = place.folder
    if not manifest_path(out, number).exists():
        return None
    manifest = read_manifest(out, number)
    if manifest.plan_sha256 != plan.sha256:
        return None
    for shard in () if place.is_store else manifest.shards:
        file = out / shard.name
        if not file.is_file() or file.stat().st_size != shard.bytes:
            return None
    return manifest


def _finish(place: Workplace, plan: WritablePlan) -> Metadata:
    """Check the sums of all manifests against the plan and write metadata.json."""
    out = place.folder
    paths = [manifest_path(out, number) for number in range(len(plan.groups))]
    place.fetch(*(path for path in paths if not path.exists()))
    found = [_finished_group(place, number, plan) for number in range(len(plan.groups))]
    missing = [number for number, manifest in enumerate(found) if manifest is None]
    if missing:
        raise FailedError(
            f"{out}: {len(missing)} of {len(plan.groups)} groups are not written, the first is group {missing[0]};"
            " run `gaudi-bert write` for them (without --finish) and then finish again"
        )
    groups = [manifest for manifest in found if manifest is not None]
    sequences, packs = sum(group.sequences for group in groups), sum(group.packs for group in groups)
    planned = sum(file.sequences for file in plan.files)
    if sequences != planned or packs != sum(group.packs for group in plan.groups):
        raise FailedError(f"{out}: {sequences} sequences in {packs} packs, planned were {planned}; write it again")
    metadata = _metadata(plan, groups)
    with exclusive_lock(out / METADATA_NAME, str(out), wait=True):
        write_metadata(out, metadata)
        place.put(out / METADATA_NAME)
    return metadata


def _metadata(plan: WritablePlan, groups: Sequence[GroupManifest]) -> Metadata:
    from gaudi_bert import __version__

    sequences, packs = sum(group.sequences for group in groups), sum(group.packs for group in groups)
    tokens = sum(group.tokens for group in groups)
    slots = packs * plan.max_sequence_length
    lower_bound = sum(group.lower_bound for group in plan.groups)
    return Metadata(
        tool_version=__version__,
        max_sequence_length=plan.max_sequence_length,
        max_predictions=plan.max_predictions,
        masked_slots=plan.masked_slots,
        depth=plan.depth,
        seed=plan.seed,
        algorithm=plan.algorithm,
        vocabulary=plan.vocabulary,
        sequences=sequences,
        packs=packs,
        tokens=tokens,
        padding_tokens=slots - tokens,
        efficiency=tokens / slots,
        packing_factor=sequences / packs,
        lower_bound=lower_bound,
        gap=packs - lower_bound,
        shard_multiple=plan.shard_multiple,
        inputs=tuple(InputFile(name=file.name, bytes=file.bytes, crc32c=file.crc32c) for file in plan.files),
        shards=tuple(shard for group in groups for shard in group.shards),
        histogram=tuple(sum(column) for column in zip(*(group.counts for group in groups), strict=True)),
    )


def _result(metadata: Metadata, seconds: float | None = None, skipped: bool = False) -> WriteResult:
    return WriteResult(
        sequences=metadata.sequences,
        packs=metadata.packs,
        tokens=metadata.tokens,
        padding_tokens=metadata.padding_tokens,
        efficiency=metadata.efficiency,
        packing_factor=metadata.packing_factor,
        lower_bound=metadata.lower_bound,
        gap=metadata.gap,
        algorithm=metadata.algorithm,
        depth=metadata.depth,
        masked_slots=metadata.masked_slots,
        shards=len(metadata.shards),
        bytes=sum(shard.bytes for shard in metadata.shards),
        seconds=seconds,
        skipped=skipped,
    )


def _groups_result(out: Path, numbers: Sequence[int], written: int) -> GroupsResult:
    manifests = [read_manifest(out, number) for number in numbers]
    return GroupsResult(
        groups=len(numbers),
        groups_written=written,
        sequences=sum(manifest.sequences for manifest in manifests),
        packs=sum(manifest.packs for manifest in manifests),
        tokens=sum(manifest.tokens for manifest in manifests),
    )
