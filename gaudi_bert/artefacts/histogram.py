"""histogram.json: how many sequences of each length there are, in total and per file.

At the least such a file has `max_sequence_length` and `counts`, which is enough to plan and to estimate. The counts of many
files are large: `list_histogram` reads them once and keeps where each file's counts lie.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, PlainSerializer, PlainValidator, ValidationError, model_validator

from gaudi_bert.artefacts.base import LARGEST_COUNT, Artefact, Count, Length
from gaudi_bert.artefacts.packed import of_counts
from gaudi_bert.artefacts.references import InputFile, VocabularyInfo
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.common.files import open_file


@dataclass(slots=True)
class FileCounts:
    """The counts of a file; of many files they are large, so they may stay in the file and be read again when requested.

    Attributes:
        in_memory: int64 [pairs, 3], in order: length, masked positions, and how many sequences have both.
        location: of rows on disk: the path of histogram.json, the name of the file, offset and size of its line.
    """

    in_memory: IntArray | None
    location: tuple[Path, str, int, int] | None = None

    @property
    def rows(self) -> IntArray:
        """As `in_memory`, wherever they are."""
        return _numbers(self._stored()) if self.in_memory is None else self.in_memory

    @property
    def text(self) -> str:
        """The same as JSON."""
        return self._stored().decode() if self.in_memory is None else json.dumps(self.in_memory.tolist())

    def offload_to(self, *location: Any) -> None:
        """Keep only the `location`."""
        self.in_memory, self.location = None, location

    def _stored(self) -> bytes:
        path, name, offset, size = self.location or (Path(), "", 0, 0)
        with open_file(path) as handle:
            handle.seek(offset)
            line = handle.read(size)
        head, _, rows = line.rstrip(b",\n").rpartition(_COUNTS)
        if len(line) != size or json.loads(head + b"}").get("name") != name:
            raise InputError(f"{path}: was changed while it was read; run the same command again")
        return rows.removesuffix(b"}")


def _counts(value: Any) -> FileCounts:
    if isinstance(value, FileCounts):
        return value
    try:
        rows = np.asarray(value if len(value) else np.zeros((0, 3), np.int64))
    except (TypeError, ValueError, OverflowError):
        rows = np.zeros(0)
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind != "i":
        raise ValueError("must be rows of integers: [length, masked positions, sequences]")
    ordered: IntArray = rows[np.lexsort((rows[:, 1], rows[:, 0]))].astype(np.int64)
    return FileCounts(ordered)


class CountedFile(InputFile):
    """One input file and what is in it."""

    model_config = ConfigDict(extra="ignore")

    sequences: Count
    tokens: Count
    counts: Annotated[FileCounts, PlainValidator(_counts), PlainSerializer(lambda counts: counts.rows.tolist())]

    @property
    def digested(self) -> str:
        """All this as JSON, by which a plan knows it."""
        return (
            f'{{"bytes": {self.bytes}, "crc32c": {self.crc32c}, "name": {json.dumps(self.name)}, '
            f'"rows": {self.counts.text}, "sequences": {self.sequences}, "tokens": {self.tokens}}}'
        )

    @model_validator(mode="after")
    def _adds_up(self) -> CountedFile:
        if (self.counts.rows < 0).any():
            raise ValueError(f"{_short(self.name)} has a negative count; lengths, masked positions and sequences are from 0")
        rows = self.counts.rows.tolist()  # Python's integers cannot overflow
        sequences, tokens = sum(row[2] for row in rows), sum(row[0] * row[2] for row in rows)
        if (sequences, tokens) != (self.sequences, self.tokens):
            raise ValueError(
                f"the counts of {_short(self.name)} do not add up to its {self.sequences} sequences, {self.tokens} tokens"
            )
        return self


class HistogramFile(Artefact):
    """The content of histogram.json; what only `gaudi-bert histogram` knows is None in others' files.

    The first of `counts` is that of sequences of length 1; `max_predictions` is the most masked positions of one sequence;
    `bad_files` are those that could not be read and were left out.
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
            sums.add(file.name, file.counts.rows)
        for number, (count, counted) in enumerate(zip(self.counts, sums.counts.tolist(), strict=True), start=1):
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


# --- read without the counts of the files


def list_histogram(path: Path | str) -> tuple[HistogramFile, IntArray | None]:
    """Read and check a histogram.json; the counts of its files stay on disk, if each has a separate line.

    Returns:
        The content, and the most masked positions of a sequence of each length, int64 [L]; None where no files are known.
    """
    listed = _list_lines(Path(path))
    if listed is not None:
        return listed
    content = HistogramFile.read(path)
    if content.files is None:
        return content, None
    sums = _FileSums(content.max_sequence_length)
    for file in content.files:
        sums.add(file.name, file.counts.rows)
    return content, sums.max_masked


_COUNTS = b', "counts": '
_FILES = b' "files": [\n'


def _list_lines(path: Path) -> tuple[HistogramFile, IntArray] | None:
    """The same of a file with a line for each input file; None for any other, and where something is wrong with it."""
    try:
        with open_file(path) as handle:
            head, position = [], 0
            for line in handle:
                position += len(line)
                if line == _FILES or position > _LONGEST_HEAD:
                    break
                head.append(line)
            content = HistogramFile.model_validate_json(b"".join([*head, b' "files": null}']))
            sums, files = _FileSums(content.max_sequence_length), []
            fields, line = set(CountedFile.model_fields), b""  # one set for all: pydantic's own take most of the memory
            for line in handle:
                if line.startswith(b" ]"):
                    break
                file = _file_of(line)
                sums.add(file.name, file.counts.rows)
                file.counts.offload_to(path, file.name, position, len(line))
                files.append(CountedFile.model_construct(fields, **dict(file)))
                position += len(line)
            ends_here = b"".join([line, *handle]).split() == [b"]", b"}"]
    except (OSError, ValueError, ValidationError):
        return None  # the reader of the complete file reports what is wrong
    whole = ends_here and sums.counts.tolist() == list(content.counts) and len({file.name for file in files}) == len(files)
    return (content.model_copy(update={"files": tuple(files)}), sums.max_masked) if whole else None


_LONGEST_HEAD = 1 << 20


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


def _file_of(line: bytes) -> CountedFile:
    """The file of a line, which must be as it is written; ValueError otherwise."""
    head, _, rows = line.rstrip(b",\n").rpartition(_COUNTS)
    form = b"[" + b", ".join([b"[, , ]"] * (rows.count(b"[") - 1)) + b"]}"
    if rows.translate(None, b"0123456789") != form or any(empty in rows for empty in (b"[,", b", ,", b", ]")):
        raise ValueError("other JSON")
    numbers = _numbers(rows)
    file = CountedFile.model_validate({**json.loads(head + b"}"), "counts": numbers})
    if not np.array_equal(file.counts.rows, numbers):
        raise ValueError("not in order")
    return file


def _numbers(rows: bytes) -> IntArray:
    """int64 [pairs, 3] of `[[1, 2, 3], [4, 5, 6]]`, in which nothing else may be."""
    text = rows.translate(None, b"[]}")
    return (np.fromstring(text, np.int64, sep=",") if text else np.zeros(0, np.int64)).reshape(-1, 3)


def _short(name: str) -> str:
    return shortened(name, 60)
