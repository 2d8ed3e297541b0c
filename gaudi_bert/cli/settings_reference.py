"""Every key of a pipeline file as a Markdown page, made from the types themselves (`gaudi-bert settings`).

`docs/settings.md` is this page; a test holds it to the types.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gaudi_bert.config import PipelineSettings

__all__ = ["settings_page"]

_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "key: value pairs", tuple: "list"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def settings_page() -> list[str]:
    """The lines of the page."""
    lines = [
        "# Every key of a pipeline file",
        "",
        "All keys are optional. `--set packing.depth=4` changes one on the command line. A wrong key or value is refused",
        "with the nearest right one. This page is `gaudi-bert settings`.",
        "",
        *_table(PipelineSettings, ""),
    ]
    for name, field in PipelineSettings.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            lines += ["", f"## {name}", "", *(model.__doc__ or "").strip().splitlines()[:1], "", *_table(model, f"{name}.")]
    return lines


def _table(model: type[BaseModel], prefix: str) -> Iterator[str]:
    rows = list(_rows(model, prefix))
    if rows:
        yield "| key | value | default | meaning |"
        yield "|---|---|---|---|"
        yield from rows


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if prefix:
                yield from _rows_of_part(kind, f"{prefix}{name}.", field)
            continue
        yield _row(f"{prefix}{name}", field, field.get_default(call_default_factory=True))


def _rows_of_part(model: type[BaseModel], prefix: str, outer: FieldInfo) -> Iterator[str]:
    """The keys of a setting that has keys of its own; their defaults are those of the whole."""
    for name, field in model.model_fields.items():
        yield _row(f"{prefix}{name}", field, getattr(outer.get_default(call_default_factory=True), name))


def _row(key: str, field: FieldInfo, default: Any) -> str:
    shown = "" if default is None else f"`{yaml.safe_dump(default, default_flow_style=True).splitlines()[0]}`"
    described = (field.description or "").replace("|", "\\|")
    return f"| `{key}` | {_value(field)} | {shown} | {described} |"


def _value(field: FieldInfo) -> str:
    kind = _kind(field.annotation)
    limits = [
        f"{sign} {getattr(limit, name):,}"
        for limit in field.metadata
        for name, sign in _SIGNS.items()
        if getattr(limit, name, None) is not None
    ]
    return f"{kind}, {' and '.join(limits)}" if limits else kind


def _kind(annotation: Any) -> str:
    """What a type is called by people who write YAML."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind(part) for part in typing.get_args(annotation) if part is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    return _NAMES.get(origin or annotation, str(annotation))
