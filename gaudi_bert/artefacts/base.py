"""The base classes of all stored JSON files, and the types and file names that several of them share.

An `Artefact` is a frozen, strictly typed pydantic model that reads and writes its own file. Files on which other stages
build (plan.json, metadata.json, the manifests) reject unknown keys. Files of metrics (`ExtensibleArtefact`) ignore unknown
keys, so that later versions can add some.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from gaudi_bert.common.errors import InputError, short_repr, shorten
from gaudi_bert.common.files import read_file, write_json, write_text
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.values import format_problem, require_pattern

LARGEST_COUNT = 2**62
"""The maximum of every count. The sum of two counts fits into an int64."""

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Positive = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Length = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
Crc32c = Annotated[int, Field(ge=0, lt=2**32)]
Sha256 = Annotated[str, require_pattern("[0-9a-f]{64}", "64 digits from 0 to f")]


class Artefact(BaseModel):
    """The base class of the JSON files that stages write. It is frozen, does not convert types, and rejects unknown keys.

    Attributes:
        file_name: The name of the file in its folder, or "" if it has no fixed name.
        remedy: What the user can do about a damaged file, for error messages.
        line_per_entry: Keys whose lists are written with one line for each entry. If there are none, the file is indented
            JSON.
        omits_defaults: Omit keys that have their default value from the file.
        rare: Keys that are omitted from the file if their value is empty.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    file_name: ClassVar[str] = ""
    remedy: ClassVar[str] = "create the file again"
    line_per_entry: ClassVar[tuple[str, ...]] = ()
    omits_defaults: ClassVar[bool] = False
    rare: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read and check a file.

        Args:
            path: The file, or the folder that contains it.

        Raises:
            InputError: The file cannot be read or is invalid. The message names the invalid key.
        """
        path = cls.path_in(path)
        return cls.parse(read_file(path), str(path), cls.remedy)

    @classmethod
    def read_if_present(cls, path: Path) -> Self | None:
        """Read and check a file, as `read` does, or return None if there is no such file."""
        return cls.read(path) if os.path.lexists(cls.path_in(path)) else None

    @classmethod
    def read_lines(cls, path: Path) -> tuple[Self, ...]:
        """Read and check a file with one object per line. If a killed run truncated the last line, the line is ignored.

        Raises:
            InputError: The file cannot be read, or a line is invalid.
        """
        return tuple(
            cls.parse(line, f"{path}: line {number}", f"remove the line, or {cls.remedy} with --overwrite")
            for number, line in enumerate(read_complete_lines(path), start=1)
        )

    @classmethod
    def parse(cls, content: bytes | Mapping[str, Any], source: str, remedy: str) -> Self:
        """Validate the content of a JSON file, and return it as an instance of this class.

        Args:
            content: The bytes of a JSON file, or its values.
            source: The name of the content for the error message.
            remedy: What the user can do, for the error message.

        Raises:
            InputError: The content is invalid.
        """
        try:
            return cls.model_validate_json(content) if isinstance(content, bytes) else cls.model_validate(content)
        except ValidationError as error:
            raise InputError(f"{source}: {_describe_first_problem(error)}; {remedy}") from error

    def write(self, path: Path) -> None:
        """Write the file atomically. `path` is the file, or the folder that contains it."""
        path = self.path_in(path)
        if not self.line_per_entry:
            write_json(path, self.as_json())
            return
        lines = []  # one line for each key and each entry of a long list, so that `diff` shows what has changed
        for key, value in self.as_json().items():
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            if key in self.line_per_entry and value:
                text = "[\n  " + ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value) + "\n ]"
            lines.append(f" {json.dumps(key)}: {text}")
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def path_in(cls, path: Path | str) -> Path:
        """Return the path of the file, given the path of the file or of its folder.

        `path` is returned unchanged if it ends in `.json` or if this kind of file has no fixed name.
        """
        path = Path(path)
        return path if path.suffix == ".json" or not cls.file_name else path / cls.file_name

    def as_json(self) -> dict[str, Any]:
        """Return the content as JSON values, with the keys and the order of the file."""
        empty = {key for key in self.rare if not getattr(self, key)}
        return self.model_dump(mode="json", exclude_defaults=self.omits_defaults, exclude=empty)

    def summary(self) -> dict[str, Any]:
        """Return the content that commands print with `--json`. Subclasses omit long lists."""
        return self.as_json()


class ExtensibleArtefact(Artefact):
    """The base class of JSON files to which later versions may add keys, such as metrics. Unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore")


