"""The base classes of all JSON files that the stages write, and the types and file names that several of these files share.

An `Artefact` is an immutable, strictly typed pydantic model that reads and writes its own file. Files from which other
stages continue (plan.json, metadata.json and the manifests) reject unknown keys. Files that contain metrics
(`ExtensibleArtefact`) ignore unknown keys, so that later versions can add some.
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

# Every count in a JSON file of this package must be at most this large. The sum of two such counts still fits into an int64.
LARGEST_COUNT = 2**62

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Positive = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Length = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
Crc32c = Annotated[int, Field(ge=0, lt=2**32)]
Sha256 = Annotated[str, require_pattern("[0-9a-f]{64}", "64 digits from 0 to f")]


class Artefact(BaseModel):
    """The base class of the JSON files that the stages of a pipeline write. Instances are immutable and strictly typed, and
    unknown keys are errors.

    Attributes:
        file_name: The name of the file in its folder, or "" if it has no fixed name.
        remedy: What the user can do if the file is damaged, for error messages.
        line_per_entry: Keys whose lists are written with one line for each entry. If there are none, the file is indented
            JSON.
        omits_defaults: Omit keys that have their default value from the file.
        rare: Keys that the file contains only if their value is not empty.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    file_name: ClassVar[str] = ""
    remedy: ClassVar[str] = "create the file again"
    line_per_entry: ClassVar[tuple[str, ...]] = ()
    omits_defaults: ClassVar[bool] = False
    rare: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read a JSON file, validate its content, and return it as an instance of this class.

        Args:
            path: The file, or the folder that contains it.

        Raises:
            InputError: The file cannot be read or is invalid. The message names the invalid key.
        """
        path = cls.json_path_in(path)
        return cls.parse(read_file(path), str(path), cls.remedy)

    @classmethod
    def read_if_present(cls, path: Path) -> Self | None:
        """Read a JSON file as `read` does, but return None if the file does not exist."""
        return cls.read(path) if os.path.lexists(cls.json_path_in(path)) else None

    @classmethod
    def read_lines(cls, path: Path) -> tuple[Self, ...]:
        """Read a file that contains one JSON object per line, and return one instance per line.

        If the process that wrote the file was killed, the incomplete last line is ignored.

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
        """Write the content to a JSON file atomically. `path` is the file, or the folder that will contain it."""
        path = self.json_path_in(path)
        if not self.line_per_entry:
            write_json(path, self.as_json())
            return
        # Write each key, and each entry of a long list, on its own line, so that `diff` shows which entries have changed.
        lines = []
        for key, value in self.as_json().items():
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            if key in self.line_per_entry and value:
                text = "[\n  " + ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value) + "\n ]"
            lines.append(f" {json.dumps(key)}: {text}")
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def json_path_in(cls, path: Path | str) -> Path:
        """Return the path of this class's JSON file, which is called `file_name`, in a folder.

        Return `path` unchanged if it already ends in `.json`, or if files of this class have no fixed name.
        """
        path = Path(path)
        return path if path.suffix == ".json" or not cls.file_name else path / cls.file_name

    def as_json(self) -> dict[str, Any]:
        """Return the content as a dictionary of JSON values, in the same order as in the file."""
        return self.model_dump(
            mode="json",
            exclude_defaults=self.omits_defaults,
            exclude={key for key in self.rare if not getattr(self, key)},
        )

    def summary(self) -> dict[str, Any]:
        """Return the content that commands print with `--json`. Subclasses may omit long lists."""
        return self.as_json()


class ExtensibleArtefact(Artefact):
    """The base class of JSON files that contain metrics. Unknown keys are ignored, because later versions may add keys."""

    model_config = ConfigDict(extra="ignore")


