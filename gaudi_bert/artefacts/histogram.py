"""histogram.json: how many sequences of each length there are, in all and file by file.

At the least such a file has `max_sequence_length` and `counts`, which is enough to plan and to estimate.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, PlainSerializer, PlainValidator, model_validator

from gaudi_bert.artefacts.metadata import VocabularyInfo
from gaudi_bert.artefacts.model import Artefact, Count, Crc32c, Length, as_lines, read_artefact
from gaudi_bert.common.errors import shortened
from gaudi_bert.common.files import write_text

__all__ = [
    "CountedFile",
    "HistogramFile",
    "read_histogram",
    "write_histogram",
]

MAX_TOKENS = 2**62


def _rows(value: Any) -> NDArray[np.int64]:
    try:
        rows = np.asarray(value if len(value) else np.zeros((0, 3), np.int64))
    except (TypeError, ValueError, OverflowError):
        rows = np.zeros(0)
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind != "i":
        raise ValueError("must be rows of whole numbers: [length, masked positions, sequences]")
    ordered: NDArray[np.int64] = rows[np.lexsort((rows[:, 1], rows[:, 0]))].astype(np.int64)
    return ordered


CountRows = Annotated[NDArray[np.int64], PlainValidator(_rows), PlainSerializer(lambda rows: rows.tolist())]
"""int64 [pairs, 3], in order: length, masked positions, and how many sequences have both."""


class CountedFile(Artefact):
    """One input file: its name relative to RECORDS, size, CRC-32C as it lies on the disk, and what is in it."""

    model_config = ConfigDict(extra="ignore")

    name: str
    bytes: Count
    crc32c: Crc32c
    sequences: Count
    tokens: Count
    counts: CountRows

    @model_validator(mode="after")
    def _adds_up(self) -> CountedFile:
        if (self.counts < 0).any():
            raise ValueError(f"{_short(self.name)} has a negative count; lengths, masked positions and sequences are from 0")
        if _exact_sum(self.counts[:, 2]) != self.sequences:
            raise ValueError(f"the counts of {_short(self.name)} do not add up to its {self.sequences} sequences")
        return self


class HistogramFile(Artefact):
    """The content of histogram.json; what only `gaudi-bert histogram` knows is None in others' files.

    Attributes:
        max_predictions: most masked positions of one sequence.
        counts: sequences of each length; the first entry is length 1.
    """

    model_config = ConfigDict(extra="ignore")

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
        if sum(number * count for number, count in enumerate(self.counts, start=1)) > MAX_TOKENS:
            raise ValueError(f"more than {MAX_TOKENS} tokens; split the data")
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


def read_histogram(path: Path) -> HistogramFile:
    """Read and check one histogram.json.

    Raises:
        InputError: it is missing, damaged, or its numbers do not go together.
    """
    return read_artefact(path, HistogramFile, "make the histogram again with `gaudi-bert histogram`")


def write_histogram(path: Path, content: HistogramFile) -> None:
    """Write histogram.json, whole or not at all."""
    write_text(path, as_lines(content, ["files"]))


def _exact_sum(values: NDArray[np.int64]) -> int:
    """The sum as Python's whole number, which cannot overflow."""
    return sum(values.tolist())


def _short(name: str) -> str:
    return shortened(name, 60)
