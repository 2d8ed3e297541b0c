"""Groups of files: what is read once, held in memory, and packed within itself.

Memory is bounded by a group and not by the data set, and groups need nothing from each other, so any worker can take any
group. Files are dealt by a seeded permutation of their sorted names, so that a group mixes all regions of a corpus; from
100,000 sequences on a group packs as well as the whole, to about 0.0002 in efficiency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.permutation import permutation
from gaudi_bert.packing.histogram import Histogram

__all__ = ["FileCounts", "form_groups", "form_runs", "group_histogram", "too_large_files"]


@dataclass(frozen=True, eq=False)
class FileCounts:
    """One input file and what is in it.

    Attributes:
        name: relative to the folder of records.
        bytes: size of the file.
        crc32c: of its bytes.
        sequences: number of sequences.
        tokens: number of real tokens.
        rows: int64 [pairs, 3]: length, masked positions, number of sequences, for each pair that occurs.
    """

    name: str
    bytes: int
    crc32c: int
    sequences: int
    tokens: int
    rows: IntArray


def form_groups(files: Sequence[FileCounts], group_sequences: int, group_bytes: int, seed: int) -> list[list[FileCounts]]:
    """Deal whole files to groups of nearly equal size within the limits.

    A file that is larger than a limit is a group of its own (`too_large_files` names those).

    Args:
        files: of different names, in any order, on which nothing depends.
        group_sequences: most sequences a group.
        group_bytes: most bytes a group.
        seed: of the permutation.

    Returns:
        The groups; within a group the files are in the order of their names.
    """
    ordered = sorted(files, key=lambda file: file.name)
    dealt = [ordered[index] for index in permutation(len(ordered), seed, "groups")]
    groups = _cut_evenly(dealt, group_sequences, group_bytes)
    return [sorted(group, key=lambda file: file.name) for group in groups]


def form_runs(files: Sequence[FileCounts], group_sequences: int, group_bytes: int) -> list[list[FileCounts]]:
    """The same without a permutation: each group is a run of the files in the order of their names."""
    return _cut_evenly(sorted(files, key=lambda file: file.name), group_sequences, group_bytes)


def _cut_evenly(dealt: list[FileCounts], group_sequences: int, group_bytes: int) -> list[list[FileCounts]]:
    """As few groups as the limits allow, then as even as that number allows: a small last group would pack badly."""
    fewest = _cut(dealt, group_sequences, group_bytes, 1)
    even = _cut(dealt, group_sequences, group_bytes, len(fewest))
    return even if len(even) == len(fewest) else fewest


def _cut(dealt: list[FileCounts], group_sequences: int, group_bytes: int, parts: int) -> list[list[FileCounts]]:
    """Cut the list where a limit would be passed, and wherever the next of `parts` equal shares is reached."""
    total = sum(file.sequences for file in dealt)
    groups: list[list[FileCounts]] = []
    sequences = size = seen = 0
    for file in dealt:
        full = sequences + file.sequences > group_sequences or size + file.bytes > group_bytes
        share_reached = len(groups) < parts and seen * parts >= total * len(groups)
        if not groups or full or share_reached:
            groups.append([])
            sequences = size = 0
        groups[-1].append(file)
        sequences, size, seen = sequences + file.sequences, size + file.bytes, seen + file.sequences
    return groups


def too_large_files(files: Sequence[FileCounts], group_sequences: int, group_bytes: int) -> list[FileCounts]:
    """The files that are larger than a group may be."""
    return [file for file in files if file.sequences > group_sequences or file.bytes > group_bytes]


def group_histogram(files: Sequence[FileCounts], max_sequence_length: int) -> Histogram:
    """The histogram of the sequences in these files, with the most masked positions at each length."""
    counts = np.zeros(max_sequence_length, dtype=np.int64)
    max_masked = np.zeros(max_sequence_length, dtype=np.int64)
    for file in files:
        lengths, masked, sequences = file.rows.T
        np.add.at(counts, lengths - 1, sequences)
        np.maximum.at(max_masked, lengths - 1, masked)
    return Histogram(max_sequence_length, counts, max_masked)
