"""Stage train: packed (or unpacked) records to checkpoints, metrics and TensorBoard logs in one folder.

The folder holds `settings.yaml` (the pipeline's settings, to be read and used again), `settings.json` (what the run is a
function of), `checkpoints/`, `metrics.jsonl`, `tensorboard/`, and, written last, `training.json` (how the run ended).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import exclusive_lock, read_json, write_json, write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PipelineSettings
from gaudi_bert.stages.artefact import Signature, begin_artefact, remove_artefact, settings_path

if TYPE_CHECKING:
    from gaudi_bert.model.config import BertConfig
    from gaudi_bert.training.device import Device
    from gaudi_bert.training.distributed import Communicator
    from gaudi_bert.training.hyperparameters import BatchPlan
    from gaudi_bert.training.loop import Outcome, TrainingRun
    from gaudi_bert.training.source import DataSource

__all__ = ["model_config", "train"]

BERT_VOCABULARY = 30522

# Settings that change nothing of the weights: a run may be resumed with others.
FREE_SETTINGS = {
    "device",
    "threads",
    "save_every_updates",
    "keep_checkpoints",
    "evaluate_every_updates",
    "evaluate_packs",
    "log_every_updates",
}


@dataclass(frozen=True)
class _Job:
    """What is known of a run before anything is built."""

    settings: PipelineSettings
    source: DataSource
    evaluation_source: DataSource | None
    config: BertConfig
    communicator: Communicator
    plan: BatchPlan
    out: Path


def train(
    settings: PipelineSettings,
    data: Path,
    evaluation_data: Path | None,
    out: Path,
    *,
    reporter: Reporter,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    on_the_fly: Path | None = None,
) -> dict[str, Any]:
    """Train a model.

    Args:
        settings: `model` and `training` are used.
        data: a packed folder, or unpacked records.
        evaluation_data: held-out data, packed or not; None for none.
        out: the folder of the run.
        reporter: where progress goes.
        resume: go on from the newest whole checkpoint in `out`, if there is one.
        overwrite: remove a run of other settings, or one that could be resumed.
        dry_run: say what the run would be, write nothing.
        on_the_fly: the plan.json by which `data`, unpacked records, is packed while training.

    Returns:
        How the run ended, as in `training.json`; with `skipped` true where it was finished already.

    Raises:
        InputError: data and model do not fit, or `out` holds another run, or one that was stopped and `resume` is False.
        FailedError: a loss is not finite, or a file cannot be written.
        StoppedError: a signal asked for it; the run can be resumed.
    """
    from gaudi_bert.training.device import open_device

    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other; give the one you mean")
    job = _plan_job(settings, data, evaluation_data, Path(out), on_the_fly)
    first = job.communicator.is_first
    reporter = reporter if first else Reporter(quiet=True)
    for line in _describe(job):
        reporter.say(line)
    if dry_run:
        return {"dry_run": True, **_plan_as_json(job)}
    asked = settings.training
    device = open_device(asked.device, asked.precision, asked.threads, settings.gaudi)
    # Files are the business of the first process alone; the others hear of what it found.
    with exclusive_lock(job.out, str(out)) if first else nullcontext():
        if job.communicator.any_true(first and _is_finished(job, resume, overwrite)):
            reporter.say(f"{out}: already trained with these settings, nothing to do")
            return {**read_json(job.out / "training.json"), "skipped": True}
        reporter.say(f"train: on {device.description}")
        for note in device.notes:
            reporter.say(note)
        summary = _summary(_train(_set_up(job, device, reporter)), job.plan)
        if first:
            write_json(job.out / "training.json", summary)
    return summary


def _plan_job(
    settings: PipelineSettings, data: Path, evaluation_data: Path | None, out: Path, on_the_fly: Path | None
) -> _Job:
    """Open the data, settle the model and the batches; refuse what does not fit."""
    from gaudi_bert.stages.on_the_fly import on_the_fly_source
    from gaudi_bert.training.distributed import connect
    from gaudi_bert.training.hyperparameters import plan_batches
    from gaudi_bert.training.source import check_fits, open_source

    source = open_source(data) if on_the_fly is None else on_the_fly_source(data, on_the_fly)
    evaluation_source = open_source(evaluation_data) if evaluation_data is not None else None
    config = model_config(settings, source)
    for each in (source, evaluation_source):
        if each is not None:
            check_fits(each, config)
    communicator = connect()
    plan = plan_batches(settings.training, source.packing_factor, communicator.size)
    return _Job(settings, source, evaluation_source, config, communicator, plan, out)


def model_config(settings: PipelineSettings, source: DataSource) -> BertConfig:
    """The model's configuration: what the settings leave open comes from the data."""
    from gaudi_bert.model.config import BertConfig

    values = settings.model.model_dump()
    if values["vocab_size"] is None:
        values["vocab_size"] = source.vocabulary_size or BERT_VOCABULARY
    if values["max_position_embeddings"] is None:
        values["max_position_embeddings"] = source.schema.max_sequence_length
    return BertConfig(**values)


