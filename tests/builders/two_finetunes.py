"""Fine-tuning and evaluation by each of two real Horovod processes; a part of `two_processes.py`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from gaudi_bert.config.pipeline import pipeline_from_mapping
from gaudi_bert.config.sections import TaskSettings, TrainingSettings
from gaudi_bert.engines.choose import load_engine
from gaudi_bert.engines.communicator import Communicator
from gaudi_bert.engines.tensorflow.horovod import connect
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.tasks.finetune import finetune
from gaudi_bert.tasks.models.task_models import open_task_model, read_task_folder, start_weights
from gaudi_bert.tasks.objective import TaskEvaluator
from gaudi_bert.tasks.task_data import TaskData, tokenized_file
from gaudi_bert.training.results import FineTuneInput
from tests.builders.bert_folder import write_bert
from tests.builders.effort import LONG
from tests.builders.reporters import QUIET
from tests.builders.task_files import write_rows

LENGTH, DEPTH, MICRO_BATCH = 61, 3, 2
# Updates of 6 packs, micro-batch by micro-batch; the rows make five of them, the last one ragged.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "token-classification": (40, {"depth": DEPTH, "batch_sequences": 18, "epochs": 2, "optimizer": "lamb"})
}
if LONG:
    RUNS["classification"] = (41, {"depth": DEPTH, "batch_sequences": 18, "epochs": 2})
    # The bias of this head shifts all scores alike: its true gradient is 0, and a small epsilon would step by its rounding.
    RUNS["question-answering"] = (29, {"depth": 1, "batch_sequences": 6, "epochs": 1, "epsilon": 1e-4})
FINETUNE = {"max_sequence_length": LENGTH, "learning_rate": 1e-3, "log_every_updates": 1, "micro_batch_packs": MICRO_BATCH}
EVALUATED_TASK, EVALUATED_ROWS = "token-classification", (1, 2, 3, 19) if LONG else (1, 19)


def write_files(folder: Path) -> Path:
    """Rows to learn from and to measure on, and a model without dropout, which each process would draw for itself."""
    folder.mkdir()
    for task, (rows, _) in RUNS.items():
        write_rows(folder / f"{task}.jsonl", task, rows, 1)
        write_rows(folder / f"{task}-evaluation.jsonl", task, 19, 2)
    for rows in EVALUATED_ROWS:
        write_rows(folder / f"evaluation-{rows}.jsonl", EVALUATED_TASK, rows, 2)
    config = write_bert(folder / "bert") / "config.json"
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config.write_text(json.dumps({**json.loads(config.read_text()), **without}))
    return folder


def fine_tuned(files: Path, task: str, out: Path, threads: int | None = None) -> None:
    """One run, by as many processes as there are."""
    changes = {**FINETUNE, **RUNS[task][1], "threads": threads}
    settings = pipeline_from_mapping({"task": {"name": task, "stride": 4}, "finetune": changes}, "test")
    rows = FineTuneInput(files / f"{task}.jsonl", files / f"{task}-evaluation.jsonl", files / "bert")
    finetune(settings, rows, out, reporter=QUIET)


def rows_of(model: Path, path: Path) -> tuple[Sequences, tuple[Row, ...]]:
    """A file of rows as a model's tokenizer has them."""
    folder = read_task_folder(model)
    settings = TaskSettings(name=folder.task, stride=4)
    return tokenized_file(path, folder.task, settings, open_tokenizer(model), folder.labels, LENGTH)


def evaluator(model: Path, path: Path, communicator: Communicator, depth: int | str = 2, seed: int = 3) -> TaskEvaluator:
    """Of a model of a task, on a file of rows."""
    folder = read_task_folder(model)
    task = folder.make_task()
    sequences, rows = rows_of(model, path)
    data = TaskData.planned(path, "", rows, sequences, max_sequence_length=LENGTH, algorithm="optimal", depth=depth)
    bert = open_task_model(start_weights(model, task, lacks_head=False), task, load_engine("tensorflow"))
    return TaskEvaluator(bert, task, data, communicator, batch_packs=MICRO_BATCH, seed=seed, best_metric=task.best_metric)


def evaluated(model: Path, path: Path, communicator: Communicator, **given: Any) -> Any:
    """What it says, by as many processes as there are."""
    return evaluator(model, path, communicator, **given).run()


def as_json(evaluation: Any) -> dict[str, Any]:
    """Everything, to the last bit."""
    logits = evaluation.logits
    return {**dataclasses.asdict(evaluation), "logits": None if logits is None else logits.tolist()}


def work(files: Path, out: Path) -> None:
    """Writes OUT/<task>/ and OUT/evaluations-<rank>.json."""
    for task in RUNS:
        fine_tuned(files, task, out / task, threads=1)
    communicator = connect(TrainingSettings())
    found = {
        str(rows): as_json(evaluated(out / EVALUATED_TASK, files / f"evaluation-{rows}.jsonl", communicator))
        for rows in EVALUATED_ROWS
    }
    (out / f"evaluations-{communicator.rank}.json").write_text(json.dumps(found))
