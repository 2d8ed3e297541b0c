"""Arguments that several commands share, and how they become settings."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Signature, signature
from itertools import takewhile
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.launch import parse_part
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.shipped import pipeline_path

if TYPE_CHECKING:  # settings take as long to load as everything else, and `--help` needs none
    from gaudi_bert.config.pipeline import PipelineSettings
    from gaudi_bert.config.sections import PackingSettings, TaskSettings

Records = Annotated[
    list[str], typer.Argument(help="Unpacked TFRecords or HDF5 files: a folder, a file or a glob.", show_default=False)
]
RecordsOrTable = Annotated[
    list[str],
    typer.Argument(help="Unpacked TFRecords, HDF5 files or a table: a folder, a file or a glob.", show_default=False),
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
_SET_HELP = "Change a setting (`gaudi-bert settings` lists them): "
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=f"{_SET_HELP}packing.depth=4.")]
SetTraining = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=f"{_SET_HELP}training.updates=100.")
]
SetFinetune = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=f"{_SET_HELP}finetune.epochs=5.")]
SetTask = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=f"{_SET_HELP}task.stride=64.")]
SetLocation = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=f"{_SET_HELP}kubernetes.namespace=mine.")
]
SetPacking = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of `packing`: packing.shard_multiple=256."),
]
Engine = Annotated[
    str | None,
    typer.Option(metavar="tensorflow|pytorch", help="What computes; default: TensorFlow for a BERT, if installed."),
]
Work = Annotated[Path, typer.Option(help="The folder that holds the work folders of pipelines.")]


def one_source(words: Sequence[str]) -> str:
    """RECORDS as one word: what was typed, or the pattern that a shell replaced by its files."""
    if len(words) == 1:
        return words[0]
    pattern = _pattern_of(words)
    if pattern is None:
        quoted = Path(words[1]).parent / f"*{Path(words[1]).suffix}"
        raise InputError(f"{words[1]}: one file, folder or pattern is expected; put a pattern in quotes: '{quoted}'")
    return pattern


def _pattern_of(files: Sequence[str]) -> str | None:
    """The pattern with one `*` that stands for just these files; None where no pattern does."""
    start = _common_beginning(files)
    end = _common_beginning([file[len(start) :][::-1] for file in files])[::-1]
    pattern = f"{glob.escape(start)}*{glob.escape(end)}"
    is_one = not pattern.endswith(".json") and sorted(glob.glob(pattern)) == sorted(files)
    return pattern if is_one and any(map(os.path.isfile, files)) else None


def _common_beginning(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    return first[: sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], zip(first, last, strict=False)))]


def stage_run(
    shard: str | None = None, finish: bool = False, *, workers: int | None = None, overwrite: bool = False
) -> StageRun:
    """Return how a stage runs, as it was typed; `shard` is `K/N`, `auto` or `auto/N`."""
    part = None if shard is None else parse_part(shard)
    return StageRun(Reporter(), overwrite, workers, part=part, finish=finish)


def pipeline_settings(
    pipeline: Path | None, overrides: list[str] | None, options: Mapping[str, tuple[str, object]] | None = None
) -> PipelineSettings:
    """The settings of a pipeline file, or one of the package, or the defaults; with options, by key, and `--set` applied."""
    from gaudi_bert.config.pipeline import load_pipeline

    return load_pipeline(None if pipeline is None else pipeline_path(pipeline), overrides or (), options)


def packing_settings(overrides: list[str] | None, **options: object) -> PackingSettings:
    """Return the settings of packing: options by name, then `--set packing.key=value`; other sections are refused."""
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
    """Return the settings of rows: options by key, then `--set task.key=value`."""
    return pipeline_settings(None, overrides, options).task


Task = Annotated[
    str | None,
    typer.Option(
        help="The task of the rows: classification, multi-label, regression, token-classification, "
        "question-answering, reranking, "
        "embedding, masked-language-modelling or causal-language-modelling.",
        show_default=False,
    ),
]


# --- how files of rows are read: the same options on every command that reads them


@dataclass(frozen=True)
class RowOptions:
    """Options of rows as typed; None where an option was not."""

    text_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The column (or key of JSON lines) of the text (text).", show_default=False),
    ] = None
    text_pair_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="The column of the second text of a pair.", show_default=False)
    ] = None
    label_column: Annotated[str | None, typer.Option(metavar="NAME", help="The column of the label (label).")] = None
    columns: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Names of the columns of a CSV or TSV file without a header.")
    ] = None
    no_header: Annotated[
        bool, typer.Option("--no-header", help="With --columns: the first line is a row, though it looks like a header.")
    ] = False
    format_: Annotated[
        str | None,
        typer.Option("--format", help="jsonl, csv, tsv, parquet, txt, ...; default: by the ending, JSON lines of a pipe."),
    ] = None
    delimiter: Annotated[
        str | None, typer.Option(metavar="CHARACTER", help="CSV and TSV: what separates cells, such as ';' or tab.")
    ] = None
    encoding: Annotated[str | None, typer.Option(metavar="NAME", help="Of the text, such as cp1252; default: UTF-8.")] = None
    on_bad_row: Annotated[
        str | None, typer.Option(help="A row that cannot be read: stop (default), or skip, which counts and names it.")
    ] = None
    too_long: Annotated[
        str | None, typer.Option(help="Rows of too many tokens: truncate, window or error; default: what loses least.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Return what was typed, by the names of `TokenizeSettings`."""
        columns = None if self.columns is None else tuple(name.strip() for name in self.columns.split(","))
        named = {**vars(self), "columns": columns, "no_header": self.no_header or None, "format": self.format_}
        return {name: value for name, value in named.items() if value is not None and name != "format_"}

    def by_key(self) -> dict[str, tuple[str, object]]:
        """The option and its value as YAML, by the key of the task that it sets."""
        keys = {"text_column": "text", "text_pair_column": "text_pair", "label_column": "label", "delimiter": "delimiter"}
        given = self.given() | ({} if self.columns is None else {"columns": f"[{self.columns}]"})
        return {
            f"task.{keys.get(name, name)}": (f"--{name.replace('_', '-')}", dumps(value) if name in keys else value)
            for name, value in given.items()
        }


NO_ROW_OPTIONS = RowOptions()


def reads_rows(*others: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of rows but for `others`; it takes them as one argument, `rows`."""

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        known = {name: each for name, each in signature(RowOptions, eval_str=True).parameters.items() if name not in others}
        own = signature(command, eval_str=True).parameters

        @wraps(command)
        def call(**values: Any) -> None:
            command(rows=RowOptions(**{name: values.pop(name) for name in known}), **values)

        listed = [option for name, each in own.items() for option in (known.values() if name == "rows" else [each])]
        call.__signature__ = Signature(listed)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in listed}
        return call

    return with_options
