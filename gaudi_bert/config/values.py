"""The base class of all settings, the types of their values, and messages about invalid values.

The messages are for people who edit YAML, so they do not contain the wording of pydantic. A message names the key, the value
and the allowed values. For a misspelt key, it suggests the most similar key.
"""

from __future__ import annotations

import codecs
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from gaudi_bert.common.errors import short_repr, shorten

Algorithm = Literal["nnls", "optimal", "nnlshp", "ennlshp", "spfhp", "lpfhp", "greedy", "ffd", "none"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
Precision = Literal["float32", "bfloat16"]
# The precision of inference. With `bfloat16`, a CPU without bfloat16 instructions computes in float32, which is faster
# there. With `bfloat16-always`, every device computes in bfloat16.
InferencePrecision = Literal["float32", "bfloat16", "bfloat16-always"]
EngineName = Literal["tensorflow", "pytorch"]
Engine = Literal["auto", "tensorflow", "pytorch"]

_BYTE_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _parse_size_in_bytes(value: object) -> int | object:
    """Convert a size such as "1GiB" or "128MB" to a number of bytes. Return any value that is not text unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2] not in _BYTE_UNITS:
        raise ValueError("must be a size in bytes, which is a number, optionally followed by B, kB, MB, GB, KiB, MiB or GiB")
    return int(float(match[1]) * _BYTE_UNITS[match[2]])


def _parse_kubernetes_quantity(value: object) -> str:
    """Validate a Kubernetes quantity such as "500m" or "409Gi", and return it as text. Numbers are also accepted."""
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not re.fullmatch(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?", text):
        raise ValueError("must be a quantity in the notation of Kubernetes, for example 500m, 2 or 16Gi")
    return text


def parse_packing_depth(value: object) -> int | Literal["max"]:
    """Validate a depth and return it as an integer, or return "max" unchanged. Text such as "3" is converted.

    Raises:
        ValueError: The value is neither `max` nor an integer from 1 to 1,024.
    """
    if value == "max":
        return "max"
    number = int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value) else value
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_DEPTH:
        raise ValueError(f"must be an integer from 1 to {MAX_DEPTH:,}, or `max` for no limit")
    return number


def require_pattern(pattern: str, description: str) -> AfterValidator:
    """Return a pydantic validator that accepts a string only if the whole string matches a regular expression.

    Args:
        pattern: The regular expression.
        description: The allowed strings in words, for the message: "must be {description}".
    """

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"must be {description}")
        return value

    return AfterValidator(check)


def _parse_delimiter(value: object) -> str:
    """Validate a delimiter, and return it as a single character. The names `tab` and `\\t` are accepted for a tab."""
    character = "\t" if value in ("\\t", "tab", "TAB") else value
    if not isinstance(character, str) or len(character) != 1 or character in '"\r\n\0':
        raise ValueError("must be one character (or `tab`), but not a quote or a line break")
    return character


def _normalize_encoding_name(name: str) -> str:
    """Return Python's standard name for a text encoding, or `utf-8` for `utf-8-sig`.

    Raises:
        ValueError: Python does not know the encoding, or it is not an encoding of text.
    """
    try:
        codec = codecs.lookup(name)
        "\n".encode(name)
    except (LookupError, ValueError):
        raise ValueError("must be a text encoding that Python supports, such as utf-8, cp1252, latin-1 or utf-16") from None
    return "utf-8" if codec.name == "utf-8-sig" else codec.name


Delimiter = Annotated[str, BeforeValidator(_parse_delimiter)]
Encoding = Annotated[str, AfterValidator(_normalize_encoding_name)]
Quantity = Annotated[str, BeforeValidator(_parse_kubernetes_quantity), WithJsonSchema({"type": ["string", "number"]})]
KubernetesName = Annotated[
    str,
    require_pattern(
        r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "at most 63 characters of a to z, 0 to 9 and -, without - at either end"
    ),
]
ImageName = Annotated[
    str, require_pattern(r"[a-z0-9][a-z0-9._/:-]*[a-z0-9]", "an image name without a tag: a to z, 0 to 9 and . _ / : -")
]
EnvironmentName = Annotated[
    str,
    require_pattern(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a variable: letters, digits and _, not beginning with a digit"),
]
Bytes = Annotated[int, BeforeValidator(_parse_size_in_bytes), Field(gt=0), WithJsonSchema({"type": ["integer", "string"]})]
MAX_DEPTH = 1024
Depth = Annotated[Annotated[int, Field(ge=1, le=MAX_DEPTH)] | Literal["max"], BeforeValidator(parse_packing_depth)]


_MAX_ROW_LENGTHS = 3


def _parse_row_lengths(value: object) -> tuple[int, ...] | Literal["auto"] | None:
    """Convert a list or comma-separated text of row lengths to a tuple of integers. Return `auto` and None unchanged.

    Raises:
        ValueError: The value is neither `auto` nor a list of one to three ascending lengths of at least 8.
    """
    if value is None:
        return None
    if value == "auto":
        return "auto"
    parts = re.findall(r"[^,\s]+", value) if isinstance(value, str) else value
    listed = parts if isinstance(parts, list | tuple) else ()
    numbers = [int(part) if isinstance(part, int | str) and re.fullmatch(r"\d{1,7}", str(part)) else 0 for part in listed]
    if not 1 <= len(numbers) <= _MAX_ROW_LENGTHS or numbers != sorted(set(numbers)) or numbers[0] < 8:
        raise ValueError(f"must be auto, or 1 to {_MAX_ROW_LENGTHS} ascending lengths of at least 8, such as 512,2048,8192")
    return tuple(numbers)


RowLengthChoice = Annotated[
    Literal["auto"] | tuple[Annotated[int, Field(ge=8, le=2**20)], ...], BeforeValidator(_parse_row_lengths)
]


# A setting with this mark may be changed when a run is resumed, because the setting does not affect what the model learns.
CHANGEABLE_ON_RESUME = "free"


def find_keys_changeable_on_resume(section: type[BaseModel]) -> set[str]:
    """Return the keys of a settings section that a user may change when resuming a run."""
    return {name for name, field in section.model_fields.items() if CHANGEABLE_ON_RESUME in field.metadata}


class Settings(BaseModel):
    """The base class of all settings sections. Sections are immutable. Unknown keys and numbers that are not finite are
    rejected.

    Pydantic builds the validators when they are first needed, so that commands without settings start quickly.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_for_number(cls, value: object, info: ValidationInfo) -> object:
        """Reject true and false where a number is expected, because pydantic would accept them as 1 and 0."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation is not bool and bool not in get_args(annotation):
            raise PydanticCustomError("truth_value", "cannot be true or false")
        return value


# --- descriptions of keys and their allowed values

_TYPE_DESCRIPTIONS = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    dict: "key: value pairs",
    tuple: "list",
}
_COMPARISON_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_LOWER = ("gt", "ge")


def describe_allowed_values(field: FieldInfo) -> str:
    """Describe the type and the limits of a settings key in words, for example "integer, >= 1 and <= 1,024"."""
    kind = _describe_type(field.annotation)
    stated = [
        (name, getattr(limit, name))
        for limit in field.metadata
        for name in _COMPARISON_SIGNS
        if getattr(limit, name, None) is not None
    ]
    # A key and its type may both have a lower limit. Describe only the higher limit, because it implies the lower one.
    lowest = max((value for name, value in stated if name in _LOWER), default=None)
    limits = [f"{_COMPARISON_SIGNS[name]} {value:,}" for name, value in stated if name not in _LOWER or value == lowest]
    return f"{kind}, {' and '.join(limits)}" if limits else kind


def _describe_type(annotation: Any) -> str:
    """Describe a type in words for people who write YAML, such as "integer", "text" or "true or false"."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _describe_type(get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if origin in (Union, UnionType):
        kinds = [_describe_type(part) for part in get_args(annotation) if part is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    return _TYPE_DESCRIPTIONS.get(origin or annotation, _TYPE_DESCRIPTIONS[dict])


def extract_types(annotation: Any) -> set[Any]:
    """Return the types that a type annotation allows, as a set. The metadata of `Annotated` is ignored.

    For example, return {str, NoneType} for `Annotated[str, ...] | None`.
    """
    if get_origin(annotation) is Annotated:
        return extract_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for one in get_args(annotation) for kind in extract_types(one)}
    return {annotation}


def find_field(settings_class: type[Settings], keys: Sequence[str]) -> FieldInfo | None:
    """Find the pydantic field of a settings key in nested sections. Return None if there is no such key.

    Args:
        settings_class: The outermost section.
        keys: The names of the inner sections, and the key, such as ["packing", "depth"].
    """
    field, section = None, _find_section_class(settings_class)
    for key in keys:
        field = section.model_fields.get(key) if section is not None else None
        section = _find_section_class(field.annotation) if field is not None else None
    return field


def _find_section_class(annotation: Any) -> type[Settings] | None:
    """Find the settings class in a type annotation. Return None if the annotation is for a single value."""
    return next((kind for kind in extract_types(annotation) if isinstance(kind, type) and issubclass(kind, Settings)), None)


def iterate_full_keys(settings_class: type[Settings], prefix: str = "") -> Iterator[str]:
    """Yield the full names of all sections, such as `packing`, and of all keys, such as `packing.depth`.

    Args:
        settings_class: The outermost section.
        prefix: The text before each name.
    """
    for name, field in settings_class.model_fields.items():
        yield f"{prefix}{name}"
        section = _find_section_class(field.annotation)
        if section is not None:
            yield from iterate_full_keys(section, f"{prefix}{name}.")


# --- messages about wrong values

_WRONG_TYPES = {
    "int": "must be an integer",
    "float": "must be a number",
    "finite": "must be a finite number",
    "bool": "must be true or false",
    "string": "must be text",
    "tuple": "must be a list",
    "list": "must be a list",
    "dict": "must contain `key: value` pairs",
    "model": "must contain `key: value` pairs",
    "truth": "cannot be true or false",
}
_DESCRIBED_BY_FIELD = ("int", "float", "greater", "less", "truth")
_LIMITS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}


