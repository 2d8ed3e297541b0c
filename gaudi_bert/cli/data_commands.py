"""Commands from text and tables to packed data: prepare, import, histogram, plan, write, pack, verify, convert, inspect."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter, count_of


def prepare(
    text: Annotated[
        list[str],
        typer.Argument(help="Text files, folders or globs; or `python-docs`, `python-docstrings`.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The folder for examples.", show_default=False)],
    vocab: Annotated[str | None, typer.Option(help="A vocab.txt.")] = None,
    train_vocab: Annotated[int | None, typer.Option(help="Train a vocabulary of this size instead.")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Slots per example.")] = None,
    max_predictions: Annotated[int | None, typer.Option(help="Most masked positions per example.")] = None,
    duplicates: Annotated[int | None, typer.Option(help="How often each document is used.")] = None,
    whole_word_masking: Annotated[bool | None, typer.Option(help="Mask whole words.")] = None,
    evaluation_fraction: Annotated[float | None, typer.Option(help="Share of documents held out.")] = None,
    seed: arguments.Seed = None,
    shard: arguments.Shard = None,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Make pretraining examples (unpacked TFRecords) from text."""
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.config.sections import PrepareSettings
    from gaudi_bert.corpus import prepare

    if vocab is not None and train_vocab is not None:
        raise InputError("--vocab and --train-vocab exclude each other; give the one you mean")
    settings = section_from_options(
        PrepareSettings,
        text=text,
        vocab=vocab,
        train_vocab=train_vocab,
        max_sequence_length=max_sequence_length,
        max_predictions=max_predictions,
        duplicates=duplicates,
        whole_word_masking=whole_word_masking,
        evaluation_fraction=evaluation_fraction,
        seed=seed,
    )
    result = prepare.prepare(
        settings,
        out,
        pipeline_folder=Path(),
        shard=arguments.parse_shard(shard),
        reporter=Reporter(),
        overwrite=overwrite,
        workers=workers,
    )
    output.print_result(result, json, output.describe_examples)


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
    text_column: arguments.TextColumn = None,
    text_pair_column: arguments.TextPairColumn = None,
    label_column: arguments.LabelColumn = None,
    columns: arguments.Columns = None,
    no_header: arguments.NoHeader = False,
    format_: arguments.Format = None,
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
        text_column=text_column,
        text_pair_column=text_pair_column,
        label_column=label_column,
        columns=None if columns is None else tuple(name.strip() for name in columns.split(",")),
        no_header=no_header or None,
        format=format_,
    )
    part = arguments.parse_shard(shard)
    result = tokenize_texts(text, tokenizer, out, settings, shard=part, reporter=Reporter(), overwrite=overwrite)
    output.print_result(result, json, _describe_tokens)


def _describe_tokens(result: Mapping[str, Any]) -> list[str]:
    if "missing_parts" in result:
        return [f"{result['missing_parts']} of {count_of(result['parts'], 'part')} to be done by other shards"]
    rows, too_long = count_of(result["rows"], "row"), result["too_long"]
    lines = [
        f"{count_of(result['texts'], 'text')} became {rows} with {count_of(result['tokens'], 'token')}"
        f"{output.skipped_note(result)}"
    ]
    if result["empty_texts"]:
        lines.append(f"{count_of(result['empty_texts'], 'text')} held nothing but space and gave no row")
    lost = f"{count_of(too_long['dropped_tokens'], 'token')} lost"
    became = {"split": f"{too_long['added_sequences']:,} rows more, no token lost", "truncate": f"cut, {lost}"}
    about = f"{count_of(too_long['rows'], 'text')} too long for {count_of(result['max_sequence_length'], 'token')}"
    return [
        *lines,
        f"{about}: {became.get(too_long['policy'], f'dropped, {lost}')}" if too_long["rows"] else "no text was too long",
    ]


