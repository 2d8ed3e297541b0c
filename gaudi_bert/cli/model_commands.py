"""Commands about the model: train, evaluate, verify-model, export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter

__all__ = ["register"]

Packed = Annotated[Path, typer.Option(help="A packed folder, or a folder of unpacked TFRecords.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    app.command()(train)
    app.command()(evaluate)
    app.command("verify-model")(verify_model)
    app.command()(export)


def train(
    data: Packed,
    out: Annotated[Path, typer.Option(help="The folder for checkpoints and metrics.", show_default=False)],
    evaluation_data: Annotated[Path | None, typer.Option(help="Held-out data, packed or not.")] = None,
    pipeline: Annotated[Path | None, typer.Option(help="A pipeline file for model and training settings.")] = None,
    set_: arguments.Set = None,
    on_the_fly: Annotated[Path | None, typer.Option(help="A plan.json: DATA is unpacked, pack it while training.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan of the run, train nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Let a run of fewer updates go on to training.updates.")] = False,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Train BERT on packed (or unpacked) records."""
    from gaudi_bert.stages.training.train import train as run

    settings = arguments.pipeline_settings(pipeline, set_)
    result = run(
        settings,
        data=data,
        evaluation_data=evaluation_data,
        out=out,
        reporter=Reporter(),
        resume=resume,
        overwrite=overwrite,
        dry_run=dry_run,
        on_the_fly=on_the_fly,
    )
    if result is not None:  # all processes but the first have nothing to print
        output.print_result(result, json, output.describe_any)


def evaluate(
    data: Packed,
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or a folder that `train` made.", show_default=False)],
    unpacked: Annotated[str | None, typer.Option(help="The same data unpacked, to show that the figures agree.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the figures to this JSON file.")] = None,
    json: arguments.Json = False,
) -> None:
    """Measure a checkpoint on held-out data."""
    from gaudi_bert.stages.training.evaluate import evaluate as run

    result = run(data=data, checkpoint=checkpoint, unpacked=unpacked, out=out, reporter=Reporter())
    if result is not None:
        output.print_result(result, json, output.describe_any)


def verify_model(
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint; without it, seeded random weights.")] = None,
    data: Annotated[Path | None, typer.Option(help="A packed folder; without it, packs made for the purpose.")] = None,
    huggingface: Annotated[
        Path | None, typer.Option(help="The folder of a transformers model, to be tried instead.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="The way of feeding it packs; without it, all are tried.")] = None,
    attention: Annotated[str | None, typer.Option(help="sdpa, eager or flex_attention; default: the model's own.")] = None,
    json: arguments.Json = False,
) -> None:
    """Prove that packing changes nothing: outputs, losses, gradients, and no leak between sequences."""
    if huggingface is not None:
        if checkpoint is not None or data is not None:
            raise InputError("--huggingface is tried on packs made for the purpose: leave --checkpoint and --data out")
        from gaudi_bert.stages.training.verify_huggingface import verify_huggingface

        found = verify_huggingface(huggingface, target=target, attention=attention, reporter=Reporter())
        output.print_result(found, json, _describe_feeding)
        return
    if target is not None or attention is not None:
        raise InputError("--target and --attention are of a transformers model: give its folder with --huggingface")
    from gaudi_bert.stages.training.verify_model import verify_model as run

    result = run(checkpoint=checkpoint, data=data, reporter=Reporter())
    output.print_result(result, json, output.describe_any)


def _describe_feeding(result: Mapping[str, Any]) -> list[str]:
    """Which way of feeding packs is right."""
    kind = f"{result['model']} ({result['model_type']}, {result['attention']})"
    return [f"{kind}: packs are treated right when fed as {' or '.join(result['right'])}"]


def export(
    checkpoint: Annotated[Path, typer.Option(help="Weights: of ours, of Hugging Face or of Google.", show_default=False)],
    format_: Annotated[str, typer.Option("--format", help="huggingface, google or savedmodel.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to make.", show_default=False)],
    vocab: Annotated[Path | None, typer.Option(help="Its vocab.txt; default: found beside the examples or weights.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="savedmodel: rows of a batch.")] = 1,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Write a model for transformers, for TF1 BERT, or for serving."""
    from gaudi_bert.stages.training.export import export as run

    result = run(checkpoint, out, kind=format_, vocabulary=vocab, rows=rows, reporter=Reporter(), overwrite=overwrite)
    output.print_result(result, json, output.describe_any)