def read_complete_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file that contains one JSON object per line. An incomplete last line is omitted.

    The last line is incomplete if the process that wrote the file was killed.
    """
    lines = read_file(path).splitlines()
    if lines and not lines[-1].endswith(b"}"):
        lines.pop()
    return lines


def _describe_first_problem(error: ValidationError) -> str:
    """Describe the first problem of a pydantic validation error in one line that names the key."""
    problem = error.errors(include_url=False)[0]
    key = shorten(".".join(str(part) for part in problem["loc"]))
    if problem["type"] == "json_invalid":
        return f"the file is not valid JSON ({shorten(problem['msg'].removeprefix('Invalid JSON: '))})"
    message = format_problem(problem)
    if key == "format_version" and problem["type"] != "missing":
        return f"format_version is {short_repr(problem['input'])}, but this version reads {message.removeprefix('must be ')}"
    if problem["type"] == "value_error":
        return f"`{key}`: {message}" if key else message
    if problem["type"] == "missing":
        return f"`{key}` is missing"
    if problem["type"] == "extra_forbidden":
        return f"the key `{key}` is unknown"
    return f"`{key or 'the content'}` is {short_repr(problem['input'])}, but {message}"


# --- names and types that several files share

METADATA_NAME = "metadata.json"
VERIFICATION_NAME = "verification.json"
# In a packed table, this sub-folder contains all files that are not Parquet. Programs that read the table must skip it.
# pyarrow and Spark ignore names that begin with `_`, and `datasets` ignores folder names that begin with `__`.
NOTES_NAME = "__gaudi_bert__"


def manifest_path(folder: Path, group: int) -> Path:
    """Return the path of the manifest, the JSON file in `folder` that describes one group of packs."""
    return folder / f"group-{group:05d}.json"


def part_path(file: Path, part: tuple[int, int]) -> Path:
    """Return the path for one part of a histogram or a verification that is divided among several runs.

    Args:
        file: The path of the complete file.
        part: (K, N) for part K of N.
    """
    return file.with_name(f"{file.stem}-{part[0]:05d}-of-{part[1]:05d}{file.suffix}")


def find_complete_parts(file: Path, names: Iterable[str]) -> list[Path]:
    """Return the paths of all parts of a histogram or a verification that was divided among several runs. Return an empty
    list if a part is missing.

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
    """The name, size and checksum of an input file, as they are stored in histograms, plans, manifests and metadata.json.

    Attributes:
        name: The name of the file without its folder.
        bytes: Its size on the disk.
        crc32c: The CRC-32C of its bytes on the disk.
        sequences: The number of its sequences. Manifests and metadata do not contain it, so it is 0 in them.
    """

    name: str
    bytes: Count
    crc32c: Crc32c
    sequences: Count = 0

    @property
    def size_and_crc32c(self) -> dict[str, int]:
        """The size and the checksum of the file. Two files with equal values have the same content, whatever their names
        are.
        """
        return self.model_dump(include={"bytes", "crc32c"})


class InputTable(InputFile):
    """The name, size, checksum and row count of an input file that contains a table.

    Attributes:
        rows: The number of its rows. Rows are numbered over all files, in the order of their names.
    """

    rows: Count


def counts_to_json_fields(counts: Sequence[int]) -> dict[str, Any]:
    """Return the sequence counts by length as a dictionary with the JSON keys `sequences`, `tokens` and `counts`.

    Args:
        counts: The number of sequences of length 1, 2, ...
    """
    return {
        "sequences": sum(counts),
        "tokens": sum(length * count for length, count in enumerate(counts, start=1)),
        "counts": tuple(counts),
    }


TooLong = Literal["error", "truncate", "split", "drop"]


class TooLongRows(Artefact):
    """How many table rows had more tokens than fit into a pack, and how these rows were handled.

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
        """Describe in one line of text how many rows were too long, and how they were handled."""
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
    """The number of tokens in a vocabulary, and the checksum of its file.

    Attributes:
        size: The number of its tokens.
        sha256: The SHA-256 of its file, in hexadecimal.
    """

    size: Positive
    sha256: str

    @classmethod
    def from_file(cls, path: Path) -> VocabularyInfo:
        """Count the tokens in a `vocab.txt` file, which contains one token per line, and compute the checksum of the file.

        Raises:
            InputError: The file cannot be read.
        """
        data = read_file(path)
        # A vocabulary file contains one token per line. Split it at newlines only, because a token may contain other
        # characters that Unicode defines as line breaks.
        return cls(size=len(data.removesuffix(b"\n").split(b"\n")), sha256=hashlib.sha256(data).hexdigest())