def import_tables(
    source: Annotated[
        str, typer.Argument(help="A .parquet, .arrow or .jsonl file, a folder or a glob.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The folder for unpacked TFRecords.", show_default=False)],
    max_sequence_length: Annotated[int | None, typer.Option(min=1, help="Default: the longest row.")] = None,
    input_column: arguments.InputColumn = None,
    max_predictions: Annotated[
        int | None, typer.Option(min=1, help="Default: the most masked positions of any row.")
    ] = None,
    shard: arguments.Shard = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Make unpacked TFRecords from tables with `input_ids` (Parquet, Arrow, JSON lines, Hugging Face datasets)."""
    from gaudi_bert.tables import import_tables

    result = import_tables.import_tables(
        source,
        out,
        max_sequence_length=max_sequence_length,
        max_predictions=max_predictions,
        input_column=input_column or "input_ids",
        shard=arguments.parse_shard(shard),
        reporter=Reporter(),
        overwrite=overwrite,
    )
    output.print_result(result, json, output.describe_import)


def histogram(
    records: arguments.Records,
    out: Annotated[Path, typer.Option(help="The histogram.json to write.", show_default=False)],
    shard: arguments.Shard = None,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Count the sequences of each length, file by file."""
    from gaudi_bert.tfrecords import histogram
    from gaudi_bert.tfrecords.histogram import histogram_shard

    part = arguments.parse_shard(shard)
    counted = part and histogram_shard(records, part)
    if part is not None and counted is None:
        output.print_result({"files": 0, "skipped": True}, json, output.describe_histogram)
        return
    result = histogram.histogram(records, out, shard=counted, reporter=Reporter(), overwrite=overwrite, workers=workers)
    output.print_result(result, json, output.describe_histogram)


def plan(
    histograms: Annotated[list[Path], typer.Argument(help="One or several histogram.json.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The plan.json to write.", show_default=False)],
    algorithm: arguments.Algorithm = None,
    depth: arguments.Depth = None,
    leftovers: Annotated[str | None, typer.Option(help="nnls only: best-fit or complement.")] = None,
    masked_slots: Annotated[int | None, typer.Option(help="Masked positions per pack (Q).")] = None,
    seed: arguments.Seed = None,
    shard: arguments.Shard = None,
    finish: Annotated[bool, typer.Option("--finish", help="After all --shard, check them and write plan.json.")] = False,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Decide which lengths share a row, and prove how close to optimal it is."""
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.config.sections import PackingSettings
    from gaudi_bert.tfrecords import plan
    from gaudi_bert.tfrecords.plan import plan_shard

    part = arguments.parse_shard(shard, finish)
    settings = section_from_options(
        PackingSettings, algorithm=algorithm, depth=depth, leftovers=leftovers, masked_slots=masked_slots, seed=seed
    )
    # A shell's `histograms/*.json` also matches the settings stored next to each of them.
    counted = [path for path in histograms if not path.name.endswith(".settings.json")]
    common: dict[str, Any] = {"reporter": Reporter(), "overwrite": overwrite, "workers": workers}
    result: object
    if part is not None:
        result = plan_shard(counted, out, settings, part, **common)
    else:
        result = plan.plan(counted, out, settings, finish=finish, **common)
    output.print_result(result, json, output.describe_groups)


def write(
    records: arguments.Records,
    plan: Annotated[Path, typer.Option(help="The plan.json.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder for packed shards.", show_default=False)],
    shard: arguments.Shard = None,
    finish: Annotated[bool, typer.Option("--finish", help="Check all groups and write the metadata.")] = False,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Write the packed TFRecords of a plan."""
    from gaudi_bert.tfrecords import write
    from gaudi_bert.tfrecords.write import write_shard

    part = arguments.parse_shard(shard, finish)
    if part is not None:
        shard_result = write_shard(records, plan, out, part, reporter=Reporter(), overwrite=overwrite, workers=workers)
        output.print_result(shard_result, json, output.describe_groups)
        return
    result = write.write(records, plan, out, finish=finish, reporter=Reporter(), overwrite=overwrite, workers=workers)
    output.print_result(result, json, output.describe_packing)


def pack(
    records: arguments.RecordsOrTable,
    out: Annotated[Path, typer.Option(help="The folder for packed shards.", show_default=False)],
    algorithm: arguments.Algorithm = None,
    depth: arguments.Depth = None,
    seed: arguments.Seed = None,
    max_sequence_length: Annotated[
        int | None, typer.Option(min=1, metavar="L", help="Tables: slots per pack.", show_default=False)
    ] = None,
    too_long: Annotated[
        str | None, typer.Option(help="Tables: what to do with longer rows: error, truncate, split or drop.")
    ] = None,
    input_column: arguments.InputColumn = None,
    index_only: Annotated[
        bool, typer.Option("--index-only", help="Tables: write only which rows share a pack, no tokens.")
    ] = False,
    columns: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Tables: pack only these columns.", show_default=False)
    ] = None,
    group_bytes: Annotated[str | None, typer.Option(help="Tables: rows in memory at once, e.g. 256MiB.")] = None,
    shard: arguments.Shard = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Tables: after all --shard, check them and write the metadata.")
    ] = False,
    workers: arguments.Workers = None,
    verify: Annotated[bool, typer.Option("--verify", help="Prove afterwards that nothing was lost.")] = False,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Pack TFRecords (the plan is stored in `OUT-plan/`), or a table with `input_ids` to Parquet."""
    from gaudi_bert.tables.sources import is_table

    both = {"algorithm": algorithm, "depth": depth, "seed": seed}
    of_tables = {
        "max_sequence_length": max_sequence_length,
        "too_long": too_long,
        "input_column": input_column,
        "index_only": index_only,
        "columns": None if columns is None else tuple(name.strip() for name in columns.split(",")),
        "group_bytes": group_bytes,
    }
    if is_table(records):
        common: dict[str, Any] = {"reporter": Reporter(), "overwrite": overwrite, "workers": workers}
        part = arguments.parse_shard(shard)
        result = _pack_table(records, out, {**both, **of_tables}, part, finish, verify, common)
        output.print_result(result, json, _describe_packed_table)
        return
    _refuse_options_of_tables(records, {**of_tables, "shard": shard, "finish": finish})
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.config.sections import PackingSettings
    from gaudi_bert.tfrecords import pack
    from gaudi_bert.tfrecords.verify import verify as verify_packs

    settings = section_from_options(PackingSettings, **both)
    packed = pack.pack(records, out, settings, reporter=Reporter(), overwrite=overwrite, workers=workers)
    if verify:
        packed = replace(packed, verified=verify_packs(records, out, reporter=Reporter(), workers=workers))
    output.print_result(packed, json, _describe_pack)


def _describe_pack(result: Mapping[str, Any]) -> list[str]:
    return [*output.describe_packing(result), *_verified_lines(result)]


def _verified_lines(result: Mapping[str, Any]) -> list[str]:
    return [f"verified: {line}" for line in output.describe_verification(result["verify"])] if "verify" in result else []


def verify(
    records: arguments.RecordsOrTable,
    packed: Annotated[Path, typer.Argument(help="The packed folder.", show_default=False)],
    workers: arguments.Workers = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Verify again what has been verified.")] = False,
    json: arguments.Json = False,
) -> None:
    """Prove that every sequence is in the packed folder exactly once, byte for byte."""
    from gaudi_bert.tables.sources import is_table
    from gaudi_bert.tables.verify import verify_table
    from gaudi_bert.tfrecords import verify

    if is_table(records):
        proof = verify_table(records, packed, reporter=Reporter(), overwrite=overwrite, workers=workers)
        output.print_result(proof, json, _describe_verified_table)
        return
    result = verify.verify(records, packed, reporter=Reporter(), overwrite=overwrite, workers=workers)
    output.print_result(result, json, output.describe_verification)


# --- tables: what `pack` and `verify` do with them, and print


def _refuse_options_of_tables(source: str, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value:
            raise InputError(
                f"--{name.replace('_', '-')} is for tables, and {source} is not one by its ending (.parquet, .arrow, "
                ".jsonl, .jsonl.gz, a datasets folder); leave it out, or use `histogram`, `plan` and `write`"
            )


def _pack_table(
    source: str,
    out: Path,
    options: Mapping[str, object],
    part: tuple[int, int] | None,
    finish: bool,
    verified: bool,
    common: Mapping[str, Any],
) -> object:
    """Pack a table, or a part of it; `options` are keys of `TableSettings`, None for the default."""
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.config.sections import TableSettings
    from gaudi_bert.tables.pack import pack_table, pack_table_shard

    if options["max_sequence_length"] is None:
        raise InputError(f"{source}: is a table: say how many slots a pack has, for example --max-sequence-length 2048")
    if part is not None and (finish or verified):
        raise InputError("--shard excludes --finish and --verify; run the shards first, then --finish once")
    settings = section_from_options(TableSettings, **options)
    if part is not None:
        return pack_table_shard(source, out, settings, part, **common)
    return pack_table(source, out, settings, finish=finish, verified=verified, **common)


def _describe_packed_table(result: Mapping[str, Any]) -> list[str]:
    if "too_long" not in result:
        return output.describe_groups(result)
    packing = output.describe_packing({**result, "depth_used": result["deepest_pack"]})
    lines = [f"{count_of(result['rows'], 'row')}, {count_of(result['sequences'], 'sequence')}", *packing]
    if result["gap"] and result["algorithm"] != "optimal":
        saved = f"{count_of(result['gap'], 'pack')} might be saved"
        lines.append(f"{saved}: --algorithm optimal looks for them, which takes a few seconds per group")
    return [*lines, _describe_long_rows(result), *_verified_lines(result)]


def _describe_long_rows(result: Mapping[str, Any]) -> str:
    effect = result["too_long"]
    if not effect["rows"]:
        return "no row was too long: none is cut, split or dropped"
    were = "row was" if effect["rows"] == 1 else "rows were"
    tokens = count_of(effect["dropped_tokens"], "token")
    done = {
        "truncate": f"cut by {tokens}",
        "split": f"split, which added {count_of(effect['added_sequences'], 'sequence')}; no token is lost",
        "drop": f"dropped with {tokens}",
    }
    return f"{effect['rows']:,} {were} too long: {done[effect['policy']]} (--too-long {effect['policy']})"


def _describe_verified_table(result: Mapping[str, Any]) -> list[str]:
    what = "in the index" if result["index_only"] else f"value for value in {', '.join(result['columns'])}"
    counted = f"{count_of(result['rows'], 'row')}, {count_of(result['sequences'], 'sequence')}"
    return [
        f"{counted} in {count_of(result['packs'], 'pack')}{output.skipped_note(result)}",
        f"every sequence is there exactly once, {what}",
        _describe_long_rows(result),
    ]


def convert(
    packed: Annotated[Path, typer.Argument(help="The packed folder.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="hdf5 (Habana's PyTorch BERT), parquet, or predecessor (its TensorFlow BERT).",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder for the converted packs.", show_default=False)],
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Write packed TFRecords in a format of other trainers."""
    from gaudi_bert.tables.packed_parquet import PARQUET_PACKS
    from gaudi_bert.tfrecords import convert
    from gaudi_bert.tfrecords.vendor_packs import HDF5_PACKS, PREDECESSOR_PACKS

    formats = {each.name: each for each in (HDF5_PACKS, PARQUET_PACKS, PREDECESSOR_PACKS)}
    if to not in formats:
        raise InputError(f"--to {to}: unknown format; write one of {', '.join(formats)}")
    result = convert.convert(packed, out, formats[to], reporter=Reporter(), overwrite=overwrite, workers=workers)
    output.print_result(result, json, _describe_conversion)


def _describe_conversion(result: Mapping[str, Any]) -> list[str]:
    counted = f"{count_of(result['packs'], 'pack')} in {count_of(result['files'], 'file')}"
    return [f"{result['format']}: {counted}{output.skipped_note(result)}"]


def inspect(
    file: Annotated[
        Path, typer.Argument(help="A TFRecord file, packed or not, an HDF5 file, or a folder of them.", show_default=False)
    ],
    record: Annotated[int, typer.Option(min=0, help="Which record, from 0.")] = 0,
    vocab: Annotated[Path | None, typer.Option(help="A vocab.txt, to show tokens.")] = None,
    json: arguments.Json = False,
) -> None:
    """Show one record in readable form."""
    from gaudi_bert.tfrecords import inspect

    result = inspect.inspect(file, record=record, vocabulary=vocab)
    if json:
        output.print_result(result, json, lambda _: [])
    else:
        output.show_record(result, sys.stdout)
