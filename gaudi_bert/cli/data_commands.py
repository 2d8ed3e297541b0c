"""The commands that pack data: estimate, prepare, tokenize, histogram, plan, write, pack, verify, convert and inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.options import TypedValue, check_option_combination

if TYPE_CHECKING:  # `--help` needs no settings, and importing them takes as long as everything else
    from gaudi_bert.config.sections import TableSettings


def estimate(
    source: Annotated[
        list[str],
        typer.Argument(
            help="TFRecords, HDF5 files, a table, lengths (.txt, .csv, .npy, .json), a histogram.json, or a built-in "
            "histogram such as wikipedia-512.",
            show_default=False,
        ),
    ],
    depths: Annotated[str, typer.Option(help="The depths to compare.")] = "1,2,3,4,8,max",
    algorithms: Annotated[str, typer.Option(help="The algorithms to compare.")] = "none,spfhp,lpfhp,nnls,optimal",
    max_sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Number of slots in a pack; default: taken from SOURCE.", show_default=False)
    ] = None,
    input_column: Annotated[
        str, typer.Option(metavar="NAME", help="Tables: column that contains the token ids.")
    ] = "input_ids",
    picture: Annotated[Path | None, typer.Option(help="Also draw charts, as .png or .svg.")] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details", help="Print times, other row lengths, and a comparison with un-padding instead of the overview."
        ),
    ] = False,
    json: arguments.Json = False,
) -> None:
    """Show how well each algorithm would pack the data at each depth, without writing anything."""
    from gaudi_bert.reporting import estimate

    result = estimate.estimate_packing_efficiency(
        arguments.join_expanded_pattern(source),
        depths=depths.split(","),
        algorithms=algorithms.split(","),
        picture=picture,
        reporter=Reporter(),
        max_sequence_length=max_sequence_length,
        input_column=input_column,
    )
    output.print_result(result, json, result.format_lines(details=details))


@arguments.add_settings_options(
    "gaudi_bert.config.sections:PrepareSettings",
    *("vocab", "train_vocab", "max_sequence_length", "max_predictions"),
    *("duplicates", "whole_word_masking", "evaluation_fraction", "seed"),
)
def prepare(
    text: Annotated[
        list[str],
        typer.Argument(
            help="Text files, folders or glob patterns, or a built-in text: python-docs or python-docstrings.",
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

    check_option_combination({"--vocab": options.get("vocab"), "--train-vocab": options.get("train_vocab")})
    result = prepare.prepare_examples(
        section_from_options(PrepareSettings, options, text=text),
        out,
        arguments.make_stage_run(shard, workers=workers, overwrite=overwrite),
        pipeline_folder=Path(),
    )
    following = output.join_shell_words(("pack", out / "train", "--out", "packed/", "--verify"))
    output.print_result(result, json, next_command=following if shard is None else None)


@arguments.add_settings_options(
    "gaudi_bert.config.sections:TokenizeSettings",
    *("too_long", "special_tokens", "text_column", "text_pair_column"),
    **{name: f"files.{name}" for name in arguments.ROW_FILE_KEYS},
)
def tokenize(
    text: Annotated[
        list[str],
        typer.Argument(
            help="Text files (JSON lines, CSV, TSV, Parquet, plain lines), folders or glob patterns, the built-in text "
            "python-docs, or - for a pipe.",
            show_default=False,
        ),
    ],
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, or the folder of a model.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to write the tables to.", show_default=False)],
    max_sequence_length: Annotated[
        int, typer.Option(help="Largest number of tokens in a row, including special tokens.", show_default=False)
    ],
    options: arguments.Options,
    shard: arguments.Shard = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Make tables of token ids from texts, with any tokenizer of the library `tokenizers`."""
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.config.sections import TokenizeSettings
    from gaudi_bert.tables.tokenize import tokenize_texts

    settings = section_from_options(TokenizeSettings, options, max_sequence_length=max_sequence_length)
    result = tokenize_texts(text, tokenizer, out, settings, arguments.make_stage_run(shard, overwrite=overwrite))
    following = output.join_shell_words(("pack", out, "--out", "packed/")) if shard is None else None
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
    """Count how many sequences of each length each file contains."""
    from gaudi_bert.tfrecords import plan

    result = plan.count_records(
        arguments.join_expanded_pattern(records),
        out,
        arguments.make_stage_run(shard, workers=workers, overwrite=overwrite),
        on_bad_file=on_bad_file,  # type: ignore[arg-type]
    )
    following = output.join_shell_words(("plan", out, "--out", out.with_name("plan.json")))
    output.print_result(result, json, next_command=following if shard is None else None)


