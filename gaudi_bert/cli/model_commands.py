"""The commands that use a model: train, evaluate, verify-model, export, finetune, predict, embed and serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import require_libraries
from gaudi_bert.common.progress import Reporter

Packed = Annotated[Path, typer.Option(help="Packed records, a packed table, or unpacked TFRecords.", show_default=False)]


@arguments.add_settings_options(arguments.PIPELINE, engine="training.engine")
def train(
    data: Packed,
    out: Annotated[Path, typer.Option(help="The folder to write checkpoints and metrics to.", show_default=False)],
    options: arguments.Options,
    evaluation_data: Annotated[Path | None, typer.Option(help="Held-out data, packed or unpacked.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="tiny (default), bert-base, bert-large, or a config.json; for a table also a model type of transformers, "
            "such as roberta, or a folder with weights.",
            show_default=False,
        ),
    ] = None,
    pipeline: Annotated[Path | None, typer.Option(help="A pipeline file with model and training settings.")] = None,
    set_: arguments.Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan of the run without training.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a finished run after training.updates was raised.")
    ] = False,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Train a BERT on packed or unpacked records, or any language model on a packed table."""
    from gaudi_bert.config.options import get_model_size_overrides, is_bert
    from gaudi_bert.runs import records, tables
    from gaudi_bert.training.run import RunOptions

    is_table = tables.is_packed_table(data, arguments.load_pipeline_settings(pipeline, set_, options).store)
    other_model = model if is_table and model is not None and not is_bert(model) else None
    bert_sizes = get_model_size_overrides(model) if model is not None and other_model is None else []
    settings = arguments.load_pipeline_settings(pipeline, [*bert_sizes, *(set_ or ())], options)
    run_options: RunOptions = {"reporter": Reporter(), "resume": resume, "overwrite": overwrite, "dry_run": dry_run}
    if is_table:
        result: object = tables.train_on_table(settings, data, other_model, evaluation_data, out, **run_options)
        following = output.join_shell_words(("embed", "--model", out, "--data", "texts.jsonl", "--out", "x.npy"))
    else:
        result = records.train(settings, data, evaluation_data, out, **run_options)
        following = output.join_shell_words(("export", "--checkpoint", out, "--out", "model/"))
    output.print_result(result, json, next_command=None if dry_run else following, shared=True)


@arguments.add_settings_options(arguments.PIPELINE, engine="training.engine")
def evaluate(
    data: Packed,
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or the output folder of `train`.", show_default=False)],
    options: arguments.Options,
    unpacked: Annotated[str | None, typer.Option(help="The same data unpacked, to show that the metrics are equal.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the metrics to this JSON file.")] = None,
    json: arguments.Json = False,
) -> None:
    """Evaluate a checkpoint on held-out data."""
    from gaudi_bert.training import evaluate

    result = evaluate.evaluate(
        data=data,
        checkpoint=checkpoint,
        unpacked=unpacked,
        out=out,
        engine=arguments.load_pipeline_settings(None, None, options).training.engine,
        reporter=Reporter(),
    )
    output.print_result(result, json, shared=True)


def verify_model(
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A checkpoint or a transformers folder; default: seeded random weights.", show_default=False),
    ] = None,
    json: arguments.Json = False,
) -> None:
    """Prove that packing changes no output, loss or gradient, and that packed sequences do not affect each other."""
    from gaudi_bert.training import verify_model

    output.print_result(verify_model.verify_model(checkpoint=checkpoint, reporter=Reporter()), json)


