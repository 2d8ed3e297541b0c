"""The commands that pack data: estimate, prepare, tokenize, histogram, plan, write, pack, verify, convert and inspect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gaudi_bert.artefacts.results import ByRowLength, PackResult, PlainResult
from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter

if TYPE_CHECKING:  # settings take as long to load as everything else, and `--help` needs none
    from gaudi_bert.artefacts.results import StageRun
    from gaudi_bert.config.sections import TableSettings


def estimate(
    source: Annotated[
        list[str],
        typer.Argument(
            help="TFRecords, HDF5 files, a table, lengths (.txt, .csv, .npy, .json), a histogram.json, or wikipedia-512.",
            show_default=False,
        ),
    ],
    depths: Annotated[str, typer.Option(help="Depths to compare.")] = "1,2,3,4,8,max",
    algorithms: Annotated[str, typer.Option(help="Algorithms to compare.")] = "none,spfhp,lpfhp,nnls,optimal",
    max_sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Number of slots in a pack; default: that of SOURCE.", show_default=False)
    ] = None,
    input_column: Annotated[
        str, typer.Option(metavar="NAME", help="Tables: the column that contains the token ids.")
    ] = "input_ids",
    picture: Annotated[Path | None, typer.Option(help="Also draw a chart, as PNG or SVG.")] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Also print times, other row lengths, and a comparison with un-padding.")
    ] = False,
    json: arguments.Json = False,
) -> None:
    """Show what packing would achieve with each algorithm at each depth, without writing anything."""
    from gaudi_bert.reporting import estimate

    data = arguments.one_source(source)
    result = estimate.estimate(
        data,
        depths=depths.split(","),
        algorithms=algorithms.split(","),
        picture=picture,
        reporter=Reporter(),
        max_sequence_length=max_sequence_length,
        input_column=input_column,
    )
    output.print_result(result, json, result.lines(details=details))


@arguments.takes(
    "gaudi_bert.config.sections:PrepareSettings",
    *("vocab", "train_vocab", "max_sequence_length", "max_predictions"),
    *("duplicates", "whole_word_masking", "evaluation_fraction", "seed"),
)
def prepare(
    text: Annotated[
        list[str],
        typer.Argument(
            help="Text files, folders or glob patterns; or the built-in `python-docs`, `python-docstrings`.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write the examples to.", show_default=False)],
    options: arguments.Options,
    shard: arguments.Shard = None,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Make pretraining examples (unpacked TFRecords) from text."""
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.config.sections import PrepareSettings
    from gaudi_bert.corpus import prepare

    typed = arguments.values_of(options)
    if {"vocab", "train_vocab"} <= typed.keys():
        raise InputError("--vocab and --train-vocab exclude each other; pass only one of them")
    settings = section_from_options(PrepareSettings, text=text, **typed)
    run = arguments.stage_run(shard, workers=workers, overwrite=overwrite)
    result = prepare.prepare(settings, out, run, pipeline_folder=Path())
    following = output.words_of("pack", out / "train", "--out", "packed/", "--verify")
    output.print_result(result, json, next_command=following if shard is None else None)


