"""Fine-tuning with the usual settings, which each task goes through once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.training import FineTuning
from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
from gaudi_bert.config.sections import TASK_NAMES
from gaudi_bert.runs.finetune import finetune
from gaudi_bert.runs.labelled_data import FineTuneFiles
from tests.builders.bert_folder import write_bert, write_rows
from tests.builders.effort import once
from tests.builders.reporters import QUIET

# Tasks whose rows are not taken in windows.
ONE_ANSWER = ("classification", "multi-label", "regression", "reranking", "embedding")
SETTINGS = {
    "max_sequence_length": 61,
    "depth": 5,
    "epochs": 2,
    "batch_sequences": 12,
    "learning_rate": 1e-3,
    "log_every_updates": 1,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return write_bert(tmp_path_factory.mktemp("model") / "bert", layers=1)


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("rows")
    return {
        task: (
            write_rows(folder / f"{task}.jsonl", task, 53, 1),
            write_rows(folder / f"{task}-evaluation.jsonl", task, 19, 2),
        )
        for task in TASK_NAMES
    }


def run(task: str, data: Path, evaluation: Path | None, model: Path, out: Path, reporter=QUIET, **options) -> Any:
    changes = options.pop("finetune", {})
    windows = {} if task in ONE_ANSWER else {"stride": 4}
    task_settings = {"name": task, "too_long": "truncate", **windows, **options.pop("task_settings", {})}
    values = {"task": task_settings, "finetune": {**SETTINGS, **changes}, "store": options.pop("store", {})}
    settings, files = section_from_mapping(PipelineSettings, values, "test"), FineTuneFiles(data, evaluation, model)
    return finetune(settings, files, out, reporter=reporter, **options)


@dataclass(frozen=True)
class Finished:
    """A run with the usual settings: its folder, which no test changes, and what it returned."""

    out: Path
    result: FineTuning


@pytest.fixture(scope="session")
def finished(files, model, tmp_path_factory) -> Callable[[str], Finished]:
    """Makes the usual run of a task, once."""

    @functools.cache
    def of(task: str) -> Finished:
        made = once(tmp_path_factory, task, lambda folder: run(task, *files[task], model, folder / "out"))
        return Finished(made / "out", FineTuning.read(made / "out" / "metrics.json"))

    return of
