"""Stage train: packed (or unpacked) records to checkpoints, metrics and TensorBoard logs in one folder.

`run.py` lists what the folder holds. Its last file is `training.json`: how the run ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.store.mirrored_folder import mirrored, shown_path
from gaudi_bert.artefacts.training import EvaluationFigures, LossFigures, TrainingResult
from gaudi_bert.artefacts.work_folder import TRAINING_NAME
from gaudi_bert.common.arrays import BatchArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter, count_of
from gaudi_bert.config.models import name_of_sizes
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.sections import ModelSettings, TrainingSettings
from gaudi_bert.config.values import free_settings
from gaudi_bert.engines.choose import load_engine
from gaudi_bert.engines.protocol import Communicator, Model, ModelSpec
from gaudi_bert.model.config import BertConfig, parameter_count
from gaudi_bert.model.heads import PretrainingHead
from gaudi_bert.model.sequences import join_sequences, split_packs
from gaudi_bert.training.evaluate import PretrainingEvaluator
from gaudi_bert.training.input.batches import Batch, TrainingOrder, training_batches, value_limits
from gaudi_bert.training.input.source import DataSource, check_fits
from gaudi_bert.training.loop import TrainingLoop
from gaudi_bert.training.mlperf import open_log
from gaudi_bert.training.objective import PretrainingObjective, denominators_for
from gaudi_bert.training.results import DryRun
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
from gaudi_bert.training.run_plan import RunPlan
from gaudi_bert.training.stored_inputs import copy_tokenizer, local_weights, open_data
from gaudi_bert.training.weights import load_weights

_BERT_VOCABULARY = 30522
_DEFAULT_MODEL = "the default, for first tries: --model bert-base, bert-large or a config.json chooses another"
_SMALL_MODELS_RATE = ", the default for small models: BERT was published with 1e-4 (--set training.learning_rate=1e-4)"

_Context = RunContext[TrainingResult]


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
) -> StageOutput[TrainingResult] | DryRun:
    """Train a model on packed or unpacked records, in the folder `out`; the same result in every process.

    A run of the same settings that was stopped continues; with `resume`, one of fewer updates does too. With `overwrite`,
    the run in `out` is removed, whatever it is. With `dry_run`, the plan of the run is printed, and nothing is written.
    """
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other; give the one you mean")
    store = settings.store
    with (
        mirrored(Path(out), store) as folder,
        open_data(data, store) as source,
        nullcontext() if evaluation_data is None else open_data(evaluation_data, store) as held_out,
    ):
        chosen = run_engine(settings.training, folder, is_bert=True, overwrite=overwrite)
        engine = load_engine(chosen.name)
        communicator = engine.connect(settings.training)
        reporter = reporter if communicator.is_first else Reporter(quiet=True)
        config, plan = _plan(settings, source, held_out, communicator, dry_run)
        for line in [chosen.line(), *_describe(settings, source, config, plan, dry_run)]:
            reporter.say(f"train: {line}")
        if dry_run:
            return DryRun(plan)
        with run_folder(
            folder / TRAINING_NAME,
            TrainingResult,
            _signature(settings, source, held_out, config),
            settings,
            settings.training,
            engine,
            communicator,
            reporter,
            resume=resume,
            overwrite=overwrite,
        ) as context:
            if context.stored is not None:
                return StageOutput(context.stored, skipped=True)
            if communicator.is_first:
                copy_tokenizer(data, folder, settings.prepare.lower_case, config.max_position_embeddings, store)
            events = open_log(folder / "mlperf.log", settings.mlperf, communicator.is_first, plan, source, config)
            spec = ModelSpec(config, PretrainingHead(settings.training.loss))
            model = engine.build(spec, context.device, seed=settings.training.seed, compiled=context.compiled)
            objective = PretrainingObjective(settings.training.loss)
            step = build_step(context, plan, model, objective, denominators_for(settings.training, source))
            evaluator = None if held_out is None else _build_evaluator(context, plan, held_out, model, config)
            speedup = _measure_speedup(context, plan, source, model, config)
            progress = restore(context, step, model, partial(_load_initial_weights, context, model, config, settings))
            batches = _open_batches(context, plan, source, config, progress.packs)
            stored_settings = {
                "model": config.to_json(),
                "training": settings.training.model_dump(mode="json", exclude={"init_checkpoint", *OF_THE_MACHINE}),
                "data": asdict(source.schema),
                COMPILED_KEY: context.compiled,
            }
            loop = TrainingLoop(context, plan, step, model, batches, progress, stored_settings, evaluator, events)
            loop.run()
            return StageOutput(context.finish(_result(loop, speedup)))


def _plan(
    settings: PipelineSettings,
    source: DataSource,
    held_out: DataSource | None,
    communicator: Communicator,
    dry_run: bool,
) -> tuple[BertConfig, RunPlan]:
    """Decide on the model and the batches; refuse what does not fit."""
    if held_out is None and settings.training.target_masked_lm_accuracy is not None:
        raise InputError("training.target_masked_lm_accuracy: needs evaluation data; pass --evaluation-data")
    config = model_config(settings.model, source.vocabulary_size, source.schema.max_sequence_length)
    for each in (source, held_out):
        if each is not None:
            check_fits(each, config)
    processes = processes_of(settings, communicator, dry_run)
    if source.cache is not None:
        stored = source.open_packs()
        source.cache.check_room(stored.streams, processes, stored.sets)
    plan = RunPlan(
        settings.training,
        source.packing_factor,
        processes=processes,
        processes_per_worker=settings.resources.processes_per_worker,
        slots_per_pack=source.schema.max_sequence_length,
        packs=source.packs,
        mean_tokens=source.mean_tokens,
    )
    if plan.packs is None:  # unpacked records do not state it; whether they are enough for one update is soon known
        packs = source.count_packs(plan.packs_per_update)
        plan = replace(plan, packs=packs if packs < plan.packs_per_update else None)
    return config, plan


def model_config(settings: ModelSettings, vocabulary_size: int | None, max_sequence_length: int) -> BertConfig:
    """The model's configuration: what the settings leave open comes from the data."""
    values = settings.model_dump()
    if values["vocab_size"] is None:
        values["vocab_size"] = vocabulary_size or _BERT_VOCABULARY
    if values["max_position_embeddings"] is None:
        values["max_position_embeddings"] = max_sequence_length
    return BertConfig(**values)