def export(
    checkpoint: Annotated[
        Path,
        typer.Option(help="A checkpoint of gaudi-bert, a Hugging Face folder, or a TF1 checkpoint.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The folder to create.", show_default=False)],
    vocab: Annotated[
        Path | None, typer.Option(help="A vocab.txt; default: the vocab.txt next to the examples or the weights.")
    ] = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Write a model as a folder that transformers can load."""
    from gaudi_bert.tasks import export

    result = export.export(checkpoint, out, vocabulary=vocab, reporter=Reporter(), overwrite=overwrite)
    following = "finetune --task classification --data train.jsonl --out tuned/ " + output.join_shell_words(("--model", out))
    output.print_result(result, json, next_command=following)


# --- tasks

Model = Annotated[Path, typer.Option(help="A folder with config.json, weights and a tokenizer.", show_default=False)]
_MaxSequenceLength = Annotated[
    int | None, typer.Option(help="Largest number of tokens in a row; default: taken from the model folder.")
]
Precision = Annotated[
    str, typer.Option(metavar="[float32|bfloat16|bfloat16-always]", help="The precision of matrix products.")
]
Unpacked = Annotated[bool, typer.Option("--unpacked", help="Compute each text in a row of its own, for comparison.")]


@arguments.add_settings_options(
    arguments.PIPELINE,
    task="task.name",
    depth="finetune.depth",
    row_lengths="finetune.row_lengths",
    engine="finetune.engine",
    labels="task.labels",
    label_column="task.label",
    **arguments.ROWS,
)
def finetune(
    data: Annotated[
        Path,
        typer.Option(
            help="Labelled rows: .jsonl, .csv, .tsv, .parquet, .conll, .txt, or .json in the format of SQuAD.",
            show_default=False,
        ),
    ],
    model: Annotated[
        Path,
        typer.Option(help="A Hugging Face folder, a TF1 checkpoint, or a checkpoint of gaudi-bert.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The folder to create, which transformers can load.", show_default=False)],
    options: arguments.Options,
    evaluation: Annotated[Path | None, typer.Option(help="Held-out labelled rows.")] = None,
    vocab: Annotated[Path | None, typer.Option(help="A folder with the tokenizer, if the model folder has none.")] = None,
    pipeline: Annotated[Path | None, typer.Option(help="A pipeline file with task and finetune settings.")] = None,
    set_: arguments.Set = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the packs and the plan of the run without training.")
    ] = False,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Train a pretrained encoder or causal model for a task, on packed rows."""
    from gaudi_bert.runs import finetune
    from gaudi_bert.runs.labelled_data import FineTuneFiles

    settings = arguments.load_pipeline_settings(pipeline, set_, options)
    result = finetune.finetune(
        settings,
        FineTuneFiles(data, evaluation, model, vocab),
        out,
        reporter=Reporter(),
        overwrite=overwrite,
        dry_run=dry_run,
    )
    use, file = ("embed", "vectors.npy") if settings.task.name == "embedding" else ("predict", "answers.jsonl")
    following = output.join_shell_words((use, "--model", out, "--data", "new.jsonl", "--out", file))
    output.print_result(result, json, next_command=None if dry_run else following, shared=True)


@arguments.add_settings_options(arguments.PIPELINE, **arguments.ROWS)
def predict(
    model: Model,
    data: Annotated[
        str,
        typer.Option(help="Rows: .jsonl, .csv, .tsv, .parquet, .txt, .conll, .json, or - for a pipe.", show_default=False),
    ],
    out: Annotated[str, typer.Option(help="The .jsonl file to write, or - for a pipe.", show_default=False)],
    options: arguments.Options,
    max_sequence_length: _MaxSequenceLength = None,
    precision: Precision = "float32",
    unpacked: Unpacked = False,
    group_by: Annotated[
        str | None,
        typer.Option(
            metavar="[query]", help="Reranking: write one line per query, with its documents in the order of their scores."
        ),
    ] = None,
    set_: arguments.Set = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Write the predictions of a fine-tuned model as JSON lines, in the order of the rows."""
    from gaudi_bert.tasks import predict
    from gaudi_bert.tasks.prediction_files import PredictOptions

    how = PredictOptions(max_sequence_length, precision, not unpacked, group_by)  # type: ignore[arg-type]
    changes = arguments.load_pipeline_settings(None, set_, options).task.model_dump(exclude_unset=True)
    result = predict.predict(model, data, out, how, changes, reporter=Reporter(), overwrite=overwrite)
    if out != "-":
        output.print_result(result, json, result.format_lines(out))


@arguments.add_settings_options(arguments.PIPELINE, **arguments.ROWS)
def embed(
    model: Model,
    data: Annotated[
        str, typer.Option(help="Rows: .jsonl, .csv, .tsv, .parquet, .txt, or - for a pipe.", show_default=False)
    ],
    out: Annotated[
        str, typer.Option(help="A .npy, .parquet or .jsonl file, or - for JSON lines to a pipe.", show_default=False)
    ],
    options: arguments.Options,
    pooling: Annotated[
        str | None,
        typer.Option(
            metavar="[cls|mean|max]",
            help="How the vectors of the tokens become one vector; default: taken from the model folder, or mean.",
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="Scale vectors to length 1; default: taken from the model folder."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text to put before each text; default: taken from the model folder, or none."),
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name of one of the model folder's prompts, such as query.")
    ] = None,
    max_sequence_length: _MaxSequenceLength = None,
    precision: Precision = "float32",
    unpacked: Unpacked = False,
    set_: arguments.Set = None,
    overwrite: arguments.Overwrite = False,
    json: arguments.Json = False,
) -> None:
    """Write a vector for each text, in the order of the texts."""
    from gaudi_bert.tasks import predict

    how = predict.EmbedOptions(
        max_sequence_length,
        precision,  # type: ignore[arg-type]
        not unpacked,
        pooling=pooling,  # type: ignore[arg-type]
        normalize=normalize,
        prompt=prompt,
        prompt_name=prompt_name,
    )
    task = arguments.load_pipeline_settings(None, set_, options).task
    result = predict.embed(model, data, out, how, task, reporter=Reporter(), overwrite=overwrite)
    if out != "-":
        output.print_result(result, json, result.format_lines(out))


@arguments.add_settings_options("gaudi_bert.serving.settings:ServeSettings")
def serve(model: Model, options: arguments.Options) -> None:
    """Serve embeddings, scores, labels or tags over HTTP, with requests packed into rows."""
    require_libraries(["fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client"], "serve")
    from gaudi_bert.config.pipeline import section_from_options
    from gaudi_bert.serving import server
    from gaudi_bert.serving.settings import ServeSettings

    server.serve(model, section_from_options(ServeSettings, options))
