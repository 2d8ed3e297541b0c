"""Reading a pipeline file and `--set`; what is wrong is refused in one line, with the nearest right key or value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.common.yaml_text import parse_yaml
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.values import Settings

__all__ = [
    "load_pipeline",
    "pipeline_from_mapping",
    "section_from_mapping",
]

Section = TypeVar("Section", bound=Settings)


def load_pipeline(path: Path | str | None, overrides: Iterable[str] = ()) -> PipelineSettings:
    """Read a pipeline file and apply `--set` overrides (`key.path=value`, the value read as YAML).

    Args:
        path: the YAML file; None for all defaults.
        overrides: what `--set` was given.

    Raises:
        InputError: the file is missing or not YAML, a key is unknown, a value is not allowed.
    """
    source = str(path) if path is not None else "the defaults"
    mapping: Any = {}
    if path is not None:
        try:
            mapping = parse_yaml(Path(path).read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise InputError(f"{path}: cannot read the pipeline file: {error.strerror}; check the path") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not a YAML file: {error}") from error
        if mapping is None:
            mapping = {}
        if not isinstance(mapping, dict):
            raise InputError(f"{path}: a pipeline file holds `key: value` pairs, not a {type(mapping).__name__}")
    for override in overrides:
        _apply_override(mapping, override)
    return pipeline_from_mapping(mapping, source)


def pipeline_from_mapping(mapping: Mapping[str, Any], source: str) -> PipelineSettings:
    """Validate `mapping`; `source` names where it came from in errors.

    Raises:
        InputError: as `load_pipeline`.
    """
    try:
        return PipelineSettings.model_validate(mapping)
    except ValidationError as error:
        raise InputError(f"{source}: {_first_problem(error, PipelineSettings)}") from error


def section_from_mapping(section: type[Section], values: Mapping[str, Any], source: str, name: str | None = None) -> Section:
    """Validate one section alone, for a command that needs no other: all of them take 0.1 s.

    Args:
        section: the section's model.
        values: what it is given; what is not there has its default.
        source: names where they came from in errors.
        name: what the section is called in a pipeline file; None where it is in none.

    Raises:
        InputError: a value is not allowed.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{source}: {_first_problem(error, section, name)}") from error


def _apply_override(mapping: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise InputError(f"--set {shortened(override)}: write it as key.path=value, for example packing.depth=4")
    *parents, last = key.strip().split(".")
    for parent in parents:
        if mapping.get(parent) is None:
            mapping[parent] = {}
        mapping = mapping[parent]
        if not isinstance(mapping, dict):
            raise InputError(f"--set {shortened(override)}: {shortened(parent)} is a single value, it has no keys below it")
    value = parse_yaml(text, f"--set {shortened(override)}")
    # A version such as 9.90 is a number or a date to YAML, but a text to us.
    is_text = isinstance(value, int | float | date) and not isinstance(value, bool) and _takes_text(parents, last)
    mapping[last] = text.strip() if is_text else value


def _takes_text(parents: Sequence[str], last: str) -> bool:
    """Whether a key's values are texts, and never numbers."""
    model: Any = PipelineSettings
    for part in (*parents, last):
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return False
        model = field.annotation
    kinds = _plain_types(model)
    return str in kinds and not kinds & {int, float}


def _plain_types(annotation: Any) -> set[Any]:
    """The types that an annotation allows, without what is said of them: `Annotated[str, ...] | None` as str and None."""
    if get_origin(annotation) is Annotated:
        return _plain_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for one in get_args(annotation) for kind in _plain_types(one)}
    return {annotation}


def _first_problem(error: ValidationError, settings: type[Settings], section: str | None = None) -> str:
    """One line for the first problem of `settings`, with the nearest right key for an unknown one."""
    problem = error.errors()[0]
    location = [str(part) for part in problem["loc"]]
    within = [section, *location] if section else location
    place = shortened(".".join(part for part in within if part != "constrained-int" and not part.startswith("literal[")))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if problem["type"] == "extra_forbidden":
        known = _keys_at(settings, location[:-1])
        near = difflib.get_close_matches(location[-1][:80], known, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}"
        return f"unknown key `{place}`; {hint}{more}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "string_type" and isinstance(problem["input"], int | float | date):
        message += "; put it in quotes"
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        choices = [choice.strip("' ") for choice in re.findall(r"'[^']*'", problem["ctx"]["expected"])]
        near = difflib.get_close_matches(problem["input"][:80], choices, n=1, cutoff=0.5)
        message += f"; did you mean `{near[0]}`?" if near else ""
    if problem["type"] == "model_type":
        message = "a section holds `key: value` pairs"
    elif problem["type"] == "missing" or _section_at(settings, location) is not None:
        # What goes wrong between the keys of a section names them, and is read better without all the others.
        return f"`{place}`: {message}{more}" if place else f"{message}{more}"
    return f"`{place}` = {shown(problem['input'])}: {message}{more}"


def _section_at(settings: type[Settings], location: Sequence[str]) -> type[Settings] | None:
    """The section at a place in `settings`; None where that is a value."""
    section: Any = settings
    for part in location:
        field = getattr(section, "model_fields", {}).get(part)
        kinds = _plain_types(field.annotation) if field is not None else set()
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)), None)
    return section


def _keys_at(settings: type[Settings], location: Sequence[str]) -> list[str]:
    """The keys allowed at a place in `settings`."""
    section = _section_at(settings, location)
    return list(section.model_fields) if section is not None else []
