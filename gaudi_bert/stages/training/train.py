"""Stage train: packed (or unpacked) records to checkpoints, metrics and TensorBoard logs in one folder.

The folder holds `settings.yaml` (the pipeline's settings, to be read and used again), `settings.json` (what the run is a
function of), `checkpoints/`, `metrics.jsonl`, `tensorboard/`, `tensorflow.log` (TensorFlow's and XLA's own lines), and,
written last, `training.json` (how the run ended).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gaudi_bert.artefacts.names import TRAINING_NAME
from gaudi_bert.artefacts.store.mirror import mirror
from gaudi_bert.artefacts.store.workplace import workplace
from gaudi_bert.artefacts.training import LossFigures, TrainingResult, read_training, write_training
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import exclusive_lock
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PipelineSettings
from gaudi_bert.stages.training.model_process import COMPILED_KEY, compiles_kernels, native_lines_in, threads_of
from gaudi_bert.stages.training.model_results import TrainDryRun, TrainResult
from gaudi_bert.stages.training.stored_inputs import weights_here
from gaudi_bert.stages.training.stored_run import StoredRun
from gaudi_bert.stages.training.train_folder import is_trained, prepare_folder
from gaudi_bert.stages.training.train_job import TrainingJob, describe_job, plan_job

if TYPE_CHECKING:
    from gaudi_bert.training.device import Device
    from gaudi_bert.training.input.batches import Batch, TrainingOrder
    from gaudi_bert.training.input.source import DataSource
    from gaudi_bert.training.logs.mlperf import RunEvents
    from gaudi_bert.training.loop import Outcome, TrainingRun
    from gaudi_bert.training.run_plan import RunPlan

__all__ = ["train"]


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
) -> TrainResult | TrainDryRun | None:
    """Train a model.

    Args:
        settings: `model` and `training` are used.
        data: a packed folder, or unpacked records.
        evaluation_data: held-out data, packed or not; None for none.
        out: the folder of the run.
        reporter: where progress goes.
        resume: go on also where the run in `out` has fewer updates. (A run of the same settings goes on in any case.)
        overwrite: remove the run in `out`, whatever it is, and start anew.
        dry_run: say what the run would be, write nothing.
        on_the_fly: the plan.json by which `data`, unpacked records, is packed while training.

    Returns:
        How the run ended, or what it would be; None in all processes but the first.

    Raises:
        InputError: data and model do not fit, or `out` holds another run.
        FailedError: a loss is not finite, or a file cannot be written.
        StoppedError: a signal asked for it; the same call goes on.
    """
    from gaudi_bert.training.device import open_device
    from gaudi_bert.training.distributed.connect import connect

    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other; give the one you mean")
    communicator = connect(settings.training)
    reporter = reporter if communicator.is_first else Reporter(quiet=True)
    asked, store = settings.training, settings.store
    read = (data, evaluation_data, on_the_fly, asked.init_checkpoint)
    with mirror(store, read) as copies, workplace(Path(out), store) as place:
        job = plan_job(settings, data, evaluation_data, place.folder, on_the_fly, communicator, dry_run, copies)
        for line in describe_job(job, dry_run):
            reporter.say(line)
        if dry_run:
            return TrainDryRun(job.plan) if communicator.is_first else None
        if asked.init_checkpoint is not None and communicator.is_first:
            initial = asked.model_copy(update={"init_checkpoint": str(weights_here(asked.init_checkpoint, copies))})
            job = replace(job, plan=replace(job.plan, settings=initial))
        device = open_device(
            asked.device, asked.precision, threads_of(asked.threads, communicator.local_size), settings.gaudi
        )
        with communicator.watched(asked) as watched:
            stored = StoredRun(place, asked.keep_checkpoints, communicator.is_first)
            return _run(replace(job, communicator=watched), stored, device, reporter, resume, overwrite)


def _run(
    job: TrainingJob, stored: StoredRun, device: Device, reporter: Reporter, resume: bool, overwrite: bool
) -> TrainResult | None:
    """Train where there is anything to do; only the first process writes files."""
    first = job.communicator.is_first
    stored.begin(overwrite)
    if job.communicator.any_true(first and not overwrite and is_trained(job)):
        return _found(job, reporter)  # without a lock, so that the folder may be read-only
    with exclusive_lock(job.out, str(job.out)) if first else nullcontext():
        if job.communicator.any_true(first and prepare_folder(job, reporter, resume=resume, overwrite=overwrite)):
            return _found(job, reporter)
        stored.has_begun()
        others = f", {job.communicator.size} processes" if job.communicator.size > 1 else ""
        reporter.say(f"train: on {device.description}{others}")
        for note in device.notes:
            reporter.say(note)
        with native_lines_in(job.out, job.communicator.rank):
            run = replace(_set_up(job, device, reporter), saved=stored.saved)
            measures = run.plan.settings.measure_speedup and job.source.is_packed
            realized_speedup = _measure_speedup(run, job.source) if measures else None
            result = _result(_train(run, job.source), job.plan, realized_speedup)
        if first:
            write_training(job.out / TRAINING_NAME, result)
            stored.finish()
    return TrainResult(result) if first else None


def _found(job: TrainingJob, reporter: Reporter) -> TrainResult | None:
    reporter.say(f"{job.out}: already trained with these settings, nothing to do")
    return TrainResult(read_training(job.out / TRAINING_NAME), skipped=True) if job.communicator.is_first else None


def _set_up(job: TrainingJob, device: Device, reporter: Reporter) -> TrainingRun:
    """Make the model and all that works on it; the device is open."""
    from gaudi_bert.model.bert import BertForPretraining
    from gaudi_bert.training.evaluate import Evaluator
    from gaudi_bert.training.input.batches import training_batches
    from gaudi_bert.training.input.value_limits import ValueLimits
    from gaudi_bert.training.loop import TrainingRun
    from gaudi_bert.training.loss_denominators import denominators_for
    from gaudi_bert.training.objective import PretrainingObjective
    from gaudi_bert.training.optimizers import Optimizer

    events = _open_events(job)
    settings = job.plan.settings
    compiled = compiles_kernels(job.out / "checkpoints", job.communicator, device, reporter)
    model = BertForPretraining(job.config, seed=settings.seed, compute_dtype=device.compute_dtype, compiled=compiled)
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
    limits = ValueLimits.of(job.source, job.config)

    def batches(order: TrainingOrder) -> Iterator[Batch]:
        return training_batches(job.source, limits, settings.micro_batch_packs, order)

    return TrainingRun(
        plan=job.plan,
        model=model,
        optimizer=Optimizer(model.variables_by_name, settings, compiled=compiled),
        communicator=job.communicator,
        objective=PretrainingObjective(settings.loss),
        batches=batches,
        evaluator=evaluator,
        folder=job.out,
        kept_settings={
            "model": job.config.to_json(),
            "training": job.settings.training.model_dump(mode="json", exclude={"init_checkpoint"}),
            "data": asdict(job.source.schema),
            COMPILED_KEY: compiled,
        },
        reporter=reporter,
        events=events,
        denominators=denominators_for(settings, job.source),
    )


def _open_events(job: TrainingJob) -> RunEvents:
    """MLPerf's log, where the settings ask for it."""
    from gaudi_bert.training.logs.mlperf import MlperfLog, open_events

    events = open_events(job.out / "mlperf.log", job.settings.mlperf, job.communicator.is_first)
    if isinstance(events, MlperfLog):
        events.describe(job.plan, job.source, job.config)
    return events


