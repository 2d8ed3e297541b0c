"""Commands from text to packed records: prepare, histogram, plan, write, pack, verify, estimate, compare, inspect."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gaudi_bert.cli import arguments, output, table_options
from gaudi_bert.cli.estimate_tables import describe_details, describe_estimate, describe_task_estimate
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    for command in (prepare, histogram, plan, write, pack, verify, estimate, compare, inspect):
        app.command()(command)


def prepare(
    text: Annotated[
        list[str],
        typer.Argument(help="Text files, folders or globs; or `python-docs`, `python-docstrings`.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The folder for examples.", show_default=False)],
    vocab: Annotated[str | None, typer.Option(help="A vocab.txt.")] = None,
    train_vocab: Annotated[int | None, typer.Option(help="Train a vocabulary of this size instead.")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Slots of an example.")] = None,
    max_predictions: Annotated[int | None, typer.Option(help="Most masked positions of an example.")] = None,
    duplicates: Annotated[int | None, typer.Option(help="Times each document is used.")] = None,
    whole_word_masking: Annotated[bool | None, typer.Option(help="Mask whole words.")] = None,
    evaluation_fraction: Annotated[float | None, typer.Option(help="Share of documents held out.")] = None,
    seed: arguments.Seed = None,
    shard: arguments.Shard = None,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Make pretraining examples (unpacked TFRecords) from text."""
    from gaudi_bert.stages.data.prepare import prepare as run

    if vocab is not None and train_vocab is not None:
        raise InputError("--vocab and --train-vocab exclude each other; give the one you mean")
    from gaudi_bert.config import PrepareSettings, section_from_mapping

    options = {
        "vocab": vocab,
        "train_vocab": train_vocab,
        "max_sequence_length": max_sequence_length,
        "max_predictions": max_predictions,
        "duplicates": duplicates,
        "whole_word_masking": whole_word_masking,
        "evaluation_fraction": evaluation_fraction,
        "seed": seed,
    }
    given = {name: value for name, value in options.items() if value is not None}
    settings = section_from_mapping(PrepareSettings, {"text": text, **given}, "the command line", "prepare")
    result = run(
        settings,
        out,
        pipeline_folder=Path(),
        shard=arguments.parse_shard(shard),
        reporter=Reporter(),
        overwrite=overwrite,
        workers=workers,
    )
    output.print_result(result, json, output.describe_examples)


