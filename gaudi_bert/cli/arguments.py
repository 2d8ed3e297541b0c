"""Arguments that several commands share, and how they become settings."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.launch import parse_part
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.shipped import pipeline_path

if TYPE_CHECKING:  # settings take as long to load as everything else, and `--help` needs none
    from pydantic.fields import FieldInfo

    from gaudi_bert.config.pipeline import PipelineSettings
    from gaudi_bert.config.sections import PackingSettings

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
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output of other settings, if all files there are ours.")
]
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
OnBadFile = Annotated[
    str,
    typer.Option(metavar="[stop|skip]", help="RECORDS: what to do about files that cannot be read; skip leaves them out."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; `gaudi-bert settings` lists them."),
]
SetPacking = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of `packing`: packing.shard_multiple=256."),
]
Work = Annotated[Path, typer.Option(help="The folder that holds the work folders of pipelines.")]


def one_source(words: Sequence[str]) -> str:
    """RECORDS as one word: what was typed, or the pattern that a shell replaced by its files."""
    if len(words) == 1:
        return words[0]
    # The pattern with one `*` that stands for just these files.
    start = _common_beginning(words)
    end = _common_beginning([word[len(start) :][::-1] for word in words])[::-1]
    pattern = f"{glob.escape(start)}*{glob.escape(end)}"
    is_one = not pattern.endswith(".json") and sorted(glob.glob(pattern)) == sorted(words)
    if not is_one or not any(map(os.path.isfile, words)):
        quoted = Path(words[1]).parent / f"*{Path(words[1]).suffix}"
        raise InputError(f"{words[1]}: one file, folder or pattern is expected; put a pattern in quotes: '{quoted}'")
    return pattern


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


def packing_settings(overrides: list[str] | None, options: Options | None = None) -> PackingSettings:
    """Return the settings of packing: options, then `--set packing.key=value`; other sections are refused."""
    typed = {f"packing.{name}": each for name, each in (options or {}).items()}
    settings = pipeline_settings(None, overrides, typed).packing
    for override in overrides or ():
        if override.partition(".")[0].strip() != "packing":
            raise InputError(f"--set {override}: this command reads the keys of `packing` alone, such as packing.depth=4")
    return settings


# --- options that are derived from settings

# What was typed by the key that it sets: the option, and its value, which is None where it was not typed.
Options = Mapping[str, tuple[str, object]]
PIPELINE = "gaudi_bert.config.pipeline:PipelineSettings"
# How files of rows are read: the same options on every command that reads them, and the key of each.
ROWS = {
    "text_column": "task.text",
    "text_pair_column": "task.text_pair",
    **{
        name: f"task.{name}"
        for name in ("columns", "no_header", "format", "delimiter", "encoding", "on_bad_row", "too_long")
    },
}


def takes(section: str, *names: str, **keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these keys of a section, described as there; without any, for all of them.

    It takes them as one argument, `options`. `section` is `module:class`, imported when the command is used: settings take
    as long to load as everything else, and the help of all commands needs none.
    """

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in signature(command, eval_str=True).parameters.values() if each.name != "options"]
        command.complete = partial(_complete, command, own, section, names, keys)  # type: ignore[attr-defined]
        command.__signature__ = Signature(own)  # type: ignore[attr-defined]
        return command

    return with_options


def _complete(
    command: Callable[..., None], own: Sequence[Parameter], section: str, names: Sequence[str], keys: Mapping[str, str]
) -> Callable[..., None]:
    """Return `command` with all of its options: those that are derived from settings come after what it needs."""
    from gaudi_bert.config.values import field_at, plain_types

    module, _, name = section.partition(":")
    settings = getattr(import_module(module), name)
    expected = {name: name for name in names or (() if keys else settings.model_fields)} | dict(keys)
    known = {option: field_at(settings, key.split(".")) for option, key in expected.items()}
    fields = {option: field for option, field in known.items() if field is not None}

    @wraps(command)
    def call(**values: Any) -> None:
        options = {}
        for option, key in expected.items():
            value = values.pop(option)
            if value and tuple[str, ...] in plain_types(fields[option].annotation):
                value = tuple(name.strip() for name in value.split(","))
            options[key] = (f"--{option.replace('_', '-')}", value)
        command(options=options, **values)

    needed = [each for each in own if each.default is Parameter.empty]
    others = [each for each in own if each.default is not Parameter.empty]
    listed = [*needed, *(_option(option, field) for option, field in fields.items()), *others]
    call.__signature__ = Signature(listed)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in listed}
    return call


def values_of(options: Options) -> dict[str, Any]:
    """Return what was typed, by key."""
    return {key: value for key, (_, value) in options.items() if value is not None}


def _option(name: str, field: FieldInfo) -> Parameter:
    """The option of a key: its values, description and default are those of the key; None where it is not typed."""
    from gaudi_bert.config.values import plain_types

    option, kinds = f"--{name.replace('_', '-')}", plain_types(field.annotation) - {type(None)}
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    text = field.description or name.replace("_", " ")
    if not text.split()[0].endswith(":"):
        text = f"{text[0].upper()}{text[1:]}"
    text += "."
    if default not in (None, False, True) and "default:" not in text:
        if name.endswith("_bytes"):
            default = f"{default // 2**30}GiB" if default >= 2**30 else f"{default // 2**20}MiB"
        text += f" [default: {default}]"
    if bool in kinds:
        flags = option if default is False or name.startswith("no_") else f"{option}/--no-{name.replace('_', '-')}"
        annotation: Any = Annotated[bool | None, typer.Option(flags, help=text)]
    else:
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        words = [_METAVARS.get(get_origin(kind) or kind, "TEXT") for kind in kinds if get_origin(kind) is not Literal]
        metavar = "|".join([*words, *choices])
        annotation = Annotated[str | None, typer.Option(option, metavar=metavar if words else f"[{metavar}]", help=text)]
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


_METAVARS = {int: "N", float: "NUMBER", tuple: "A,B,...", Path: "PATH"}