def _measure_speedup(run: TrainingRun, source: DataSource) -> float:
    """How many times as many sequences packing trains on per second, measured on the first micro-batch."""
    from gaudi_bert.model.bert import BertForPretraining
    from gaudi_bert.training.input.batches import TrainingOrder
    from gaudi_bert.training.speedup import measure_speedup

    run.communicator.note("measuring the speed-up", slow=True)
    settings = run.plan.settings
    order = TrainingOrder(settings.seed, settings.shuffle_packs, run.communicator.rank, run.communicator.size)
    batch = next(run.batches(order))
    speedup = measure_speedup(
        cast(BertForPretraining, run.model), settings.loss, batch, source.schema.max_predictions, source.packing_factor
    )
    run.reporter.say(f"train: {speedup.line()}")
    return speedup.realized


def _train(run: TrainingRun, source: DataSource) -> Outcome:
    """Start or resume, and train to the end."""
    from gaudi_bert.model.bert import BertForPretraining
    from gaudi_bert.training.loop import Progress, TrainingLoop
    from gaudi_bert.training.resume import resume_run, share_state
    from gaudi_bert.training.weights.sources import load_weights

    progress = Progress()
    if run.communicator.is_first:
        progress = resume_run(run.checkpoints, run.model, run.optimizer, source.epoch_packs, run.reporter.say)
        initial = run.plan.settings.init_checkpoint
        if progress.update == 0 and initial is not None:
            weights = load_weights(initial, cast(BertForPretraining, run.model))
            lacking = f", but for {len(weights.missing)} variables that it lacks" if weights.missing else ""
            run.reporter.say(f"train: starts from the weights of {weights.path} ({weights.kind}){lacking}")
    progress = share_state(progress, run.model, run.optimizer, run.communicator)
    return TrainingLoop(run, progress).run()


def _result(outcome: Outcome, plan: RunPlan, realized_speedup: float | None) -> TrainingResult:
    from gaudi_bert.training.evaluate import Evaluation

    report, evaluation = outcome.report, cast(Evaluation | None, outcome.evaluation)
    return TrainingResult(
        updates=outcome.progress.update,
        sequences=outcome.progress.sequences,
        tokens=outcome.progress.tokens,
        processes=plan.processes,
        sequences_per_second=report.sequences_per_second if report is not None else None,
        tokens_per_second=report.tokens_per_second if report is not None else None,
        slots_per_second=report.slots_per_second if report is not None else None,
        packing_factor=plan.packing_factor,
        sequences_per_update=plan.sequences_per_update,
        reached_target=outcome.reached_target,
        training=LossFigures.model_validate(report.figures.as_json()) if report is not None else None,
        evaluation=evaluation.as_figures() if evaluation is not None else None,
        realized_speedup=realized_speedup,
    )
