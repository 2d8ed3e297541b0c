"""The files of a pipeline's task stages: what it names, or what its own earlier stages made."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.artefacts.store.location import in_store, place_below, shown_place
from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.built_in_texts import BUILT_IN_ROWS
from gaudi_bert.common.errors import InputError
from gaudi_bert.config import PipelineSettings
from gaudi_bert.stages.tasks.finetune_job import FineTuneInput

__all__ = ["check_work_folder", "finetuning_files", "has_built_in_rows", "rows_to_predict", "settings_for_finetuning"]


def has_built_in_rows(settings: PipelineSettings) -> bool:
    """Whether any rows are those that Python carries."""
    asked = settings.finetune
    return any(name in BUILT_IN_ROWS for name in (asked.data, asked.evaluation_data, settings.predict.data))


def settings_for_finetuning(settings: PipelineSettings, pipeline_folder: Path) -> PipelineSettings:
    """With the file of label names where it is, seen from this process."""
    labels = settings.task.labels
    if labels is None:
        return settings
    task = settings.task.model_copy(update={"labels": str(_file(labels, "task.labels", pipeline_folder))})
    return settings.model_copy(update={"task": task})


def finetuning_files(settings: PipelineSettings, folder: WorkFolder, pipeline_folder: Path) -> FineTuneInput:
    """What `finetune` reads.

    Raises:
        InputError: something is not there.
    """
    asked = settings.finetune

    def rows(key: str, text: str, split: str) -> Path:
        return folder.rows(split) if text in BUILT_IN_ROWS else _file(text, key, pipeline_folder)

    data = rows("finetune.data", str(asked.data), "train")
    evaluation = None
    if asked.evaluation_data is not None:
        evaluation = rows("finetune.evaluation_data", asked.evaluation_data, "evaluation")
    vocabulary = _file(asked.vocab, "finetune.vocab", pipeline_folder) if asked.vocab is not None else None
    if asked.init_checkpoint is not None:
        return FineTuneInput(data, evaluation, _weights(asked.init_checkpoint), vocabulary)
    return FineTuneInput(data, evaluation, folder.train, vocabulary or _own_vocabulary(folder))


def rows_to_predict(settings: PipelineSettings, folder: WorkFolder, pipeline_folder: Path) -> Path:
    """What `predict` reads.

    Raises:
        InputError: it is not there.
    """
    text = str(settings.predict.data)
    return folder.rows("evaluation") if text in BUILT_IN_ROWS else _file(text, "predict.data", pipeline_folder)


def _own_vocabulary(folder: WorkFolder) -> Path:
    """Where the vocabulary of this pipeline's examples lies: beside those that it made, or beside the given ones."""
    return folder.examples if folder.records is None else folder.records.parent


def _file(text: str, key: str, pipeline_folder: Path) -> Path:
    path = place_below(pipeline_folder, text)
    if not in_store(path) and not path.exists():
        raise InputError(f"{key} = {path}: no such file or folder; check the path")
    return path


def _weights(text: str) -> Path:
    """A URL; or a folder, a file, a TF1 checkpoint's prefix, from where the command was started, as `train` has it."""
    path = Path(text)
    if not in_store(path) and not path.exists() and not any(path.parent.glob(f"{path.name}.*")):
        raise InputError(f"finetune.init_checkpoint = {path}: no such file or folder; check the path")
    return path


def check_work_folder(folder: WorkFolder) -> None:
    """Refuse a work folder that the stages of tasks cannot work in.

    Raises:
        InputError: it is in an object store.
    """
    if in_store(folder.root):
        raise InputError(
            f"--work {shown_place(folder.root)}: the stages finetune and predict have their work folder on this machine; "
            "give a folder (rows and weights may be URLs)"
        )
