"""histogram.json: how many sequences of each length there are, in total and per file.

At the least such a file has `max_sequence_length` and `counts`, which is enough to plan and to estimate.
"""

from __future__ import annotations

import itertools
import json
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, PlainSerializer, PlainValidator, model_validator

from gaudi_bert.artefacts.base import LARGEST_COUNT, Artefact, Count, InputFile, Length, VocabularyInfo
from gaudi_bert.artefacts.packed import of_counts
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import shortened
from gaudi_bert.common.progress import count_of, human_bytes


def _counts(value: Any) -> IntArray:
    try:
        rows = np.asarray(value if len(value) else np.zeros((0, 3), np.int64))
    except (TypeError, ValueError, OverflowError):
        rows = np.zeros(0)
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind != "i":
        raise ValueError("must be rows of integers: [length, masked positions, sequences]")
    ordered: IntArray = rows[np.lexsort((rows[:, 1], rows[:, 0]))].astype(np.int64)
    return ordered


class CountedFile(InputFile):
    """One input file and what is in it.

    `counts` is int64 [pairs, 3], in order: length, masked positions, and how many sequences have both.
    """

    model_config = ConfigDict(extra="ignore")

    sequences: Count
    tokens: Count
    counts: Annotated[IntArray, PlainValidator(_counts), PlainSerializer(lambda rows: rows.tolist())]

    @property
    def digested(self) -> str:
        """All this as JSON, by which a plan knows it."""
        return (
            f'{{"bytes": {self.bytes}, "crc32c": {self.crc32c}, "name": {json.dumps(self.name)}, '
            f'"rows": {json.dumps(self.counts.tolist())}, "sequences": {self.sequences}, "tokens": {self.tokens}}}'
        )

    @model_validator(mode="after")
    def _adds_up(self) -> CountedFile:
        if (self.counts < 0).any():
            raise ValueError(f"{_short(self.name)} has a negative count; lengths, masked positions and sequences are from 0")
        rows = self.counts.tolist()  # Python's integers cannot overflow
        sequences, tokens = sum(row[2] for row in rows), sum(row[0] * row[2] for row in rows)
        if (sequences, tokens) != (self.sequences, self.tokens):
            raise ValueError(
                f"the counts of {_short(self.name)} do not add up to its {self.sequences} sequences, {self.tokens} tokens"
            )
        return self


class HistogramFile(Artefact):
    """The content of histogram.json; what only `gaudi-bert histogram` knows is None in others' files.

    The first of `counts` is that of sequences of length 1; `max_predictions` is the most masked positions of one sequence;
    `bad_files` are those that could not be read and were skipped.
    """

    model_config = ConfigDict(extra="ignore")

    remedy = "make the histogram again with `gaudi-bert histogram`"
    line_per_entry = ("files",)
    rare = ("bad_files",)

    format_version: Literal[1] = 1
    max_sequence_length: Length
    max_predictions: Length | None = None
    sequences: Count | None = None
    tokens: Count | None = None
    vocabulary: VocabularyInfo | None = None
    counts: tuple[Count, ...]
    bad_files: tuple[InputFile, ...] = ()
    files: tuple[CountedFile, ...] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> HistogramFile:
        length = self.max_sequence_length
        if len(self.counts) != length:
            raise ValueError(f"{len(self.counts)} counts for lengths 1 to {length}")
        right = of_counts(self.counts)
        if right["tokens"] > LARGEST_COUNT:
            raise ValueError(f"more than {LARGEST_COUNT} tokens; split the data")
        for key, value in (("sequences", self.sequences), ("tokens", self.tokens)):
            if value not in (None, right[key]):
                raise ValueError(f"{key} is {value}, the counts add up to {right[key]}")
        if self.files is not None:
            self._check_files(self.files)
        return self

    def _check_files(self, files: tuple[CountedFile, ...]) -> None:
        for one, other in itertools.pairwise(sorted(file.name for file in files)):
            if one == other:
                raise ValueError(f"{_short(one)} is counted twice")
        sums = _FileSums(self.max_sequence_length)
        for file in files:
            sums.add(file.name, file.counts)
        for number, (count, counted) in enumerate(zip(self.counts, sums.counts.tolist(), strict=True), start=1):
            if count != counted:
                raise ValueError(f"length {number} is counted {count} times in all, but {counted} times in the files")

    def max_masked(self) -> IntArray | None:
        """The most masked positions of a sequence of each length, int64 [L]; None where no files are known."""
        if self.files is None:
            return None
        sums = _FileSums(self.max_sequence_length)
        for file in self.files:
            sums.add(file.name, file.counts)
        return sums.max_masked

    def totals(self) -> HistogramTotals:
        """The totals of its files."""
        files = self.files or ()
        sequences, tokens = sum(file.sequences for file in files), sum(file.tokens for file in files)
        return HistogramTotals(
            sequences,
            tokens,
            len(files),
            sum(file.bytes for file in files),
            self.max_sequence_length,
            self.max_predictions or 0,
            tokens / sequences,
        )

    def summary(self) -> dict[str, Any]:
        """The totals by name."""
        return self.totals()._asdict()

    def lines(self) -> list[str]:
        """Return the totals for people."""
        totals = self.totals()
        return [
            f"{count_of(totals.sequences, 'sequence')} in {count_of(totals.files, 'file')} "
            f"({human_bytes(totals.bytes)}), mean length {totals.mean_length:.1f}, at most {totals.max_sequence_length}"
        ]


class HistogramTotals(NamedTuple):
    """What is printed of a histogram; `max_predictions` is 0 where no sequence has masked positions."""

    sequences: int
    tokens: int
    files: int
    bytes: int
    max_sequence_length: int
    max_predictions: int
    mean_length: float


class _FileSums:
    """Over files: the sequences of each length, and the most masked positions of one of them, int64 [L]."""

    def __init__(self, length: int) -> None:
        self.counts, self.max_masked = np.zeros(length, np.int64), np.zeros(length, np.int64)

    def add(self, name: str, rows: IntArray) -> None:
        """Add the counts of a file; ValueError where a length or a masked count is out of range."""
        lengths, masked, sequences = rows.T
        longest = self.counts.size
        for what, values, least in (("length", lengths, 1), ("masked count", masked, 0)):
            outside = (values < least) | (values > longest)
            if outside.any():
                raise ValueError(f"a {what} of {_short(name)} is {values[outside][0]}; it must be from {least} to {longest}")
        np.add.at(self.counts, lengths - 1, sequences)
        np.maximum.at(self.max_masked, lengths - 1, masked)


def _short(name: str) -> str:
    return shortened(name, 60)
