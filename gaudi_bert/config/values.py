"""The kinds of values that settings take, and the base of all settings."""

from __future__ import annotations

import codecs
import re
from typing import Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

Algorithm = Literal["nnls", "optimal", "nnlshp", "ennlshp", "spfhp", "lpfhp", "greedy", "ffd", "none"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
Precision = Literal["float32", "bfloat16"]
EngineName = Literal["tensorflow", "pytorch"]
Engine = Literal["auto", "tensorflow", "pytorch"]

_BYTE_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(value: object) -> object:
    """`1GiB`, `128MB` or a plain number of bytes, as an int; pydantic refuses anything else."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2] not in _BYTE_UNITS:
        raise ValueError("must be a size in bytes: a number, or one with B, kB, MB, GB, KiB, MiB or GiB after it")
    return int(float(match[1]) * _BYTE_UNITS[match[2]])


def _parse_quantity(value: object) -> object:
    """A Kubernetes quantity (`500m`, `2`, `409Gi`) as the string that manifests need; 2 and 0.5 without quotes are fine."""
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not re.fullmatch(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?", text):
        raise ValueError("must be a quantity as Kubernetes writes it, for example 500m, 2 or 16Gi")
    return text


def _parse_depth(value: object) -> object:
    """An integer in its range, as it is or as text, or `max`; anything else is refused with one message."""
    number = int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value) else value
    if number != "max" and (isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_DEPTH):
        raise ValueError(f"must be an integer from 1 to {MOST_DEPTH:,}, or `max` for no limit")
    return number


def matching(pattern: str, description: str) -> AfterValidator:
    """Text that a pattern matches; `description` is what users read of it where it does not."""

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"must be {description}")
        return value

    return AfterValidator(check)


def _parse_delimiter(value: object) -> object:
    """A tab is hard to type: it may be written as `tab` or `\\t`."""
    character = "\t" if value in ("\\t", "tab", "TAB") else value
    if not isinstance(character, str) or len(character) != 1 or character in '"\r\n\0':
        raise ValueError("must be one character (or `tab`), and no quote or end of a line")
    return character


def _check_encoding(name: str) -> str:
    try:
        codec = codecs.lookup(name)
        "\n".encode(name)
    except (LookupError, ValueError):
        raise ValueError("must be an encoding of text that Python knows: utf-8, cp1252, latin-1, utf-16") from None
    return "utf-8" if codec.name == "utf-8-sig" else codec.name


Delimiter = Annotated[str, BeforeValidator(_parse_delimiter)]
Encoding = Annotated[str, AfterValidator(_check_encoding)]
Quantity = Annotated[str, BeforeValidator(_parse_quantity), WithJsonSchema({"type": ["string", "number"]})]
KubernetesName = Annotated[
    str, matching(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "at most 63 of a to z, 0 to 9 and -, without - at either end")
]
ImageName = Annotated[
    str, matching(r"[a-z0-9][a-z0-9._/:-]*[a-z0-9]", "an image without its tag: a to z, 0 to 9 and . _ / : -")
]
EnvironmentName = Annotated[
    str, matching(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a variable: letters, digits and _, no digit first")
]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0), WithJsonSchema({"type": ["integer", "string"]})]
MOST_DEPTH = 1024
Depth = Annotated[Annotated[int, Field(ge=1, le=MOST_DEPTH)] | Literal["max"], BeforeValidator(_parse_depth)]


MOST_ROW_LENGTHS = 3


def _parse_row_lengths(value: object) -> object:
    """`auto`, or lengths as a list or as text with commas; anything else is refused with one message."""
    if value is None or value == "auto":
        return value
    parts = re.findall(r"[^,\s]+", value) if isinstance(value, str) else value
    numbers = (
        [int(part) if re.fullmatch(r"\d{1,7}", str(part)) else 0 for part in parts]
        if isinstance(parts, list | tuple)
        else []
    )
    if not 1 <= len(numbers) <= MOST_ROW_LENGTHS or numbers != sorted(set(numbers)) or numbers[0] < 8:
        raise ValueError(f"must be auto, or 1 to {MOST_ROW_LENGTHS} lengths from 8, ascending, as in 512,2048,8192")
    return tuple(numbers)


RowLengthChoice = Annotated[
    Literal["auto"] | tuple[Annotated[int, Field(ge=8, le=2**20)], ...], BeforeValidator(_parse_row_lengths)
]


class _Free:
    """The mark of a setting that may change between two runs in one training folder: it changes nothing of the model."""


FREE = _Free()


def free_settings(section: type[BaseModel]) -> set[str]:
    """The keys of a section that are marked `FREE`."""
    return {name for name, field in section.model_fields.items() if FREE in field.metadata}


class Settings(BaseModel):
    """Base of all settings: frozen, no unknown keys, finite numbers; their checks are built when they are first needed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """`true` is not 1, though pydantic would take it for that."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation is not bool and bool not in get_args(annotation):
            raise PydanticCustomError("truth_value", "cannot be true or false")
        return value
