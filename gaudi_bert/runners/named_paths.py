"""The files and folders that a pipeline file names, and that have to be there before it runs."""

from __future__ import annotations

from collections.abc import Iterator

from gaudi_bert.common.built_in_texts import BUILT_IN_ROWS, BUILT_IN_TEXTS
from gaudi_bert.config import PipelineSettings

__all__ = ["named_paths"]


def named_paths(settings: PipelineSettings) -> Iterator[tuple[str, str]]:
    """Each key that names something on a disk, and what it names (of `prepare.text`: a file, a folder or a glob)."""
    if settings.pretrains:
        yield from _of_pretraining(settings)
    if settings.finetunes:
        yield from _of_tasks(settings)


def _of_pretraining(settings: PipelineSettings) -> Iterator[tuple[str, str]]:
    prepare = settings.prepare
    if prepare.records is None:
        texts = (prepare.text,) if isinstance(prepare.text, str) else prepare.text or ()
        yield from (("prepare.text", text) for text in texts if text not in BUILT_IN_TEXTS)
    single = {
        "prepare.records": prepare.records,
        "prepare.evaluation_records": prepare.evaluation_records,
        "prepare.vocab": prepare.vocab,
        "training.init_checkpoint": settings.training.init_checkpoint,
    }
    yield from ((key, path) for key, path in single.items() if path is not None)


def _of_tasks(settings: PipelineSettings) -> Iterator[tuple[str, str]]:
    finetune = settings.finetune
    single = {
        "finetune.data": finetune.data,
        "finetune.evaluation_data": finetune.evaluation_data,
        "finetune.init_checkpoint": finetune.init_checkpoint,
        "finetune.vocab": finetune.vocab,
        "task.labels": settings.task.labels,
        "predict.data": settings.predict.data,
    }
    yield from ((key, path) for key, path in single.items() if path is not None and path not in BUILT_IN_ROWS)
