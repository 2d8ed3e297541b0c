"""Stage finetune: labelled rows and a pretrained model to a model of a task, as a folder that `transformers` opens.

`training/run.py` names the steps, and describes the folder. In addition there are `best/` (the checkpoint with the best
evaluation) and in the end that model (`config.json`, `model.safetensors`, the tokenizer), its answers on the evaluation data
(`predictions.jsonl`), and, written last, `metrics.json`.
"""

from __future__ import annotations

from pathlib import Path

from typing_extensions import Unpack

from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.store.mirrored_folder import local_copies
from gaudi_bert.artefacts.training import FineTuning
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import in_store, shown_location
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.rows.reading import check_first_row
from gaudi_bert.tasks.kinds.task import learns_pairs
from gaudi_bert.tasks.task_data import is_labelled
from gaudi_bert.training.jobs.pairs import PairJob
from gaudi_bert.training.jobs.rows import FineTuneInput, FineTuneJob
from gaudi_bert.training.run import RunOptions, run_job
from gaudi_bert.training.run_plan import RunPlan


def finetune(
    settings: PipelineSettings,
    files: FineTuneInput,
    out: Path,
    **options: Unpack[RunOptions],
) -> StageOutput[FineTuning] | RunPlan:
    """Train a pretrained model for a task, in the folder `out`; files in an object store are copied to scratch."""
    for key, path in (("--out", out), ("task.labels", settings.task.labels)):
        if path is not None and in_store(path):
            raise InputError(
                f"{key} {shown_location(path)}: fine-tuning needs it on this machine; give a local path, and copy it "
                "from or to the store"
            )
    paths = (files.data, files.evaluation_data, files.model, files.vocabulary)
    with local_copies(paths, settings.store) as copies:
        name = settings.task.name
        if name is not None:
            check_first_row(str(copies[0]), name, settings.task, labelled=is_labelled(name))
        job = _job_of(settings, FineTuneInput(*copies), Path(out))  # type: ignore[arg-type]
        return run_job(job, settings, out, **options)


def _job_of(settings: PipelineSettings, files: FineTuneInput, out: Path) -> FineTuneJob:
    """Return the job of the task."""
    task = settings.task
    if learns_pairs(task):
        return PairJob(settings, files, out)
    if task.loss is not None:
        others = " but listwise" if task.name == "reranking" else ""
        raise InputError(f"task.loss = {task.loss}: {task.name} has no other loss{others}; leave it out")
    return FineTuneJob(settings, files, out)