def histogram(
    records: arguments.Records,
    out: Annotated[Path, typer.Option(help="The histogram.json to write.", show_default=False)],
    shard: arguments.Shard = None,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Count the sequences of each length, file by file."""
    from gaudi_bert.stages.data.counted_records import histogram_shard
    from gaudi_bert.stages.data.histogram import histogram as run

    part = arguments.parse_shard(shard)
    counted = part and histogram_shard(records, part)
    if part is not None and counted is None:
        Reporter().say(f"{records}: nothing to do, there are fewer files than shards")
        output.print_result({"files": 0, "skipped": True}, json, lambda _: [])
        return
    result = run(records, out, shard=counted, reporter=Reporter(), overwrite=overwrite, workers=workers)
    output.print_result(result, json, output.describe_histogram)


def plan(
    histograms: Annotated[list[Path], typer.Argument(help="One or several histogram.json.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The plan.json to write.", show_default=False)],
    algorithm: arguments.Algorithm = None,
    depth: arguments.Depth = None,
    leftovers: Annotated[str | None, typer.Option(help="nnls only: best-fit or complement.")] = None,
    masked_slots: Annotated[int | None, typer.Option(help="Masked positions per pack (Q).")] = None,
    seed: arguments.Seed = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Decide which lengths share a row, and prove how near the optimum that is."""
    from gaudi_bert.stages.data.plan import plan as run

    settings = arguments.packing_settings(
        algorithm=algorithm, depth=depth, leftovers=leftovers, masked_slots=masked_slots, seed=seed
    )
    # A shell's `histograms/*.json` also names the settings that lie beside each of them.
    counted = [path for path in histograms if not path.name.endswith(".settings.json")]
    result = run(counted, out, settings, reporter=Reporter(), overwrite=overwrite)
    output.print_result(result, json, output.describe_packing)


def write(
    records: arguments.Records,
    plan: Annotated[Path, typer.Option(help="The plan.json.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder for packed shards.", show_default=False)],
    shard: arguments.Shard = None,
    finish: Annotated[bool, typer.Option("--finish", help="Check all groups and write the metadata.")] = False,
    parquet: Annotated[bool, typer.Option("--parquet", help="Write the packs as Parquet too, in OUT/parquet/.")] = False,
    predecessor_metadata: Annotated[
        bool, typer.Option("--predecessor-metadata", help="Also write OUT_metadata.json, for Habana's trainer.")
    ] = False,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Write the packed TFRecords of a plan."""
    from gaudi_bert.cli.results import to_json
    from gaudi_bert.stages.data.packed_copies import packed_copies
    from gaudi_bert.stages.data.write import write as run
    from gaudi_bert.stages.data.write import write_shard

    if finish and shard is not None:
        raise InputError("--finish and --shard exclude each other; run the shards first, then --finish once")
    if shard is not None and (parquet or predecessor_metadata):
        raise InputError("--parquet and --predecessor-metadata need the whole folder; give them with --finish")
    part = arguments.parse_shard(shard)
    if part is not None:
        shard_result = write_shard(records, plan, out, part, reporter=Reporter(), overwrite=overwrite, workers=workers)
        output.print_result(shard_result, json, output.describe_any)
        return
    result = run(records, plan, out, finish=finish, reporter=Reporter(), overwrite=overwrite, workers=workers)
    copies = packed_copies(out, plan, parquet=parquet, predecessor_metadata=predecessor_metadata, reporter=Reporter())
    output.print_result({**to_json(result), **to_json(copies)}, json, output.describe_packing)


def pack(
    records: arguments.RecordsOrTable,
    out: Annotated[Path, typer.Option(help="The folder for packed shards.", show_default=False)],
    algorithm: arguments.Algorithm = None,
    depth: arguments.Depth = None,
    seed: arguments.Seed = None,
    max_sequence_length: table_options.MaxSequenceLength = None,
    too_long: table_options.TooLong = None,
    index_only: table_options.IndexOnly = False,
    keep_together: table_options.KeepTogether = None,
    columns: table_options.Columns = None,
    group_bytes: table_options.GroupBytes = None,
    shard: arguments.Shard = None,
    finish: table_options.Finish = False,
    workers: arguments.Workers = None,
    verify: Annotated[bool, typer.Option("--verify", help="Prove afterwards that nothing was lost.")] = False,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Pack TFRecords (the plan is kept in `OUT-plan/`), or a table with `input_ids` to Parquet."""
    from gaudi_bert.stages.data.pack import pack as run

    of_tables = {
        "max_sequence_length": max_sequence_length,
        "too_long": too_long,
        "index_only": index_only,
        "keep_together": keep_together,
        "columns": None if columns is None else tuple(name.strip() for name in columns.split(",")),
        "group_bytes": group_bytes,
    }
    if table_options.is_table(records):
        options = {**of_tables, "algorithm": algorithm, "depth": depth, "seed": seed}
        packed = table_options.pack_table(
            *(records, out, options), shard=shard, finish=finish, workers=workers, verified=verify, overwrite=overwrite
        )
        output.print_result(packed, json, table_options.describe_table)
        return
    table_options.refuse_table_options(records, {**of_tables, "shard": shard, "finish": finish})
    settings = arguments.packing_settings(algorithm=algorithm, depth=depth, seed=seed)
    result = run(records, out, settings, reporter=Reporter(), overwrite=overwrite, workers=workers, verified=verify)
    output.print_result(result, json, _describe_pack)


def _describe_pack(result: Mapping[str, Any]) -> list[str]:
    lines = output.describe_packing(result)
    if "verify" in result:
        lines.append(f"verified: every one of {result['verify']['sequences']:,} sequences is there exactly once")
    return lines


def verify(
    records: arguments.RecordsOrTable,
    packed: Annotated[Path, typer.Argument(help="The packed folder.", show_default=False)],
    workers: arguments.Workers = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Verify again what is verified already.")] = False,
    json: arguments.Json = False,
) -> None:
    """Prove that every sequence is in the packed folder exactly once, byte for byte."""
    from gaudi_bert.stages.data.verify import verify as run
    from gaudi_bert.stages.tables.verify_table import verify_table

    if table_options.is_table(records):
        proof = verify_table(records, packed, reporter=Reporter(), overwrite=overwrite, workers=workers)
        output.print_result(proof, json, table_options.describe_proof)
        return
    result = run(records, packed, reporter=Reporter(), overwrite=overwrite, workers=workers)
    output.print_result(result, json, output.describe_any)


def estimate(
    source: Annotated[
        str,
        typer.Argument(
            help="TFRecords, a histogram.json, a shipped one (wikipedia-512), or with --task a file of rows.",
            show_default=False,
        ),
    ],
    depths: Annotated[
        str | None, typer.Option(help="Depths to compare.", show_default="1,2,3,4,8,max; of a task 3,6,12,max")
    ] = None,
    algorithms: Annotated[str, typer.Option(help="Algorithms to compare.")] = "none,spfhp,lpfhp,nnls,optimal",
    picture: Annotated[Path | None, typer.Option(help="Also draw it, as PNG or SVG.")] = None,
    details: Annotated[bool, typer.Option("--details", help="Also print times, other lengths and un-padding.")] = False,
    task: Annotated[str | None, typer.Option(help="SOURCE holds rows of this task: classification, ...")] = None,
    model: Annotated[Path | None, typer.Option(help="With --task: a folder with the tokenizer.")] = None,
    row_lengths: Annotated[str, typer.Option(help="With --task: tokens of a row, to compare.")] = "128,256,384,512",
    columns: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="With --task: columns of a table without header.")
    ] = None,
    set_: arguments.Set = None,
    json: arguments.Json = False,
) -> None:
    """What packing would give at each depth and with each algorithm, before anything is written."""
    from gaudi_bert.stages.estimates.estimate import estimate as run

    if task is not None:
        _estimate_task(source, task, model, row_lengths, depths or "3,6,12,max", columns, set_, json)
        return
    wanted = (depths or "1,2,3,4,8,max").split(",")
    result = run(source, depths=wanted, algorithms=algorithms.split(","), picture=picture, reporter=Reporter())
    output.print_result(result, json, describe_details if details else describe_estimate)


