"""Commands from text to packed data: prepare, histogram, plan, write, pack, verify, convert, inspect."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gaudi_bert.cli import arguments, output, table_commands
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter

if TYPE_CHECKING:  # they need numpy, and `--help` does without
    pass


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
    run = arguments.stage_run(shard, workers=workers, overwrite=overwrite)
    result = prepare.prepare(settings, out, run, pipeline_folder=Path())
    following = output.words_of("pack", out / "train", "--out", "packed/", "--verify")
    output.print_result(result, json, next_command=following if shard is None else None)


def histogram(
    records: arguments.Records,
    out: Annotated[Path, typer.Option(help="The histogram.json to write.", show_default=False)],
    on_bad_file: arguments.OnBadFile = "stop",
    shard: arguments.Shard = None,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Count the sequences of each length, file by file."""
    from gaudi_bert.tfrecords import histogram

    run = arguments.stage_run(shard, workers=workers, overwrite=overwrite)
    result = histogram.histogram(
        arguments.one_source(records),
        out,
        run,
        on_bad_file=on_bad_file,  # type: ignore[arg-type]
    )
    following = output.words_of("plan", out, "--out", out.with_name("plan.json"))
    output.print_result(result, json, next_command=following if shard is None else None)


def plan(
    histograms: Annotated[list[Path], typer.Argument(help="One or several histogram.json.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The plan.json to write.", show_default=False)],
    algorithm: arguments.Algorithm = None,
    depth: arguments.Depth = None,
    leftovers: Annotated[str | None, typer.Option(help="nnls only: how sequences that remain are packed.")] = None,
    masked_slots: Annotated[int | None, typer.Option(help="Masked positions per pack (Q).")] = None,
    seed: arguments.Seed = None,
    set_: arguments.SetPacking = None,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    verbose: arguments.Verbose = False,
    json: arguments.Json = False,
) -> None:
    """Decide which lengths share a row, and prove how close to optimal it is."""
    from gaudi_bert.packs import plan

    run = arguments.stage_run(workers=workers, overwrite=overwrite)
    settings = arguments.packing_settings(
        set_, algorithm=algorithm, depth=depth, leftovers=leftovers, masked_slots=masked_slots, seed=seed
    )
    # A shell's `histograms/*.json` also matches the settings stored next to each of them.
    counted = [path for path in histograms if not path.name.endswith(".settings.json")]
    planned = plan.plan(counted, out, settings, run)
    following = f"write RECORDS {output.words_of('--plan', out, '--out', 'packed/')}"
    output.print_result(planned, json, planned.lines(verbose=verbose), following)


def write(
    records: arguments.Records,
    plan: Annotated[Path, typer.Option(help="The plan.json.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder for packed shards.", show_default=False)],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Other shards than planned: packing.shard_multiple or packing.shard_bytes."
        ),
    ] = None,
    shard: arguments.Shard = None,
    finish: Annotated[bool, typer.Option("--finish", help="Check all groups and write the metadata.")] = False,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    verbose: arguments.Verbose = False,
    json: arguments.Json = False,
) -> None:
    """Write the packed TFRecords of a plan."""
    from gaudi_bert.tfrecords import write

    run = arguments.stage_run(shard, finish, workers=workers, overwrite=overwrite)
    shards, source = _shard_settings(set_, plan), arguments.one_source(records)
    written = write.write(source, plan, out, run, shards=shards)
    following = output.words_of("verify", source, out) if shard is None else None
    output.print_result(written, json, written.lines(out=out, verbose=verbose), following)


_OF_SHARDS = ("shard_multiple", "shard_bytes")
"""What a plan proposes and `write` may still change: no pack depends on it."""


def _shard_settings(overrides: list[str] | None, plan: Path) -> dict[str, int]:
    """Return what `write --set` changes about the shards of a plan; what the plan has decided is refused."""
    settings = arguments.packing_settings(overrides)
    decided = sorted(settings.model_fields_set.difference(_OF_SHARDS))
    if decided:
        typed = next((each for each in overrides or () if arguments.set_key(each) == f"packing.{decided[0]}"), "packing")
        raise InputError(
            f"--set {typed}: {plan.name} has decided `packing.{decided[0]}`; give it to `gaudi-bert plan`, and here only "
            + " or ".join(f"packing.{name}" for name in _OF_SHARDS)
        )
    return settings.model_dump(include=settings.model_fields_set)


