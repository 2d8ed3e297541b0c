"""histogram.json: how many sequences of each length there are, in total and per file.

At the least such a file has `max_sequence_length` and `counts`, which is enough to plan and to estimate.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, PlainSerializer, PlainValidator, model_validator

from gaudi_bert.artefacts.base import Artefact, Count, Length
from gaudi_bert.artefacts.packed import InputFile, VocabularyInfo, of_counts
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import shortened

MAX_TOKENS = 2**62


def _rows(value: Any) -> IntArray:
    try:
        rows = np.asarray(value if len(value) else np.zeros((0, 3), np.int64))
    except (TypeError, ValueError, OverflowError):
        rows = np.zeros(0)
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind != "i":
        raise ValueError("must be rows of whole numbers: [length, masked positions, sequences]")
    ordered: IntArray = rows[np.lexsort((rows[:, 1], rows[:, 0]))].astype(np.int64)
    return ordered


CountRows = Annotated[IntArray, PlainValidator(_rows), PlainSerializer(lambda rows: rows.tolist())]
"""int64 [pairs, 3], in order: length, masked positions, and how many sequences have both."""


class CountedFile(InputFile):
    """One input file and what is in it."""

    model_config = ConfigDict(extra="ignore")

    sequences: Count
    tokens: Count
    counts: CountRows

    @model_validator(mode="after")
    def _adds_up(self) -> CountedFile:
        if (self.counts < 0).any():
            raise ValueError(f"{_short(self.name)} has a negative count; lengths, masked positions and sequences are from 0")
        rows = self.counts.tolist()  # Python's whole numbers cannot overflow
        sequences, tokens = sum(row[2] for row in rows), sum(row[0] * row[2] for row in rows)
        if (sequences, tokens) != (self.sequences, self.tokens):
            raise ValueError(
                f"the counts of {_short(self.name)} do not add up to its {self.sequences} sequences, {self.tokens} tokens"
            )
        return self


class HistogramFile(Artefact):
    """The content of histogram.json; what only `gaudi-bert histogram` knows is None in others' files.

    Attributes:
        max_predictions: most masked positions of one sequence.
        counts: sequences of each length; the first entry is length 1.
    """

    model_config = ConfigDict(extra="ignore")

    remedy = "make the histogram again with `gaudi-bert histogram`"
    line_per_entry = ("files",)

    format_version: Literal[1] = 1
    max_sequence_length: Length
    max_predictions: Length | None = None
    sequences: Count | None = None
    tokens: Count | None = None
    vocabulary: VocabularyInfo | None = None
    counts: tuple[Count, ...]
    files: tuple[CountedFile, ...] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> HistogramFile:
        length = self.max_sequence_length
        if len(self.counts) != length:
            raise ValueError(f"{len(self.counts)} counts for lengths 1 to {length}")
        right = of_counts(self.counts)
        if right["tokens"] > MAX_TOKENS:
            raise ValueError(f"more than {MAX_TOKENS} tokens; split the data")
        for key, value in (("sequences", self.sequences), ("tokens", self.tokens)):
            if value not in (None, right[key]):
                raise ValueError(f"{key} is {value}, the counts add up to {right[key]}")
        if self.files is not None:
            self._check_files(self.files)
        return self

    def _check_files(self, files: tuple[CountedFile, ...]) -> None:
        length = self.max_sequence_length
        totals = np.zeros(length + 1, np.int64)
        names = sorted(file.name for file in files)
        for one, other in itertools.pairwise(names):
            if one == other:
                raise ValueError(f"{_short(one)} is counted twice")
        for file in files:
            lengths, masked, sequences = file.counts.T
            for what, values, least in (("length", lengths, 1), ("masked count", masked, 0)):
                outside = (values < least) | (values > length)
                if outside.any():
                    raise ValueError(
                        f"a {what} of {_short(file.name)} is {values[outside][0]}; it must be from {least} to {length}"
                    )
            np.add.at(totals, lengths, sequences)
        for number, (count, counted) in enumerate(zip(self.counts, totals[1:].tolist(), strict=True), start=1):
            if count != counted:
                raise ValueError(f"length {number} is counted {count} times in all, but {counted} times in the files")

    def summary(self) -> dict[str, Any]:
        """The totals of its files."""
        files = self.files or ()
        sequences, tokens = sum(file.sequences for file in files), sum(file.tokens for file in files)
        return {
            "sequences": sequences,
            "tokens": tokens,
            "files": len(files),
            "bytes": sum(file.bytes for file in files),
            "max_sequence_length": self.max_sequence_length,
            "max_predictions": self.max_predictions or 0,
            "mean_length": tokens / sequences,
        }


def _short(name: str) -> str:
    return shortened(name, 60)
