"""The file histogram.json, which contains the number of sequences of each length, in total and for each input file.

`max_sequence_length` and `counts` are the only required keys. They are sufficient for planning and estimating a packing, but
not for writing packs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, PlainSerializer, PlainValidator, model_validator
from typing_extensions import Self

from gaudi_bert.artefacts.base import (
    LARGEST_COUNT,
    Artefact,
    Count,
    InputFile,
    Length,
    VocabularyInfo,
    counts_to_json_fields,
)
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.files import hash_json
from gaudi_bert.common.progress import format_bytes, format_count


def _parse_counts(value: Any) -> IntArray:
    """Check the counts of an input file, and convert them to an int64 array. Each row contains a length, a number of masked
    positions, and how many sequences have both.

    The rows are sorted by length and then by masked positions.

    Raises:
        ValueError: The value is not a list of rows of three integers.
    """
    try:
        rows = np.asarray(value if len(value) else np.zeros((0, 3), np.int64))
    except (TypeError, ValueError, OverflowError):
        rows = np.zeros(0)
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind != "i":
        raise ValueError("must be a list of rows of three integers: [length, masked positions, sequences]")
    ordered: IntArray = rows[np.lexsort((rows[:, 1], rows[:, 0]))].astype(np.int64)
    return ordered


class CountedFile(InputFile):
    """An input file and its sequence counts, by length and number of masked positions.

    Attributes:
        sequences: The number of sequences.
        tokens: The number of non-padding tokens.
        counts: int64 [pairs, 3], sorted. The columns are the length, the number of masked positions, and the number of
            sequences that have both.
    """

    model_config = ConfigDict(extra="ignore")

    sequences: Count
    tokens: Count
    counts: Annotated[IntArray, PlainValidator(_parse_counts), PlainSerializer(lambda rows: rows.tolist())]

    @model_validator(mode="after")
    def _check_sums(self) -> CountedFile:
        """Check that no count is negative, and that the counts add up to the stated numbers of sequences and tokens."""
        if (self.counts < 0).any():
            raise ValueError(f"{shorten(self.name)} contains a negative count; all counts must be at least 0")
        rows = self.counts.tolist()  # sums of large counts could overflow int64, so compute them with Python integers
        sequences, tokens = sum(row[2] for row in rows), sum(row[0] * row[2] for row in rows)
        if (sequences, tokens) != (self.sequences, self.tokens):
            raise ValueError(
                f"the counts of {shorten(self.name)} do not add up to the stated {self.sequences} sequences and "
                f"{self.tokens} tokens"
            )
        return self


class _LengthTotals(NamedTuple):
    """For each sequence length from 1 to L, the number of sequences in all input files and their maximum number of masked
    positions.

    Attributes:
        counts: The number of sequences, int64 [L].
        max_masked: The maximum number of masked positions of a sequence, int64 [L].
    """

    counts: IntArray
    max_masked: IntArray


class HistogramFile(Artefact):
    """The content of histogram.json. If another program wrote the file, optional values may be None.

    Attributes:
        max_sequence_length: L, the number of tokens in a row, including padding.
        max_predictions: P, the maximum number of masked positions in a sequence.
        sequences: The number of sequences.
        tokens: The number of non-padding tokens.
        vocabulary: The vocabulary of the records.
        counts: The number of sequences of length 1, 2, ..., L.
        bad_files: The input files that could not be read and were skipped.
        files: The counts of each input file.
    """

    model_config = ConfigDict(extra="ignore")

    remedy = "create the histogram again with `gaudi-bert histogram`"
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

    @classmethod
    def read_and_merge(cls, paths: Sequence[Path]) -> Self:
        """Read one or several histogram files, and merge them into one histogram.

        The files are sorted by name, so that the result does not depend on how they were divided into parts.

        Args:
            paths: The histogram files.

        Raises:
            InputError: A file is invalid, the histograms are of different kinds of records, a file was counted twice, or
                there are no sequences.
        """
        if not paths:
            raise InputError(
                "expected a histogram.json; create one with `gaudi-bert histogram RECORDS --out histogram.json`"
            )
        parts = [cls.read(path) for path in paths]
        first, parts_with_files = parts[0], [part for part in parts if part.files is not None]
        for part, path in zip(parts, paths, strict=True):
            for key in ("max_sequence_length", "max_predictions", "vocabulary"):
                one, other = getattr(first, key), getattr(part, key)
                if one != other:
                    raise InputError(
                        f"{path}: {key} is {other}, but {one} in {paths[0]}; merge only histograms of the same kind of "
                        "records"
                    )
            if parts_with_files and part.files is None:
                raise InputError(
                    f"{path}: the histogram has no counts per file, but others have; create it with `gaudi-bert histogram`"
                )
        counts = np.sum([part.counts for part in parts], axis=0, dtype=np.int64).tolist()
        if not any(counts):
            raise InputError(
                f"{paths[0]}: the histogram contains no sequences, so there is nothing to pack; check the counted records"
            )
        merged = {
            **counts_to_json_fields(counts),
            "max_sequence_length": first.max_sequence_length,
            "max_predictions": first.max_predictions,
            "vocabulary": first.vocabulary,
            "bad_files": tuple(sorted((file for part in parts for file in part.bad_files), key=lambda file: file.name)),
            "files": tuple(
                sorted((file for part in parts_with_files for file in part.files or ()), key=lambda file: file.name)
            )
            if parts_with_files
            else None,
        }
        return cls.parse(merged, str(paths[0]), "pass each histogram once")

    @property
    def sha256(self) -> str:
        """The SHA-256 of the content. A plan stores this checksum to identify its histogram."""
        return hash_json(self.as_json())

    @model_validator(mode="after")
    def _check_counts(self) -> HistogramFile:
        """Check that the sequence counts agree with the stated totals and with the counts of the input files. Also check
        that no file is listed twice.
        """
        length = self.max_sequence_length
        if len(self.counts) != length:
            raise ValueError(f"expected {length} counts, for lengths 1 to {length}, found {len(self.counts)}")
        sums = counts_to_json_fields(self.counts)
        if sums["tokens"] > LARGEST_COUNT:
            raise ValueError(f"the number of tokens must be at most {LARGEST_COUNT}; split the data into smaller parts")
        for key, value in (("sequences", self.sequences), ("tokens", self.tokens)):
            if value not in (None, sums[key]):
                raise ValueError(f"{key} is {value}, but the counts add up to {sums[key]}")
        for one, other in itertools.pairwise(sorted(file.name for file in self.files or ())):
            if one == other:
                raise ValueError(f"the file {shorten(one)} was counted twice")
        if self.files is not None:
            counts_of_files = self._sum_files().counts.tolist()
            for length, (count, file_count) in enumerate(zip(self.counts, counts_of_files, strict=True), start=1):
                if count != file_count:
                    raise ValueError(f"length {length} occurs {count} times in total, but {file_count} times in the files")
        return self

    def compute_max_masked_positions(self) -> IntArray | None:
        """Return the maximum number of masked positions for each length, int64 [L]. Return None if the histogram has no
        counts per file.
        """
        return None if self.files is None else self._sum_files().max_masked

    def _sum_files(self) -> _LengthTotals:
        """For each sequence length, add up the sequence counts of all input files.

        Raises:
            ValueError: A length or a number of masked positions is out of range.
        """
        longest = self.max_sequence_length
        counts, max_masked = np.zeros(longest, np.int64), np.zeros(longest, np.int64)
        for file in self.files or ():
            lengths, masked, sequences = file.counts.T
            for name, values, smallest in (("length", lengths, 1), ("masked count", masked, 0)):
                outside = (values < smallest) | (values > longest)
                if outside.any():
                    raise ValueError(
                        f"a {name} of {shorten(file.name)} must be between {smallest} and {longest}, but is "
                        f"{values[outside][0]}"
                    )
            np.add.at(counts, lengths - 1, sequences)
            np.maximum.at(max_masked, lengths - 1, masked)
        return _LengthTotals(counts, max_masked)

    def summary(self) -> dict[str, Any]:
        """Return the numbers of files, bytes, sequences and tokens, the mean and maximum length, and `max_predictions`. The
        last value is 0 if the histogram does not state it.
        """
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

    def format_lines(self) -> list[str]:
        """Return one line of text with the numbers of sequences, files and bytes, and the mean and the maximum length."""
        totals = self.summary()
        return [
            f"{format_count(totals['sequences'], 'sequence')} in {format_count(totals['files'], 'file')} "
            f"({format_bytes(totals['bytes'])}), mean length {totals['mean_length']:.1f}, at most {self.max_sequence_length}"
        ]
