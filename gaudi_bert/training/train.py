"""Stage train: packed (or unpacked) records to checkpoints, metrics and TensorBoard logs in one folder.

`run.py` says what the folder holds. Its last file is `training.json`: how the run ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.results import Made
from gaudi_bert.artefacts.store.mirrored_folder import mirrored, shown
from gaudi_bert.artefacts.training import EvaluationFigures, LossFigures, TrainingResult
from gaudi_bert.artefacts.work_folder import TRAINING_NAME
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter, count_of
from gaudi_bert.config.models import name_of_sizes
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.sections import ModelSettings, TrainingSettings
from gaudi_bert.config.values import free_settings
from gaudi_bert.model.bert import BertForPretraining
from gaudi_bert.model.config import BertConfig, parameter_count
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.distributed.horovod import connect
from gaudi_bert.training.evaluator import PretrainingEvaluator
from gaudi_bert.training.input.batches import Batch, TrainingOrder, training_batches, value_limits
from gaudi_bert.training.input.source import DataSource, check_fits
from gaudi_bert.training.loop import Outcome, TrainingRun
from gaudi_bert.training.mlperf import MlperfLog, open_events
from gaudi_bert.training.objective import PretrainingObjective, denominators_for
from gaudi_bert.training.results import DryRun
from gaudi_bert.training.run import COMPILED_KEY, RunFolder, Session, carry_out, processes_of, train_to_the_end
from gaudi_bert.training.run_plan import RunPlan
from gaudi_bert.training.stored_inputs import leave_tokenizer, local_weights, open_data
from gaudi_bert.training.tensorflow.optimizers import Optimizer
from gaudi_bert.training.tensorflow.speedup import measure_speedup
from gaudi_bert.training.weights.sources import load_weights

BERT_VOCABULARY = 30522
_DEFAULT_MODEL = "the default, for first tries: --model bert-base, bert-large or a config.json chooses another"
_SMALL_MODELS_RATE = ", the default for small models: BERT was published with 1e-4 (--set training.learning_rate=1e-4)"


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
) -> Made[TrainingResult] | DryRun:
    """Train a model.

    Args:
        settings: `model` and `training` are used.
        data: a packed folder, or unpacked records.
        evaluation_data: held-out data, packed or not; None for none.
        out: the folder of the run.
        resume: continue also where the run in `out` has fewer updates. (A run of the same settings continues in any case.)
        overwrite: remove the run in `out`, whatever it is, and start anew.
        dry_run: say what the run would be, write nothing.

    Returns:
        How the run ended, or what it would be: the same in every process.
    """
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other; give the one you mean")
    communicator = connect(settings.training)
    reporter = reporter if communicator.is_first else Reporter(quiet=True)
    initial, store = settings.training.init_checkpoint, settings.store
    with (
        open_data(data, store) as source,
        nullcontext() if evaluation_data is None else open_data(evaluation_data, store) as evaluation_source,
        mirrored(Path(out), store) as folder,
        ExitStack() as weights,
    ):
        job = _plan_job(settings, source, evaluation_source, communicator, dry_run)
        for line in _describe_job(job, dry_run):
            reporter.say(line)
        if dry_run:
            return DryRun(job.plan)
        if initial is not None and communicator.is_first:
            job = replace(job, initial=weights.enter_context(local_weights(initial, store)))
        run = RunFolder(
            stage="train",
            path=folder,
            result=folder / TRAINING_NAME,
            content=TrainingResult,
            signature=_signature(job),
            settings=settings,
            section=settings.training,
        )
        return carry_out(
            run,
            communicator,
            reporter,
            lambda session: _train(job, data, folder, session, reporter),
            resume=resume,
            overwrite=overwrite,
        )


@dataclass(frozen=True)
class _TrainingJob:
    """What is known of a run before anything is built; `initial` are weights to start from, in the first process."""

    settings: PipelineSettings
    source: DataSource
    evaluation_source: DataSource | None
    config: BertConfig
    plan: RunPlan
    initial: Path | None = None


def _plan_job(
    settings: PipelineSettings,
    source: DataSource,
    evaluation_source: DataSource | None,
    communicator: Communicator,
    dry_run: bool,
) -> _TrainingJob:
    """Decide on the model and the batches; refuse what does not fit."""
    if evaluation_source is None and settings.training.target_masked_lm_accuracy is not None:
        raise InputError("training.target_masked_lm_accuracy: there is no evaluation data to reach it on; give some")
    config = model_config(settings.model, source.vocabulary_size, source.schema.max_sequence_length)
    for each in (source, evaluation_source):
        if each is not None:
            check_fits(each, config)
    processes = processes_of(settings, communicator, dry_run)
    if source.cache is not None:
        source.cache.check_room(source.streams, processes)
    plan = RunPlan(
        settings.training,
        source.packing_factor,
        processes=processes,
        processes_per_worker=settings.resources.processes_per_worker,
        slots_per_pack=source.schema.max_sequence_length,
        packs=source.packs,
    )
    if plan.packs is None:  # nothing says it; whether they are enough for one update is soon known
        packs = source.count_packs(plan.packs_per_update)
        plan = replace(plan, packs=packs if packs < plan.packs_per_update else None)
    return _TrainingJob(settings, source, evaluation_source, config, plan)


def model_config(settings: ModelSettings, vocabulary_size: int | None, max_sequence_length: int) -> BertConfig:
    """The model's configuration: what the settings leave open comes from the data."""
    values = settings.model_dump()
    if values["vocab_size"] is None:
        values["vocab_size"] = vocabulary_size or BERT_VOCABULARY
    if values["max_position_embeddings"] is None:
        values["max_position_embeddings"] = max_sequence_length
    return BertConfig(**values)


