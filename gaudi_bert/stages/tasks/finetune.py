"""Stage finetune: labelled rows and a pretrained model to a model of a task, as a folder that `transformers` opens.

The loop is that of pretraining. The folder holds, while it runs, `settings.yaml`, `settings.json`, `checkpoints/`, `best/`,
`metrics.jsonl`, `tensorboard/` and `tensorflow.log`; and in the end the model with the best evaluation (`config.json`,
`model.safetensors`, the tokenizer), its answers on the evaluation data (`predictions.jsonl`), and, written last,
`metrics.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished
from gaudi_bert.artefacts.finetuning import (
    BestCheckpoint,
    FineTuning,
    read_best,
    read_finetuning,
    write_best,
    write_finetuning,
)
from gaudi_bert.artefacts.names import FINETUNING_NAME
from gaudi_bert.artefacts.store.location import in_store, shown_place
from gaudi_bert.artefacts.store.mirror import local_copies
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, exclusive_lock, write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PipelineSettings
from gaudi_bert.config.training import LoopSettings
from gaudi_bert.stages.tasks.finetune_job import FineTuneInput, FineTuneJob, describe_job, loop_settings, plan_job
from gaudi_bert.stages.tasks.task_rows import file_identity
from gaudi_bert.stages.training.model_process import COMPILED_KEY, compiles_kernels, native_lines_in, threads_of
from gaudi_bert.stages.training.model_results import FineTuneDryRun, FineTuneResult

if TYPE_CHECKING:
    from gaudi_bert.training.device import Device
    from gaudi_bert.training.distributed.communicator import Communicator
    from gaudi_bert.training.evaluate_task import TaskEvaluator
    from gaudi_bert.training.input.batches import Batch, TrainingOrder
    from gaudi_bert.training.loop import Evaluation, TrainingRun

__all__ = ["finetune"]

PREDICTIONS_NAME, BEST_NAME = "predictions.jsonl", "best/best.json"

# Settings that change nothing of the model: a run may be resumed with others.
FREE_SETTINGS = {
    *(
        "device",
        "threads",
        "keep_checkpoints",
        "log_every_updates",
        "fusion_bytes",
        "stall_seconds",
        "watch_port",
        "metrics_port",
    ),
    "save_every_updates",
}


# What they hold is known by its content.
FILES = {"data", "evaluation_data", "init_checkpoint", "vocab"}


def finetune(
    settings: PipelineSettings,
    files: FineTuneInput,
    out: Path,
    *,
    reporter: Reporter,
    overwrite: bool = False,
    dry_run: bool = False,
) -> FineTuneResult | FineTuneDryRun | None:
    """Train a pretrained model for a task.

    Args:
        settings: `task`, `finetune` and `store` are used.
        files: rows and weights; what lies in an object store is copied to scratch.
        out: the folder to make.
        reporter: where progress goes.
        overwrite: remove the run in `out`, whatever it is, and start anew.
        dry_run: say what the run would be, write nothing.

    Returns:
        How good the model is, or what the run would be; None in all processes but the first.

    Raises:
        InputError: a file, a row or a setting is wrong, or `out` holds another run.
        FailedError: a loss is not finite, or a file cannot be written.
        StoppedError: a signal asked for it; the same call goes on.
    """
    for key, place in (("--out", out), ("task.labels", settings.task.labels)):
        if place is not None and in_store(place):
            raise InputError(
                f"{key} {shown_place(place)}: fine-tuning has it on this machine; give a place here, and copy it from or to "
                "the store"
            )
    places = (files.data, files.evaluation_data, files.model, files.vocabulary)
    with local_copies(places, settings.store) as copies:
        here = FineTuneInput(*copies)  # type: ignore[arg-type]
        return _finetune(settings, here, out, reporter, overwrite, dry_run)


def _finetune(
    settings: PipelineSettings, files: FineTuneInput, out: Path, reporter: Reporter, overwrite: bool, dry_run: bool
) -> FineTuneResult | FineTuneDryRun | None:
    from gaudi_bert.training.device import open_device
    from gaudi_bert.training.distributed.connect import connect

    asked = settings.finetune
    communicator = connect(loop_settings(asked))
    reporter = reporter if communicator.is_first else Reporter(quiet=True)
    job = plan_job(settings, files, Path(out), communicator, dry_run, reporter)
    for line in describe_job(job, dry_run):
        reporter.say(line)
    if dry_run:
        return FineTuneDryRun(job.plan) if communicator.is_first else None
    threads = threads_of(asked.threads, communicator.local_size)
    device = open_device(asked.device, asked.precision, threads, settings.gaudi)
    with communicator.watched(job.plan.settings) as watched:
        return _run(job, watched, device, reporter, overwrite)


def _run(
    job: FineTuneJob, communicator: Communicator, device: Device, reporter: Reporter, overwrite: bool
) -> FineTuneResult | None:
    """Fine-tune where there is anything to do; only the first process writes files."""
    first, final, signature = communicator.is_first, job.out / FINETUNING_NAME, _signature(job)
    if communicator.any_true(first and not overwrite and is_finished(job.out, final, signature)):
        return _found(job, communicator, reporter)
    with exclusive_lock(job.out, str(job.out)) if first else nullcontext():
        if communicator.any_true(first and _prepare_folder(job, signature, overwrite)):
            return _found(job, communicator, reporter)
        others = f", {communicator.size} processes" if communicator.size > 1 else ""
        reporter.say(f"finetune: on {device.description}{others}")
        with native_lines_in(job.out, communicator.rank):
            result = _train(job, communicator, device, reporter)
        if first:
            write_finetuning(final, result)
    return FineTuneResult(result) if first else None


def _found(job: FineTuneJob, communicator: Communicator, reporter: Reporter) -> FineTuneResult | None:
    reporter.say(f"{job.out}: already fine-tuned with these settings, nothing to do")
    return FineTuneResult(read_finetuning(job.out / FINETUNING_NAME), skipped=True) if communicator.is_first else None


def _signature(job: FineTuneJob) -> Signature:
    """What the model is a function of."""
    from gaudi_bert.training.weights.task_models import weights_identity

    kept = job.asked.model_dump(mode="json", exclude=FREE_SETTINGS | FILES)
    task = job.task.settings.model_dump(mode="json", exclude={"labels", "n_best"})
    inputs = {
        "data": job.data.identity,
        "evaluation_data": job.evaluation.identity if job.evaluation is not None else None,
        "model": weights_identity(job.start.weights),
        "tokenizer": file_identity(job.tokenizer.file),
        "labels": list(job.task.labels),
    }
    return Signature("finetune", {"task": task, "finetune": kept}, inputs)


def _prepare_folder(job: FineTuneJob, signature: Signature, overwrite: bool) -> bool:
    """Whether the run is finished already; otherwise its folder is made ready to begin or to go on."""
    from gaudi_bert.artefacts.completion import remove_artefact, settings_path

    if overwrite and settings_path(job.out).exists():
        remove_artefact(job.out, settings_path(job.out))
    if begin_artefact(job.out, job.out / FINETUNING_NAME, signature, overwrite=overwrite):
        return True
    write_text(job.out / "settings.yaml", yaml.safe_dump(job.settings.model_dump(mode="json"), sort_keys=False))
    return False


def _train(job: FineTuneJob, communicator: Communicator, device: Device, reporter: Reporter) -> FineTuning:
    """Start or resume, train to the end, and leave the best model."""
    from gaudi_bert.tasks.model import BertForTask
    from gaudi_bert.training.evaluate_task import TaskEvaluator
    from gaudi_bert.training.loop import Progress, TrainingLoop
    from gaudi_bert.training.resume import resume_run, share_state

    settings = job.plan.settings
    compiled = compiles_kernels(job.out / "checkpoints", communicator, device, reporter)
    model = BertForTask(
        job.start.config, job.task, seed=settings.seed, compute_dtype=device.compute_dtype, compiled=compiled
    )
    evaluator = None
    if job.evaluation is not None:
        evaluator = TaskEvaluator(
            model,
            job.evaluation,
            communicator,
            batch_packs=job.asked.micro_batch_packs,
            seed=settings.seed,
            best_metric=job.best_metric,
        )
    run = _training_run(job, communicator, reporter, model, evaluator, compiled)
    model.load_values(job.start.variables)
    progress = Progress()
    if communicator.is_first:
        progress = resume_run(run.checkpoints, model, run.optimizer, lambda: job.data.packing.packs, reporter.say)
    progress = share_state(progress, model, run.optimizer, communicator)
    outcome = TrainingLoop(run, progress).run()
    return _finish(job, communicator, model, evaluator, outcome.progress.update)


def _training_run(
    job: FineTuneJob,
    communicator: Communicator,
    reporter: Reporter,
    model: Any,
    evaluator: TaskEvaluator | None,
    compiled: bool,
) -> TrainingRun:
    from gaudi_bert.training.input.task_data import task_batches
    from gaudi_bert.training.loop import TrainingRun
    from gaudi_bert.training.objective import TaskObjective
    from gaudi_bert.training.optimizers import Optimizer

    settings = job.plan.settings

    def batches(order: TrainingOrder) -> Iterator[Batch]:
        return task_batches(job.data, job.task, settings.micro_batch_packs, job.asked.epochs, order)

    def evaluated(update: int, evaluation: Evaluation) -> None:
        if communicator.is_first:
            _keep_best(job, model, update, evaluation.as_json())

    return TrainingRun(
        plan=job.plan,
        model=model,
        optimizer=Optimizer(model.variables_by_name, settings, compiled=compiled),
        communicator=communicator,
        objective=TaskObjective(job.task),
        batches=batches,
        evaluator=evaluator,
        folder=job.out,
        kept_settings={
            "model": job.start.config.to_json(),
            "training": {name: getattr(job.asked, name) for name in LoopSettings.model_fields},
            COMPILED_KEY: compiled,
        },
        reporter=reporter,
        evaluated=evaluated,
    )


def _keep_best(job: FineTuneJob, model: Any, update: int, figures: dict[str, float]) -> None:
    """Keep the weights where no evaluation before was as good. The weights come first, so best.json never lies."""
    from gaudi_bert.training.checkpoint import Checkpoint, write_checkpoint

    path = job.out / BEST_NAME
    before = read_best(path)
    sign = -1.0 if job.best_metric in job.task.lower_is_better else 1.0
    is_better = before is None or sign * figures[job.best_metric] > sign * before.metrics[job.best_metric]
    if is_better and not math.isnan(figures[job.best_metric]):
        variables = {name: variable.numpy() for name, variable in model.variables_by_name.items()}
        settings = {"model": job.start.config.to_json()}
        written = write_checkpoint(path.parent, Checkpoint(update, variables, settings=settings))
        write_best(path, BestCheckpoint(update=update, metric=job.best_metric, metrics=figures))
        for other in path.parent.glob("update-*.safetensors"):
            if other != written:
                other.unlink()


def _finish(
    job: FineTuneJob, communicator: Communicator, model: Any, evaluator: TaskEvaluator | None, update: int
) -> FineTuning:
    """Take the best weights, evaluate them once more, and write the model and its answers."""
    from gaudi_bert.training.checkpoint import find_checkpoint, read_checkpoint
    from gaudi_bert.training.weights.task_models import write_task_folder

    best = read_best(job.out / BEST_NAME) if communicator.is_first else None
    if best is not None:
        update = best.update
        model.load_values(read_checkpoint(find_checkpoint(job.out / "best")).variables)
    communicator.broadcast(list(model.variables_by_name.values()))
    evaluation = evaluator.run() if evaluator is not None else None
    packing = job.data.packing
    result = FineTuning(
        task=job.task.name,
        model=job.start.weights.path.name,
        labels=job.task.labels,
        max_sequence_length=job.data.length,
        sequences=packing.sequences,
        packs=packing.packs,
        lower_bound=packing.lower_bound,
        packing_factor=packing.packing_factor,
        depth=packing.depth_used,
        algorithm=packing.algorithm_used,
        epochs=job.asked.epochs,
        updates=job.plan.settings.updates,
        best_metric=job.best_metric if evaluation is not None else None,
        best_update=update,
        evaluated_rows=evaluation.rows if evaluation is not None else 0,
        metrics=dict(evaluation.figures) if evaluation is not None else {},
        baseline=job.task.baseline(job.data.sequences, job.evaluation.sequences) if job.evaluation is not None else {},
    )
    if communicator.is_first:
        variables = {name: variable.numpy() for name, variable in model.variables_by_name.items()}
        write_task_folder(job.out, job.start.config, job.task, variables, job.tokenizer, job.data.length)
        if job.evaluation is not None and evaluation is not None and evaluation.logits is not None:
            answers = job.task.answers(evaluation.logits, job.evaluation.sequences, job.evaluation.rows)
            with atomic_file(job.out / PREDICTIONS_NAME) as handle:
                for answer in answers:
                    handle.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
    return result