def _estimate_task(
    source: str,
    task: str,
    model: Path | None,
    row_lengths: str,
    depths: str,
    columns: str | None,
    set_: list[str] | None,
    json: bool,
) -> None:
    from gaudi_bert.stages.estimates.estimate import parse_depth
    from gaudi_bert.stages.estimates.estimate_task import estimate_task

    if model is None:
        raise InputError("--task needs --model DIR, a folder with the tokenizer")
    if not all(length.strip().isdigit() and int(length) >= 3 for length in row_lengths.split(",")):
        raise InputError(f"--row-lengths {row_lengths}: write whole numbers from 3, with commas between")
    result = estimate_task(
        source,
        model,
        arguments.task_settings(set_, columns, name=task),
        row_lengths=[int(length) for length in row_lengths.split(",")],
        depths=[parse_depth(depth) for depth in depths.split(",")],
        reporter=Reporter(),
    )
    output.print_result(result, json, describe_task_estimate)


def compare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="LENGTHS",
            help="Lengths (.npy, .txt, FILE.parquet:COLUMN), a histogram.json, a shipped one, or TFRecords.",
            show_default=False,
        ),
    ],
    max_sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Slots of a pack; default: the longest length.", show_default=False)
    ] = None,
    depth: arguments.Depth = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw it, as PNG or SVG.")] = None,
    json: arguments.Json = False,
) -> None:
    """Our packing beside that of TRL, seqpacker, NeMo, axolotl and grain, and the proven bound."""
    from gaudi_bert.cli.compare_table import describe_comparison
    from gaudi_bert.stages.estimates.compare import compare as run

    result = run(source, max_sequence_length=max_sequence_length, depth=depth or "max", picture=picture, reporter=Reporter())
    output.print_result(result, json, describe_comparison)


def inspect(
    file: Annotated[Path, typer.Argument(help="A TFRecord file, packed or not.", show_default=False)],
    record: Annotated[int, typer.Option(min=0, help="Which record, from 0.")] = 0,
    vocab: Annotated[Path | None, typer.Option(help="A vocab.txt, to show tokens.")] = None,
    json: arguments.Json = False,
) -> None:
    """Show one record so that a person can read it."""
    from gaudi_bert.cli.record_view import show_record
    from gaudi_bert.stages.data.inspect import inspect as run

    result = run(file, record=record, vocabulary=vocab)
    if json:
        output.print_result(result, json, output.describe_any)
    else:
        show_record(result, sys.stdout)
