"""Typed results as the objects that `--json` prints: dictionaries are built here alone.

By default a result becomes an object of its fields; a field that keeps its default (not skipped, not measured) is omitted,
and what is stored in an artefact is printed as it is stored. A result that is printed otherwise has a function here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import singledispatch
from typing import Any

from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.examples import PreparedExamples
from gaudi_bert.artefacts.results import ByRowLength, PackResult, PreparedShard, ReportResult, StageOutput
from gaudi_bert.training.results import DryRun, GraphResult


@singledispatch
def to_json(result: Any) -> Any:
    """`result` as JSON holds it: objects as dictionaries, anything else as it is."""
    if is_dataclass(result) and not isinstance(result, type):
        return _fields(result)
    return result


@to_json.register(Mapping)
def _(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_json(value) for name, value in result.items()}


@to_json.register(list)
@to_json.register(tuple)
def _(result: Any) -> list[Any]:
    return [to_json(value) for value in result]


@to_json.register
def _(result: Artefact) -> dict[str, Any]:
    return result.as_json()


@to_json.register(StageOutput)
def _(result: StageOutput[Any]) -> dict[str, Any]:
    # `prepare` always prints whether it was skipped.
    skipped = {"skipped": result.skipped} if isinstance(result.content, PreparedExamples) else {}
    return {**result.content.summary(), **_fields(result, "content"), **skipped}


@to_json.register
def _(result: PreparedShard) -> dict[str, Any]:
    return {"finished": False, **_fields(result)}


@to_json.register(PackResult)
def _(result: PackResult[Any, Any]) -> dict[str, Any]:
    planned = {} if result.planned is None else to_json(result.planned)
    verified = {} if result.verified is None else {"verify": to_json(result.verified)}
    return {**planned, **to_json(result.written), **verified}


@to_json.register(ByRowLength)
def _(result: ByRowLength[Any]) -> dict[str, Any]:
    return {"row_lengths": {str(length): to_json(each) for length, each in result.tables.items()}}


@to_json.register
def _(result: ReportResult) -> dict[str, Any]:
    return {**_fields(result, "figures"), **result.figures}


@to_json.register
def _(result: DryRun) -> dict[str, Any]:
    return {"dry_run": True, **result.plan.as_json()}


@to_json.register
def _(result: GraphResult) -> dict[str, Any]:
    sizes = {**result.sizes._asdict(), "vocabulary": result.vocabulary}
    shown = {**_fields(result, "report", "vocabulary"), "sizes": sizes}
    return {**shown, "fit": result.report.is_fit, **_fields(result.report)}


def _fields(result: Any, *others: str) -> dict[str, Any]:
    """The fields of a data class but for `others`; without those that keep their default."""
    known = [field for field in fields(result) if field.name not in others]
    return {
        field.name: to_json(getattr(result, field.name)) for field in known if getattr(result, field.name) != field.default
    }
