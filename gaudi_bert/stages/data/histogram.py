"""The stage `histogram`: one pass over RECORDS that checks every byte and counts the sequences of each
length, file by file.

Every record is held to the contract here (both CRCs, features, sizes, masks, positions), so that bad input is
refused before anything is planned or written. Files are read by several threads, each in constant memory; the
result does not depend on how many.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.histogram import CountedFile, HistogramFile, read_histogram, write_histogram
from gaudi_bert.artefacts.metadata import VocabularyInfo
from gaudi_bert.artefacts.store.location import shown_place
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.artefacts.store.workplace import Workplace, begin_in, workplace
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import StoreSettings
from gaudi_bert.stages.results import HistogramResult

if TYPE_CHECKING:
    from gaudi_bert.records.files import RecordFile
    from gaudi_bert.records.inputs import RecordInputs
    from gaudi_bert.records.schema import UnpackedSchema

__all__ = ["histogram"]

_MERGE_EVERY = 1 << 16  # sequences whose (length, masked) pairs are kept before they are merged into counts


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
) -> HistogramResult:
    """Check RECORDS and count their sequences.

    Args:
        records: a folder, a file or a glob of unpacked TFRecords.
        out: the histogram.json to write.
        shard: (K, N): only files K, K + N, ... of the sorted list; `plan` merges the parts.
        reporter: where progress goes.
        overwrite: replace a histogram of other records.
        vocabulary: a vocab.txt; by default `vocab.txt` beside the folder of RECORDS, if there is one.
        workers: threads; None for all cores.
        store: how object stores are reached, where RECORDS or `out` are URLs.

    Raises:
        InputError: bad input, with file, record and offset; or `out` was made from something else.
    """
    from gaudi_bert.records.inputs import open_inputs

    with open_inputs(records, Objects(store)) as inputs, workplace(out.parent, store) as place:
        files = list(inputs.files)
        if shard is not None:
            files = files[shard[0] :: shard[1]]
            if not files:
                raise InputError(f"{records}: shard {shard[0]}/{shard[1]} has no files, there are fewer than {shard[1]}")
        vocabulary = vocabulary if vocabulary is not None else inputs.vocabulary
        info = None if vocabulary is None else VocabularyInfo.of(vocabulary)
        signature = Signature(
            "histogram",
            {"shard": None if shard is None else list(shard)},
            {"files": {file.name: file.bytes for file in files}, "vocabulary": None if info is None else info.as_json()},
        )
        made = place.folder / out.name
        if begin_in(place, made, made, signature, overwrite):
            reporter.say(f"{shown_place(out)}: already there, nothing to do")
            return _result(read_histogram(made), skipped=True)
        content = _count(inputs, files, info, reporter, workers)
        _keep(place, made, content)
        return _result(content)


def _count(
    inputs: RecordInputs, files: list[RecordFile], vocabulary: VocabularyInfo | None, reporter: Reporter, workers: int | None
) -> HistogramFile:
    """Read all files, each when its turn comes."""
    from gaudi_bert.records.read.threads import map_files, worker_count

    ahead = worker_count(workers, len(files))
    with (
        reporter.task("histogram", sum(file.bytes for file in files), "bytes") as task,
        inputs.turns([[file.name] for file in files], ahead) as turns,
        turns.batch(0),  # the first file is there until the end: its first record says what all are held to
    ):
        schema = _common_schema(files, reporter)

        def count(number: int, buffer: NDArray[np.uint8]) -> CountedFile:
            with turns.batch(number) if number else nullcontext():
                return _count_file(files[number], schema, buffer, task.advance)

        counted = map_files(count, range(len(files)), workers)
    return _content(schema, counted, vocabulary)


def _keep(place: Workplace, made: Path, content: HistogramFile) -> None:
    write_histogram(made, content)
    place.put(made)


def _common_schema(files: list[RecordFile], reporter: Reporter) -> UnpackedSchema:
    """The sizes of the first record; every other record is then held to them."""
    from gaudi_bert.records.read.scan import unpacked_schema

    schema, others = unpacked_schema(files[0].path)
    if others:
        names = ", ".join(f"`{name}`" for name in others)
        reporter.say(f"{files[0].path}: also has {names}, which packed records do not carry")
    return schema


def _count_file(
    file: RecordFile, schema: UnpackedSchema, buffer: NDArray[np.uint8], progress: Callable[[int], None]
) -> CountedFile:
    """The entry of one file in histogram.json."""
    from gaudi_bert.records.read.scan import RecordScan, UnpackedFormat
    from gaudi_bert.records.wire.framing import NO_RECORD

    records = UnpackedFormat.for_pieces(schema, buffer)
    scan = RecordScan(file.path, records, buffer, progress=progress)
    totals: dict[int, int] = {}
    pending: list[NDArray[np.int32]] = []
    for _ in scan.pieces():
        rows = records.index.rows[: records.rows]
        pending.append(rows["length"] * np.int32(schema.max_predictions + 1) + rows["masked"])
        if sum(keys.size for keys in pending) >= _MERGE_EVERY:
            _merge(totals, pending)
    _merge(totals, pending)
    if records.records == 0:
        raise InputError(f"{file.path}: {NO_RECORD}")
    counts = [(*divmod(key, schema.max_predictions + 1), count) for key, count in sorted(totals.items())]
    return CountedFile(
        name=file.name,
        bytes=scan.file_bytes,
        crc32c=scan.file_crc32c,
        sequences=records.records,
        tokens=sum(length * count for length, _, count in counts),
        counts=np.array(counts, np.int64),
    )


def _merge(totals: dict[int, int], pending: list[NDArray[np.int32]]) -> None:
    """Move the pending keys into the totals."""
    if pending:
        keys, counts = np.unique(np.concatenate(pending), return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            totals[key] = totals.get(key, 0) + count
        pending.clear()


def _content(schema: UnpackedSchema, files: list[CountedFile], vocabulary: VocabularyInfo | None) -> HistogramFile:
    counts = np.zeros(schema.max_sequence_length + 1, np.int64)
    for file in files:
        lengths, _, sequences = file.counts.T
        np.add.at(counts, lengths, sequences)
    return HistogramFile(
        max_sequence_length=schema.max_sequence_length,
        max_predictions=schema.max_predictions,
        sequences=sum(file.sequences for file in files),
        tokens=sum(file.tokens for file in files),
        vocabulary=vocabulary,
        counts=tuple(counts[1:].tolist()),
        files=tuple(files),
    )


def _result(content: HistogramFile, skipped: bool = False) -> HistogramResult:
    files = content.files or ()
    sequences, tokens = sum(file.sequences for file in files), sum(file.tokens for file in files)
    return HistogramResult(
        sequences=sequences,
        tokens=tokens,
        files=len(files),
        bytes=sum(file.bytes for file in files),
        max_sequence_length=content.max_sequence_length,
        max_predictions=content.max_predictions or 0,
        mean_length=tokens / sequences,
        skipped=skipped,
    )