def read_complete_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that contains one JSON object per line. An incomplete last line is omitted.

    The last line is incomplete if the process that wrote it was killed.
    """
    lines = read_file(path).splitlines()
    if lines and not lines[-1].endswith(b"}"):
        lines.pop()
    return lines


def _describe_first_problem(error: ValidationError) -> str:
    """Return the first problem of a pydantic error as one line of text that names the key."""
    problem = error.errors(include_url=False)[0]
    key = shorten(".".join(str(part) for part in problem["loc"]))
    if problem["type"] == "json_invalid":
        return f"is not a valid JSON file ({shorten(problem['msg'].removeprefix('Invalid JSON: '))})"
    message = format_problem(problem)
    if key == "format_version" and problem["type"] != "missing":
        return f"format_version is {short_repr(problem['input'])}, but this version reads {message.removeprefix('must be ')}"
    if problem["type"] == "value_error":
        return f"`{key}`: {message}" if key else message
    if problem["type"] == "missing":
        return f"`{key}` is missing"
    if problem["type"] == "extra_forbidden":
        return f"contains the unknown key `{key}`"
    return f"`{key or 'the content'}` is {short_repr(problem['input'])}, but {message}"


# --- names and types that several files share

METADATA_NAME = "metadata.json"
VERIFICATION_NAME = "verification.json"
NOTES_NAME = "__gaudi_bert__"
"""The folder, in a folder of tables, for all files that are not Parquet.

pyarrow and Spark ignore names that begin with `_`, and `datasets` ignores folders that begin with `__`.
"""


def manifest_path(folder: Path, group: int) -> Path:
    """Return the path of a group's manifest. `folder` is the folder of the manifests."""
    return folder / f"group-{group:05d}.json"


def part_path(file: Path, part: tuple[int, int]) -> Path:
    """Return the path of the file in which part K of N of a histogram or verification is stored.

    Args:
        file: The path of the complete file.
        part: (K, N) for part K of N.
    """
    return file.with_name(f"{file.stem}-{part[0]:05d}-of-{part[1]:05d}{file.suffix}")


def find_complete_parts(file: Path, names: Iterable[str]) -> list[Path]:
    """Return the paths of all N parts of a histogram or verification, or an empty list if a part is missing.

    Args:
        file: The path of the complete file.
        names: The names of the files in its folder.
    """
    parts_by_count: dict[int, list[Path]] = {}
    for name in sorted(names):
        match = re.fullmatch(re.escape(file.stem) + r"-(\d{5})-of-(\d{5})\.json", name)
        if match is not None:
            parts_by_count.setdefault(int(match[2]), []).append(file.with_name(name))
    complete = [paths for parts, paths in sorted(parts_by_count.items()) if len(paths) == parts]
    return complete[0] if complete else []


class InputFile(Artefact):
    """An input file as the histogram, the plan, the manifests and the metadata list it.

    Attributes:
        name: The name of the file without its folder.
        bytes: Its size on the disk.
        crc32c: The CRC-32C of its bytes on the disk.
        sequences: The number of its sequences. Manifests and metadata omit it, and it is 0 there.
    """

    name: str
    bytes: Count
    crc32c: Crc32c
    sequences: Count = 0

    @property
    def identity(self) -> dict[str, int]:
        """The size and the checksum, which identify the file independently of its name and folder."""
        return self.model_dump(include={"bytes", "crc32c"})


class InputTable(InputFile):
    """An input file that is a table.

    Attributes:
        rows: The number of its rows. Rows are numbered over all files, in the order of their names.
    """

    rows: Count


def counts_to_json_fields(counts: Sequence[int]) -> dict[str, Any]:
    """Return the values of the keys `sequences`, `tokens` and `counts` of a manifest or histogram.

    Args:
        counts: The number of sequences of length 1, 2, ...
    """
    tokens = sum(length * count for length, count in enumerate(counts, start=1))
    return {"sequences": sum(counts), "tokens": tokens, "counts": tuple(counts)}


TooLong = Literal["error", "truncate", "split", "drop"]


class TooLongRows(Artefact):
    """Counts of the rows that have more tokens than a pack has slots, and what was done with them.

    Attributes:
        policy: "error" rejects such rows, "truncate" keeps their first tokens, "split" cuts them into several sequences, and
            "drop" omits them.
        rows: The number of rows that were too long.
        dropped_rows: The number of rows that are in no pack.
        dropped_tokens: The number of tokens that are in no pack.
        added_sequences: The number of sequences, in addition to one per row, that splitting produced.
    """

    policy: TooLong
    rows: Count
    dropped_rows: Count
    dropped_tokens: Count
    added_sequences: Count

    def format_line(self) -> str:
        """Return the summary as one line of text."""
        if not self.rows:
            return "no row was too long"
        were = "row was" if self.rows == 1 else "rows were"
        tokens = format_count(self.dropped_tokens, "token")
        done = {
            "truncate": f"truncated, which removed {tokens}",
            "split": f"split, which added {format_count(self.added_sequences, 'sequence')} and lost no token",
            "drop": f"dropped, which removed {tokens}",
        }
        return f"{self.rows:,} {were} too long: {done[self.policy]} (--too-long {self.policy})"


class VocabularyInfo(Artefact):
    """The size and the checksum of a vocabulary, which identify it.

    Attributes:
        size: The number of its tokens.
        sha256: The SHA-256 of its file, in hexadecimal.
    """

    size: Positive
    sha256: str

    @classmethod
    def from_file(cls, path: Path) -> VocabularyInfo:
        """Return the identity of a `vocab.txt`, which has one token per line.

        Raises:
            InputError: The file cannot be read.
        """
        data = read_file(path)
        # A token may contain other characters that Unicode defines as line breaks, so only newlines separate tokens.
        return cls(size=len(data.removesuffix(b"\n").split(b"\n")), sha256=hashlib.sha256(data).hexdigest())
