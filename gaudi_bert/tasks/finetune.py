"""Stage finetune: labelled rows and a pretrained model to a model of a task, as a folder that `transformers` opens.

`training/run.py` names the steps, and `training/run_folder.py` describes the folder. In addition there are `best/` (the
checkpoint with the best evaluation) and in the end that model (`config.json`, `model.safetensors`, the tokenizer), its
answers on the evaluation data (`predictions.jsonl`), and, written last, `metrics.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.store.copies import local_copies
from gaudi_bert.artefacts.store.objects import in_store, shown_location
from gaudi_bert.artefacts.training import BestCheckpoint, FineTuning
from gaudi_bert.artefacts.work_folder import FINETUNING_NAME
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.progress import Reporter, count_of
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.sections import TASK_NAMES, FineTuneSettings, LoopSettings, TaskName, TrainingSettings
from gaudi_bert.config.values import free_settings
from gaudi_bert.engines.protocol import Communicator, Model, ModelSpec
from gaudi_bert.model.masking import NO_VOCABULARY
from gaudi_bert.rows.reading import LeftOut
from gaudi_bert.rows.tokenizer import RowTokenizer, open_tokenizer
from gaudi_bert.rows.tokenizing import policy_of
from gaudi_bert.rows.types import QuestionRow
from gaudi_bert.tasks.kinds.task import Task, task_named
from gaudi_bert.tasks.models.task_models import is_bert, start_weights, vocabulary_of, write_task_folder
from gaudi_bert.tasks.objective import TaskEvaluation, TaskObjective, TaskResult
from gaudi_bert.tasks.task_data import TaskData, file_identity, labels_of, task_batches, tokenized_file
from gaudi_bert.training.checkpoint import Checkpoint, find_checkpoint, read_checkpoint, write_checkpoint
from gaudi_bert.training.input.batches import Batch, TrainingOrder
from gaudi_bert.training.loop import TrainingLoop
from gaudi_bert.training.objective import Evaluation
from gaudi_bert.training.results import DryRun, FineTuneInput
from gaudi_bert.training.run import Job, run_job
from gaudi_bert.training.run_folder import RunContext
from gaudi_bert.training.run_plan import FINE_TUNING_KEYS, RunPlan

PREDICTIONS_NAME, BEST_NAME = "predictions.jsonl", "best/best.json"

# Settings that name files, which are known by their content.
_FILES = {"data", "evaluation_data", "init_checkpoint", "vocab"}


def finetune(
    settings: PipelineSettings,
    files: FineTuneInput,
    out: Path,
    *,
    reporter: Reporter,
    overwrite: bool = False,
    dry_run: bool = False,
) -> StageOutput[FineTuning] | DryRun:
    """Train a pretrained model for a task.

    Args:
        settings: `task`, `finetune` and `store` are used.
        files: rows and weights; what lies in an object store is copied to scratch.
        overwrite: remove the run in `out`, whatever it is, and start again.
        dry_run: say what the run would be, write nothing.

    Returns:
        How good the model is, or what the run would be: the same in every process.
    """
    for key, path in (("--out", out), ("task.labels", settings.task.labels)):
        if path is not None and in_store(path):
            raise InputError(
                f"{key} {shown_location(path)}: fine-tuning needs it on this machine; give a local path, and copy it "
                "from or to the store"
            )
    paths = (files.data, files.evaluation_data, files.model, files.vocabulary)
    with local_copies(paths, settings.store) as copies:
        job = _FineTuneJob(settings, FineTuneInput(*copies), Path(out))  # type: ignore[arg-type]
        return run_job(job, settings, out, reporter=reporter, overwrite=overwrite, dry_run=dry_run)


class _FineTuneJob(Job[FineTuning]):
    """A model of a task on labelled rows."""

    result_name, result_type = FINETUNING_NAME, FineTuning

    def __init__(self, settings: PipelineSettings, files: FineTuneInput, out: Path) -> None:
        self.section = self._section = settings.finetune
        self._settings, self._files, self._out = settings, files, out
        self.is_bert = is_bert(files.model)

    def prepare(self, reporter: Reporter) -> None:
        """Read and tokenize the rows, plan their packs, open the weights; refuse what does not fit."""
        task_settings, section, files = self._settings.task, self._section, self._files
        if task_settings.name is None:
            raise InputError(f"--task (task.name) is not set; choose one of {', '.join(TASK_NAMES)}")
        name = task_settings.name
        tokenizer = open_tokenizer(files.vocabulary or files.model)
        labels = labels_of(files.data, name, task_settings)
        kind = task_named(name)
        start = start_weights(files.model, kind(task_settings, labels))
        length, positions = section.max_sequence_length, start.sizes.positions
        if length > positions:
            raise InputError(
                f"finetune.max_sequence_length = {length}: the model has {positions} positions; set it to no more"
            )
        tokenizer.check_fits(start.sizes.vocab_size, start.sizes.segments)
        data = _data(files.data, self._settings, tokenizer, labels, section.depth, reporter, is_first=True)
        # Questions without an answer need a threshold for giving none.
        has_unanswerable = any(isinstance(row, QuestionRow) and row.answers == () for row in data.rows)
        if has_unanswerable and task_settings.null_score_threshold is None:
            task_settings = task_settings.model_copy(update={"null_score_threshold": 0.0})
        needs_words = name == "masked-language-modelling"
        self._task = kind(task_settings, labels, vocabulary_of(tokenizer) if needs_words else NO_VOCABULARY)
        self._tokenizer, self._start, self._data, self._held_out = tokenizer, start, data, None
        if files.evaluation_data is not None:
            depth = section.evaluation_depth
            self._held_out = _data(files.evaluation_data, self._settings, tokenizer, labels, depth, reporter)
        self._best_metric = _best_metric(self._task, section, self._held_out is not None)
        self.spec = ModelSpec(start.config, self._task.head)
        self.objective = TaskObjective(self._task)

    def plan(self, processes: int) -> RunPlan:
        """Updates and batches, from epochs and sequences."""
        return _plan(self._section, self._data, processes, self._settings.resources.processes_per_worker)

    def describe(self, plan: RunPlan, dry_run: bool) -> list[str]:
        """The rows and their packs, the model, the batches."""
        task, data, section, start = self._task, self._data, self._section, self._start
        packing, labels = data.packing, f", {len(task.labels)} labels" if task.labels else ""
        return [
            f"{task.name}{labels}: {len(data.rows):,} rows of {data.path}, {packing.sequences:,} sequences, "
            f"{packing.tokens / packing.sequences:.1f} tokens on average, rows of {data.length}",
            f"{packing.packs:,} packs of depth {packing.depth_used}, "
            f"{packing.packing_factor:.3f} sequences per pack, {packing.efficiency:.2%} real tokens; "
            f"no packing of this depth has fewer than {packing.lower_bound:,}",
            f"{start.path} ({start.kind}): {count_of(start.sizes.layers, 'layer')}, hidden size "
            f"{start.sizes.hidden_size}; {len(start.fresh)} variables start from random numbers",
            f"asked for {section.batch_sequences:,} sequences per update, {count_of(section.epochs, 'epoch')}; "
            f"{section.optimizer}, learning rate {section.learning_rate:g}",
            *filter(None, [task.note()]),
            *plan.short_lines(),
            *(plan.table() if dry_run else []),
        ]

    def signature(self) -> Signature:
        """What the model depends on."""
        section = self._section.model_dump(mode="json", exclude=free_settings(FineTuneSettings) | _FILES)
        task = self._task.settings.model_dump(mode="json", exclude={"labels", "n_best"})
        inputs = {
            "data": self._data.identity,
            "evaluation_data": self._held_out.identity if self._held_out is not None else None,
            "model": f"{self._start.path.name}:{self._start.identity}",
            "tokenizer": file_identity(self._tokenizer.file),
            "labels": list(self._task.labels),
        }
        return Signature("finetune", {"task": task, "finetune": section}, inputs)

    def evaluation(self, plan: RunPlan) -> TaskEvaluation | None:
        """The held-out rows."""
        if self._held_out is None:
            return None
        return TaskEvaluation(
            self._task, self._held_out, self._section.micro_batch_packs, plan.settings.seed, self._best_metric
        )

    def load_start(self, model: Model, reporter: Reporter) -> None:
        """The encoder of `--model`, and its head where it fits."""
        model.load_values(self._start.variables)

    def batches(self, plan: RunPlan, order: TrainingOrder) -> Iterator[Batch]:
        """Packs of all epochs, and then empty ones."""
        return task_batches(self._data, self._task, plan.settings.micro_batch_packs, self._section.epochs, order)

    def evaluated(self, run: RunContext[FineTuning], model: Model, update: int, evaluation: Evaluation) -> None:
        """Keep the weights where no evaluation before was better. The weights come first, so best.json never lies."""
        if not run.communicator.is_first:
            return
        path, figures = self._out / BEST_NAME, evaluation.as_json()
        before = BestCheckpoint.read_if_present(path)
        rank = partial(self._task.rank, best_metric=self._best_metric)
        is_best = before is None or rank(figures) >= rank(before.metrics)  # of equal ones the later one
        if is_best and not math.isnan(figures[self._best_metric]):
            settings = {"model": self._start.config.to_json()}
            written = write_checkpoint(path.parent, Checkpoint(update, model.values(), settings=settings))
            BestCheckpoint(update=update, metric=self._best_metric, metrics=figures).write(path)
            for other in path.parent.glob("update-*.safetensors"):
                if other != written:
                    other.unlink()

    def finish(self, loop: TrainingLoop) -> FineTuning:
        """Take the best weights, evaluate them once more, and write the model and its answers."""
        model, communicator = loop.model, loop.context.communicator
        best_update = self._take_best(model, communicator)
        result = None if loop.evaluator is None else cast(TaskResult, loop.evaluator.run())
        if communicator.is_first:
            write_task_folder(self._out, self._start, self._task, model.values(), self._tokenizer, self._data.length)
            self._write_answers(result)
        packing = self._data.packing
        return FineTuning(
            task=self._task.name,
            model=self._start.path.name,
            labels=self._task.labels,
            max_sequence_length=self._data.length,
            sequences=packing.sequences,
            packs=packing.packs,
            lower_bound=packing.lower_bound,
            packing_factor=packing.packing_factor,
            depth=packing.depth_used,
            algorithm=packing.algorithm_used,
            epochs=self._section.epochs,
            updates=loop.plan.settings.updates,
            best_metric=self._best_metric if result is not None else None,
            best_update=loop.progress.update if best_update is None else best_update,
            evaluated_rows=result.rows if result is not None else 0,
            metrics=dict(result.figures) if result is not None else {},
            baseline=self._task.baseline(self._data.sequences, self._held_out.sequences) if self._held_out else {},
        )

    def _take_best(self, model: Model, communicator: Communicator) -> int | None:
        """Load the weights of the best evaluation in every process; its update, None where nothing was evaluated."""
        best = communicator.from_first(lambda: BestCheckpoint.read_if_present(self._out / BEST_NAME))
        if best is not None and communicator.is_first:
            model.load_values(read_checkpoint(find_checkpoint(self._out / "best")).variables)
        if communicator.size > 1:
            model.load_values(communicator.broadcast(model.values()))
        return None if best is None else best.update

    def _write_answers(self, result: TaskResult | None) -> None:
        """What the model answers to the held-out rows."""
        if result is None or result.logits is None or self._held_out is None:
            return
        with atomic_file(self._out / PREDICTIONS_NAME) as handle:
            for answer in self._task.answers(result.logits, self._held_out.sequences, self._held_out.rows):
                handle.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")


def _data(
    path: Path,
    settings: PipelineSettings,
    tokenizer: RowTokenizer,
    labels: tuple[str, ...],
    depth: int | str,
    reporter: Reporter,
    *,
    is_first: bool = False,
) -> TaskData:
    """The packs of a file; of the first one a line states how it is read, as all are."""
    section, name = settings.finetune, cast(TaskName, settings.task.name)
    length = section.max_sequence_length
    say = (lambda line: reporter.say(f"finetune: {line}")) if is_first else None
    left_out = LeftOut()
    sequences, rows = tokenized_file(path, name, settings.task, tokenizer, labels, length, say, left_out)
    if left_out.rows:
        reporter.say(f"finetune: {left_out}")
    if sequences.cut_rows:
        what = f"cut to {length} tokens" if policy_of(name, settings.task) == "truncate" else "taken in windows"
        reporter.say(f"finetune: {path}: {sequences.cut_rows:,} of {len(rows):,} rows are too long and were {what}")
    return TaskData.planned(
        path,
        file_identity(path),
        rows,
        sequences,
        max_sequence_length=length,
        algorithm=section.algorithm,
        depth=depth,
    )


def _plan(section: FineTuneSettings, data: TaskData, processes: int, processes_per_worker: int) -> RunPlan:
    factor, packs = data.packing.packing_factor, data.packing.packs
    micro_batch, steps = _batch_of(section, factor, processes)
    per_update = micro_batch * steps * processes
    updates, an_epoch = (math.ceil(epochs * packs / per_update) for epochs in (section.epochs, 1))
    in_other_words = {
        "micro_batch_packs": micro_batch,
        "global_batch_sequences": section.batch_sequences,
        "updates": updates,
        "warmup_updates": min(updates, round(section.warmup_share * updates)),
        "evaluate_every_updates": section.evaluate_every_updates or an_epoch,
        "save_every_updates": section.save_every_updates or an_epoch,
    }
    settings = TrainingSettings.model_validate({**_loop_settings(section), **in_other_words})
    return RunPlan(
        settings,
        factor,
        processes=processes,
        processes_per_worker=processes_per_worker,
        slots_per_pack=data.length,
        packs=packs,
        mean_tokens=data.packing.tokens / data.packing.sequences,
        keys=FINE_TUNING_KEYS,
    )


def _loop_settings(section: FineTuneSettings) -> dict[str, Any]:
    """The settings that are those of the training loop too."""
    return {name: getattr(section, name) for name in LoopSettings.model_fields}


def _batch_of(section: FineTuneSettings, factor: float, processes: int) -> tuple[int, int]:
    """Packs of a micro-batch, and micro-batches of an update as `RunPlan` has them, nearest to the requested batch."""

    def steps_with(packs: int) -> int:
        return max(1, round(section.batch_sequences / (packs * factor * processes)))

    def distance(packs: int) -> tuple[float, int]:
        real = steps_with(packs) * packs * factor * processes
        return round(abs(real / section.batch_sequences - 1.0), 2), steps_with(packs)

    best = min(range(1, section.micro_batch_packs + 1), key=distance)
    return best, steps_with(best)


def _best_metric(task: Task, section: FineTuneSettings, is_evaluated: bool) -> str:
    if section.best_metric is not None and not is_evaluated:
        raise InputError("finetune.best_metric: needs evaluation data; give --evaluation FILE")
    best_metric = section.best_metric or task.best_metric
    if best_metric not in task.metric_names:
        raise InputError(
            f"finetune.best_metric = {best_metric}: {task.name} has no such metric; choose one of "
            f"{', '.join(task.metric_names)}"
        )
    return best_metric
