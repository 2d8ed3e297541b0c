"""What is known of the unpacked records: one histogram.json or several, merged, as the packing room takes it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.artefacts.histogram import HistogramFile, read_histogram
from gaudi_bert.artefacts.metadata import VocabularyInfo
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from gaudi_bert.config import StoreSettings
from gaudi_bert.packing.groups import FileCounts, group_histogram
from gaudi_bert.packing.histogram import Histogram, merge_histograms

__all__ = ["CountedRecords", "histogram_shard", "read_histograms"]


@dataclass(frozen=True)
class CountedRecords:
    """What is known of the unpacked records.

    Attributes:
        histogram: all sequences together; with the most masked positions at each length if the files are known.
        max_predictions: most masked positions of one sequence (P), or None where no file said it.
        files: the input files in the order of their names, or None where only counts are known.
        vocabulary: of the token ids, where it is known.
    """

    histogram: Histogram
    max_predictions: int | None
    files: tuple[FileCounts, ...] | None
    vocabulary: VocabularyInfo | None

    @property
    def sha256(self) -> str:
        """Identity of all this; the same whether it came in one file or in several."""
        value = {
            "max_sequence_length": self.histogram.max_sequence_length,
            "max_predictions": self.max_predictions,
            "counts": self.histogram.counts.tolist(),
            "files": None if self.files is None else [_identity(file) for file in self.files],
            "vocabulary": None if self.vocabulary is None else self.vocabulary.as_json(),
        }
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def read_histograms(paths: Sequence[Path]) -> CountedRecords:
    """Read and merge.

    Raises:
        InputError: no file, a damaged one, files that do not belong together, or no sequence at all.
    """
    if not paths:
        raise InputError("no histogram.json is given; make one with `gaudi-bert histogram RECORDS --out histogram.json`")
    parts = [_counted_records(read_histogram(path)) for path in paths]
    merged = parts[0] if len(parts) == 1 else _merge(parts, [str(path) for path in paths])
    if merged.histogram.sequences == 0:
        raise InputError(f"{paths[0]}: holds no sequence, so there is nothing to pack; check which records were counted")
    return merged


def histogram_shard(
    records: str | Path, shard: tuple[int, int], store: StoreSettings | None = None
) -> tuple[int, int] | None:
    """The part (K, N) that machine `shard` counts, N no more than there are files; None where none is left for it.

    Raises:
        InputError: there are no records.
    """
    from gaudi_bert.records.inputs import open_inputs

    number, machines = shard
    with open_inputs(records, Objects(store)) as inputs:
        parts = min(machines, len(inputs.files))
    return (number, parts) if number < parts else None


def _counted_records(content: HistogramFile) -> CountedRecords:
    length = content.max_sequence_length
    if content.files is None:
        histogram = Histogram(length, np.array(content.counts, np.int64))
        return CountedRecords(histogram, content.max_predictions, None, content.vocabulary)
    files = _in_order(
        [FileCounts(file.name, file.bytes, file.crc32c, file.sequences, file.tokens, file.counts) for file in content.files]
    )
    return CountedRecords(group_histogram(files, length), content.max_predictions, files, content.vocabulary)


def _identity(file: FileCounts) -> dict[str, Any]:
    return {**vars(file), "rows": file.rows.tolist()}


def _merge(parts: Sequence[CountedRecords], sources: Sequence[str]) -> CountedRecords:
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


def _in_order(files: Sequence[FileCounts]) -> tuple[FileCounts, ...]:
    ordered = sorted(files, key=lambda file: file.name)
    for one, other in itertools.pairwise(ordered):
        if one.name == other.name:
            raise InputError(f"{one.name}: is counted twice; give each histogram once")
    return tuple(ordered)