def _describe_job(job: _TrainingJob, dry_run: bool) -> list[str]:
    """The run as lines for people; all of its figures before a dry run."""
    settings, source, config = job.plan.settings, job.source, job.config
    chosen, training = job.settings.model, job.settings.training
    asked = "as requested" if {"hidden_size", "num_hidden_layers"} & chosen.model_fields_set else _DEFAULT_MODEL
    kind = f"packed, depth {source.depth}" if source.is_packed else "not packed"
    vocabulary = f"vocabulary {config.vocab_size:,}"
    if source.vocabulary_size is None:
        vocabulary += " (the data does not record its own)"
    layers = count_of(config.num_hidden_layers, "layer")
    lines = [
        f"{name_of_sizes(chosen) or 'a BERT'}: {layers}, hidden size {config.hidden_size}, "
        f"{parameter_count(config) / 1e6:,.1f} million parameters; {asked}",
        f"{shown(source.path)} ({kind}, length {source.schema.max_sequence_length}, {vocabulary})",
        f"{settings.optimizer}, learning rate {settings.learning_rate:g}"
        + (_SMALL_MODELS_RATE if config.hidden_size >= 512 and "learning_rate" not in training.model_fields_set else ""),
        *job.plan.short_lines(),
        *(job.plan.table() if dry_run else []),
    ]
    return [f"train: {line}" for line in lines]


def _signature(job: _TrainingJob) -> Signature:
    """What the weights depend on."""
    section = job.settings.training.model_dump(exclude=free_settings(TrainingSettings))
    # The path of the initial checkpoint is the user's, not the artefact's; its name is enough to notice another one.
    section["init_checkpoint"] = Path(section["init_checkpoint"]).name if section["init_checkpoint"] else None
    if section["decay_from"] == "warmup":
        del section["decay_from"]  # a run of the edition that had no such setting can be resumed
    evaluation = job.evaluation_source.identity if job.evaluation_source is not None else None
    inputs = {"data": job.source.identity, "evaluation_data": evaluation}
    return Signature("train", {"model": job.config.to_json(), "training": section}, inputs)


