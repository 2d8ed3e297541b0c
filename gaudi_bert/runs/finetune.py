"""Stage finetune: train a pretrained model for a task on labelled rows, and write a folder that `transformers` can open.

`training/run.py` contains the steps of a run and describes its folder. For fine-tuning, the folder also contains `best/`
(the checkpoint with the best evaluation) and, at the end, the best model (`config.json`, `model.safetensors` and the
tokenizer), its predictions on the evaluation data (`predictions.jsonl`) and, written last, `metrics.json`. `rows.py`
contains the job for tasks whose loss is a sum over rows, and `pairs.py` the job for tasks with one loss over all rows of an
update.
"""

from __future__ import annotations

from pathlib import Path

from typing_extensions import Unpack

from gaudi_bert.artefacts.mirrored_folder import open_local_copies
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.training import FineTuning
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import format_location, is_in_store
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.rows.reading import check_first_row
from gaudi_bert.rows.types import LANGUAGE_MODELLING
from gaudi_bert.runs.pairs import PairJob
from gaudi_bert.runs.rows import FineTuneInput, FineTuneJob
from gaudi_bert.tasks.kinds.task import learns_pairs
from gaudi_bert.training.run import RunOptions, run_job
from gaudi_bert.training.run_plan import RunPlan


def finetune(
    settings: PipelineSettings,
    files: FineTuneInput,
    out: Path,
    **options: Unpack[RunOptions],
) -> StageOutput[FineTuning] | RunPlan:
    """Fine-tune a pretrained model for a task.

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
                f"{key} {format_location(path)}: fine-tuning needs it on this machine; give a local path, and copy it "
                "from or to the store"
            )
    paths = (files.data, files.evaluation_data, files.model, files.vocabulary)
    with open_local_copies(paths, settings.store) as copies:
        name = settings.task.name
        if name is not None:
            check_first_row(str(copies[0]), name, settings.task, labelled=name not in LANGUAGE_MODELLING)
        job = _job_of(settings, FineTuneInput(*copies), Path(out))  # type: ignore[arg-type]
        return run_job(job, settings, out, **options)


def _job_of(settings: PipelineSettings, files: FineTuneInput, out: Path) -> FineTuneJob:
    """Return the job for the task.

    Raises:
        InputError: The task does not support the chosen loss.
    """
    task = settings.task
    if learns_pairs(task):
        return PairJob(settings, files, out)
    if task.loss is not None:
        others = " but listwise" if task.name == "reranking" else ""
        raise InputError(f"task.loss = {task.loss}: {task.name} has no other loss{others}; leave it out")
    return FineTuneJob(settings, files, out)
