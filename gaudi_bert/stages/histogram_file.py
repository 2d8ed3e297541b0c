"""Reading `histogram.json`: one or several, merged, every value checked before anything is built on it.

At the least such a file has `max_sequence_length` and `counts` (`counts[0]` is length 1): enough to plan and to estimate.
What `gaudi-bert histogram` writes has the counts of every input file as well, with which a plan can be written.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json
from gaudi_bert.packing.groups import FileCounts, group_histogram
from gaudi_bert.packing.histogram import Histogram, merge_histograms

__all__ = ["CountedRecords", "counted_records", "read_histograms"]

MOST = 2**62  # of any whole number, so that sums fit int64


@dataclass(frozen=True)
class CountedRecords:
    """What is known of the unpacked records.

    Attributes:
        histogram: all sequences together; with the most masked positions at each length if the files are known.
        max_predictions: most masked positions of one sequence (P), or None where no file said it.
        files: the input files in the order of their names, or None where only counts are known.
        vocabulary: {"size", "sha256"}, or None.
    """

    histogram: Histogram
    max_predictions: int | None
    files: tuple[FileCounts, ...] | None
    vocabulary: Mapping[str, Any] | None

    @property
    def sha256(self) -> str:
        """Identity of all this; the same whether it came in one file or in several."""
        value = {
            "max_sequence_length": self.histogram.max_sequence_length,
            "max_predictions": self.max_predictions,
            "counts": self.histogram.counts.tolist(),
            "files": None if self.files is None else [_identity(file) for file in self.files],
            "vocabulary": self.vocabulary,
        }
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def read_histograms(paths: Sequence[Path]) -> CountedRecords:
    """Read and merge.

    Raises:
        InputError: no file, not JSON, a value out of range, files that do not belong together, or no sequence at all.
    """
    if not paths:
        raise InputError("no histogram.json is given; make one with `gaudi-bert histogram RECORDS --out histogram.json`")
    parts = [counted_records(read_json(path), str(path)) for path in paths]
    merged = parts[0] if len(parts) == 1 else _merge(parts, [str(path) for path in paths])
    if merged.histogram.sequences == 0:
        raise InputError(f"{paths[0]}: holds no sequence, so there is nothing to pack; check which records were counted")
    return merged


def counted_records(value: Any, source: str) -> CountedRecords:
    """The content of one histogram.json; `source` names it in errors.

    Raises:
        InputError: as `read_histograms`, for one file.
    """
    if not isinstance(value, Mapping) or "max_sequence_length" not in value or "counts" not in value:
        raise InputError(
            f"{source}: is no histogram: it needs `max_sequence_length` and `counts`; make it with `gaudi-bert histogram`"
        )
    try:
        histogram = Histogram(value["max_sequence_length"], value["counts"])
        max_predictions = value.get("max_predictions")
        if max_predictions is not None:
            _check_whole(max_predictions, "max_predictions", 1, MOST)
        if value.get("files") is None:
            return CountedRecords(histogram, max_predictions, None, value.get("vocabulary"))
        if not isinstance(value["files"], list):
            raise InputError("`files` is a list with an entry for each file, or null; make the histogram again")
        files = _in_order([_file_counts(entry, histogram.max_sequence_length) for entry in value["files"]])
        by_files = group_histogram(files, histogram.max_sequence_length)
        if not np.array_equal(by_files.counts, histogram.counts):
            length = int(np.flatnonzero(by_files.counts != histogram.counts)[0]) + 1
            raise InputError(
                f"length {length} is counted {histogram.counts[length - 1]} times in all,"
                f" but {by_files.counts[length - 1]} times in the files; make the histogram again"
            )
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    return CountedRecords(by_files, max_predictions, files, value.get("vocabulary"))


def _file_counts(entry: Any, max_sequence_length: int) -> FileCounts:
    needed = ("name", "bytes", "crc32c", "sequences", "tokens", "counts")
    if not isinstance(entry, Mapping) or any(key not in entry for key in needed):
        raise InputError(f"an entry of `files` lacks one of {', '.join(needed)}; make the histogram again")
    name = entry["name"]
    for key in ("bytes", "crc32c", "sequences", "tokens"):
        _check_whole(entry[key], f"{key} of {name}", 0, MOST)
    rows = _rows(entry["counts"], str(name), max_sequence_length)
    if int(rows[:, 2].sum()) != entry["sequences"]:
        raise InputError(f"the counts of {name} do not add up to its {entry['sequences']} sequences")
    return FileCounts(str(name), entry["bytes"], entry["crc32c"], entry["sequences"], entry["tokens"], rows)


def _rows(counts: Any, name: str, max_sequence_length: int) -> np.ndarray:
    """The rows [length, masked, sequences] of a file, in order, as int64 [rows, 3]."""
    try:
        rows = np.asarray(counts if counts else np.zeros((0, 3), dtype=np.int64))
    except (ValueError, OverflowError):
        rows = np.zeros(0)
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind != "i":
        raise InputError(f"the counts of {name} must be rows of whole numbers: [length, masked, sequences]")
    limits = {"length": (1, max_sequence_length), "masked count": (0, max_sequence_length), "count": (0, MOST)}
    for column, (what, (least, most)) in enumerate(limits.items()):
        outside = (rows[:, column] < least) | (rows[:, column] > most)
        if outside.any():
            raise InputError(f"a {what} of {name} is {rows[outside][0, column]}; it must be from {least} to {most}")
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))].astype(np.int64)


def _identity(file: FileCounts) -> dict[str, Any]:
    return {**vars(file), "rows": file.rows.tolist()}


def _check_whole(value: Any, name: str, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(f"{name} is {value!r}; it must be a whole number from {least} to {most}")


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
