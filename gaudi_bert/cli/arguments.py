"""Arguments that several commands share, and how they become settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.launch import parse_part
from gaudi_bert.config.shipped import pipeline_path

if TYPE_CHECKING:  # settings take as long to load as everything else, and `--help` needs none
    from gaudi_bert.config.pipeline import PipelineSettings
    from gaudi_bert.config.sections import PackingSettings, TaskSettings

Records = Annotated[
    str, typer.Argument(help="Unpacked TFRecords or HDF5 files: a folder, a file or a glob.", show_default=False)
]
RecordsOrTable = Annotated[
    str, typer.Argument(help="Unpacked TFRecords, HDF5 files or a table: a folder, a file or a glob.", show_default=False)
]
Pipeline = Annotated[
    Path,
    typer.Argument(
        help="A pipeline file, e.g. wiki.yaml; or demo, which comes with the package.",
        callback=pipeline_path,
        show_default=False,
    ),
]


def _for_programs(requested: bool) -> bool:
    """Suppress the notice of compilation."""
    if requested:
        os.environ["GAUDI_BERT_QUIET"] = "1"
    return requested


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.", callback=_for_programs)]
Verbose = Annotated[bool, typer.Option("--verbose", help="Also print the algorithm and the masked slots.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the results of other settings.")]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="K/N",
        help="Do only part K of N (K from 0); auto takes both from a Slurm array, auto/N takes K from an Indexed Job.",
    ),
]
Workers = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Processes or threads; default: all cores.", show_default=False)
]
Algorithm = Annotated[str | None, typer.Option(help="The packing algorithm.")]
Depth = Annotated[str | None, typer.Option(metavar="S|max", help="Most sequences per pack, or max.")]
InputColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="Tables: the column of token ids (input_ids).", show_default=False)
]
OnBadFile = Annotated[
    str, typer.Option(metavar="stop|skip", help="RECORDS: what to do about files that cannot be read; skip leaves them out.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of every random choice.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting (`gaudi-bert settings` lists them): training.updates=100."
    ),
]
SetPacking = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of `packing`: packing.shard_multiple=256."),
]
TextColumn = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The column (or key of JSON lines) of the text (text).", show_default=False),
]
TextPairColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="The column of the second text of a pair.", show_default=False)
]
LabelColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="The column of the label (label), where labels are read.")
]
Columns = Annotated[
    str | None, typer.Option(metavar="A,B,...", help="Names of the columns of a CSV or TSV file without a header.")
]
NoHeader = Annotated[
    bool, typer.Option("--no-header", help="With --columns: the first line is a row, though it looks like a header.")
]
Format = Annotated[
    str | None,
    typer.Option("--format", help="jsonl, csv, tsv, parquet, txt, ...; default: by the ending, JSON lines of a pipe."),
]
Engine = Annotated[
    str | None,
    typer.Option(metavar="tensorflow|pytorch", help="What computes; default: TensorFlow for a BERT, if installed."),
]
Work = Annotated[Path, typer.Option(help="The folder that holds the work folders of pipelines.")]


def parse_shard(text: str | None, finish: bool = False) -> tuple[int, int] | None:
    """`K/N`, `auto` or `auto/N` as (K, N); None where nothing was given."""
    if text is not None and finish:
        raise InputError("--finish and --shard exclude each other; run the shards first, then --finish once")
    return None if text is None else parse_part(text)


def pipeline_settings(
    pipeline: Path | None, overrides: list[str] | None, options: Mapping[str, tuple[str, object]] | None = None
) -> PipelineSettings:
    """The settings of a pipeline file (or the defaults) with options, by key, and `--set` applied."""
    from gaudi_bert.config.pipeline import load_pipeline

    return load_pipeline(pipeline, overrides or (), options)


def packing_settings(overrides: list[str] | None, **options: object) -> PackingSettings:
    """How sequences are packed: options by name, then `--set packing.key=value`; a key of another section is refused."""
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.config.sections import PackingSettings

    if not overrides:
        return section_from_options(PackingSettings, **options)
    typed = {f"packing.{name}": (f"--{name.replace('_', '-')}", value) for name, value in options.items()}
    settings = pipeline_settings(None, overrides, typed).packing
    for override in overrides:
        if set_key(override).partition(".")[0] != "packing":
            raise InputError(f"--set {override}: this command reads the keys of `packing` alone, such as packing.depth=4")
    return settings


def set_key(override: str) -> str:
    """The key of a `--set KEY=VALUE`."""
    return override.partition("=")[0].strip()


def task_settings(overrides: list[str] | None, options: Mapping[str, tuple[str, object]]) -> TaskSettings:
    """How rows are read: options by key, then `--set task.key=value`."""
    return pipeline_settings(None, overrides, options).task


def row_options(
    columns: str | None,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
    no_header: bool = False,
    format_: str | None = None,
) -> dict[str, tuple[str, object]]:
    """The options that say how rows are read, by the key that they set."""
    named = {"text": text_column, "text_pair": text_pair_column, "label": label_column}
    names = {key: (f"--{key.replace('_', '-')}-column", name and dumps(name)) for key, name in named.items()}
    return {
        **{f"task.{key}": option for key, option in names.items()},
        "task.columns": ("--columns", None if columns is None else f"[{columns}]"),
        "task.no_header": ("--no-header", no_header or None),
        "task.format": ("--format", format_),
    }