@arguments.add_settings_options(
    "gaudi_bert.config.sections:PackingSettings", "algorithm", "depth", "leftovers", "masked_slots", "seed"
)
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
    """Plan which sequence lengths share a row, and prove how close the plan is to the optimum."""
    from gaudi_bert.tfrecords import plan

    run = arguments.make_stage_run(workers=workers, overwrite=overwrite)
    settings = arguments.load_packing_settings(set_, options)
    # A pattern such as `histograms/*.json` also matches the settings files next to the histograms, so skip the settings
    # files.
    counted = [path for path in histograms if not path.name.endswith(".settings.json")]
    planned = plan.plan_packs(counted, out, settings, run)
    following = f"write RECORDS {output.join_shell_words(('--plan', out, '--out', 'packed/'))}"
    output.print_result(planned, json, planned.format_lines(verbose=verbose), following)


def write(
    records: arguments.Records,
    plan: Annotated[Path, typer.Option(help="The plan.json that says how to pack the records.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to write the packs to.", show_default=False)],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change packing.shard_multiple or packing.shard_bytes of the plan."),
    ] = None,
    shard: arguments.Shard = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="After all parts are written, check all groups and write the metadata.")
    ] = False,
    workers: arguments.Workers = None,
    overwrite: arguments.Overwrite = False,
    verbose: arguments.Verbose = False,
    json: arguments.Json = False,
) -> None:
    """Write packed TFRecords according to a plan."""
    from gaudi_bert.tfrecords import write

    run = arguments.make_stage_run(shard, finish, workers=workers, overwrite=overwrite)
    source = arguments.join_expanded_pattern(records)
    written = write.write_packed_records(source, plan, out, run, shards=_parse_shard_overrides(set_, plan))
    following = output.join_shell_words(("verify", source, out)) if shard is None else None
    output.print_result(written, json, written.format_lines(out=out, verbose=verbose), following)


# A plan contains these settings, but `write --set` may change them, because they do not affect the content of the packs.
_KEYS_OF_SHARDS = ("shard_multiple", "shard_bytes")


def _parse_shard_overrides(overrides: list[str] | None, plan: Path) -> dict[str, int]:
    """Return a dictionary of the shard settings that the user has changed with `write --set`.

    Raises:
        InputError: `--set` names another key, which the plan has already decided.
    """
    settings = arguments.load_packing_settings(overrides)
    for override in overrides or ():
        key = override.partition("=")[0].strip()
        if key.removeprefix("packing.") not in _KEYS_OF_SHARDS:
            raise InputError(
                f"--set {override}: `write` cannot change `{key}` of {plan.name}; pass it to `gaudi-bert plan` (`write` "
                f"can only change {' and '.join(f'packing.{name}' for name in _KEYS_OF_SHARDS)})"
            )
    return settings.model_dump(include=settings.model_fields_set)


_KEYS_OF_RECORDS_AND_TABLES = ("algorithm", "depth", "seed")


@arguments.add_settings_options(
    "gaudi_bert.config.sections:TableSettings",
    *_KEYS_OF_RECORDS_AND_TABLES,
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
        bool, typer.Option("--finish", help="Tables: after all parts are packed, check all groups and write the metadata.")
    ] = False,
    workers: arguments.Workers = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Afterwards, prove that no sequence was lost or changed.")
    ] = False,
    overwrite: arguments.Overwrite = False,
    verbose: arguments.Verbose = False,
    json: arguments.Json = False,
) -> None:
    """Pack TFRecords (and write the plan to `OUT-plan/`), or pack a table with a column of token ids into Parquet."""
    from gaudi_bert.tables.sources import is_table

    source = arguments.join_expanded_pattern(records)
    if is_table(source):
        from gaudi_bert.tables.pack import pack_table

        if on_bad_file != "stop":
            raise InputError(
                f"--on-bad-file {on_bad_file}: files of a table cannot be skipped; pass only the good files, for example "
                "with a glob pattern"
            )
        check_option_combination({"--shard": shard, "--verify": verify})
        run = arguments.make_stage_run(shard, finish, workers=workers, overwrite=overwrite)
        result = pack_table(source, out, _make_table_settings(source, options, set_), run, verify=verify)
        train = f"{output.join_shell_words(('train', '--data', out, '--out', 'run/'))} --model MODEL"
        output.print_result(
            result, json, result.format_lines(out=out, verbose=verbose), None if shard is not None else train
        )
        return
    for_tables = [typed.text for name, typed in options.items() if name not in _KEYS_OF_RECORDS_AND_TABLES]
    for option in [*for_tables, *["--shard"] * (shard is not None), *["--finish"] * finish]:
        raise InputError(
            f"{option}: this option applies only to tables, but {source} is not a table (.parquet, .arrow, .jsonl, "
            ".jsonl.gz, a datasets folder); omit it, or use `histogram`, `plan` and `write`"
        )
    from gaudi_bert.tfrecords.write import pack_records

    packed = pack_records(
        source,
        out,
        arguments.load_packing_settings(set_, options),
        arguments.make_stage_run(workers=workers, overwrite=overwrite),
        on_bad_file=on_bad_file,  # type: ignore[arg-type]
        verify=verify,
    )
    output.print_result(
        packed, json, packed.format_lines(out, verbose), output.join_shell_words(("train", "--data", out, "--out", "run/"))
    )


