"""Groups of files: what is read once, held in memory, and packed within itself.

Memory is bounded by a group and not by the data set, and groups need nothing from each other, so any worker can take any
group. Files are dealt by a seeded permutation of their sorted names, so that a group mixes all regions of a corpus; from
100,000 sequences on a group packs as well as all the data, to about 0.0002 in efficiency.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from gaudi_bert.common.arrays import IntArray, permutation
from gaudi_bert.packing.histogram import Histogram


class _SizedFile(Protocol):
    """What groups need to know of a file, or of a part of one."""

    @property
    def name(self) -> str:
        """Relative to the folder of records."""

    @property
    def bytes(self) -> int:
        """Its size."""

    @property
    def sequences(self) -> int:
        """How many it holds."""


File = TypeVar("File", bound=_SizedFile)


def form_groups(files: Sequence[File], group_sequences: int, group_bytes: int, seed: int) -> list[list[File]]:
    """Deal files, in any order, to groups of nearly equal size within the limits; a group is in the order of the names.

    A file that is larger than a limit is a group alone (`too_large_files` names those).
    """
    ordered = sorted(files, key=lambda file: file.name)
    dealt = [ordered[index] for index in permutation(len(ordered), seed, "groups")]
    groups = _cut_evenly(dealt, group_sequences, group_bytes)
    return [sorted(group, key=lambda file: file.name) for group in groups]


def _cut_evenly(dealt: list[File], group_sequences: int, group_bytes: int) -> list[list[File]]:
    """As few groups as the limits allow, then as even as that number allows: a small last group would pack badly."""
    fewest = _cut(dealt, group_sequences, group_bytes, 1)
    even = _cut(dealt, group_sequences, group_bytes, len(fewest))
    return even if len(even) == len(fewest) else fewest


def _cut(dealt: list[File], group_sequences: int, group_bytes: int, parts: int) -> list[list[File]]:
    """Cut the list where a limit would be passed, and wherever the next of `parts` equal shares is reached."""
    total = sum(file.sequences for file in dealt)
    groups: list[list[File]] = []
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


def too_large_files(files: Sequence[File], group_sequences: int, group_bytes: int) -> list[File]:
    """The files that are larger than a group may be."""
    return [file for file in files if file.sequences > group_sequences or file.bytes > group_bytes]


def group_histogram(counts_of_files: Iterable[IntArray], max_sequence_length: int) -> Histogram:
    """The histogram of the sequences of some files, with the most masked positions at each length.

    Args:
        counts_of_files: int64 [pairs, 3] of each file: length, masked positions, number of sequences.
    """
    counts = np.zeros(max_sequence_length, dtype=np.int64)
    max_masked = np.zeros(max_sequence_length, dtype=np.int64)
    for rows in counts_of_files:
        lengths, masked, sequences = rows.T
        np.add.at(counts, lengths - 1, sequences)
        np.maximum.at(max_masked, lengths - 1, masked)
    return Histogram(max_sequence_length, counts, max_masked)
