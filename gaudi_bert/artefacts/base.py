"""What all stored JSON files have in common: a frozen, strictly typed model that reads and writes itself; and what several
of them refer to: files by their names, input files, rows that are too long, the vocabulary.

Files that others build on (plan.json, metadata.json, the manifests) refuse unknown keys; files that hold figures to look at
(`Figures`) ignore them, so that later versions may add some.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from gaudi_bert.common.errors import InputError, short_repr, shorten
from gaudi_bert.common.files import read_file, write_json, write_text
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.values import matching, plain_message

LARGEST_COUNT = 2**62
"""Of anything that is counted: sums of two fit int64."""

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Positive = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Length = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
Crc32c = Annotated[int, Field(ge=0, lt=2**32)]
Sha256 = Annotated[str, matching("[0-9a-f]{64}", "64 digits from 0 to f")]


class Artefact(BaseModel):
    """Base of the content of every stored file: frozen; numbers, texts and booleans are not converted; no unknown keys.

    Attributes:
        file_name: the file's name in its folder; "" where it has no fixed one.
        remedy: what to do about a damaged file.
        line_per_entry: keys whose lists have one line per entry; a file without any is indented JSON.
        omits_defaults: leave out what keeps its default.
        rare: keys that are omitted where they are empty.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    file_name: ClassVar[str] = ""
    remedy: ClassVar[str] = "make it again"
    line_per_entry: ClassVar[tuple[str, ...]] = ()
    omits_defaults: ClassVar[bool] = False
    rare: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read and check a file, or the file of this name in a folder. Errors are one line that names the wrong key."""
        path = cls.path_in(path)
        return cls.parse(read_file(path), str(path), cls.remedy)

    @classmethod
    def read_if_present(cls, path: Path) -> Self | None:
        """The content of a file; None where there is nothing of its name."""
        return cls.read(path) if os.path.lexists(cls.path_in(path)) else None

    @classmethod
    def read_lines(cls, path: Path) -> tuple[Self, ...]:
        """Read and check a file with one object per line; a last line that a killed run cut short is omitted."""
        return tuple(
            cls.parse(line, f"{path}: line {number}", f"remove it, or {cls.remedy} with --overwrite")
            for number, line in enumerate(whole_lines(path), start=1)
        )

    @classmethod
    def parse(cls, content: bytes | Mapping[str, Any], source: str, remedy: str) -> Self:
        """Check JSON that was read already, or its values; `source` names it in errors."""
        try:
            return cls.model_validate_json(content) if isinstance(content, bytes) else cls.model_validate(content)
        except ValidationError as error:
            raise InputError(f"{source}: {_first_problem(error)}; {remedy}") from error

    def write(self, path: Path) -> None:
        """Write the file, or the file of this name in a folder, atomically."""
        path = self.path_in(path)
        if not self.line_per_entry:
            write_json(path, self.as_json())
            return
        lines = []  # one per key, and per entry of long lists: short, and comparable line by line
        for key, value in self.as_json().items():
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            if key in self.line_per_entry and value:
                text = "[\n  " + ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value) + "\n ]"
            lines.append(f" {json.dumps(key)}: {text}")
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def path_in(cls, path: Path | str) -> Path:
        """`path` itself where it is a JSON file, or the file of this name in the folder `path`."""
        path = Path(path)
        return path if path.suffix == ".json" or not cls.file_name else path / cls.file_name

    def as_json(self) -> dict[str, Any]:
        """The content as JSON holds it, in the order of the file."""
        empty = {key for key in self.rare if not getattr(self, key)}
        return self.model_dump(mode="json", exclude_defaults=self.omits_defaults, exclude=empty)

    def summary(self) -> dict[str, Any]:
        """Return what is printed: all, unless a subclass leaves long lists out."""
        return self.as_json()


class Figures(Artefact):
    """Base of files that people look at and nothing builds upon: keys of a later version are ignored."""

    model_config = ConfigDict(extra="ignore")


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file with one object per line; a last one that a killed run cut short is omitted."""
    lines = read_file(path).splitlines()
    if lines and not lines[-1].endswith(b"}"):
        lines.pop()
    return lines


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    key = shorten(".".join(str(part) for part in problem["loc"]))
    if problem["type"] == "json_invalid":
        return f"not a JSON file ({shorten(problem['msg'].removeprefix('Invalid JSON: '))})"
    message = plain_message(problem)
    if key == "format_version" and problem["type"] != "missing":
        return f"format_version {short_repr(problem['input'])}, this version reads {message.removeprefix('must be ')}"
    if problem["type"] == "value_error":
        return f"`{key}`: {message}" if key else message
    if problem["type"] == "missing":
        return f"is not as this version writes it: `{key}` is missing"
    if problem["type"] == "extra_forbidden":
        return f"is not as this version writes it: unknown key `{key}`"
    return f"is not as this version writes it: `{key or 'its content'}` = {short_repr(problem['input'])}: {message}"