def _make_table_settings(source: str, options: arguments.Options, overrides: list[str] | None) -> TableSettings:
    """Return the settings for packing a table, which come from the command's options and from `--set packing.key=value`.

    The number of slots in a pack defaults to the longest of `--row-lengths`, or to the length that `tokenize` has recorded.

    Raises:
        InputError: A value is wrong, `--set` names a key that tables do not have, or the number of slots is unknown.
    """
    from gaudi_bert.artefacts.examples import TokenisedTexts
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.config.sections import TableSettings

    packing = arguments.load_packing_settings(overrides)
    changed = packing.model_dump(mode="json", include=packing.model_fields_set)
    typed = {name: TypedValue(f"--set packing.{name}={value}", value) for name, value in changed.items()}
    for name in sorted(set(changed) - set(TableSettings.model_fields)):
        raise InputError(f"{typed[name].text}: this setting applies only to TFRecords, but {source} is a table; omit it")
    settings = section_from_options(TableSettings, {**options, **typed}, max_sequence_length=1)
    longest = max(settings.explicit_row_lengths, default=None)
    if "max_sequence_length" in options:
        if longest is not None and settings.max_sequence_length != longest:
            raise InputError(
                f"--max-sequence-length {settings.max_sequence_length}: must be the longest of --row-lengths, {longest}; "
                "omit it"
            )
        return settings
    texts = TokenisedTexts.read_if_present(Path(source))
    length = longest if texts is None else longest or texts.max_sequence_length
    if length is None:
        raise InputError(f"{source}: the pack size is unknown; pass it, for example with --max-sequence-length 2048")
    return settings.model_copy(update={"max_sequence_length": length})


def verify(
    records: arguments.RecordsOrTable,
    packed: Annotated[Path, typer.Argument(help="The packed folder.", show_default=False)],
    shard: arguments.Shard = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="After all parts are verified, combine the results and write verification.json.")
    ] = False,
    workers: arguments.Workers = None,
    json: arguments.Json = False,
) -> None:
    """Prove that the packed folder contains every sequence exactly once."""
    from gaudi_bert.tables.sources import is_table

    run = arguments.make_stage_run(shard, finish, workers=workers)
    source = arguments.join_expanded_pattern(records)
    if is_table(source):
        from gaudi_bert.tables.verify import verify_table

        output.print_result(verify_table(source, packed, run), json)
        return
    from gaudi_bert.tfrecords import verify

    result = verify.verify_records(source, packed, run)
    following = output.join_shell_words(("train", "--data", packed, "--out", "run/")) if shard is None else None
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
    """Convert packed TFRecords to HDF5, for Habana's PyTorch BERT."""
    from gaudi_bert.tfrecords import convert

    if to != "hdf5":
        raise InputError(f"--to {to}: must be hdf5, the only supported format")
    output.print_result(
        convert.convert_to_hdf5(packed, out, reporter=Reporter(), overwrite=overwrite, workers=workers), json
    )


def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            help="A TFRecord file (packed or unpacked), an HDF5 file, or a folder of such files.", show_default=False
        ),
    ],
    record: Annotated[int, typer.Option(min=0, help="The number of the record, counted from 0.")] = 0,
    vocab: Annotated[Path | None, typer.Option(help="A vocab.txt, to print tokens instead of token ids.")] = None,
    json: arguments.Json = False,
) -> None:
    """Print one record in a form that people can read."""
    from gaudi_bert.tfrecords import inspect

    output.print_result(inspect.inspect_record(file, record=record, vocabulary=vocab), json)
