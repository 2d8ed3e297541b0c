"""What is settled of fine-tuning before anything is built: rows, labels, weights, packs, and what an update is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import FineTuneSettings, PipelineSettings, TaskName, TaskSettings, TrainingSettings
from gaudi_bert.config.training import LoopSettings
from gaudi_bert.stages.tasks.task_rows import file_identity, labels_of, tokenized_file

if TYPE_CHECKING:
    from gaudi_bert.tasks.rows.tokenizer import RowTokenizer
    from gaudi_bert.tasks.task import Task, Vocabulary
    from gaudi_bert.training.distributed.communicator import Communicator
    from gaudi_bert.training.input.task_data import TaskData
    from gaudi_bert.training.run_plan import RunPlan
    from gaudi_bert.training.weights.task_models import StartWeights

__all__ = ["FineTuneInput", "FineTuneJob", "describe_job", "loop_settings", "plan_job"]


@dataclass(frozen=True)
class FineTuneInput:
    """The files of a run.

    Attributes:
        data: rows to learn from.
        evaluation_data: rows to measure on; None for none.
        model: weights to start from.
        vocabulary: a folder with the tokenizer, where it does not lie with the weights.
    """

    data: Path
    evaluation_data: Path | None
    model: Path
    vocabulary: Path | None = None


@dataclass(frozen=True)
class FineTuneJob:
    """What is known of a run before anything is built."""

    settings: PipelineSettings
    files: FineTuneInput
    task: Task
    start: StartWeights
    tokenizer: RowTokenizer
    data: TaskData
    evaluation: TaskData | None
    plan: RunPlan
    best_metric: str
    out: Path

    @property
    def asked(self) -> FineTuneSettings:
        """The settings of fine-tuning."""
        return self.settings.finetune


def loop_settings(asked: FineTuneSettings, **more: object) -> TrainingSettings:
    """The settings of the training loop; `more` is what fine-tuning says in other words."""
    shared = {name: getattr(asked, name) for name in LoopSettings.model_fields}
    return TrainingSettings.model_validate({**shared, **more})


def plan_job(
    settings: PipelineSettings,
    files: FineTuneInput,
    out: Path,
    communicator: Communicator,
    dry_run: bool,
    reporter: Reporter,
) -> FineTuneJob:
    """Read and tokenize the rows, plan their packs, open the weights; refuse what does not fit.

    Raises:
        InputError: a file, a row or a setting is wrong.
    """
    from gaudi_bert.tasks.registry import task_named
    from gaudi_bert.tasks.rows.tokenizer import open_tokenizer
    from gaudi_bert.training.weights.task_models import start_weights

    task_settings, asked = settings.task, settings.finetune
    if task_settings.name is None:
        raise InputError("task.name: is not set; say which task, for example --task classification")
    name = task_settings.name
    tokenizer = open_tokenizer(files.vocabulary or files.model)
    labels = labels_of(files.data, name, task_settings)
    kind = task_named(name)
    start = start_weights(files.model, kind(task_settings, labels))
    length, positions = asked.max_sequence_length, start.config.max_position_embeddings
    if length > positions:
        raise InputError(f"finetune.max_sequence_length = {length}: the model has {positions} positions; set it to no more")
    if tokenizer.vocabulary_size > start.config.vocab_size:
        raise InputError(
            f"{tokenizer.file}: has {tokenizer.vocabulary_size:,} tokens, the model has {start.config.vocab_size:,}; "
            "give the tokenizer that it was trained with"
        )
    data = _data(files.data, settings, tokenizer, labels, asked.depth, reporter)
    task_settings = _settled(task_settings, data)
    task = kind(task_settings, labels, _vocabulary(tokenizer))
    evaluation = None
    if files.evaluation_data is not None:
        evaluation = _data(files.evaluation_data, settings, tokenizer, labels, asked.evaluation_depth, reporter)
    resources = settings.resources
    alone = dry_run and communicator.size == 1
    processes = resources.workers * resources.processes_per_worker if alone else communicator.size
    plan = _plan(asked, data, processes, resources.processes_per_worker)
    best_metric = _best_metric(task, asked, evaluation is not None)
    return FineTuneJob(settings, files, task, start, tokenizer, data, evaluation, plan, best_metric, out)


def _data(
    path: Path,
    settings: PipelineSettings,
    tokenizer: RowTokenizer,
    labels: tuple[str, ...],
    depth: int | str,
    reporter: Reporter,
) -> TaskData:
    from gaudi_bert.training.input.task_data import TaskData

    asked, name = settings.finetune, cast(TaskName, settings.task.name)
    length = asked.max_sequence_length
    # Rows are kept of both files: whether a question has no answer is known from them alone.
    sequences, rows = tokenized_file(path, name, settings.task, tokenizer, labels, length, keep_rows=True)
    if sequences.cut_rows:
        what = "cut" if settings.task.too_long == "truncate" else "taken in windows"
        reporter.say(f"finetune: {path}: {sequences.cut_rows:,} of {len(rows):,} rows are too long and were {what}")
    return TaskData.planned(
        path,
        file_identity(path),
        rows,
        sequences,
        max_sequence_length=length,
        algorithm=asked.algorithm,
        depth=depth,
    )


def _settled(settings: TaskSettings, data: TaskData) -> TaskSettings:
    """With a threshold for giving no answer, where the data has questions without one and the settings do not say it."""
    from gaudi_bert.tasks.rows.types import QuestionRow

    unanswerable = any(isinstance(row, QuestionRow) and row.answers == () for row in data.rows)
    if unanswerable and settings.null_score_threshold is None:
        return settings.model_copy(update={"null_score_threshold": 0.0})
    return settings


def _vocabulary(tokenizer: RowTokenizer) -> Vocabulary:
    from gaudi_bert.tasks.task import Vocabulary

    special = {tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id}
    unknown = tokenizer.tokenizer.token_to_id("[UNK]")
    return Vocabulary(
        tokenizer.vocabulary_size, tuple(sorted(special | ({unknown} if unknown is not None else set()))), tokenizer.mask_id
    )


def _plan(asked: FineTuneSettings, data: TaskData, processes: int, processes_per_worker: int) -> RunPlan:
    from gaudi_bert.training.run_plan import FINE_TUNING_KEYS, plan_run

    factor, packs = data.packing.packing_factor, data.packing.packs
    micro_batch, steps = _batch_of(asked, factor, processes)
    per_update = micro_batch * steps * processes
    updates = math.ceil(asked.epochs * packs / per_update)
    an_epoch = math.ceil(packs / per_update)
    settings = loop_settings(
        asked,
        micro_batch_packs=micro_batch,
        global_batch_sequences=asked.batch_sequences,
        updates=updates,
        warmup_updates=min(updates, round(asked.warmup_share * updates)),
        evaluate_every_updates=asked.evaluate_every_updates or an_epoch,
        save_every_updates=asked.save_every_updates or an_epoch,
    )
    return plan_run(
        settings,
        factor,
        processes=processes,
        processes_per_worker=processes_per_worker,
        slots_per_pack=data.length,
        packs=packs,
        keys=FINE_TUNING_KEYS,
    )


def _batch_of(asked: FineTuneSettings, factor: float, processes: int) -> tuple[int, int]:
    """Packs of a micro-batch, and micro-batches of an update as `RunPlan` has them, that come nearest to what was asked."""

    def steps_with(packs: int) -> int:
        return max(1, round(asked.batch_sequences / (packs * factor * processes)))

    def distance(packs: int) -> tuple[float, int]:
        real = steps_with(packs) * packs * factor * processes
        return round(abs(real / asked.batch_sequences - 1.0), 2), steps_with(packs)

    best = min(range(1, asked.micro_batch_packs + 1), key=distance)
    return best, steps_with(best)


def _best_metric(task: Task, asked: FineTuneSettings, is_evaluated: bool) -> str:
    if asked.best_metric is not None and not is_evaluated:
        raise InputError("finetune.best_metric: there is no evaluation data to measure it on; give --evaluation FILE")
    best_metric = asked.best_metric or task.best_metric
    if best_metric not in task.metric_names:
        raise InputError(
            f"finetune.best_metric = {best_metric}: {task.name} has no such metric; choose one of "
            f"{', '.join(task.metric_names)}"
        )
    return best_metric


def describe_job(job: FineTuneJob, dry_run: bool) -> list[str]:
    """The run as lines for people; all of its figures before a dry run."""
    packing, asked, config = job.data.packing, job.asked, job.start.config
    labels = f", {len(job.task.labels)} labels" if job.task.labels else ""
    lines = [
        f"{job.task.name}{labels}: {len(job.data.rows):,} rows of {job.data.path}, {packing.sequences:,} sequences, "
        f"{packing.tokens / packing.sequences:.1f} tokens on average, rows of {job.data.length}",
        f"{packing.packs:,} packs of depth {packing.depth_used} ({packing.algorithm_used}), "
        f"{packing.packing_factor:.3f} sequences per pack, {packing.efficiency:.2%} real tokens; "
        f"no packing of this depth has fewer than {packing.lower_bound:,} (gap {packing.gap})",
        f"{job.start.weights.path} ({job.start.weights.kind}): {config.num_hidden_layers} layers, hidden size "
        f"{config.hidden_size}; {len(job.start.fresh)} variables start from random numbers",
        f"asked for {asked.batch_sequences:,} sequences an update, {asked.epochs} epochs; {asked.optimizer}, "
        f"learning rate {asked.learning_rate:g}",
        *job.plan.short_lines(),
        *(job.plan.table() if dry_run else []),
    ]
    return [f"finetune: {line}" for line in lines]