def _train(job: _TrainingJob, data: Path, folder: Path, session: Session, reporter: Reporter) -> TrainingResult:
    if session.communicator.is_first:
        all_settings, positions = job.settings, job.config.max_position_embeddings
        leave_tokenizer(data, folder, all_settings.prepare.lower_case, positions, all_settings.store)
    run, settings = _set_up(job, folder, session, reporter), job.plan.settings
    model = cast(BertForPretraining, run.model)
    measures = settings.measure_speedup and job.source.is_packed
    # A card works by itself: only the clock knows how long. On a CPU, the work of other processes is not counted.
    clock = time.process_time if session.device.kind == "cpu" else time.perf_counter
    realized_speedup = _measure_speedup(run, model, job.source, clock) if measures else None

    def start() -> None:
        if job.initial is not None:
            weights = load_weights(job.initial, model)
            lacking = f", but for {len(weights.missing)} variables that it lacks" if weights.missing else ""
            reporter.say(f"train: starts from the weights of {weights.path} ({weights.kind}){lacking}")

    return _result(train_to_the_end(run, start), job.plan, realized_speedup)


def _set_up(job: _TrainingJob, folder: Path, session: Session, reporter: Reporter) -> TrainingRun:
    source, settings, communicator = job.source, job.plan.settings, session.communicator
    events = open_events(folder / "mlperf.log", job.settings.mlperf, communicator.is_first)
    if isinstance(events, MlperfLog):
        events.describe(job.plan, source, job.config)
    dtype, compiled = session.device.compute_dtype, session.compiled
    model = BertForPretraining(job.config, seed=settings.seed, compute_dtype=dtype, compiled=compiled)
    evaluator = None
    if job.evaluation_source is not None:
        evaluator = PretrainingEvaluator(
            model,
            job.evaluation_source,
            communicator,
            loss=settings.loss,
            batch_packs=settings.micro_batch_packs,
            take_packs=settings.evaluate_packs,
        )
    limits = value_limits(source, job.config)

    def batches(order: TrainingOrder) -> Iterator[Batch]:
        return training_batches(source, limits, settings.micro_batch_packs, order)

    return TrainingRun(
        plan=job.plan,
        model=model,
        optimizer=Optimizer(model.variables_by_name, settings, compiled=compiled),
        communicator=communicator,
        objective=PretrainingObjective(settings.loss),
        batches=batches,
        evaluator=evaluator,
        folder=folder,
        stored_settings={
            "model": job.config.to_json(),
            "training": job.settings.training.model_dump(mode="json", exclude={"init_checkpoint"}),
            "data": asdict(source.schema),
            COMPILED_KEY: compiled,
        },
        reporter=reporter,
        events=events,
        denominators=denominators_for(settings, source),
    )


def _measure_speedup(
    run: TrainingRun, model: BertForPretraining, source: DataSource, clock: Callable[[], float]
) -> float | None:
    """How many times as many sequences packing trains on per second, measured on the first micro-batch."""
    run.communicator.note("measuring the speed-up", slow=True)
    run.reporter.say("train: measuring how much faster packs are than padded rows")
    settings = run.plan.settings
    order = TrainingOrder(settings.seed, settings.shuffle_packs, run.communicator.rank, run.communicator.size)
    batch = next(run.batches(order))
    speedup = measure_speedup(model, settings.loss, batch, source.schema.max_predictions, source.packing_factor, clock)
    run.reporter.say(f"train: {speedup.line()}")
    return speedup.realized


def _result(outcome: Outcome, plan: RunPlan, realized_speedup: float | None) -> TrainingResult:
    report, evaluation = outcome.report, cast(EvaluationFigures | None, outcome.evaluation)
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
        training=cast(LossFigures, report.figures) if report is not None else None,
        evaluation=evaluation,
        realized_speedup=realized_speedup,
    )
