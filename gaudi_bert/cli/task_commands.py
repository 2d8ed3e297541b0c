"""Commands for downstream tasks: finetune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.progress import Reporter

__all__ = ["register"]

Data = Annotated[
    Path,
    typer.Option(help="Labelled rows: .jsonl, .csv, .tsv, .parquet, .conll, SQuAD's .json, .txt.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    app.command()(finetune)


def finetune(
    data: Data,
    model: Annotated[
        Path, typer.Option(help="A Hugging Face folder, a TF1 checkpoint, or a checkpoint of ours.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The folder to make: transformers can open it.", show_default=False)],
    task: Annotated[str | None, typer.Option(help="classification, multi-label, ...: see docs/finetuning.md.")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="Held-out rows of the same kind.")] = None,
    vocab: Annotated[Path | None, typer.Option(help="A folder with the tokenizer, if MODEL has none.")] = None,
    depth: arguments.Depth = None,
    columns: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Names of the columns of a CSV or TSV without a header.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="A label's name a line: labels in the data are its line numbers, from 0.")
    ] = None,
    pipeline: Annotated[Path | None, typer.Option(help="A pipeline file for task and finetune settings.")] = None,
    set_: arguments.Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the packs and the plan, train nothing.")] = False,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Train a pretrained BERT for a task, on packed rows."""
    from gaudi_bert.stages.tasks.finetune import finetune as run
    from gaudi_bert.stages.tasks.finetune_job import FineTuneInput

    given = {"task.name": task, "finetune.depth": depth, "task.labels": labels}
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    overrides += [f"task.columns=[{columns}]"] if columns is not None else []
    result = run(
        arguments.pipeline_settings(pipeline, [*overrides, *(set_ or ())]),
        FineTuneInput(data, evaluation, model, vocab),
        out,
        reporter=Reporter(),
        overwrite=overwrite,
        dry_run=dry_run,
    )
    if result is not None:  # all processes but the first have nothing to print
        output.print_result(result, json, output.describe_finetuning)
