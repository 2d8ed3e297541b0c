"""What all stored JSON files have in common: a frozen, strictly typed model, and errors of one line when one is read.

Files that others build on (plan.json, metadata.json, the manifests) refuse a key that they do not know; files that hold
figures to look at (`Figures`) leave it alone, so that later versions may add some.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gaudi_bert.common.errors import InputError, shortened, shown

__all__ = [
    "LARGEST_COUNT",
    "Artefact",
    "Count",
    "Crc32c",
    "Figures",
    "Length",
    "Positive",
    "Sha256",
    "Share",
    "as_lines",
    "checked_artefact",
    "read_artefact",
    "read_lines",
    "whole_lines",
]

LARGEST_COUNT = 2**62
"""Of anything that is counted: sums of two fit int64."""

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Positive = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Length = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
Crc32c = Annotated[int, Field(ge=0, lt=2**32)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

Content = TypeVar("Content", bound="Artefact")


class Artefact(BaseModel):
    """Base of the content of every stored file: frozen; whole numbers, texts and truths are not converted; no other key."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    def as_json(self) -> dict[str, Any]:
        """The content as JSON holds it, in the order of the file."""
        return self.model_dump(mode="json")


class Figures(Artefact):
    """Base of files that are looked at and not built upon: keys of a later version are left alone."""

    model_config = ConfigDict(extra="ignore")


def read_artefact(path: Path, model: type[Content], remedy: str) -> Content:
    """Read and check one file.

    Args:
        path: the file.
        model: what it must hold.
        remedy: what to do where it is damaged, e.g. "make the plan again".

    Raises:
        InputError: it is missing, or not as this version writes it; one line that names the place in the file.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}; check the path") from error
    return checked_artefact(data, model, str(path), remedy)


def read_lines(path: Path, model: type[Content], remedy: str) -> tuple[Content, ...]:
    """Read and check a file with an object a line.

    Raises:
        InputError: as `whole_lines`, or a line is not as this version writes it.
    """
    return tuple(
        checked_artefact(line, model, f"{path}: line {number}", f"remove it, or {remedy} with --overwrite")
        for number, line in enumerate(whole_lines(path, remedy), start=1)
    )


def whole_lines(path: Path, remedy: str) -> list[bytes]:
    """The lines of a file with an object a line; a last one cut short, as a killed run leaves it, is left out.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}; {remedy}") from error
    if lines and not lines[-1].endswith(b"}"):
        lines.pop()
    return lines


def checked_artefact(content: bytes | Mapping[str, Any], model: type[Content], source: str, remedy: str) -> Content:
    """The same for JSON that was read already, or for its values; `source` names it in errors.

    Raises:
        InputError: as `read_artefact`.
    """
    try:
        return model.model_validate_json(content) if isinstance(content, bytes) else model.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{source}: {_first_problem(error)}; {remedy}") from error


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False)[0]
    place = shortened(".".join(str(part) for part in problem["loc"]))
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "json_invalid":
        return f"not a JSON file ({shortened(message.removeprefix('Invalid JSON: '))})"
    if place == "format_version":
        return f"format_version {shown(problem['input'])}, this version reads 1"
    if problem["type"] == "value_error":
        return f"`{place}`: {message}" if place else message
    if problem["type"] == "missing":
        return f"is not as this version writes it: `{place}` is missing"
    if problem["type"] == "extra_forbidden":
        return f"is not as this version writes it: unknown key `{place}`"
    return f"is not as this version writes it: `{place or 'its content'}` = {shown(problem['input'])}: {message}"


def as_lines(content: Artefact, listed: Collection[str]) -> str:
    """JSON with a line for each key, and for each entry of those in `listed`: short, and comparable line by line."""
    lines = []
    for key, value in content.as_json().items():
        if key in listed and value:
            entries = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value)
            lines.append(f" {json.dumps(key)}: [\n  {entries}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
