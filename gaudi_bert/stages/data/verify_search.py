"""The second pass of `verify`: which sequences are missing, doubled or changed, when the fingerprints say
that some are.

Only sequences whose hash falls into a class that differs are kept, and only as many classes as fit into a
bounded table, so memory stays constant however much is wrong; the counts of what is missing are then of those
classes and said to be "at least".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gaudi_bert.artefacts.metadata import Metadata
    from gaudi_bert.records.files import RecordFile
    from gaudi_bert.records.proof.file_contents import SequenceSums
    from gaudi_bert.records.schema import UnpackedSchema

__all__ = ["describe_difference"]

_MOST_KEPT = 1_000_000
_NAMED = 3


def describe_difference(
    files: Sequence[RecordFile],
    schema: UnpackedSchema,
    packed: Path,
    metadata: Metadata,
    unpacked: SequenceSums,
    repacked: SequenceSums,
    workers: int | None,
) -> str:
    """One line: how many sequences of the records are missing, how many there are too many, and the first of
    them."""
    from gaudi_bert.records.proof.file_contents import packed_pieces, unpacked_pieces
    from gaudi_bert.records.schema import PackedSchema

    classes, all_of_them = _classes_to_search(unpacked.sums, repacked.sums)
    wanted = _collect(files, lambda file, buffer: unpacked_pieces(file.path, schema, buffer), classes, workers)
    shards = [shard for shard in metadata.shards if shard.bytes]
    packed_schema = PackedSchema.of(metadata)
    found = _collect(
        shards, lambda shard, buffer: packed_pieces(packed / shard.name, packed_schema, buffer), classes, workers
    )
    missing, extra = _surplus(wanted, found), _surplus(found, wanted)
    least = "" if all_of_them else "at least "
    parts = []
    if missing.size:
        places = [f"{files[row[1]].name} record {row[2]}" for row in _first(missing)]
        parts.append(f"{least}{missing.shape[0]} sequences of the records are missing: {_listed(places, missing.shape[0])}")
    if extra.size:
        places = [f"{shards[row[1]].name} record {row[2]} sequence {row[3]}" for row in _first(extra)]
        parts.append(f"{least}{extra.shape[0]} are doubled, changed or foreign: {_listed(places, extra.shape[0])}")
    return "; ".join([*parts, "write the folder again"])


def _first(rows: NDArray[np.int64]) -> list[list[int]]:
    return [[int(value) for value in row] for row in rows[:_NAMED]]


def _listed(places: list[str], count: int) -> str:
    return ", ".join(places) + (", ..." if count > len(places) else "")


def _classes_to_search(unpacked: NDArray[np.int64], repacked: NDArray[np.int64]) -> tuple[NDArray[np.bool_], bool]:
    """bool [CLASSES]: which to search; and whether these are all that differ."""
    differing = np.flatnonzero((unpacked != repacked).any(axis=1))
    sizes = np.cumsum(unpacked[differing, 0] + repacked[differing, 0])
    kept = max(1, int(np.searchsorted(sizes, _MOST_KEPT, side="right")))
    chosen = np.zeros(unpacked.shape[0], dtype=bool)
    chosen[differing[:kept]] = True
    return chosen, kept >= differing.size


def _collect(
    items: Sequence[Any],
    open_pieces: Callable[[Any, NDArray[np.uint8]], Iterator[tuple[Any, Any]]],
    classes: NDArray[np.bool_],
    workers: int | None,
) -> NDArray[np.int64]:
    """int64 [found, 4]: hash, number of the file, number of the record, number of the sequence in it (from
    1)."""
    from gaudi_bert.records.read.threads import map_files

    def search(task: tuple[int, Any], buffer: NDArray[np.uint8]) -> NDArray[np.int64]:
        number, item = task
        rows, record = [], 0
        for _, piece in open_pieces(item, buffer):
            sizes = piece.pack_sizes if piece.pack_sizes is not None else np.ones(piece.hashes.size, np.int64)
            chosen = np.flatnonzero(classes[(piece.hashes >> 20) & (classes.size - 1)])
            owners = np.repeat(np.arange(sizes.size), sizes)
            places = np.arange(piece.hashes.size) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
            columns = (piece.hashes[chosen], np.full(chosen.size, number), record + owners[chosen], places[chosen])
            rows.append(np.stack(columns, axis=1))
            record += sizes.size
        return np.concatenate(rows) if rows else np.zeros((0, 4), np.int64)

    found = map_files(search, list(enumerate(items)), workers)
    return np.concatenate(found) if found else np.zeros((0, 4), np.int64)


def _surplus(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of `left` whose hash occurs more often there than in `right` (the later ones of each hash)."""
    values, inverse, counts = np.unique(left[:, 0], return_inverse=True, return_counts=True)
    others, other_counts = np.unique(right[:, 0], return_counts=True)
    allowed = np.zeros(values.size, np.int64)
    places: NDArray[np.int64] = np.asarray(np.searchsorted(others, values))
    known = places < others.size
    known[known] = others[places[known]] == values[known]
    allowed[known] = other_counts[places[known]]
    order = np.argsort(inverse, kind="stable")
    rank = np.empty(left.shape[0], np.int64)
    rank[order] = np.arange(left.shape[0]) - np.repeat(np.cumsum(counts) - counts, counts)
    return left[rank >= allowed[inverse]]
