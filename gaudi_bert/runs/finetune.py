"""Stage finetune: train a pretrained model for a task on labelled rows, and write a folder that `transformers` can open.

`training/run.py` contains the steps of a run, and describes its folder. During fine-tuning, the folder also contains `best/`
(the checkpoint with the best evaluation). At the end, it contains the best model (`config.json`, `model.safetensors` and the
tokenizer), its predictions on the evaluation data (`predictions.jsonl`) and, written last, `metrics.json`. `rows.py`
contains the job for tasks whose loss is a sum over rows, and `pairs.py` the job for tasks with a single loss over all rows
of an update.
"""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

from typing_extensions import Unpack

from gaudi_bert.artefacts.mirrored_folder import open_local_copies
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.training import FineTuning
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import format_location, is_in_store
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.rows.reading import check_first_row
from gaudi_bert.rows.types import LANGUAGE_MODELLING
from gaudi_bert.runs.labelled_data import FineTuneFiles, read_labelled_data
from gaudi_bert.runs.pairs import PairJob, check_no_packing_settings
from gaudi_bert.runs.rows import FineTuneJob, RowJob
from gaudi_bert.tasks.task import has_loss_across_rows
from gaudi_bert.tasks.task_models import is_bert
from gaudi_bert.training.run import RunOptions, run_job
from gaudi_bert.training.run_plan import DryRun


def finetune(
    settings: PipelineSettings,
    files: FineTuneFiles,
    out: Path,
    **options: Unpack[RunOptions],
) -> StageOutput[FineTuning] | DryRun:
    """Fine-tune a pretrained model for a task on labelled rows, and write a folder that `transformers` can open.

    Args:
        settings: The settings of the pipeline.
        files: The rows and the model. Files in an object store are copied to this machine first.
        out: The folder of the run, on this machine.
        **options: See `RunOptions`.

    Returns:
        The result, or the plan for a dry run.

    Raises:
        InputError: The settings, the rows and the model do not fit together, or `out` is in an object store.
        StoppedError: A signal requested a stop. A checkpoint has been saved.
        FailedError: The training diverged, or another process was lost.
    """
    for key, path in (("--out", out), ("task.labels", settings.task.labels)):
        if path is not None and is_in_store(path):
            raise InputError(
                f"{key} {format_location(path)}: fine-tuning does not support URLs of an object store for this path; pass a "
                "local path"
            )
    with open_local_copies(astuple(files), settings.store) as copies:
        name = settings.task.name
        if name is not None:
            check_first_row(str(copies[0]), name, settings.task, labelled=name not in LANGUAGE_MODELLING)
        inputs = FineTuneFiles(*copies)  # type: ignore[arg-type]
        return run_job(
            lambda reporter: create_job(settings, inputs, Path(out), reporter),
            settings,
            settings.finetune,
            out,
            is_bert=is_bert(inputs.model),
            **options,
        )


def create_job(settings: PipelineSettings, files: FineTuneFiles, out: Path, reporter: Reporter) -> FineTuneJob:
    """Read the files of a fine-tuning run, and return the job that trains the model for the chosen task.

    Args:
        settings: The settings of the pipeline.
        files: The rows and the model.
        out: The folder of the run.
        reporter: Shows messages to the user.

    Raises:
        InputError: The task does not support the chosen loss, or the files, the model and the settings do not fit together.
    """
    task, compares_rows = settings.task, has_loss_across_rows(settings.task)
    if compares_rows:
        check_no_packing_settings(settings)
    elif task.loss is not None:
        supported = "only listwise is supported" if task.name == "reranking" else "the setting is not supported"
        raise InputError(f"task.loss = {task.loss}: {supported} for {task.name}; remove the setting")
    read = read_labelled_data(settings, files, reporter, packs_training_rows=not compares_rows)
    return (PairJob if compares_rows else RowJob)(settings.finetune, read, out)
