"""Commands that take in other tools' data: import."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.progress import Reporter

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    app.command("import")(import_tables)


def import_tables(
    source: Annotated[
        str, typer.Argument(help="A .parquet, .arrow or .jsonl file, a folder or a glob.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The folder for unpacked TFRecords.", show_default=False)],
    max_sequence_length: Annotated[int | None, typer.Option(min=1, help="Default: the longest row.")] = None,
    max_predictions: Annotated[int | None, typer.Option(min=1, help="Default: the most masked positions of a row.")] = None,
    shard: arguments.Shard = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Make unpacked TFRecords from tables with `input_ids` (Parquet, Arrow, JSON lines, Hugging Face datasets)."""
    from gaudi_bert.stages.tables.import_tables import import_tables as run

    result = run(
        source,
        out,
        max_sequence_length=max_sequence_length,
        max_predictions=max_predictions,
        shard=arguments.parse_shard(shard),
        reporter=Reporter(),
        overwrite=overwrite,
    )
    output.print_result(asdict(result), json, output.describe_any)
