"""What all stored JSON files have in common: a frozen, strictly typed model that reads and writes itself.

A subclass states the file's name (where it has a fixed one) and what to do about a damaged one. Files that others build on
(plan.json, metadata.json, the manifests) refuse unknown keys; files that hold figures to look at (`Figures`) ignore them, so
that later versions may add some.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.common.files import read_file, write_json, write_text
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
        rare: keys that are left out where they are empty.
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
        try:
            data = read_file(path)
        except OSError as error:
            raise InputError(f"{path}: cannot read: {error.strerror}; check the path") from error
        return cls.parse(data, str(path), cls.remedy)

    @classmethod
    def read_if_present(cls, path: Path) -> Self | None:
        """The content of a file; None where there is nothing of its name."""
        return cls.read(path) if os.path.lexists(cls.path_in(path)) else None

    @classmethod
    def read_lines(cls, path: Path) -> tuple[Self, ...]:
        """Read and check a file with one object per line; a last line that a killed run cut short is omitted."""
        return tuple(
            cls.parse(line, f"{path}: line {number}", f"remove it, or {cls.remedy} with --overwrite")
            for number, line in enumerate(whole_lines(path, cls.remedy), start=1)
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
        if self.line_per_entry:
            write_text(path, self._as_lines())
        else:
            write_json(path, self.as_json())

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
        """What is printed of it: all, unless a subclass leaves long lists out."""
        return self.as_json()

    def _as_lines(self) -> str:
        """JSON with a line per key, and per entry of long lists: short, and comparable line by line."""
        lines = []
        for key, value in self.as_json().items():
            if key in self.line_per_entry and value:
                entries = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value)
                lines.append(f" {json.dumps(key)}: [\n  {entries}\n ]")
            else:
                lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}")
        return "{\n" + ",\n".join(lines) + "\n}\n"


class Figures(Artefact):
    """Base of files that people look at and nothing builds upon: keys of a later version are ignored."""

    model_config = ConfigDict(extra="ignore")


def whole_lines(path: Path, remedy: str) -> list[bytes]:
    """The lines of a file with one object per line; a last one that a killed run cut short is omitted."""
    try:
        lines = read_file(path).splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}; {remedy}") from error
    if lines and not lines[-1].endswith(b"}"):
        lines.pop()
    return lines


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    key = shortened(".".join(str(part) for part in problem["loc"]))
    if problem["type"] == "json_invalid":
        return f"not a JSON file ({shortened(problem['msg'].removeprefix('Invalid JSON: '))})"
    message = plain_message(problem)
    if key == "format_version" and problem["type"] != "missing":
        return f"format_version {shown(problem['input'])}, this version reads {message.removeprefix('must be ')}"
    if problem["type"] == "value_error":
        return f"`{key}`: {message}" if key else message
    if problem["type"] == "missing":
        return f"is not as this version writes it: `{key}` is missing"
    if problem["type"] == "extra_forbidden":
        return f"is not as this version writes it: unknown key `{key}`"
    return f"is not as this version writes it: `{key or 'its content'}` = {shown(problem['input'])}: {message}"
