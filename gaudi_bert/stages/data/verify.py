"""The stage `verify`: proof that the packed folder holds every sequence of RECORDS exactly once, byte for byte.

First pass, at the speed of a scan and in constant memory: every input file and every shard is read, checked
(both CRCs of every record, every value, the CRC of every file against metadata.json) and summed into
fingerprints (see `records.fingerprint`). Equal sums: done, once metadata.json and the manifests are found to say the
same (`verify_metadata`). Second pass, only if they differ: the sequences of
the classes that differ are compared one by one and named.

What it found is kept in the folder itself, so that the same folder is not verified twice; a shard or an input
file that changed since, if only by its time, is verified anew.

It also says how even and how well mixed the shards are: the packs that an epoch drops at a number of workers,
and the standard deviation of sequences per batch against that of independent draws.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.artefacts.completion import Signature, is_finished, settings_path
from gaudi_bert.artefacts.metadata import Metadata, Shard, VocabularyInfo
from gaudi_bert.artefacts.names import METADATA_NAME, VERIFICATION_NAME
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.artefacts.store.workplace import Workplace, begin_in, workplace
from gaudi_bert.artefacts.verification import Verification, read_verification, write_verification
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import StoreSettings
from gaudi_bert.stages.data.verify_metadata import PackedContents, ShardContents, check_metadata
from gaudi_bert.stages.results import VerifyResult

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from gaudi_bert.records.files import RecordFile
    from gaudi_bert.records.inputs import RecordInputs
    from gaudi_bert.records.proof.file_contents import SequenceSums
    from gaudi_bert.records.proof.mixing import Mixing
    from gaudi_bert.records.schema import UnpackedSchema

__all__ = ["verify"]


def verify(
    records: str | Path,
    packed: Path,
    *,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
    store: StoreSettings | None = None,
) -> VerifyResult:
    """Verify a packed folder against the records that it was made from.

    Args:
        records: the unpacked RECORDS.
        packed: the packed folder, whole.
        reporter: where progress goes.
        overwrite: verify again what was verified already.
        workers: threads; None for all cores.
        store: how object stores are reached, where a path is a URL.

    Raises:
        InputError: the records are damaged, or there is no packed folder.
        FailedError: something is missing, doubled, changed or damaged; the first of it is named.
    """
    from gaudi_bert.records.inputs import open_inputs
    from gaudi_bert.records.packed_folder import read_metadata

    with workplace(packed, store) as place, open_inputs(records, Objects(store)) as inputs:
        folder, shown = place.folder, place.url or str(packed)
        place.fetch(folder / METADATA_NAME)
        metadata = read_metadata(folder)
        _check_folder(place, metadata)
        if not (folder / METADATA_NAME).exists():  # the predecessor's: nothing of ours is put there
            return VerifyResult(_prove(inputs, place, metadata, reporter, workers))
        out, signature = folder / VERIFICATION_NAME, _signature(folder, inputs.files)
        if not overwrite and _is_verified(inputs, place, metadata, signature):
            reporter.say(f"{shown}: already verified, nothing to do")
            return VerifyResult(read_verification(out), skipped=True)
        keep = place.is_store or os.access(folder, os.W_OK)
        if keep:
            # A verification is of no use to anyone once its data changed, so it is replaced without being asked.
            place.remove((out, settings_path(out)))
            begin_in(place, out, out, signature)
        else:
            reporter.say(f"note: {shown} cannot be written to, so that it was verified cannot be kept there")
        found = _prove(inputs, place, metadata, reporter, workers)
        if keep:
            write_verification(out, found)
            place.put(out)
    return VerifyResult(found)


def _signature(packed: Path, files: Sequence[RecordFile]) -> Signature:
    """What is verified: the metadata, which holds every size and CRC, against these files."""
    metadata_sha256 = hashlib.sha256((packed / METADATA_NAME).read_bytes()).hexdigest()
    return Signature("verify", {}, {"metadata_sha256": metadata_sha256, "files": {file.name: file.bytes for file in files}})


def _is_verified(inputs: RecordInputs, place: Workplace, metadata: Metadata, signature: Signature) -> bool:
    """Whether the same was verified, and nothing was changed since."""
    out = place.folder / VERIFICATION_NAME
    place.fetch(out, settings_path(out))
    if not place.is_store:
        sources = [*(place.folder / shard.name for shard in metadata.shards), *(file.path for file in inputs.files)]
        return is_finished(out, out, signature, sources if not inputs.are_fetched else sources[: len(metadata.shards)])
    if not is_finished(out, out, signature):
        return False
    made = {name: info.modified or math.inf for name, info in place.listed(place.folder).items()}
    changed = [*(made[shard.name] for shard in metadata.shards), *inputs.changed]
    return max(changed) <= made[VERIFICATION_NAME] < math.inf


def _prove(
    inputs: RecordInputs, place: Workplace, metadata: Metadata, reporter: Reporter, workers: int | None
) -> Verification:
    """Read both sides, compare them, and hold what is said of them to what was found."""
    from gaudi_bert.records.proof.file_contents import SequenceSums
    from gaudi_bert.records.proof.mixing import Mixing
    from gaudi_bert.records.schema import UnpackedSchema

    packed, schema = place.folder, UnpackedSchema.of(metadata)
    unpacked, repacked = SequenceSums(), SequenceSums()
    mixing = Mixing.for_shards([shard.packs for shard in metadata.shards])
    total = sum(file.bytes for file in inputs.files) + sum(shard.bytes for shard in metadata.shards)
    with reporter.task("verify", total, "bytes") as task:
        differing = _read_inputs(inputs, schema, metadata, unpacked, workers, task.advance)
        shards = _read_shards(place, metadata, repacked, mixing, workers, task.advance)
    if not _same(unpacked, repacked):
        from gaudi_bert.stages.data.verify_search import describe_difference

        paths = [packed / shard.name for shard in metadata.shards]
        with inputs.all_here(), place.turns([paths]) as turns, turns.batch(0):
            difference = describe_difference(inputs.files, schema, packed, metadata, unpacked, repacked, workers)
        raise FailedError(f"{packed}: {difference}")
    if differing:
        raise FailedError(f"{packed}: {differing[0]}; the sequences are the same, but write it again to be sure")
    if (packed / METADATA_NAME).exists():
        if place.is_store:
            place.fetch(*(packed / name for name in place.listed(packed) if name.startswith("group-")))
        check_metadata(packed, metadata, _contents(inputs, metadata, unpacked, shards))
    return _verification(metadata, repacked, mixing, reporter)


def _contents(
    inputs: RecordInputs, metadata: Metadata, unpacked: SequenceSums, shards: Mapping[str, ShardContents]
) -> PackedContents:
    vocabulary = inputs.vocabulary
    return PackedContents(
        histogram=unpacked.lengths[1 : metadata.max_sequence_length + 1],
        shards=shards,
        vocabulary=None if vocabulary is None else VocabularyInfo.of(vocabulary),
    )


def _check_folder(place: Workplace, metadata: Metadata) -> None:
    """The folder holds the shards of the metadata and no other TFRecords, which a reader might take for its
    own."""
    packed, named = place.folder, {shard.name for shard in metadata.shards}
    if place.is_store:
        there = {name: info.bytes for name, info in place.listed(packed).items()}
    else:
        files = [packed / name for name in named] + list(packed.glob("packed-*"))
        there = {path.name: path.stat().st_size for path in files if path.is_file()}
    for shard in metadata.shards:
        path = packed / shard.name
        if shard.name not in there:
            raise FailedError(f"{path}: the shard is missing; write the folder again")
        if there[shard.name] != shard.bytes:
            raise FailedError(f"{path}: {there[shard.name]} bytes, metadata.json says {shard.bytes}; write it again")
    for name in sorted(there):
        if name.startswith("packed-") and name not in named:
            raise FailedError(f"{packed / name}: is not in metadata.json; remove it, or write the folder again")


def _read_inputs(
    inputs: RecordInputs,
    schema: UnpackedSchema,
    metadata: Metadata,
    total: SequenceSums,
    workers: int | None,
    progress: Callable[[int], None],
) -> list[str]:
    """Add all input files to `total`; how they differ from those of the metadata."""
    from gaudi_bert.records.proof.file_contents import sum_pieces, unpacked_pieces
    from gaudi_bert.records.read.threads import map_files, worker_count

    lock, files = threading.Lock(), inputs.files
    with inputs.turns([[file.name] for file in files], worker_count(workers, len(files))) as turns:

        def read(number: int, buffer: NDArray[np.uint8]) -> tuple[int, int]:
            with turns.batch(number):
                sums = sum_pieces(unpacked_pieces(files[number].path, schema, buffer, progress))
            with lock:
                total.add(sums)
            return sums.file_bytes, sums.file_crc32c

        seen = map_files(read, range(len(files)), workers)
    found = {file.name: each for file, each in zip(files, seen, strict=True)}
    if not metadata.inputs:
        return []  # the predecessor did not note its input files
    packed = {file.name: (file.bytes, file.crc32c) for file in metadata.inputs}
    differing = [f"input file {name} is not among those that were packed" for name in found if name not in packed]
    for name, identity in packed.items():
        if name not in found:
            differing.append(f"input file {name} was packed but is missing now")
        elif found[name] != identity:
            differing.append(f"input file {name} has changed since it was packed")
    return differing


def _read_shards(
    place: Workplace,
    metadata: Metadata,
    total: SequenceSums,
    mixing: Mixing,
    workers: int | None,
    progress: Callable[[int], None],
) -> dict[str, ShardContents]:
    """Add all shards to `total` and `mixing`, and hold each to its entry in the metadata; what each holds, by name."""
    from gaudi_bert.records.proof.file_contents import packed_pieces, sum_pieces
    from gaudi_bert.records.read.threads import map_files, worker_count
    from gaudi_bert.records.schema import PackedSchema

    lock, schema = threading.Lock(), PackedSchema.of(metadata)
    paths = {shard.name: place.folder / shard.name for shard in metadata.shards}

    def read_shard(shard: Shard, buffer: NDArray[np.uint8]) -> ShardContents:
        path = paths[shard.name]
        try:
            sums = sum_pieces(packed_pieces(path, schema, buffer, progress) if shard.bytes else iter(()))
        except InputError as error:
            raise FailedError(str(error)) from error
        if shard.crc32c is not None and sums.file_crc32c != shard.crc32c:
            raise FailedError(f"{path}: its CRC-32C differs from metadata.json; write it again")
        if sums.pack_sizes.size != shard.packs:
            raise FailedError(f"{path}: {sums.pack_sizes.size} packs, metadata.json says {shard.packs}; write it again")
        with lock:
            total.add(sums)
            mixing.add(sums.pack_sizes)
        return ShardContents(sums.pack_sizes.size, sums.sequences, sums.tokens)

    with place.turns([[path] for path in paths.values()], worker_count(workers, len(paths))) as turns:

        def read(number: int, buffer: NDArray[np.uint8]) -> ShardContents:
            with turns.batch(number):
                return read_shard(metadata.shards[number], buffer)

        return dict(zip(paths, map_files(read, range(len(paths)), workers), strict=True))


def _same(unpacked: SequenceSums, repacked: SequenceSums) -> bool:
    return bool((unpacked.sums == repacked.sums).all()) and unpacked.tokens == repacked.tokens


def _verification(metadata: Metadata, repacked: SequenceSums, mixing: Mixing, reporter: Reporter) -> Verification:
    from gaudi_bert.records.proof.mixing import dropped_packs, is_balanced

    packs = [shard.packs for shard in metadata.shards]
    balanced = is_balanced([shard.name for shard in metadata.shards], packs)
    dropped = dropped_packs(sum(packs))
    ratio = mixing.ratio
    if not balanced:
        reporter.say(
            "note: the shards of a group differ by more than one pack, so readers of whole shards get unequal shares"
        )
    if ratio is not None and not mixing.is_fair:
        reporter.say(f"note: sequences per batch vary {ratio:.2f} times as much as independent draws would (1.2 is fair)")
    return Verification(
        sequences=repacked.sequences,
        tokens=repacked.tokens,
        packs=sum(packs),
        shards=len(packs),
        input_files=len(metadata.inputs),
        fingerprint=repacked.fingerprint,
        balanced=balanced,
        most_dropped_packs=max(dropped.values()),
        dropped_packs={str(workers): count for workers, count in dropped.items()},
        mixing=ratio,
        fairly_mixed=mixing.is_fair,
        mixing_batch_packs=mixing.batch_packs,
    )