def pack(
    records: arguments.RecordsOrTable,
    out: Annotated[Path, typer.Option(help="The folder for packed shards.", show_default=False)],
    algorithm: arguments.Algorithm = None,
    depth: arguments.Depth = None,
    seed: arguments.Seed = None,
    set_: arguments.SetPacking = None,
    max_sequence_length: Annotated[
        int | None, typer.Option(min=1, metavar="L", help="Tables: slots per pack.", show_default=False)
    ] = None,
    row_lengths: Annotated[
        str | None,
        typer.Option(
            metavar="auto|A,B,C",
            help="Tables: packs of up to three lengths, or of those that cost least, each in a folder.",
            show_default=False,
        ),
    ] = None,
    too_long: Annotated[str | None, typer.Option(help="Tables: what to do with longer rows.")] = None,
    input_column: arguments.InputColumn = None,
    columns: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Tables: pack only these columns.", show_default=False)
    ] = None,
    group_bytes: Annotated[str | None, typer.Option(help="Tables: rows in memory at once, e.g. 256MiB.")] = None,
    on_bad_file: arguments.OnBadFile = "stop",
    shard: arguments.Shard = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Tables: after all --shard, check them and write the metadata.")
    ] = False,
    workers: arguments.Workers = None,
    verify: Annotated[bool, typer.Option("--verify", help="Prove afterwards that nothing was lost.")] = False,
    overwrite: arguments.Overwrite = False,
    verbose: arguments.Verbose = False,
    json: arguments.Json = False,
) -> None:
    """Pack TFRecords (the plan is stored in `OUT-plan/`), or a table with `input_ids` to Parquet."""
    from gaudi_bert.tables.sources import is_table

    source = arguments.one_source(records)
    both = {"algorithm": algorithm, "depth": depth, "seed": seed}
    of_tables = {
        "max_sequence_length": max_sequence_length,
        "row_lengths": row_lengths,
        "too_long": too_long,
        "input_column": input_column,
        "columns": None if columns is None else tuple(name.strip() for name in columns.split(",")),
        "group_bytes": group_bytes,
    }
    if is_table(source):
        if on_bad_file != "stop":
            raise InputError("--on-bad-file: the files of a table are not left out; give good ones, by a pattern")
        if shard is not None and (finish or verify):
            raise InputError("--shard excludes --finish and --verify; run the shards first, then --finish once")
        run = arguments.stage_run(shard, finish, workers=workers, overwrite=overwrite)
        result = table_commands.pack_as_table(source, out, {**both, **of_tables}, set_ or [], run, verify)
        train = f"{output.words_of('train', '--data', out, '--out', 'run/')} --model MODEL"
        output.print_result(result, json, result.lines(out=out, verbose=verbose), None if shard is not None else train)
        return
    for name, value in {**of_tables, "shard": shard, "finish": finish}.items():
        if value:
            raise InputError(
                f"--{name.replace('_', '-')} is for tables, and {source} is not one by its ending (.parquet, .arrow, "
                ".jsonl, .jsonl.gz, a datasets folder); leave it out, or use `histogram`, `plan` and `write`"
            )
    from gaudi_bert.tfrecords import pack

    settings = arguments.packing_settings(set_, **both)
    packed = pack.pack(
        source,
        out,
        settings,
        arguments.stage_run(workers=workers, overwrite=overwrite),
        on_bad_file=on_bad_file,  # type: ignore[arg-type]
        verified=verify,
    )
    output.print_result(packed, json, packed.lines(out, verbose), output.words_of("train", "--data", out, "--out", "run/"))


def verify(
    records: arguments.RecordsOrTable,
    packed: Annotated[Path, typer.Argument(help="The packed folder.", show_default=False)],
    shard: arguments.Shard = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="After all --shard, check them and write verification.json.")
    ] = False,
    workers: arguments.Workers = None,
    json: arguments.Json = False,
) -> None:
    """Prove that every sequence is in the packed folder exactly once."""
    from gaudi_bert.tables.sources import is_table

    run = arguments.stage_run(shard, finish, workers=workers)
    source = arguments.one_source(records)
    if is_table(source):
        from gaudi_bert.tables.verify import verify_table

        output.print_result(verify_table(source, packed, run), json)
        return
    from gaudi_bert.tfrecords import verify

    result = verify.verify(source, packed, run)
    following = output.words_of("train", "--data", packed, "--out", "run/") if shard is None else None
    output.print_result(result, json, next_command=following)


def convert(
    packed: Annotated[Path, typer.Argument(help="The packed folder.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="hdf5: packs for Habana's PyTorch BERT.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder for the converted packs.", show_default=False)],
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Write packed TFRecords as HDF5, for Habana's PyTorch BERT."""
    from gaudi_bert.tfrecords import convert

    if to != "hdf5":
        raise InputError(f"--to {to}: unknown format; write hdf5")
    result = convert.convert(packed, out, reporter=Reporter(), overwrite=overwrite, workers=workers)
    output.print_result(result, json)


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
        output.print_result(result, json)
    else:
        output.show_record(result, sys.stdout)