def _describe(settings: PipelineSettings, source: DataSource, config: BertConfig, plan: RunPlan, dry_run: bool) -> list[str]:
    """The run as lines for people; all of its figures before a dry run."""
    chosen, training = settings.model, plan.settings
    origin = "as requested" if {"hidden_size", "num_hidden_layers"} & chosen.model_fields_set else _DEFAULT_MODEL
    kind = f"packed, depth {source.depth}" if source.is_packed else "not packed"
    vocabulary = f"vocabulary {config.vocab_size:,}"
    if source.vocabulary_size is None:
        vocabulary += " (the data does not record its own)"
    has_default_rate = "learning_rate" not in settings.training.model_fields_set
    return [
        f"{name_of_sizes(chosen) or 'a BERT'}: {count_of(config.num_hidden_layers, 'layer')}, "
        f"hidden size {config.hidden_size}, {parameter_count(config) / 1e6:,.1f} million parameters; {origin}",
        f"{shown_path(source.path)} ({kind}, length {source.schema.max_sequence_length}, {vocabulary})",
        f"{training.optimizer}, learning rate {training.learning_rate:g}"
        + (_SMALL_MODELS_RATE if config.hidden_size >= 512 and has_default_rate else ""),
        *plan.short_lines(),
        *filter(None, [source.reading_cost(plan.processes)]),
        *(plan.table() if dry_run else []),
    ]


def _signature(settings: PipelineSettings, source: DataSource, held_out: DataSource | None, config: BertConfig) -> Signature:
    """What the weights depend on."""
    section = settings.training.model_dump(exclude=free_settings(TrainingSettings))
    # The path of the initial checkpoint is the user's, not the artefact's; its name is enough to notice another one.
    section["init_checkpoint"] = Path(section["init_checkpoint"]).name if section["init_checkpoint"] else None
    if section["decay_from"] == "warmup":
        del section["decay_from"]  # a run of the edition that had no such setting can be resumed
    inputs = {"data": source.identity, "evaluation_data": held_out.identity if held_out is not None else None}
    return Signature("train", {"model": config.to_json(), "training": section}, inputs)


def _build_evaluator(
    context: _Context, plan: RunPlan, held_out: DataSource, model: Model, config: BertConfig
) -> PretrainingEvaluator:
    return PretrainingEvaluator(
        model,
        config,
        held_out,
        context.communicator,
        batch_packs=plan.settings.micro_batch_packs,
        take_packs=plan.settings.evaluate_packs,
    )


