"""Commands that use a trained model on rows of text: predict, embed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.progress import Reporter

__all__ = ["register"]

Model = Annotated[Path, typer.Option(help="A folder with config.json, weights and tokenizer.", show_default=False)]
Data = Annotated[str, typer.Option(help="Rows: .jsonl, .csv, .tsv, .parquet, .txt; - reads a pipe.", show_default=False)]
Columns = Annotated[str | None, typer.Option(metavar="A,B,...", help="The columns of a CSV or TSV file without a header.")]
MaxSequenceLength = Annotated[int | None, typer.Option(help="Most tokens of a row; default: the model's own.")]
Precision = Annotated[str, typer.Option(help="Of matrix products: float32 or bfloat16.")]
Unpacked = Annotated[bool, typer.Option("--unpacked", help="One row at a time, to compare.")]


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    app.command()(predict)
    app.command()(embed)


def predict(
    model: Model,
    data: Annotated[
        str,
        typer.Option(help="Rows: .jsonl, .csv, .tsv, .parquet, .txt, .conll, .json; - reads a pipe.", show_default=False),
    ],
    out: Annotated[str, typer.Option(help="The .jsonl file to write; - for a pipe.", show_default=False)],
    columns: Columns = None,
    max_sequence_length: MaxSequenceLength = None,
    precision: Precision = "float32",
    unpacked: Unpacked = False,
    set_: arguments.Set = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """The answers of a fine-tuned model, one JSON line a row, in the order of the rows."""
    from gaudi_bert.stages.tasks.predict import PredictOptions
    from gaudi_bert.stages.tasks.predict import predict as run

    options = PredictOptions(max_sequence_length, precision, not unpacked)  # type: ignore[arg-type]
    changes = arguments.task_settings(set_, columns).model_dump(exclude_unset=True)
    result = run(model, data, out, options, changes, reporter=Reporter(), overwrite=overwrite)
    if out != "-":
        output.print_result(result, json, output.describe_answers)


def embed(
    model: Model,
    data: Data,
    out: Annotated[
        str, typer.Option(help="A .npy, .parquet or .jsonl file; - for JSON lines to a pipe.", show_default=False)
    ],
    pooling: Annotated[str | None, typer.Option(help="cls, mean or max; default: the folder's own, or mean.")] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Vectors of length 1; default: as the folder does.")
    ] = None,
    columns: Columns = None,
    max_sequence_length: MaxSequenceLength = None,
    precision: Precision = "float32",
    unpacked: Unpacked = False,
    set_: arguments.Set = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """A vector for each text, in the order of the texts."""
    from gaudi_bert.stages.tasks.embed import EmbedOptions
    from gaudi_bert.stages.tasks.embed import embed as run

    options = EmbedOptions(pooling, normalize, max_sequence_length, precision, not unpacked)  # type: ignore[arg-type]
    settings = arguments.task_settings(set_, columns, too_long="truncate")
    reporter = Reporter()
    result = run(model, data, out, options, settings, reporter=reporter, overwrite=overwrite)
    if out != "-":
        output.print_result(result, json, output.describe_answers)
