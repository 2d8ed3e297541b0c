"""The stage `write`: the packed shards of a plan, group by group, and metadata.json when all groups are there.

A group is a pure function of its files and the plan: whoever writes it, on whatever machine and with however
many threads, writes the same bytes. Its shards come first and its manifest `group-GGGGG.json` last, all of
them whole or absent, so a killed run is continued by running it again: groups with a manifest are skipped. A
kernel lock keeps two writers of one group apart.

A group with fewer packs than shards still has them all, some of them empty files: then every reader may count
on a multiple of `shard_multiple` shards a group, and rank r of W reads the shards whose index mod W is r.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import exclusive_lock, read_json, write_json
from gaudi_bert.common.progress import Reporter, Task

if TYPE_CHECKING:
    import numpy as np

    from gaudi_bert.records.metadata import Shard
    from gaudi_bert.records.read.group import GroupFile
    from gaudi_bert.stages.plan_reader import WritePlan

__all__ = ["match_files", "write"]

MANIFEST_VERSION = 1


def write(
    records: str | Path,
    plan: Path,
    out: Path,
    *,
    shard: tuple[int, int] | None = None,
    finish: bool = False,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
) -> dict[str, Any]:
    """Write the packed records of a plan.

    Args:
        records: the RECORDS that the plan was made for.
        plan: plan.json.
        out: the folder of the packed shards.
        shard: (K, N): only groups K, K + N, ...; `finish` afterwards, once.
        finish: write no group, but check that all are there and write metadata.json.
        reporter: where progress goes.
        overwrite: replace what another plan made.
        workers: threads; None for all cores.

    Returns:
        The totals of the packed folder, or of this shard's groups.

    Raises:
        InputError: bad records, records that are not the plan's, or a folder made by another plan.
        FailedError: disk full, another writer, or a group missing at `finish`.
    """
    from gaudi_bert.records.files import list_record_files, records_folder
    from gaudi_bert.records.metadata import METADATA_NAME
    from gaudi_bert.records.packed_folder import read_metadata
    from gaudi_bert.stages.plan_reader import read_plan

    started = time.monotonic()
    content = read_plan(plan)
    if records_folder(records).resolve() == out.resolve():
        raise InputError(f"{out}: the output folder is the folder of the records; choose another one")
    signature = Signature("write", {}, {"plan_sha256": content.sha256})
    with exclusive_lock(out / "settings.json", str(out), wait=True):
        done = begin_artefact(out, out / METADATA_NAME, signature, overwrite)
    if done:
        reporter.say(f"{out}: already there, nothing to do")
        return {**_summary(read_metadata(out)), "skipped": True}
    numbers = range(len(content.groups))
    if not finish:
        files = match_files(records, list_record_files(records), content)
        mine = numbers if shard is None else numbers[shard[0] :: shard[1]]
        written = _write_groups(out, content, files, mine, reporter, workers)
        if shard is not None:
            return _shard_summary(out, mine, written)
    return {**_finish(out, content), "seconds": round(time.monotonic() - started, 3)}


def match_files(records: str | Path, found: Sequence[Any], plan: WritePlan) -> dict[str, GroupFile]:
    """The files of the plan, by name, where they are now."""
    from gaudi_bert.records.read.group import GroupFile

    there = {file.name: file for file in found}
    for name in sorted(set(there) - {file.name for file in plan.files}):
        raise InputError(f"{there[name].path}: is not in the plan; make the histogram and the plan again")
    matched = {}
    for file in plan.files:
        if file.name not in there:
            raise InputError(f"{records}: file {file.name} of the plan is missing; bring it back, or plan again")
        if there[file.name].bytes != file.bytes:
            raise InputError(
                f"{there[file.name].path}: {there[file.name].bytes} bytes, the plan was made for {file.bytes};"
                " make the histogram and the plan again"
            )
        matched[file.name] = GroupFile(file.name, there[file.name].path, file.bytes, file.crc32c, file.sequences)
    return matched


def _write_groups(
    out: Path,
    plan: WritePlan,
    files: dict[str, GroupFile],
    numbers: Sequence[int],
    reporter: Reporter,
    workers: int | None,
) -> int:
    """Write the groups that have no manifest yet; how many that were."""
    from gaudi_bert.records.read.group import buffer_bytes, group_buffer

    waiting = [number for number in numbers if _manifest(out, number, plan) is None]
    members = {number: [files[name] for name in plan.groups[number].files] for number in waiting}
    if len(waiting) < len(numbers):
        reporter.say(f"{out}: {len(numbers) - len(waiting)} of {len(numbers)} groups are there already")
    if not waiting:
        return 0
    buffer = group_buffer(max(buffer_bytes(group) for group in members.values()))
    with reporter.task("write", sum(file.bytes for group in members.values() for file in group), "bytes") as task:
        for number in waiting:
            with exclusive_lock(_manifest_path(out, number), f"{out}: group {number}"):
                if _manifest(out, number, plan) is None:
                    _write_group(out, plan, number, members[number], buffer, task, workers)
    return len(waiting)


def _write_group(
    out: Path,
    plan: WritePlan,
    number: int,
    files: Sequence[GroupFile],
    buffer: np.ndarray,
    task: Task,
    workers: int | None,
) -> None:
    """Read, pack and write one group; half of its bytes count as progress when read, half when packed."""
    from gaudi_bert.records.assign import assign_sequences, shard_bounds
    from gaudi_bert.records.read.group import read_group
    from gaudi_bert.records.read.threads import map_in_threads, worker_count
    from gaudi_bert.records.write.encoder import PackEncoder
    from gaudi_bert.records.write.shards import WRITERS_A_CORE, count_group_shards, output_buffer, shard_name, write_shard

    planned = plan.groups[number]
    group = read_group(files, plan.unpacked_schema, buffer, workers, lambda count: task.advance(count / 2))
    assignment = assign_sequences(group.lengths, planned.strategies, plan.seed, number)
    schema = plan.packed_schema
    shards = count_group_shards(schema, group.index, assignment, plan.shard_multiple, plan.shard_bytes)
    bounds = shard_bounds(planned.packs, shards, sum(earlier.packs for earlier in plan.groups[:number]))
    encoder = PackEncoder(schema, group.buffer, group.offsets, group.index, assignment.starts, assignment.members)
    share = sum(file.bytes for file in files) / planned.packs / 2
    cores = worker_count(workers, shards)
    slots = threading.Semaphore(cores)
    made = map_in_threads(
        lambda shard, output: write_shard(
            out / shard_name(number, shard),
            encoder,
            int(bounds[shard]),
            int(bounds[shard + 1]),
            output,
            slots,
            lambda packs: task.advance(packs * share),
        ),
        range(shards),
        WRITERS_A_CORE * cores,
        lambda: output_buffer(schema),
    )
    write_json(_manifest_path(out, number), _new_manifest(plan, number, group.lengths, made))


def _new_manifest(plan: WritePlan, number: int, lengths: np.ndarray, shards: Sequence[Shard]) -> dict[str, Any]:
    import numpy as np

    return {
        "format_version": MANIFEST_VERSION,
        "plan_sha256": plan.sha256,
        "group": number,
        "sequences": lengths.size,
        "packs": plan.groups[number].packs,
        "tokens": int(lengths.sum(dtype=np.int64)),
        "counts": np.bincount(lengths, minlength=plan.max_sequence_length + 1)[1:].tolist(),
        "shards": [shard.model_dump() for shard in shards],
    }


def _manifest_path(out: Path, number: int) -> Path:
    return out / f"group-{number:05d}.json"


def _manifest(out: Path, number: int, plan: WritePlan) -> dict[str, Any] | None:
    """The manifest of a group, if it is there, of this plan, and its shards have their sizes."""
    path = _manifest_path(out, number)
    if not path.exists():
        return None
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("plan_sha256") != plan.sha256:
        return None
    for shard in manifest["shards"]:
        file = out / shard["name"]
        if not file.is_file() or file.stat().st_size != shard["bytes"]:
            return None
    return manifest


def _finish(out: Path, plan: WritePlan) -> dict[str, Any]:
    """Check the sums of all manifests against the plan and write metadata.json."""
    from gaudi_bert import __version__
    from gaudi_bert.records.metadata import METADATA_NAME, InputFile, Metadata, Shard

    manifests = [_manifest(out, number, plan) for number in range(len(plan.groups))]
    missing = [number for number, manifest in enumerate(manifests) if manifest is None]
    if missing:
        raise FailedError(
            f"{out}: {len(missing)} of {len(plan.groups)} groups are not written, the first is group {missing[0]};"
            " run `gaudi-bert write` for them (without --finish) and then finish again"
        )
    groups = [manifest for manifest in manifests if manifest is not None]
    sequences, packs, tokens = (sum(group[key] for group in groups) for key in ("sequences", "packs", "tokens"))
    planned = sum(file.sequences for file in plan.files)
    if sequences != planned or packs != sum(group.packs for group in plan.groups):
        raise FailedError(f"{out}: {sequences} sequences in {packs} packs, planned were {planned}; write it again")
    lower_bound = sum(group.lower_bound for group in plan.groups)
    slots = packs * plan.max_sequence_length
    metadata = Metadata(
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
        shards=tuple(Shard(**shard) for group in groups for shard in group["shards"]),
        histogram=tuple(sum(column) for column in zip(*(group["counts"] for group in groups), strict=True)),
    )
    with exclusive_lock(out / METADATA_NAME, str(out), wait=True):
        write_json(out / METADATA_NAME, metadata.model_dump(mode="json"))
    return _summary(metadata)


def _summary(metadata: Any) -> dict[str, Any]:
    keys = (
        *("sequences", "packs", "tokens", "padding_tokens", "efficiency", "packing_factor", "lower_bound", "gap"),
        *("algorithm", "depth", "masked_slots"),
    )
    return {
        **{key: getattr(metadata, key) for key in keys},
        "shards": len(metadata.shards),
        "bytes": sum(shard.bytes for shard in metadata.shards),
    }


def _shard_summary(out: Path, numbers: Sequence[int], written: int) -> dict[str, Any]:
    manifests = [read_json(_manifest_path(out, number)) for number in numbers]
    return {
        "groups": len(numbers),
        "groups_written": written,
        "sequences": sum(manifest["sequences"] for manifest in manifests),
        "packs": sum(manifest["packs"] for manifest in manifests),
        "tokens": sum(manifest["tokens"] for manifest in manifests),
    }
