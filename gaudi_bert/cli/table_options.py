"""What `pack` and `verify` do with a table: the options that only tables have, and the lines that are printed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter

__all__ = [
    "Columns",
    "Finish",
    "GroupBytes",
    "IndexOnly",
    "KeepTogether",
    "MaxSequenceLength",
    "TooLong",
    "describe_proof",
    "describe_table",
    "is_table",
    "pack_table",
    "refuse_table_options",
]

MaxSequenceLength = Annotated[int | None, typer.Option(min=1, help="Tables: slots of a pack.", show_default=False)]
TooLong = Annotated[
    str | None,
    typer.Option(help="Tables: what becomes of longer rows: error (default), truncate, split or drop.", show_default=False),
]
IndexOnly = Annotated[bool, typer.Option("--index-only", help="Tables: write which rows share a pack, and no tokens.")]
KeepTogether = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Tables: rows with the same value stay in one pack.", show_default=False)
]
Columns = Annotated[str | None, typer.Option(metavar="A,B,...", help="Tables: pack these columns only.", show_default=False)]
GroupBytes = Annotated[
    str | None, typer.Option(help="Tables: rows in memory at once, e.g. 256MiB (default 1GiB).", show_default=False)
]
Finish = Annotated[bool, typer.Option("--finish", help="Tables: after all --shard, check them and write the metadata.")]


def is_table(source: str) -> bool:
    """Whether the source is a table and not TFRecords."""
    from gaudi_bert.stages.tables.table_groups import is_table

    return is_table(source)


def refuse_table_options(source: str, given: Mapping[str, object]) -> None:
    """TFRecords have none of these.

    Raises:
        InputError: one was given.
    """
    for name, value in given.items():
        if value:
            raise InputError(
                f"--{name.replace('_', '-')} is for tables, and {source} is none by its ending (.parquet, .arrow, .jsonl, "
                ".jsonl.gz, a datasets folder); leave it out, or use `histogram`, `plan` and `write`"
            )


def pack_table(
    source: str,
    out: Path,
    options: Mapping[str, object],
    *,
    shard: str | None,
    finish: bool,
    workers: int | None,
    verified: bool,
    overwrite: bool,
) -> object:
    """Pack a table, or a part of it.

    Args:
        source: the table.
        out: the packed folder.
        options: those that are keys of `TableSettings`; None for the default.
        shard, finish, workers, verified, overwrite: as on the command line.

    Raises:
        InputError: options that do not go together, or what the stage refuses.
    """
    from gaudi_bert.config import TableSettings, section_from_mapping
    from gaudi_bert.stages.tables.pack_table import pack_table as run
    from gaudi_bert.stages.tables.pack_table import pack_table_shard

    if options.get("max_sequence_length") is None:
        raise InputError(f"{source}: is a table: say how many slots a pack has, for example --max-sequence-length 2048")
    part = arguments.parse_shard(shard)
    if part is not None and (finish or verified):
        raise InputError("--shard excludes --finish and --verify; run the shards first, then --finish once")
    given = {name: value for name, value in options.items() if value is not None}
    settings = section_from_mapping(TableSettings, given, "the command line")
    if part is not None:
        return pack_table_shard(source, out, settings, part, reporter=Reporter(), overwrite=overwrite, workers=workers)
    return run(
        source,
        out,
        settings,
        finish=finish,
        reporter=Reporter(),
        overwrite=overwrite,
        workers=workers,
        verified=verified,
    )


def describe_table(result: Mapping[str, Any]) -> list[str]:
    """The lines of a packed table."""
    if "too_long" not in result:
        return output.describe_any(result)
    packing = output.describe_packing({**result, "depth_used": result["deepest_pack"]})
    lines = [f"{result['rows']:,} rows, {result['sequences']:,} sequences", *packing]
    if result["gap"] and result["algorithm"] != "optimal":
        lines.append(f"{result['gap']:,} packs might be saved: --algorithm optimal looks for them, a few seconds a group")
    lines += describe_policy(result)
    if "verify" in result:
        lines.append(f"verified: every one of {result['verify']['sequences']:,} sequences is there exactly once")
    return lines


def describe_policy(result: Mapping[str, Any]) -> list[str]:
    """What became of rows that were too long; nothing where there was none."""
    effect = result["too_long"]
    if not effect["rows"]:
        return ["no row was too long: none is cut, split or dropped"]
    done = {
        "truncate": f"cut, and {effect['dropped_tokens']:,} tokens are in no pack",
        "split": f"split into {effect['added_sequences']:,} sequences more, no token is lost",
        "drop": f"dropped with {effect['dropped_tokens']:,} tokens",
    }
    return [f"{effect['rows']:,} rows were too long: {done[effect['policy']]} (--too-long {effect['policy']})"]


def describe_proof(result: Mapping[str, Any]) -> list[str]:
    """The lines of a verified table."""
    what = "in the index" if result["index_only"] else f"value for value in {', '.join(result['columns'])}"
    counted = f"{result['rows']:,} rows, {result['sequences']:,} sequences in {result['packs']:,} packs"
    return [
        f"{counted}{output.skipped_note(result)}",
        f"every sequence is there exactly once, {what}",
        *describe_policy(result),
    ]
