"""Stage finetune: labelled rows and a pretrained model to a model of a task, as a folder that `transformers` opens.

The loop is that of pretraining, and `training/run.py` describes the folder. In addition there are `best/` (the
checkpoint with the best evaluation) and in the end that model (`config.json`, `model.safetensors`, the tokenizer), its
answers on the evaluation data (`predictions.jsonl`), and, written last, `metrics.json`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
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
from gaudi_bert.engines.choose import load_engine
from gaudi_bert.engines.protocol import Communicator, Model, ModelSpec
from gaudi_bert.model.masking import NO_VOCABULARY
from gaudi_bert.rows.reading import LeftOut
from gaudi_bert.rows.tokenizer import RowTokenizer, open_tokenizer
from gaudi_bert.rows.tokenizing import policy_of
from gaudi_bert.rows.types import QuestionRow
from gaudi_bert.tasks.kinds.task import Task, task_named
from gaudi_bert.tasks.models.task_models import StartWeights, is_bert, start_weights, vocabulary_of, write_task_folder
from gaudi_bert.tasks.objective import TaskEvaluator, TaskObjective
from gaudi_bert.tasks.task_data import TaskData, file_identity, labels_of, task_batches, tokenized_file
from gaudi_bert.training.checkpoint import Checkpoint, find_checkpoint, read_checkpoint, write_checkpoint
from gaudi_bert.training.input.batches import TrainingOrder
from gaudi_bert.training.loop import Evaluation, TrainingLoop
from gaudi_bert.training.results import DryRun, FineTuneInput
from gaudi_bert.training.run import (
    COMPILED_KEY,
    OF_THE_MACHINE,
    RunContext,
    build_step,
    processes_of,
    restore,
    run_engine,
    run_folder,
)
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
        local = FineTuneInput(*copies)  # type: ignore[arg-type]
        chosen = run_engine(settings.finetune, Path(out), is_bert=is_bert(local.model), overwrite=overwrite)
        engine = load_engine(chosen.name)
        communicator = engine.connect(settings.finetune)
        reporter = reporter if communicator.is_first else Reporter(quiet=True)
        job = _plan_job(settings, local, Path(out), communicator, dry_run, reporter)
        for line in [chosen.line(), *_describe_job(job, dry_run)]:
            reporter.say(f"finetune: {line}")
        if dry_run:
            return DryRun(job.plan)
        with run_folder(
            job.out / FINETUNING_NAME,
            FineTuning,
            _signature(job),
            settings,
            settings.finetune,
            engine,
            communicator,
            reporter,
            overwrite=overwrite,
        ) as context:
            if context.stored is not None:
                return StageOutput(context.stored, skipped=True)
            return StageOutput(context.finish(_train(job, context)))


@dataclass(frozen=True)
class _FineTuneJob:
    """What is known of a run before anything is built."""

    section: FineTuneSettings
    task: Task
    start: StartWeights
    tokenizer: RowTokenizer
    data: TaskData
    evaluation: TaskData | None
    plan: RunPlan
    best_metric: str
    out: Path


def _plan_job(
    settings: PipelineSettings,
    files: FineTuneInput,
    out: Path,
    communicator: Communicator,
    dry_run: bool,
    reporter: Reporter,
) -> _FineTuneJob:
    """Read and tokenize the rows, plan their packs, open the weights; refuse what does not fit."""
    task_settings, section = settings.task, settings.finetune
    if task_settings.name is None:
        raise InputError(f"--task (task.name) is not set; choose one of {', '.join(TASK_NAMES)}")
    name = task_settings.name
    tokenizer = open_tokenizer(files.vocabulary or files.model)
    labels = labels_of(files.data, name, task_settings)
    kind = task_named(name)
    start = start_weights(files.model, kind(task_settings, labels))
    length, positions = section.max_sequence_length, start.sizes.positions
    if length > positions:
        raise InputError(f"finetune.max_sequence_length = {length}: the model has {positions} positions; set it to no more")
    tokenizer.check_fits(start.sizes.vocab_size, start.sizes.segments)
    data = _data(files.data, settings, tokenizer, labels, section.depth, reporter, is_first=True)
    # Questions without an answer need a threshold for giving none.
    has_unanswerable = any(isinstance(row, QuestionRow) and row.answers == () for row in data.rows)
    if has_unanswerable and task_settings.null_score_threshold is None:
        task_settings = task_settings.model_copy(update={"null_score_threshold": 0.0})
    task = kind(task_settings, labels, vocabulary_of(tokenizer) if name == "masked-language-modelling" else NO_VOCABULARY)
    evaluation = None
    if files.evaluation_data is not None:
        evaluation = _data(files.evaluation_data, settings, tokenizer, labels, section.evaluation_depth, reporter)
    processes = processes_of(settings, communicator, dry_run)
    plan = _plan(section, data, processes, settings.resources.processes_per_worker)
    best_metric = _best_metric(task, section, evaluation is not None)
    return _FineTuneJob(section, task, start, tokenizer, data, evaluation, plan, best_metric, out)


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


def _describe_job(job: _FineTuneJob, dry_run: bool) -> list[str]:
    """The run as lines for people; all of its figures before a dry run."""
    packing, section, start = job.data.packing, job.section, job.start
    labels = f", {len(job.task.labels)} labels" if job.task.labels else ""
    return [
        f"{job.task.name}{labels}: {len(job.data.rows):,} rows of {job.data.path}, {packing.sequences:,} sequences, "
        f"{packing.tokens / packing.sequences:.1f} tokens on average, rows of {job.data.length}",
        f"{packing.packs:,} packs of depth {packing.depth_used}, "
        f"{packing.packing_factor:.3f} sequences per pack, {packing.efficiency:.2%} real tokens; "
        f"no packing of this depth has fewer than {packing.lower_bound:,}",
        f"{start.path} ({start.kind}): {count_of(start.sizes.layers, 'layer')}, hidden size "
        f"{start.sizes.hidden_size}; {len(start.fresh)} variables start from random numbers",
        f"asked for {section.batch_sequences:,} sequences per update, {count_of(section.epochs, 'epoch')}; "
        f"{section.optimizer}, learning rate {section.learning_rate:g}",
        *job.plan.short_lines(),
        *(job.plan.table() if dry_run else []),
    ]


def _signature(job: _FineTuneJob) -> Signature:
    """What the model depends on."""
    section = job.section.model_dump(mode="json", exclude=free_settings(FineTuneSettings) | _FILES)
    task = job.task.settings.model_dump(mode="json", exclude={"labels", "n_best"})
    inputs = {
        "data": job.data.identity,
        "evaluation_data": job.evaluation.identity if job.evaluation is not None else None,
        "model": f"{job.start.path.name}:{job.start.identity}",
        "tokenizer": file_identity(job.tokenizer.file),
        "labels": list(job.task.labels),
    }
    return Signature("finetune", {"task": task, "finetune": section}, inputs)


def _train(job: _FineTuneJob, context: RunContext[FineTuning]) -> FineTuning:
    """Train to the end, and leave the best model."""
    settings, communicator, compiled = job.plan.settings, context.communicator, context.compiled
    spec = ModelSpec(job.start.config, job.task.head)
    model = context.engine.build(spec, context.device, seed=settings.seed, compiled=compiled)
    evaluator = None
    if job.evaluation is not None:
        evaluator = TaskEvaluator(
            model,
            job.task,
            job.evaluation,
            communicator,
            batch_packs=job.section.micro_batch_packs,
            seed=settings.seed,
            best_metric=job.best_metric,
        )
    step = build_step(context, job.plan, model, TaskObjective(job.task))
    progress = restore(context, step, model, lambda: model.load_values(job.start.variables))
    order = TrainingOrder(
        settings.seed, settings.shuffle_packs, communicator.rank, communicator.size, packs_done=progress.packs
    )
    batches = task_batches(job.data, job.task, settings.micro_batch_packs, job.section.epochs, order)
    stored_settings = {
        "model": job.start.config.to_json(),
        "training": {name: value for name, value in _loop_settings(job.section).items() if name not in OF_THE_MACHINE},
        COMPILED_KEY: compiled,
    }

    def evaluated(update: int, evaluation: Evaluation) -> None:
        if communicator.is_first:
            _keep_best(job, model, update, evaluation.as_json())

    loop = TrainingLoop(
        context, job.plan, step, model, batches, progress, stored_settings, evaluator=evaluator, evaluated=evaluated
    )
    loop.run()
    return _finish(job, communicator, model, evaluator, loop.progress.update)


def _keep_best(job: _FineTuneJob, model: Model, update: int, figures: dict[str, float]) -> None:
    """Keep the weights where no evaluation before was as good. The weights come first, so best.json never lies."""
    path = job.out / BEST_NAME
    before = BestCheckpoint.read_if_present(path)
    sign = -1.0 if job.best_metric in job.task.lower_is_better else 1.0
    is_better = before is None or sign * figures[job.best_metric] > sign * before.metrics[job.best_metric]
    if is_better and not math.isnan(figures[job.best_metric]):
        settings = {"model": job.start.config.to_json()}
        written = write_checkpoint(path.parent, Checkpoint(update, model.values(), settings=settings))
        BestCheckpoint(update=update, metric=job.best_metric, metrics=figures).write(path)
        for other in path.parent.glob("update-*.safetensors"):
            if other != written:
                other.unlink()


def _finish(
    job: _FineTuneJob, communicator: Communicator, model: Model, evaluator: TaskEvaluator | None, update: int
) -> FineTuning:
    """Take the best weights, evaluate them once more, and write the model and its answers."""
    best = communicator.from_first(lambda: BestCheckpoint.read_if_present(job.out / BEST_NAME))
    update = update if best is None else best.update
    if best is not None and communicator.is_first:
        model.load_values(read_checkpoint(find_checkpoint(job.out / "best")).variables)
    if communicator.size > 1:
        model.load_values(communicator.broadcast(model.values()))
    evaluation = evaluator.run() if evaluator is not None else None
    packing = job.data.packing
    result = FineTuning(
        task=job.task.name,
        model=job.start.path.name,
        labels=job.task.labels,
        max_sequence_length=job.data.length,
        sequences=packing.sequences,
        packs=packing.packs,
        lower_bound=packing.lower_bound,
        packing_factor=packing.packing_factor,
        depth=packing.depth_used,
        algorithm=packing.algorithm_used,
        epochs=job.section.epochs,
        updates=job.plan.settings.updates,
        best_metric=job.best_metric if evaluation is not None else None,
        best_update=update,
        evaluated_rows=evaluation.rows if evaluation is not None else 0,
        metrics=dict(evaluation.figures) if evaluation is not None else {},
        baseline=job.task.baseline(job.data.sequences, job.evaluation.sequences) if job.evaluation is not None else {},
    )
    if communicator.is_first:
        write_task_folder(job.out, job.start, job.task, model.values(), job.tokenizer, job.data.length)
        if job.evaluation is not None and evaluation is not None and evaluation.logits is not None:
            answers = job.task.answers(evaluation.logits, job.evaluation.sequences, job.evaluation.rows)
            with atomic_file(job.out / PREDICTIONS_NAME) as handle:
                for answer in answers:
                    handle.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
    return result
