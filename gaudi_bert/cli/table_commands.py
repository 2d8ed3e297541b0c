"""The command tokenize, and what `pack` and `verify` do with tables, and print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gaudi_bert.artefacts.results import ByRowLength, PackResult, PlainResult
from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import InputError

if TYPE_CHECKING:  # settings take as long to load as everything else, and `--help` needs none
    from gaudi_bert.artefacts.stage_run import StageRun
    from gaudi_bert.config.sections import TableSettings


@arguments.reads_rows("label_column", "too_long")
def tokenize(
    text: Annotated[
        list[str],
        typer.Argument(
            help="Files of text (JSON lines, CSV, TSV, Parquet, plain lines), folders or globs; `python-docs`; - is a pipe.",
            show_default=False,
        ),
    ],
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, or a model's folder.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder for tables of tokens.", show_default=False)],
    max_sequence_length: Annotated[int, typer.Option(help="Most tokens of a row.", show_default=False)],
    too_long: Annotated[
        str | None, typer.Option(help="Longer texts: split (default), truncate, drop or error.", show_default=False)
    ] = None,
    no_special_tokens: Annotated[
        bool, typer.Option("--no-special-tokens", help="Leave out the tokens that the tokenizer adds to each row.")
    ] = False,
    rows: arguments.RowOptions = arguments.NO_ROW_OPTIONS,
    shard: arguments.Shard = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Make tables of tokens from text, with any tokenizer of the library `tokenizers`; `pack` packs them."""
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.config.sections import TokenizeSettings
    from gaudi_bert.tables.tokenize import tokenize_texts

    settings = section_from_options(
        TokenizeSettings,
        max_sequence_length=max_sequence_length,
        too_long=too_long,
        special_tokens=not no_special_tokens,
        **rows.given(),
    )
    result = tokenize_texts(text, tokenizer, out, settings, arguments.stage_run(shard, overwrite=overwrite))
    following = output.words_of("pack", out, "--out", "packed/") if shard is None else None
    output.print_result(result, json, next_command=following)


# --- what `pack` does with tables


def pack_as_table(
    source: str,
    out: Path,
    options: Mapping[str, object],
    overrides: list[str],
    run: StageRun,
    verified: bool,
) -> PackResult | PlainResult | ByRowLength[PackResult | PlainResult]:
    """Pack a table, or a part of it; `options` are keys of `TableSettings`, None for the default."""
    from gaudi_bert.tables.pack import pack_table
    from gaudi_bert.tables.sources import tokenized_length

    if options["max_sequence_length"] is None:
        options = {**options, "max_sequence_length": _longest_row(options) or tokenized_length(source)}
    if options["max_sequence_length"] is None:
        raise InputError(f"{source}: is a table: say how many slots a pack has at most, such as --max-sequence-length 2048")
    settings = _table_settings(source, options, overrides)
    if settings.row_lengths is not None and settings.max_sequence_length != settings.most_tokens:
        raise InputError(
            f"--max-sequence-length {settings.max_sequence_length}: the longest of --row-lengths has "
            f"{settings.most_tokens}; leave it out, or give one of as many"
        )
    return pack_table(source, out, settings, run, verified=verified)


def _longest_row(options: Mapping[str, object]) -> int | None:
    """The longest of the lengths of rows that were typed, which are checked here; None where none were."""
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.config.sections import TableSettings

    typed = section_from_options(TableSettings, max_sequence_length=1, row_lengths=options["row_lengths"])
    return max(typed.given_lengths, default=None)


def _table_settings(source: str, options: Mapping[str, object], overrides: list[str]) -> TableSettings:
    """The settings of a table: its options, then the keys of `packing` that tables have."""
    from gaudi_bert.config.pipeline import section_from_mapping, section_from_options
    from gaudi_bert.config.sections import TableSettings

    settings = section_from_options(TableSettings, **options)
    packing = arguments.packing_settings(overrides)
    changed = packing.model_dump(mode="json", include=packing.model_fields_set)
    for name in sorted(set(changed) - set(TableSettings.model_fields)):
        raise InputError(f"--set packing.{name}={changed[name]}: is for TFRecords, and {source} is a table; leave it out")
    typed = {name: f"--set packing.{name}={value}" for name, value in changed.items()}
    values = settings.model_dump(mode="json", include=settings.model_fields_set)
    return section_from_mapping(TableSettings, {**values, **changed}, "the options", typed)
