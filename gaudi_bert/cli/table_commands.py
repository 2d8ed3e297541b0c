"""The command tokenize, and what `pack` and `verify` do with tables, and print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gaudi_bert.artefacts.results import ByRowLength, GroupsResult, PackResult, StageOutput, TokenisedShard
from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import count_of

if TYPE_CHECKING:  # settings take as long to load as everything else, and `--help` needs none
    from gaudi_bert.artefacts.base import TooLongRows
    from gaudi_bert.artefacts.examples import TokenisedTexts
    from gaudi_bert.artefacts.packed import TableMetadata, TableVerification
    from gaudi_bert.artefacts.stage_run import StageRun
    from gaudi_bert.config.sections import TableSettings

    _PackedTable = PackResult[TableMetadata, TableVerification]
    _Packed = ByRowLength[_PackedTable | GroupsResult] | _PackedTable | GroupsResult
    _VerifiedTable = StageOutput[TableVerification] | GroupsResult
    _Verified = ByRowLength[_VerifiedTable] | _VerifiedTable


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
    output.print_result(result, json, _describe_tokens, following)


def _describe_tokens(result: StageOutput[TokenisedTexts] | TokenisedShard) -> list[str]:
    if isinstance(result, TokenisedShard):
        return [f"{result.missing_parts} of {count_of(result.parts, 'part')} to be done by other shards"]
    texts, too_long = result.content, result.content.too_long
    lines = [
        f"{count_of(texts.texts, 'text')} became {count_of(texts.rows, 'row')} with {count_of(texts.tokens, 'token')}"
        f"{output.skipped_note(result.skipped)}"
    ]
    if texts.empty_texts:
        lines.append(f"{count_of(texts.empty_texts, 'text')} held nothing but space and gave no row")
    if not too_long.rows:
        return [*lines, "no text was too long"]
    lost = f"{count_of(too_long.dropped_tokens, 'token')} lost"
    became = {"split": f"{too_long.added_sequences:,} rows more, no token lost", "truncate": f"cut, {lost}"}
    about = f"{count_of(too_long.rows, 'text')} too long for {count_of(texts.max_sequence_length, 'token')}"
    return [*lines, f"{about}: {became.get(too_long.policy, f'dropped, {lost}')}"]


# --- what `pack` and `verify` do with tables


def pack_as_table(
    source: str,
    out: Path,
    options: Mapping[str, object],
    overrides: list[str],
    run: StageRun,
    verified: bool,
) -> _Packed:
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


def describe_packed_table(result: _Packed, out: Path, verbose: bool) -> list[str]:
    """The lines of a packed table, or of a part of it; of rows of several lengths, those of each."""
    if isinstance(result, ByRowLength):
        return _by_row_length(
            {length: describe_packed_table(each, out / f"rows-{length}", verbose) for length, each in result.tables.items()}
        )
    if isinstance(result, GroupsResult):
        return output.part_lines(result)
    table = result.written.content
    lines = output.packed_lines(table, None if table.row_lengths else table.rows, result.written.skipped)
    lines.append(f"Wrote {out} ({count_of(len(table.shard_table), 'shard')})")
    if verbose:
        lines.append(output.algorithm_line(table.algorithm, table.algorithms_used, table.deepest_pack))
    if table.gap and table.algorithm != "optimal":
        saved = f"{count_of(table.gap, 'pack')} might be saved"
        lines.append(f"{saved}: --algorithm optimal looks for them, which takes a few seconds per group")
    proof = [] if result.verified is None else output.verified_lines(result.verified)
    return [*lines, _long_rows_line(table.too_long), *proof]


def _by_row_length(lines: Mapping[int, list[str]]) -> list[str]:
    """The lines of each length, and at the end those that are of all."""
    first, *others = lines.values()
    of_all = [line for line in first if all(line in other for other in others)]
    own = [f"rows of {length:,}: {line}" for length, each in lines.items() for line in each if line not in of_all]
    return [*own, *of_all]


def _long_rows_line(effect: TooLongRows) -> str:
    if not effect.rows:
        return "no row was too long: none is cut, split or dropped"
    were = "row was" if effect.rows == 1 else "rows were"
    tokens = count_of(effect.dropped_tokens, "token")
    done = {
        "truncate": f"cut by {tokens}",
        "split": f"split, which added {count_of(effect.added_sequences, 'sequence')}; no token is lost",
        "drop": f"dropped with {tokens}",
    }
    return f"{effect.rows:,} {were} too long: {done[effect.policy]} (--too-long {effect.policy})"


def verify_as_table(source: str, packed: Path, run: StageRun, json: bool) -> None:
    """Verify a packed table, or a part of it, and print the result."""
    from gaudi_bert.tables.verify import verify_table

    output.print_result(verify_table(source, packed, run), json, _describe_verified_table)


def _describe_verified_table(result: _Verified) -> list[str]:
    if isinstance(result, ByRowLength):
        return _by_row_length({length: _describe_verified_table(each) for length, each in result.tables.items()})
    if isinstance(result, GroupsResult):
        return output.describe_verification(result)
    proof = result.content
    counted = f"{count_of(proof.rows, 'row')}, {count_of(proof.sequences, 'sequence')}"
    return [
        f"{counted} in {count_of(proof.packs, 'pack')}{output.skipped_note(result.skipped)}",
        f"every sequence is there exactly once, value for value in {', '.join(proof.columns)}",
        _long_rows_line(proof.too_long),
    ]