def _open_batches(
    context: _Context, plan: RunPlan, source: DataSource, config: BertConfig, packs_done: int
) -> Iterator[Batch]:
    settings, communicator = plan.settings, context.communicator
    order = TrainingOrder(settings.seed, settings.shuffle_packs, communicator.rank, communicator.size, packs_done)
    return training_batches(source, value_limits(source, config), settings.micro_batch_packs, order)


def _measure_speedup(context: _Context, plan: RunPlan, source: DataSource, model: Model, config: BertConfig) -> float | None:
    """How many times as many sequences packing trains on per second, measured on the first micro-batch."""
    if not (plan.settings.measure_speedup and source.is_packed):
        return None
    context.communicator.note("measuring the speed-up", slow=True)
    context.reporter.say("train: measuring how much faster packs are than padded rows")
    batch = next(_open_batches(context, plan, source, config, 0))
    rows, length = batch["input_ids"].shape
    singles = [[placed.sequence] for placed in split_packs(batch)][:rows]
    unpacked = join_sequences(singles, length, source.schema.max_predictions, 1)
    # A card works by itself: only the clock knows how long. On a CPU, the work of other processes is not counted.
    clock = time.process_time if context.device.kind == "cpu" else time.perf_counter

    def seconds(inputs: BatchArrays) -> float:
        started = clock()
        model.work(inputs)
        return clock() - started

    pairs = [(seconds(batch), seconds(unpacked)) for _ in range(_PAIRS + 1)]
    speedup = Speedup(source.packing_factor, *zip(*pairs[1:], strict=True))  # the first pair builds the graphs
    context.reporter.say(f"train: {speedup.line()}")
    return speedup.realized


def _load_initial_weights(context: _Context, model: Model, config: BertConfig, settings: PipelineSettings) -> None:
    """Those that the settings name, if any."""
    initial = settings.training.init_checkpoint
    if initial is not None:
        with local_weights(initial, settings.store) as path:
            weights = load_weights(path, model, config)
        lacking = f", but for {len(weights.missing)} variables that it lacks" if weights.missing else ""
        context.reporter.say(f"train: starts from the weights of {weights.path} ({weights.kind}){lacking}")


def _result(loop: TrainingLoop, realized_speedup: float | None) -> TrainingResult:
    return TrainingResult(
        **loop.outcome(),
        training=cast(LossFigures, loop.report.figures) if loop.report is not None else None,
        evaluation=cast(EvaluationFigures | None, loop.evaluation),
        realized_speedup=realized_speedup,
    )


# --- The speed-up that packing really brings, measured in the run itself, before its first update
#
# The same model passes forward and backward over a micro-batch of packs, and over as many rows that hold one sequence each.
# With s_packed and s_unpacked seconds per micro-batch, and f sequences per pack,
#
#     realized speed-up = f * s_unpacked / s_packed
#
# which falls short of f by what block masks, gathered positions and the larger heads cost (Krell et al. 2021, table 2).
# It is the median over alternating pairs of passes. On a CPU the seconds are those of its cores, which other processes on
# the machine change little; on a card they are by the clock. f is the limit: a result well above it was disturbed, and is
# not reported as a speed-up. No variable is changed. It takes two more graphs, so it has to be requested.

_PAIRS = 5
_TOLERANCE = 1.05


@dataclass(frozen=True)
class Speedup:
    """Seconds of alternating passes, one of each per pair: a micro-batch of packs, and as many rows of one sequence."""

    packing_factor: float
    packed_seconds: tuple[float, ...]
    unpacked_seconds: tuple[float, ...]

    @property
    def measured(self) -> float:
        """Sequences per second, packed over unpacked: the median over the pairs."""
        ratios = np.array(self.unpacked_seconds) / np.array(self.packed_seconds)
        return self.packing_factor * float(np.median(ratios))

    @property
    def realized(self) -> float | None:
        """The speed-up; None where more was measured than is possible."""
        return self.measured if self.measured <= _TOLERANCE * self.packing_factor else None

    def line(self) -> str:
        """For people."""
        if self.realized is None:
            return (
                f"realized speed-up not measurable now: the machine was busy ({self.measured:.2f} measured, "
                f"{self.packing_factor:.2f} is the limit)"
            )
        packed, unpacked = (1000 * np.median(seconds) for seconds in (self.packed_seconds, self.unpacked_seconds))
        return (
            f"realized speed-up {self.realized:.3f} at {self.packing_factor:.3f} sequences per pack "
            f"({self.realized / self.packing_factor:.1%} of it): a micro-batch takes "
            f"{packed:.1f} ms packed, {unpacked:.1f} ms with one sequence per row"
        )
