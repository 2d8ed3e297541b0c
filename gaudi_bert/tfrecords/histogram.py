"""The stage `histogram`: one pass over RECORDS that checks every byte and counts the sequences of each
length, file by file.

Every record is held to the contract here (both CRCs, features, sizes, masks, positions), so that bad input is
refused before anything is planned or written. Files are read by several threads, each in constant memory; the
result does not depend on how many.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.artefacts.histogram import CountedFile, FileCounts, HistogramFile, list_histogram
from gaudi_bert.artefacts.references import VocabularyInfo
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.store.mirrored_folder import mirrored, read_ahead
from gaudi_bert.artefacts.store.objects import Objects, shown_location
from gaudi_bert.common.arrays import ByteArray, Int32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.packing.histogram import Histogram, merge_histograms
from gaudi_bert.tfrecords.files import open_inputs
from gaudi_bert.tfrecords.scanning.scan import RecordScan, UnpackedFormat, map_files, unpacked_schema, worker_count
from gaudi_bert.tfrecords.wire.framing import NO_RECORD
from gaudi_bert.tfrecords.wire.schema import UnpackedSchema

_MERGE_EVERY = 1 << 16  # sequences whose (length, masked) pairs wait before they are merged into counts


def histogram(
    records: str | Path,
    out: Path,
    *,
    shard: tuple[int, int] | None = None,
    reporter: Reporter,
    overwrite: bool = False,
    vocabulary: Path | None = None,
    workers: int | None = None,
    store: StoreSettings | None = None,
) -> StageOutput[HistogramFile]:
    """Check RECORDS and count their sequences; the vocabulary is by default `vocab.txt` next to the folder of RECORDS."""
    with open_inputs(records, Objects(store)) as inputs, mirrored(out.parent, store) as folder:
        sizes = inputs.sizes
        if shard is not None:
            sizes = {path: sizes[path] for path in inputs.paths[shard[0] :: shard[1]]}
            if not sizes:
                raise InputError(f"{records}: shard {shard[0]}/{shard[1]} has no files, there are fewer than {shard[1]}")
        vocabulary = vocabulary if vocabulary is not None else inputs.vocabulary
        info = None if vocabulary is None else VocabularyInfo.of(vocabulary)
        signature = Signature(
            "histogram",
            {"shard": None if shard is None else list(shard)},
            {
                "files": {path.name: size for path, size in sizes.items()},
                "vocabulary": None if info is None else info.as_json(),
            },
        )
        path = folder / out.name
        if begin_artefact(path, path, signature, overwrite):
            reporter.say(f"{shown_location(out)}: already there, nothing to do")
            return StageOutput(HistogramFile.read(path), skipped=True)
        content = _count(sizes, info, reporter, workers)
        content.write(path)
        return StageOutput(content)


def _count(
    sizes: Mapping[Path, int], vocabulary: VocabularyInfo | None, reporter: Reporter, workers: int | None
) -> HistogramFile:
    """Read all files; from a store, each is fetched shortly before."""
    files, ahead = list(sizes), worker_count(workers, len(sizes))
    with (
        reporter.task("histogram", sum(sizes.values()), "bytes") as task,
        read_ahead(files, ahead) as batches,
        batches.batch(0),  # the first file is there until the end: its first record has the sizes that all are held to
    ):
        # The sizes of the first record; every other record is held to them.
        schema, others = unpacked_schema(files[0])
        if others:
            names = ", ".join(f"`{name}`" for name in others)
            reporter.say(f"{files[0]}: also has {names}, which packed records do not carry")

        def count(number: int, buffer: ByteArray) -> CountedFile:
            with batches.batch(number) if number else nullcontext():
                return _count_file(files[number], schema, buffer, task.advance)

        counted = map_files(count, range(len(files)), workers)
    counts = np.zeros(schema.max_sequence_length + 1, np.int64)
    for file in counted:
        lengths, _, sequences = file.counts.rows.T
        np.add.at(counts, lengths, sequences)
    return HistogramFile(
        max_sequence_length=schema.max_sequence_length,
        max_predictions=schema.max_predictions,
        sequences=sum(file.sequences for file in counted),
        tokens=sum(file.tokens for file in counted),
        vocabulary=vocabulary,
        counts=tuple(counts[1:].tolist()),
        files=tuple(counted),
    )


def _count_file(path: Path, schema: UnpackedSchema, buffer: ByteArray, progress: Callable[[int], None]) -> CountedFile:
    records = UnpackedFormat.for_pieces(schema, buffer)
    scan = RecordScan(path, records, buffer, progress=progress)
    totals: Counter[int] = Counter()
    pending: list[Int32Array] = []
    for _ in scan.pieces():
        rows = records.index.rows[: records.rows]
        pending.append(rows["length"] * np.int32(schema.max_predictions + 1) + rows["masked"])
        if sum(keys.size for keys in pending) >= _MERGE_EVERY:
            _merge(totals, pending)
    _merge(totals, pending)
    if records.records == 0:
        raise InputError(f"{path}: {NO_RECORD}")
    counts = [(*divmod(key, schema.max_predictions + 1), count) for key, count in sorted(totals.items())]
    return CountedFile(
        name=path.name,
        bytes=scan.file_bytes,
        crc32c=scan.file_crc32c,
        sequences=records.records,
        tokens=sum(length * count for length, _, count in counts),
        counts=FileCounts(np.array(counts, np.int64)),
    )


def _merge(totals: Counter[int], pending: list[Int32Array]) -> None:
    if pending:
        keys, counts = np.unique(np.concatenate(pending), return_counts=True)
        totals.update(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
        pending.clear()


# --- reading one histogram.json or several, merged, as the packing room takes it


@dataclass(frozen=True)
class CountedRecords:
    """What is known of the unpacked records.

    Attributes:
        histogram: all sequences together; with the most masked positions at each length if the files are known.
        max_predictions: most masked positions of one sequence (P), or None where no file states it.
        files: the input files in the order of their names, or None where only counts are known.
        vocabulary: of the token ids, where it is known.
    """

    histogram: Histogram
    max_predictions: int | None
    files: tuple[CountedFile, ...] | None
    vocabulary: VocabularyInfo | None

    @cached_property
    def sha256(self) -> str:
        """Identity of all this; the same whether it came in one file or in several."""
        # As JSON with sorted keys, of which the longest part is read and forgotten file by file.
        digest = hashlib.sha256(f'{{"counts": {json.dumps(self.histogram.counts.tolist())}, "files": '.encode())
        if self.files is None:
            digest.update(b"null")
        for number, file in enumerate(self.files or ()):
            digest.update(f"{', ' if number else '['}{file.digested}".encode())
        others = {
            "max_predictions": self.max_predictions,
            "max_sequence_length": self.histogram.max_sequence_length,
            "vocabulary": None if self.vocabulary is None else self.vocabulary.as_json(),
        }
        closing = "" if self.files is None else "]" if self.files else "[]"
        digest.update(f"{closing}, {json.dumps(others, sort_keys=True)[1:]}".encode())
        return digest.hexdigest()


def read_histograms(paths: Sequence[Path]) -> CountedRecords:
    """Read and merge."""
    if not paths:
        raise InputError("no histogram.json is given; make one with `gaudi-bert histogram RECORDS --out histogram.json`")
    parts = [_counted_records(path) for path in paths]
    merged = parts[0] if len(parts) == 1 else _merge_records(parts, [str(path) for path in paths])
    if merged.histogram.sequences == 0:
        raise InputError(f"{paths[0]}: holds no sequence, so there is nothing to pack; check which records were counted")
    return merged


def histogram_shard(
    records: str | Path, shard: tuple[int, int], store: StoreSettings | None = None
) -> tuple[int, int] | None:
    """The part (K, N) that machine `shard` counts, N at most the number of files; None for a machine without files."""
    number, machines = shard
    with open_inputs(records, Objects(store)) as inputs:
        parts = min(machines, len(inputs.sizes))
    return (number, parts) if number < parts else None


def _counted_records(path: Path) -> CountedRecords:
    content, max_masked = list_histogram(path)
    histogram = Histogram(content.max_sequence_length, np.array(content.counts, np.int64), max_masked)
    files = None if content.files is None else _in_order(content.files)
    return CountedRecords(histogram, content.max_predictions, files, content.vocabulary)


def _merge_records(parts: Sequence[CountedRecords], sources: Sequence[str]) -> CountedRecords:
    first = parts[0]
    for part, source in zip(parts, sources, strict=True):
        for name, one, other in (
            ("max_sequence_length", first.histogram.max_sequence_length, part.histogram.max_sequence_length),
            ("max_predictions", first.max_predictions, part.max_predictions),
            ("vocabulary", first.vocabulary, part.vocabulary),
        ):
            if one != other:
                raise InputError(f"{source}: {name} is {other}, but {one} in {sources[0]}; only like records can be merged")
    known = [part.files for part in parts if part.files is not None]
    if known and len(known) < len(parts):
        lacking = sources[[part.files is None for part in parts].index(True)]
        raise InputError(f"{lacking}: has no counts per file while others have; make it with `gaudi-bert histogram`")
    files = _in_order([file for part in known for file in part]) if known else None
    merged = merge_histograms(part.histogram for part in parts)
    return CountedRecords(merged, first.max_predictions, files, first.vocabulary)


def _in_order(files: Sequence[CountedFile]) -> tuple[CountedFile, ...]:
    ordered = sorted(files, key=lambda file: file.name)
    for one, other in itertools.pairwise(ordered):
        if one.name == other.name:
            raise InputError(f"{one.name}: is counted twice; give each histogram once")
    return tuple(ordered)