def _describe(job: _Job) -> list[str]:
    """The run as lines for people."""
    settings, source, config, plan = job.settings.training, job.source, job.config, job.plan
    kind = f"packed, depth {source.depth}" if source.is_packed else "not packed"
    vocabulary = f"vocabulary {config.vocab_size:,}"
    if source.vocabulary_size is None:
        vocabulary += " (the data does not record its own)"
    packs = plan.packs_per_update * settings.updates
    sequences = packs * plan.packing_factor
    epochs = f" ({packs / source.packs:,.1f} times the data)" if source.packs else ""
    return [
        f"train: {source.path} ({kind}, length {source.schema.max_sequence_length}, {vocabulary})",
        f"train: {config.num_hidden_layers} layers, hidden size {config.hidden_size}; {settings.optimizer}, learning rate "
        f"{settings.learning_rate:g}, {settings.warmup_updates:,} of {settings.updates:,} updates are warm-up",
        *(f"train: {line}" for line in plan.lines()),
        f"train: {settings.updates:,} updates are about {sequences:,.0f} sequences{epochs}",
    ]


def _plan_as_json(job: _Job) -> dict[str, Any]:
    plan = job.plan
    return {
        "updates": job.settings.training.updates,
        "accumulation_steps": plan.accumulation_steps,
        "micro_batch_packs": plan.micro_batch_packs,
        "workers": plan.workers,
        "packing_factor": plan.packing_factor,
        "packs_per_update": plan.packs_per_update,
        "sequences_per_update": plan.sequences_per_update,
        "sequences_asked_per_update": plan.asked_sequences,
    }


def _is_finished(job: _Job, resume: bool, overwrite: bool) -> bool:
    """Whether the run is there already; otherwise its folder is made ready."""
    from gaudi_bert.training.checkpoint import checkpoint_files

    out, final, signature = job.out, job.out / "training.json", _signature(job)
    finished = begin_artefact(out, final, signature, overwrite=overwrite)
    if finished and not overwrite:
        return True
    if finished or (checkpoint_files(out / "checkpoints") and not resume):
        if not overwrite:
            raise InputError(f"{out}: holds a run that was stopped; pass --resume to go on, or --overwrite to start anew")
        remove_artefact(out, settings_path(out))
        begin_artefact(out, final, signature)
    write_text(out / "settings.yaml", yaml.safe_dump(job.settings.model_dump(mode="json"), sort_keys=False))
    return False


def _signature(job: _Job) -> Signature:
    """What the weights are a function of."""
    kept = job.settings.training.model_dump(exclude=FREE_SETTINGS)
    # The path of the initial checkpoint is the user's, not the artefact's; its name is enough to notice another one.
    kept["init_checkpoint"] = Path(kept["init_checkpoint"]).name if kept["init_checkpoint"] else None
    evaluation = job.evaluation_source.identity if job.evaluation_source is not None else None
    inputs = {"data": job.source.identity, "evaluation_data": evaluation}
    return Signature("train", {"model": job.config.to_json(), "training": kept}, inputs)


def _set_up(job: _Job, device: Device, reporter: Reporter) -> TrainingRun:
    """Make the model and all that works on it; the device is open."""
    from gaudi_bert.model.bert import BertForPretraining
    from gaudi_bert.training.evaluate import Evaluator
    from gaudi_bert.training.loop import TrainingRun
    from gaudi_bert.training.optimizers import Optimizer

    settings = job.settings.training
    model = BertForPretraining(job.config, seed=settings.seed, compute_dtype=device.compute_dtype)
    evaluator = None
    if job.evaluation_source is not None:
        evaluator = Evaluator(
            model,
            job.evaluation_source,
            job.communicator,
            loss=settings.loss,
            batch_packs=settings.micro_batch_packs,
            take_packs=settings.evaluate_packs,
        )
    return TrainingRun(
        settings=settings,
        plan=job.plan,
        model=model,
        optimizer=Optimizer(model.variables_by_name, settings),
        communicator=job.communicator,
        source=job.source,
        evaluator=evaluator,
        folder=job.out,
        kept_settings={
            "model": job.config.to_json(),
            "training": settings.model_dump(mode="json", exclude={"init_checkpoint"}),
        },
        reporter=reporter,
    )


def _train(run: TrainingRun) -> Outcome:
    """Start or resume, and train to the end."""
    from gaudi_bert.training.loop import Progress, TrainingLoop
    from gaudi_bert.training.resume import load_weights, resume_run, share_state

    progress = Progress()
    if run.communicator.is_first:
        progress = resume_run(run.checkpoints, run.model, run.optimizer, run.communicator.size, run.reporter.say)
        if progress.update == 0 and run.settings.init_checkpoint is not None:
            load_weights(run.settings.init_checkpoint, run.model)
            run.reporter.say(f"train: starts from the weights of {run.settings.init_checkpoint}")
    progress = share_state(progress, run.model, run.optimizer, run.communicator)
    return TrainingLoop(run, progress).run()


def _summary(outcome: Outcome, plan: BatchPlan) -> dict[str, Any]:
    report, evaluation = outcome.report, outcome.evaluation
    return {
        "updates": outcome.progress.update,
        "sequences": outcome.progress.sequences,
        "tokens": outcome.progress.tokens,
        "packing_factor": plan.packing_factor,
        "sequences_per_update": plan.sequences_per_update,
        "training": report.figures.as_json() if report is not None else None,
        "evaluation": evaluation.as_json() if evaluation is not None else None,
        "sequences_per_second": report.sequences_per_second if report is not None else None,
        "tokens_per_second": report.tokens_per_second if report is not None else None,
    }
