"""Which sequences are missing, doubled or changed, where the sums of two sets of sequences differ: `verify`'s second pass.

Only sequences whose hash falls into a class that differs are collected, and only as many classes as fit into a bounded
table, so memory stays constant however much is wrong. Counts are then of those classes: "at least".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.artefacts.packed import Metadata
from gaudi_bert.artefacts.store.mirrored_folder import read_ahead
from gaudi_bert.common.arrays import BoolArray, ByteArray, IntArray
from gaudi_bert.tfrecords.scanning.file_contents import SequenceSums, packed_pieces, unpacked_pieces
from gaudi_bert.tfrecords.scanning.scan import map_files
from gaudi_bert.tfrecords.wire.schema import PackedSchema

Pieces = Iterator[tuple[Any, Any]]

_MOST_SEARCHED = 1_000_000
_NAMED = 3


def describe_difference(
    files: Sequence[Path],
    shards: Sequence[Path],
    metadata: Metadata,
    unpacked: SequenceSums,
    repacked: SequenceSums,
    workers: int | None,
) -> str:
    """One line: how many sequences of the records are missing, how many are too many, and the first of them."""
    with read_ahead([files]) as one, one.batch(0), read_ahead([shards]) as other, other.batch(0):
        return _describe(files, shards, metadata, unpacked, repacked, workers)


def describe_missing_files(missing: Sequence[str], known: int) -> str:
    """One line about input files that manifests list and RECORDS lacks; `known` is how many these manifests list."""
    return (
        f"{len(missing):,} of {known:,} input files are missing from the records: "
        f"{_listed(missing[:_NAMED], len(missing))}; verify with the files that were packed"
    )


def _describe(
    files: Sequence[Path],
    shards: Sequence[Path],
    metadata: Metadata,
    unpacked: SequenceSums,
    repacked: SequenceSums,
    workers: int | None,
) -> str:
    packed_schema = PackedSchema.of(metadata)
    schema = packed_schema.unpacked
    classes, all_of_them = _classes_to_search(unpacked.sums, repacked.sums)
    expected = _collect(files, lambda path, buffer: unpacked_pieces(path, schema, buffer), classes, workers)
    shards = [path for path in shards if path.stat().st_size]
    stored = _collect(shards, lambda path, buffer: packed_pieces(path, packed_schema, buffer), classes, workers)
    missing, extra = _surplus(expected, stored), _surplus(stored, expected)
    least = "" if all_of_them else "at least "
    parts = []
    if missing.size:
        names = [f"{files[row[1]].name} record {row[2]}" for row in missing[:_NAMED].tolist()]
        parts.append(f"{least}{missing.shape[0]} sequences of the records are missing: {_listed(names, missing.shape[0])}")
    if extra.size:
        names = [f"{shards[row[1]].name} record {row[2]} sequence {row[3]}" for row in extra[:_NAMED].tolist()]
        parts.append(f"{least}{extra.shape[0]} are doubled, changed or foreign: {_listed(names, extra.shape[0])}")
    return "; ".join([*parts, "write the folder again"])


def _listed(names: Sequence[str], count: int) -> str:
    return ", ".join(names) + (", ..." if count > len(names) else "")


def _classes_to_search(unpacked: IntArray, repacked: IntArray) -> tuple[BoolArray, bool]:
    """bool [CLASSES]: which to search; and whether these are all that differ."""
    differing = np.flatnonzero((unpacked != repacked).any(axis=1))
    sizes = np.cumsum(unpacked[differing, 0] + repacked[differing, 0])
    count = max(1, int(np.searchsorted(sizes, _MOST_SEARCHED, side="right")))
    chosen = np.zeros(unpacked.shape[0], dtype=bool)
    chosen[differing[:count]] = True
    return chosen, count >= differing.size


def _collect(
    items: Sequence[Any], open_pieces: Callable[[Any, ByteArray], Pieces], classes: BoolArray, workers: int | None
) -> IntArray:
    """int64 [sequences, 4]: hash, number of the file, number of the record, number of the sequence in it (from 1)."""

    def search(task: tuple[int, Any], buffer: ByteArray) -> IntArray:
        number, item = task
        rows, record = [], 0
        for _, piece in open_pieces(item, buffer):
            sizes = piece.pack_sizes if piece.pack_sizes is not None else np.ones(piece.hashes.size, np.int64)
            chosen = np.flatnonzero(classes[(piece.hashes >> 20) & (classes.size - 1)])
            owners = np.repeat(np.arange(sizes.size), sizes)
            numbers = np.arange(piece.hashes.size) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
            columns = (piece.hashes[chosen], np.full(chosen.size, number), record + owners[chosen], numbers[chosen])
            rows.append(np.stack(columns, axis=1))
            record += sizes.size
        return np.concatenate(rows) if rows else np.zeros((0, 4), np.int64)

    parts = map_files(search, list(enumerate(items)), workers)
    return np.concatenate(parts) if parts else np.zeros((0, 4), np.int64)


def _surplus(rows: IntArray, others: IntArray) -> IntArray:
    """Those of `rows` whose hash occurs more often there than in `others` (the later ones of each hash)."""
    allowed = Counter(others[:, 0].tolist())
    surplus = []
    for number, value in enumerate(rows[:, 0].tolist()):
        if not allowed[value]:
            surplus.append(number)
        else:
            allowed[value] -= 1
    return rows[surplus]