# --- what several files refer to

METADATA_NAME = "metadata.json"
VERIFICATION_NAME = "verification.json"
NOTES_NAME = "__gaudi_bert__"
"""The folder for all that is not Parquet in a folder of tables: pyarrow and Spark pass over names that begin with `_`,
`datasets` over folders that begin with two."""


def manifest_path(folder: Path, group: int) -> Path:
    """The path of the manifest of `group` in a packed folder."""
    return folder / f"group-{group:05d}.json"


def part_path(file: Path, part: tuple[int, int]) -> Path:
    """Return the path of part K of N of a file that is written in parts: of a histogram, or of a verification."""
    return file.with_name(f"{file.stem}-{part[0]:05d}-of-{part[1]:05d}{file.suffix}")


def complete_parts(file: Path, names: Iterable[str]) -> list[Path]:
    """Return all parts of a file, where `names` has them all; else none."""
    parts_by_count: dict[int, list[Path]] = {}
    for name in sorted(names):
        match = re.fullmatch(re.escape(file.stem) + r"-(\d{5})-of-(\d{5})\.json", name)
        if match is not None:
            parts_by_count.setdefault(int(match[2]), []).append(file.with_name(name))
    complete = [paths for parts, paths in sorted(parts_by_count.items()) if len(paths) == parts]
    return complete[0] if complete else []


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
        """Return size and checksum, which identify it in any folder."""
        return self.model_dump(include={"bytes", "crc32c"})


class InputTable(InputFile):
    """A table file and its number of rows; rows are numbered through all files in the order of their names."""

    rows: Count


TooLong = Literal["error", "truncate", "split", "drop"]


class TooLongRows(Artefact):
    """Account of rows longer than a pack.

    By the policy they are refused, cut to their first tokens, cut into pieces (`added_sequences` are those beyond one per
    row), or dropped; what is dropped is in no pack.
    """

    policy: TooLong
    rows: Count
    dropped_rows: Count
    dropped_tokens: Count
    added_sequences: Count

    def line(self) -> str:
        """Return the line for people."""
        if not self.rows:
            return "no row was too long: none is cut, split or dropped"
        were = "row was" if self.rows == 1 else "rows were"
        tokens = format_count(self.dropped_tokens, "token")
        done = {
            "truncate": f"cut by {tokens}",
            "split": f"split, which added {format_count(self.added_sequences, 'sequence')}; no token is lost",
            "drop": f"dropped with {tokens}",
        }
        return f"{self.rows:,} {were} too long: {done[self.policy]} (--too-long {self.policy})"


class VocabularyInfo(Artefact):
    """The vocabulary: its number of tokens, and the SHA-256 of the file in hexadecimal."""

    size: Positive
    sha256: str

    @classmethod
    def of(cls, path: Path) -> VocabularyInfo:
        """Read a vocab.txt: one token per line, and only a newline ends it."""
        data = read_file(path)
        # Tokens may hold other characters that Unicode counts as line breaks.
        return cls(size=len(data.removesuffix(b"\n").split(b"\n")), sha256=hashlib.sha256(data).hexdigest())
