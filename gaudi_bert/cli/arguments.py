"""Arguments that several commands share, and how their text becomes values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gaudi_bert.common.parts import parse_part

if TYPE_CHECKING:  # settings take as long to load as all the rest, and `--help` needs none
    from gaudi_bert.config import PackingSettings, PipelineSettings, TaskSettings

__all__ = [
    "Algorithm",
    "Depth",
    "Json",
    "Overwrite",
    "Records",
    "RecordsOrTable",
    "Seed",
    "Set",
    "Shard",
    "Workers",
    "packing_settings",
    "parse_shard",
    "pipeline_settings",
    "task_settings",
]

Records = Annotated[str, typer.Argument(help="Unpacked TFRecords: a folder, a file or a glob.", show_default=False)]
RecordsOrTable = Annotated[
    str, typer.Argument(help="Unpacked TFRecords or a table: a folder, a file or a glob.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what other settings made.")]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="K/N", help="Do part K (from 0) of N only; auto: as Slurm's array says, auto/N: as an Indexed Job says."
    ),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes or threads; default: all cores.", show_default=False)]
Algorithm = Annotated[str | None, typer.Option(help="nnls, optimal, nnlshp, ennlshp, spfhp, lpfhp, greedy, ffd, none.")]
Depth = Annotated[str | None, typer.Option(metavar="S|max", help="Most sequences per pack, or max.")]
Seed = Annotated[int | None, typer.Option(help="Seed of every random choice.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: packing.depth=4.")]


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """`K/N`, `auto` or `auto/N` as (K, N); None where nothing was given.

    Raises:
        InputError: not of these forms, K is not in 0 .. N - 1, or the environment does not say which part this is.
    """
    return None if text is None else parse_part(text)


def pipeline_settings(pipeline: Path | None, overrides: list[str] | None) -> PipelineSettings:
    """The settings of a pipeline file (or the defaults) with `--set` applied."""
    from gaudi_bert.config import load_pipeline

    return load_pipeline(pipeline, overrides or ())


def task_settings(overrides: list[str] | None, columns: str | None = None, **defaults: str) -> TaskSettings:
    """How rows are read: `defaults`, then `--columns`, then `--set task.key=value`.

    Raises:
        InputError: a key or a value is wrong.
    """
    from gaudi_bert.config import load_pipeline

    given = [f"task.{name}={value}" for name, value in defaults.items()]
    given += [f"task.columns=[{columns}]"] if columns is not None else []
    return load_pipeline(None, [*given, *(overrides or ())]).task


def packing_settings(**given: object) -> PackingSettings:
    """Packing settings from options; an option that is None keeps its default.

    Raises:
        InputError: a value is not allowed.
    """
    from gaudi_bert.config import PackingSettings, section_from_mapping

    values = {name: value for name, value in given.items() if value is not None}
    return section_from_mapping(PackingSettings, values, "the command line", "packing")
