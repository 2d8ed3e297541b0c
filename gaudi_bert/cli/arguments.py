"""Arguments and options that several commands share, and their conversion to settings.

Most options of a command are keys of a settings section. `add_settings_options` takes their help, choices and defaults from
the section.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.launch import parse_shard_option
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.options import TypedValue, find_pipeline_file

if TYPE_CHECKING:  # `--help` needs no settings, and importing them takes as long as everything else
    from pydantic.fields import FieldInfo

    from gaudi_bert.config.pipeline import PipelineSettings
    from gaudi_bert.config.sections import PackingSettings

Records = Annotated[
    list[str],
    typer.Argument(help="Unpacked TFRecords or HDF5 files: a folder, a file or a glob pattern.", show_default=False),
]
RecordsOrTable = Annotated[
    list[str],
    typer.Argument(
        help="Unpacked TFRecords, HDF5 files or a table: a folder, a file or a glob pattern.", show_default=False
    ),
]
Pipeline = Annotated[
    Path,
    typer.Argument(
        help="A pipeline file such as wiki.yaml, or demo, which comes with the package.",
        callback=find_pipeline_file,
        show_default=False,
    ),
]


def _silence_compiler_for_json(is_json_requested: bool) -> bool:
    """If JSON output was requested, suppress messages about the compilation of kernels. Return the argument unchanged."""
    if is_json_requested:
        os.environ["GAUDI_BERT_QUIET"] = "1"
    return is_json_requested


Json = Annotated[
    bool,
    typer.Option("--json", help="Print the result as one JSON object, for programs.", callback=_silence_compiler_for_json),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Also print the algorithm and the number of masked slots.")]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Replace output that was made with other settings, if gaudi-bert wrote all files in that place."
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="K/N",
        help="Do only part K of N, counted from 0. `auto` reads K and N from a Slurm array, and auto/N reads K from an "
        "Indexed Job.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Number of processes or threads; default: one per core.", show_default=False),
]
OnBadFile = Annotated[
    str,
    typer.Option(metavar="[stop|skip]", help="What to do if a record file cannot be read: stop, or skip the file."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, for example training.updates=100. `gaudi-bert settings` lists all settings.",
    ),
]
SetPacking = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting of the section `packing`, for example packing.shard_multiple=256.",
    ),
]
Work = Annotated[Path, typer.Option(help="The folder that contains the work folders of all pipelines.")]


def join_expanded_pattern(words: Sequence[str]) -> str:
    """Return the file, folder or glob pattern that the user typed. If the shell has expanded a pattern, reconstruct it from
    the matching files.

    If it was a glob pattern, the shell has expanded it to `words`.

    Raises:
        InputError: There are several words, and they are not the files that match one pattern.
    """
    if len(words) == 1:
        return words[0]
    # The shell has replaced a pattern such as `data/*.txt` by the names of the matching files. Guess the pattern from their
    # common beginning and end. The guess is right if it matches exactly these files.
    start = os.path.commonprefix(words)  # noqa: RUF071 - compare characters, not path components
    end = os.path.commonprefix([word[len(start) :][::-1] for word in words])[::-1]  # noqa: RUF071
    pattern = f"{glob.escape(start)}*{glob.escape(end)}"
    is_guess_right = not pattern.endswith(".json") and sorted(glob.glob(pattern)) == sorted(words)
    if not is_guess_right or not any(map(os.path.isfile, words)):
        quoted = Path(words[1]).parent / f"*{Path(words[1]).suffix}"
        raise InputError(
            f"{words[1]}: expected a single file, folder or pattern, found {len(words)}; put a pattern in quotes: '{quoted}'"
        )
    return pattern


def make_stage_run(
    shard: str | None = None, finish: bool = False, *, workers: int | None = None, overwrite: bool = False
) -> StageRun:
    """Create a `StageRun`, which a command passes to its stage, from the values of the command's options.

    Args:
        shard: The value of `--shard`, which is `K/N`, `auto` or `auto/N`, or None to do all of the work.
        finish: Whether to only check that all parts are done, and write the final file.
        workers: The number of processes or threads, or None for one per core.
        overwrite: Whether to replace output that was made with other settings.
    """
    return StageRun(Reporter(), overwrite, workers, part=None if shard is None else parse_shard_option(shard), finish=finish)


def load_pipeline_settings(
    pipeline: Path | None, overrides: list[str] | None, options: Options | None = None
) -> PipelineSettings:
    """Load the settings of a pipeline file. Options replace its values, and `--set` replaces both.

    Args:
        pipeline: A file, the name of a bundled pipeline, or None for the defaults.
        overrides: The values of `--set`.
        options: The options that the user typed, by the settings key that each option changes.
    """
    from gaudi_bert.config.pipeline import load_pipeline

    return load_pipeline(None if pipeline is None else find_pipeline_file(pipeline), overrides or (), options)


def load_packing_settings(overrides: list[str] | None, options: Options | None = None) -> PackingSettings:
    """Return the settings of the section `packing`. The command's options replace the defaults, and `--set` replaces both.

    Raises:
        InputError: `--set` names a key of another section.
    """
    for override in overrides or ():
        if override.partition(".")[0].strip() != "packing":
            raise InputError(f"--set {override}: this command only accepts keys of `packing`, for example packing.depth=4")
    return load_pipeline_settings(
        None, overrides, {f"packing.{name}": value for name, value in (options or {}).items()}
    ).packing


# --- options that are derived from settings

# The settings that the user changed with command-line options: the value that the user typed, by settings key.
Options = Mapping[str, TypedValue]
PIPELINE = "gaudi_bert.config.pipeline:PipelineSettings"
# These settings describe how to read a file of rows. Every command that reads such files has options with the same names.
ROW_FILE_KEYS = ("columns", "no_header", "format", "delimiter", "encoding", "on_bad_row")
# All commands that run a model on files of rows have these options. Each value is the settings key that the option changes.
ROWS = {
    "text_column": "task.text",
    "text_pair_column": "task.text_pair",
    **{name: f"task.{name}" for name in (*ROW_FILE_KEYS, "too_long")},
}


def add_settings_options(section: str, *names: str, **keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds options to a command. Each option sets one key in a section of the settings.

    The help, the choices and the default of an option are those of its key. The command receives the options that the user
    typed as one argument `options`, which maps keys to values. The section is imported when the command is used, because
    `gaudi-bert --help` does not need settings, and importing them takes as long as everything else.

    Example:
        ```python
        @add_settings_options("gaudi_bert.config.sections:PackingSettings", "algorithm", "depth")
        def plan(out: Path, options: Options) -> None:  # --algorithm and --depth
            settings = section_from_options(PackingSettings, options)
        ```

    Args:
        section: The class of the section, as `module:class`.
        *names: Keys that are also the names of their options. Without `names` and `keys`, every key gets an option.
        **keys: The keys of options with another name, by the name of the option.
    """

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in signature(command, eval_str=True).parameters.values() if each.name != "options"]
        command.complete = partial(_make_command_with_options, command, own, section, names, keys)  # type: ignore[attr-defined]
        command.__signature__ = Signature(own)  # type: ignore[attr-defined]
        return command

    return with_options