@arguments.takes(
    "gaudi_bert.config.sections:TokenizeSettings",
    *("too_long", "special_tokens", "text_column", "text_pair_column", "columns", "no_header"),
    *("format", "delimiter", "encoding", "on_bad_row"),
)
def tokenize(
    text: Annotated[
        list[str],
        typer.Argument(
            help="Text files (JSON lines, CSV, TSV, Parquet, plain lines), folders or patterns; `python-docs`; - reads a "
            "pipe.",
            show_default=False,
        ),
    ],
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, or the folder of a model.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to write the tables to.", show_default=False)],
    max_sequence_length: Annotated[int, typer.Option(help="Largest number of tokens in a row.", show_default=False)],
    options: arguments.Options,
    shard: arguments.Shard = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Make tables of token ids from text, with any tokenizer of the library `tokenizers`."""
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.config.sections import TokenizeSettings
    from gaudi_bert.tables.tokenize import tokenize_texts

    typed = arguments.values_of(options)
    settings = section_from_options(TokenizeSettings, max_sequence_length=max_sequence_length, **typed)
    result = tokenize_texts(text, tokenizer, out, settings, arguments.stage_run(shard, overwrite=overwrite))
    following = output.words_of("pack", out, "--out", "packed/") if shard is None else None
    output.print_result(result, json, next_command=following)


def histogram(
    records: arguments.Records,
    out: Annotated[Path, typer.Option(help="The histogram.json to write.", show_default=False)],
    on_bad_file: arguments.OnBadFile = "stop",
    shard: arguments.Shard = None,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Count how many sequences there are of each length, file by file."""
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


@arguments.takes("gaudi_bert.config.sections:PackingSettings", "algorithm", "depth", "leftovers", "masked_slots", "seed")
def plan(
    histograms: Annotated[list[Path], typer.Argument(help="One or more histogram.json files.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The plan.json to write.", show_default=False)],
    options: arguments.Options,
    set_: arguments.SetPacking = None,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    verbose: arguments.Verbose = False,
    json: arguments.Json = False,
) -> None:
    """Decide which lengths share a row, and prove how close the packing is to optimal."""
    from gaudi_bert.packs import plan

    run = arguments.stage_run(workers=workers, overwrite=overwrite)
    settings = arguments.packing_settings(set_, options)
    # The pattern `histograms/*.json` also matches the settings files next to the histograms.
    counted = [path for path in histograms if not path.name.endswith(".settings.json")]
    planned = plan.plan(counted, out, settings, run)
    following = f"write RECORDS {output.words_of('--plan', out, '--out', 'packed/')}"
    output.print_result(planned, json, planned.lines(verbose=verbose), following)


def write(
    records: arguments.Records,
    plan: Annotated[Path, typer.Option(help="The plan.json to carry out.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to write the packs to.", show_default=False)],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change the planned shards: packing.shard_multiple or packing.shard_bytes."
        ),
    ] = None,
    shard: arguments.Shard = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="After all parts are written, check the groups and write the metadata.")
    ] = False,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    verbose: arguments.Verbose = False,
    json: arguments.Json = False,
) -> None:
    """Write packed TFRecords according to a plan."""
    from gaudi_bert.tfrecords import write

    run = arguments.stage_run(shard, finish, workers=workers, overwrite=overwrite)
    shards, source = _shard_settings(set_, plan), arguments.one_source(records)
    written = write.write(source, plan, out, run, shards=shards)
    following = output.words_of("verify", source, out) if shard is None else None
    output.print_result(written, json, written.lines(out=out, verbose=verbose), following)


_OF_SHARDS = ("shard_multiple", "shard_bytes")
"""Settings that `write` may change although the plan contains them, because no pack depends on them."""


def _shard_settings(overrides: list[str] | None, plan: Path) -> dict[str, int]:
    """Return the settings of shards that `write --set` changes.

    Raises:
        InputError: `--set` names a key that the plan has already decided.
    """
    settings = arguments.packing_settings(overrides)
    for override in overrides or ():
        key = override.partition("=")[0].strip()
        if key.removeprefix("packing.") not in _OF_SHARDS:
            raise InputError(
                f"--set {override}: {plan.name} already contains `{key}`; pass it to `gaudi-bert plan`; `write` can only "
                "change " + " or ".join(f"packing.{name}" for name in _OF_SHARDS)
            )
    return settings.model_dump(include=settings.model_fields_set)


# Keys that both tables and records have.
_OF_BOTH = ("algorithm", "depth", "seed")


@arguments.takes(
    "gaudi_bert.config.sections:TableSettings",
    *_OF_BOTH,
    *("max_sequence_length", "row_lengths", "too_long", "input_column", "columns", "group_bytes"),
)
def pack(
    records: arguments.RecordsOrTable,
    out: Annotated[Path, typer.Option(help="The folder to write the packs to.", show_default=False)],
    options: arguments.Options,
    set_: arguments.SetPacking = None,
    on_bad_file: arguments.OnBadFile = "stop",
    shard: arguments.Shard = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Tables: after all parts are packed, check them and write the metadata.")
    ] = False,
    workers: arguments.Workers = None,
    verify: Annotated[bool, typer.Option("--verify", help="Afterwards, prove that nothing was lost.")] = False,
    overwrite: arguments.Overwrite = False,
    verbose: arguments.Verbose = False,
    json: arguments.Json = False,
) -> None:
    """Pack TFRecords (with their plan in `OUT-plan/`), or pack a table with `input_ids` into Parquet."""
    from gaudi_bert.tables.sources import is_table

    source = arguments.one_source(records)
    if is_table(source):
        if on_bad_file != "stop":
            raise InputError(
                "--on-bad-file: files of a table cannot be left out; name only the good files, for example by a pattern"
            )
        if shard is not None and (finish or verify):
            raise InputError("--shard excludes --finish and --verify; run all shards first, then --finish once")
        run = arguments.stage_run(shard, finish, workers=workers, overwrite=overwrite)
        result = _pack_table(source, out, options, set_ or [], run, verify)
        train = f"{output.words_of('train', '--data', out, '--out', 'run/')} --model MODEL"
        output.print_result(result, json, result.lines(out=out, verbose=verbose), None if shard is not None else train)
        return
    of_tables = {option: value for name, (option, value) in options.items() if name not in _OF_BOTH}
    for option, value in {**of_tables, "--shard": shard, "--finish": finish}.items():
        if value:
            raise InputError(
                f"{option} is for tables, but {source} does not have the ending of a table (.parquet, .arrow, "
                ".jsonl, .jsonl.gz, a datasets folder); leave it out, or use `histogram`, `plan` and `write`"
            )
    from gaudi_bert.tfrecords.write import pack as pack_records

    settings = arguments.packing_settings(set_, {name: options[name] for name in _OF_BOTH})
    packed = pack_records(
        source,
        out,
        settings,
        arguments.stage_run(workers=workers, overwrite=overwrite),
        on_bad_file=on_bad_file,  # type: ignore[arg-type]
        verify=verify,
    )
    output.print_result(packed, json, packed.lines(out, verbose), output.words_of("train", "--data", out, "--out", "run/"))