def format_problem(problem: ErrorDetails) -> str:
    """Convert a pydantic error to a message for users, such as "must be an integer"."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "value_error":  # one of our validators raised it, so the message is already written for users
        return problem["msg"].removeprefix("Value error, ")
    if kind == "literal_error":
        choices = context["expected"].replace("'", "")
        near = difflib.get_close_matches(
            short_repr(problem["input"]).strip("'"), re.split(", | or ", choices), n=1, cutoff=0.75
        )
        return f"must be {choices}" + (f"; did you mean {near[0]}?" if near else "")
    if kind in _LIMITS:
        return f"must be {_COMPARISON_SIGNS[_LIMITS[kind]]} {context[_LIMITS[kind]]:,}"
    if kind in ("string_too_short", "too_short"):
        return f"must have a length of at least {context['min_length']}"
    message = _WRONG_TYPES.get(kind.partition("_")[0], "cannot be used here")
    is_unquoted = kind == "string_type" and isinstance(problem["input"], int | float | date)
    return f"{message}; put it in quotes" if is_unquoted else message


def format_first_problem(
    error: ValidationError, settings_class: type[Settings], values: Any, source: str, typed_by_key: Mapping[str, str]
) -> str:
    """Return a one-line message about the first error that pydantic found in a section of settings.

    Args:
        error: The problems that pydantic found.
        settings_class: The class of the section.
        values: The values that were validated.
        source: The file or other place that the values come from. The message begins with it.
        typed_by_key: For each key that the user typed on the command line, the option with its value. The message begins
            with this text if the key is wrong.
    """
    problems = [(_find_invalid_key(each, values), each) for each in error.errors()]
    key, problem = problems[0]
    others = len({other for other, _ in problems}) - 1
    more = f" (and {others} more)" if others else ""
    typed_key = max(
        (each for each in typed_by_key if _contains_key(each, key) or _contains_key(key, each)), key=len, default=None
    )
    where = shorten(source if typed_key is None else typed_by_key[typed_key])
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        return f"{where}: unknown key `{shorten(key)}`; {suggest_keys(key, settings_class)}{more}"
    field, message = find_field(settings_class, key.split(".")), format_problem(problem)
    is_one_of_several = sum(other == key for other, _ in problems) > 1
    if field is not None and (is_one_of_several or problem["type"].partition("_")[0] in _DESCRIBED_BY_FIELD):
        message = "must be " + re.sub(r"\b(?=number\b|list\b)", "a ", describe_allowed_values(field)).replace(
            "integer", "an integer"
        )
    if key in ("", typed_key) or f"{key}." in message:  # the message of a rule about several keys names them already
        return f"{where}: {message}{more}"
    is_rule = problem["type"] == "missing" or (problem["type"] == "value_error" and isinstance(problem["input"], Mapping))
    value = "" if is_rule or typed_key is not None else f" = {short_repr(problem['input'])}"
    return f"{where}: `{shorten(key)}`{value}: {message}{more}"


def _find_invalid_key(error: ErrorDetails, values: Any) -> str:
    """Return the full name of the settings key that caused a pydantic error, such as "packing.depth".

    pydantic also appends the name of a type if it tried several types. Such names are left out, because `values` does not
    contain them.
    """
    path: list[str] = []
    for part in error["loc"]:
        is_entry = isinstance(values, list | tuple) and isinstance(part, int)
        if is_entry or (isinstance(values, Mapping) and part in values):
            values = values[part]
            path.append(str(part))
        elif error["type"] == "missing":
            path.append(str(part))
    return ".".join(path)


def _contains_key(section: str, key: str) -> bool:
    """Return whether `key`, such as "packing.depth", equals `section` or belongs to it."""
    return key == section or key.startswith(f"{section}.")


# For each settings key, the names of the same setting in other programs. If a user types one of these names, the error
# message suggests our key.
_NAMES_IN_OTHER_PROGRAMS = {
    "updates": "steps max_steps num_steps train_steps num_train_steps total_steps",
    "epochs": "num_epochs num_train_epochs max_epochs",
    "global_batch_sequences": "batch_size global_batch_size train_batch_size per_device_train_batch_size",
    "batch_sequences": "batch_size global_batch_size train_batch_size per_device_train_batch_size",
    "learning_rate": "lr",
    "warmup_updates": "warmup_steps num_warmup_steps",
    "warmup_share": "warmup_ratio",
    "save_every_updates": "save_steps",
    "evaluate_every_updates": "eval_steps",
    "max_sequence_length": "max_length max_seq_length max_seq_len seq_length model_max_length",
}


def suggest_keys(key: str, settings_class: type[Settings]) -> str:
    """Return a sentence that suggests existing keys for an unknown key, such as "did you mean `packing.depth`?".

    Keys with this name, or with this name in another program, come first, and those in the same section are preferred. If
    there are none, the key of the section with the most similar name is suggested. If the section is unknown too, all keys
    are compared.

    Args:
        key: The unknown key, such as "packing.dept".
        settings_class: The outermost section.
    """
    known = list(iterate_full_keys(settings_class))
    section, _, name = key[:160].rpartition(".")
    siblings = [each for each in known if section and each.rpartition(".")[0] == section]
    names = {name, *(own for own, others in _NAMES_IN_OTHER_PROGRAMS.items() if name in others.split())}
    named = [each for each in siblings if each.rpartition(".")[2] in names]
    named = named or [each for each in known if each.rpartition(".")[2] in names]
    if named:
        return f"did you mean {' or '.join(f'`{each}`' for each in named)}?"
    by_name = {each.rpartition(".")[2]: each for each in siblings or known}
    near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{by_name[near[0]]}`?"
    return f"`gaudi-bert settings{f' {section}' if siblings and section else ''}` lists the keys"