def _make_command_with_options(
    command: Callable[..., None],
    other_parameters: Sequence[Parameter],
    section: str,
    option_names: Sequence[str],
    keys_by_option: Mapping[str, str],
) -> Callable[..., None]:
    """Return a command with additional options for keys of a settings section. Required options are listed first.

    Args:
        command: The function of the command, which has a parameter `options`.
        other_parameters: The other parameters of the command.
        section: The class of the section, as in `add_settings_options`.
        option_names: The names of options that have the same name as their key.
        keys_by_option: The key of each option that has another name than its key.
    """
    from gaudi_bert.config.values import extract_types, find_field

    module, _, name = section.partition(":")
    settings = getattr(import_module(module), name)
    expected = {name: name for name in option_names or (() if keys_by_option else settings.model_fields)}
    expected |= keys_by_option
    fields: dict[str, Any] = {option: find_field(settings, key.split(".")) for option, key in expected.items()}
    if None in fields.values():
        raise KeyError(f"{section} has no keys for {[option for option, field in fields.items() if field is None]}")

    @wraps(command)
    def call(**values: Any) -> None:
        options = {}
        for option, key in expected.items():
            value = values.pop(option)
            flag = f"--{option.replace('_', '-')}"
            if value == "":
                raise InputError(f"{flag}: must not be empty; pass a value, or omit the option")
            if value is not None:
                text = f"{flag} {value}"
                if tuple[str, ...] in extract_types(fields[option].annotation):
                    value = tuple(name.strip() for name in value.split(","))
                options[key] = TypedValue(text, value)
        command(options=options, **values)

    listed = [
        *(each for each in other_parameters if each.default is Parameter.empty),
        *(_make_option(option, field) for option, field in fields.items()),
        *(each for each in other_parameters if each.default is not Parameter.empty),
    ]
    call.__signature__ = Signature(listed)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in listed}
    return call


def _make_option(name: str, field: FieldInfo) -> Parameter:
    """Create the command-line option for a settings key, with the choices, the description and the default of the key.

    The value of the parameter is None if the user does not type the option.
    """
    from gaudi_bert.config.values import extract_types

    option, kinds = f"--{name.replace('_', '-')}", extract_types(field.annotation) - {type(None)}
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