def _pack_table(
    source: str,
    out: Path,
    typed: arguments.Options,
    overrides: list[str],
    run: StageRun,
    verify: bool,
) -> PackResult | PlainResult | ByRowLength[PackResult | PlainResult]:
    from gaudi_bert.artefacts.examples import TokenisedTexts
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.config.sections import TableSettings
    from gaudi_bert.tables.pack import pack_table

    options = arguments.values_of(typed)
    if "max_sequence_length" not in options:
        # Use the longest of the row lengths that the user typed. This also validates them.
        given = section_from_options(TableSettings, max_sequence_length=1, row_lengths=options.get("row_lengths"))
        texts = TokenisedTexts.read_if_present(Path(source))  # `tokenize` has recorded how long rows may be
        known = None if texts is None else texts.max_sequence_length
        options["max_sequence_length"] = max(given.given_lengths, default=known)
    if options["max_sequence_length"] is None:
        raise InputError(
            f"{source}: for a table, pass the number of slots in a pack, for example --max-sequence-length 2048"
        )
    settings = _table_settings(source, options, overrides)
    if settings.row_lengths is not None and settings.max_sequence_length != settings.most_tokens:
        raise InputError(
            f"--max-sequence-length {settings.max_sequence_length}: must equal the longest of --row-lengths, "
            f"{settings.most_tokens}; leave it out"
        )
    return pack_table(source, out, settings, run, verify=verify)


def _table_settings(source: str, options: Mapping[str, object], overrides: list[str]) -> TableSettings:
    """Return the settings of a table: the options, then the keys of `--set packing.key=value`.

    Raises:
        InputError: `--set` names a key that tables do not have.
    """
    from gaudi_bert.config.pipeline import section_from_mapping, section_from_options
    from gaudi_bert.config.sections import TableSettings

    settings = section_from_options(TableSettings, **options)
    packing = arguments.packing_settings(overrides)
    changed = packing.model_dump(mode="json", include=packing.model_fields_set)
    for name in sorted(set(changed) - set(TableSettings.model_fields)):
        raise InputError(f"--set packing.{name}={changed[name]}: is for TFRecords, but {source} is a table; leave it out")
    typed = {name: f"--set packing.{name}={value}" for name, value in changed.items()}
    values = settings.model_dump(mode="json", include=settings.model_fields_set)
    return section_from_mapping(TableSettings, {**values, **changed}, "the options", typed)


def verify(
    records: arguments.RecordsOrTable,
    packed: Annotated[Path, typer.Argument(help="The packed folder.", show_default=False)],
    shard: arguments.Shard = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="After all parts are verified, check them and write verification.json.")
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
            metavar="[hdf5]",
            help="The format to write: hdf5, for Habana's PyTorch BERT.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write the converted packs to.", show_default=False)],
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Write packed TFRecords as HDF5, for Habana's PyTorch BERT."""
    from gaudi_bert.tfrecords import convert

    if to != "hdf5":
        raise InputError(f"--to {to}: unknown format; must be hdf5")
    result = convert.convert(packed, out, reporter=Reporter(), overwrite=overwrite, workers=workers)
    output.print_result(result, json)


def inspect(
    file: Annotated[
        Path, typer.Argument(help="A TFRecord file, packed or not, an HDF5 file, or a folder of them.", show_default=False)
    ],
    record: Annotated[int, typer.Option(min=0, help="The number of the record, counted from 0.")] = 0,
    vocab: Annotated[Path | None, typer.Option(help="A vocab.txt, to show tokens instead of ids.")] = None,
    json: arguments.Json = False,
) -> None:
    """Print one record in readable form."""
    from gaudi_bert.tfrecords import inspect

    result = inspect.inspect(file, record=record, vocabulary=vocab)
    output.print_result(result, json)
