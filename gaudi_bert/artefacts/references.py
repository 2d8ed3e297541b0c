"""What several artefacts refer to: files by their names, input files, rows that are too long, the vocabulary.

Apart from `packed.py` and `histogram.py`, which need numpy: `run` starts without it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from gaudi_bert.artefacts.base import Artefact, Count, Crc32c, Positive
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_file

METADATA_NAME = "metadata.json"
VERIFICATION_NAME = "verification.json"
NOTES_NAME = "__gaudi_bert__"
"""The folder for all that is not Parquet in a folder of tables: pyarrow and Spark pass over names that begin with `_`,
`datasets` over folders that begin with two."""


def manifest_path(folder: Path, group: int) -> Path:
    """The path of the manifest of `group` in a packed folder."""
    return folder / f"group-{group:05d}.json"


# --- the parts of a histogram that several machines count: each writes its own, and `plan` takes them all


def group_verification_path(verification: Path, group: int) -> Path:
    """The path of the proof of one group, next to verification.json."""
    return verification.with_name(f"{verification.stem}-{group:05d}{verification.suffix}")


def histogram_part(histogram: Path, part: tuple[int, int]) -> Path:
    """The path of part K of N of `histogram`: machine K counts the files K, K + N, ..., and `plan` takes all parts."""
    return histogram.with_name(f"{histogram.stem}-{part[0]:05d}-of-{part[1]:05d}.json")


def histogram_parts(histogram: Path) -> list[Path]:
    """The files that make up a histogram: the complete one, or all its parts; empty where it is not complete."""
    if histogram.exists():
        return [histogram]
    return complete_parts(histogram, (path.name for path in histogram.parent.glob(f"{histogram.stem}-*-of-*.json")))


def complete_parts(histogram: Path, names: Iterable[str]) -> list[Path]:
    """All parts of a histogram, where `names` has them all."""
    parts_by_count: dict[int, list[Path]] = {}
    for name in sorted(names):
        match = re.fullmatch(re.escape(histogram.stem) + r"-(\d{5})-of-(\d{5})\.json", name)
        if match is not None:
            parts_by_count.setdefault(int(match[2]), []).append(histogram.with_name(name))
    complete = [paths for parts, paths in sorted(parts_by_count.items()) if len(paths) == parts]
    return complete[0] if complete else []


# --- inputs


class InputFile(Artefact):
    """An input file, as histogram, plan, manifests and metadata know it: by its name, its bytes and CRC-32C on disk.

    `sequences` is as the histogram counted them; 0, and omitted, in manifests and metadata.
    """

    name: str
    bytes: Count
    crc32c: Crc32c
    sequences: Count = 0

    @property
    def identity(self) -> dict[str, int]:
        """What identifies it in addition to its name, in any folder."""
        return self.model_dump(include={"bytes", "crc32c"})


class InputTable(InputFile):
    """A table file and its number of rows; rows are numbered through all files in the order of their names."""

    rows: Count


TooLong = Literal["error", "truncate", "split", "drop"]


class TooLongRows(Artefact):
    """What became of rows longer than a pack.

    Attributes:
        policy: what becomes of them: refused, cut to their first tokens, cut into pieces, or dropped.
        dropped_rows: how many of them are in no pack.
        dropped_tokens: tokens that are in no pack.
        added_sequences: sequences beyond one per row, from splitting.
    """

    policy: TooLong
    rows: Count
    dropped_rows: Count
    dropped_tokens: Count
    added_sequences: Count


class VocabularyInfo(Artefact):
    """The vocabulary: its number of tokens, and the SHA-256 of the file in hexadecimal."""

    size: Positive
    sha256: str

    @classmethod
    def of(cls, path: Path) -> VocabularyInfo:
        """Of a vocab.txt: one token per line, and only a newline ends it."""
        try:
            data = read_file(path)
        except OSError as error:
            raise InputError(f"{path}: cannot read the vocabulary: {error.strerror}; check the path") from error
        # Tokens may hold other characters that Unicode counts as line breaks.
        return cls(size=len(data.removesuffix(b"\n").split(b"\n")), sha256=hashlib.sha256(data).hexdigest())
