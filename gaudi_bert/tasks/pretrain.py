"""Stage train on a packed table: any model of words, masked or next ones, from fresh weights or from given ones.

The folder is that of any run (`training/run.py`). At its end it also holds the model as `transformers` opens it
(`config.json`, `model.safetensors`, the tokenizer), so it is what `finetune --model` takes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.references import METADATA_NAME, NOTES_NAME
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.store.copies import local_copy
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored
from gaudi_bert.artefacts.store.objects import in_store
from gaudi_bert.artefacts.training import TableTraining, WordEvaluation, WordFigures
from gaudi_bert.artefacts.work_folder import TRAINING_NAME
from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.common.files import read_json
from gaudi_bert.common.progress import Reporter, count_of
from gaudi_bert.config.models import MODELS
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.config.values import free_settings
from gaudi_bert.engines.choose import load_engine
from gaudi_bert.engines.communicator import Communicator
from gaudi_bert.engines.protocol import Model, ModelSpec
from gaudi_bert.model.config import BertConfig, EncoderConfig
from gaudi_bert.model.heads import TaskHead, TaskKind
from gaudi_bert.model.masking import NO_VOCABULARY
from gaudi_bert.tasks.kinds.task import Task, task_named
from gaudi_bert.tasks.models.task_models import StartWeights, is_bert, start_weights, vocabulary_of, write_task_folder
from gaudi_bert.tasks.objective import TaskObjective
from gaudi_bert.tasks.table_data import (
    TableSource,
    WordTargets,
    check_table_fits,
    evaluation_table_batches,
    is_packed_table,
    open_packed_table,
    table_batches,
)
from gaudi_bert.training.checkpoint import Progress, resume_run, share_state
from gaudi_bert.training.evaluator import majority_share
from gaudi_bert.training.input.batches import TrainingOrder
from gaudi_bert.training.loop import TrainingLoop
from gaudi_bert.training.objective import LossDenominators
from gaudi_bert.training.results import DryRun
from gaudi_bert.training.run import COMPILED_KEY, OF_THE_MACHINE, RunContext, processes_of, run_engine, run_folder
from gaudi_bert.training.run_plan import RunPlan
from gaudi_bert.training.step import TrainingStep
from gaudi_bert.training.weights.model_files import read_config

_MASKED: TaskKind = "masked-language-modelling"


def is_table_of_tokens(data: Path, store: StoreSettings | None = None) -> bool:
    """Whether `data` is a packed table, on a disk or in an object store; anything else is packed or unpacked records."""
    if not in_store(data):
        return is_packed_table(data)
    with mirrored(data, store) as folder:
        fetch(folder / NOTES_NAME / METADATA_NAME)
        return is_packed_table(folder)


def train_on_table(
    settings: PipelineSettings,
    data: Path,
    model: str | None,
    evaluation_data: Path | None,
    out: Path,
    *,
    reporter: Reporter,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> StageOutput[TableTraining] | DryRun:
    """Train a model of words.

    Args:
        settings: `model`, `training` and `task.masked_lm_probability` are used.
        data: a packed table.
        model: a folder with weights; a config.json, a name of `config.models`, or a type of `transformers`: fresh weights.
        evaluation_data: another packed table of the same tokenizer; None for none.
        out: the folder of the run.
        resume, overwrite, dry_run: as `training.train.train`.
    """
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other; give the one you mean")
    _check_settings(settings.training, evaluation_data)
    with ExitStack() as stack:
        folder = stack.enter_context(mirrored(Path(out), settings.store))
        source, held_out = (
            None if each is None else open_packed_table(stack.enter_context(local_copy(each, settings.store)))
            for each in (data, evaluation_data)
        )
        source = cast(TableSource, source)
        given = None if model is None else stack.enter_context(local_copy(model, settings.store))
        task, start = _start(given, settings, source)
        is_bert_model = isinstance(start.config, BertConfig)
        chosen = run_engine(settings.training, folder, is_bert=is_bert_model, overwrite=overwrite)
        engine = load_engine(chosen.name)
        communicator = engine.connect(settings.training)
        reporter = reporter if communicator.is_first else Reporter(quiet=True)
        for each in (source, held_out):
            if each is not None:
                check_table_fits(each, start.sizes)
        plan = RunPlan(
            settings.training,
            source.metadata.packing_factor,
            processes=processes_of(settings, communicator, dry_run),
            processes_per_worker=settings.resources.processes_per_worker,
            slots_per_pack=source.length,
            packs=source.metadata.packs,
        )
        job = _TableJob(settings, task, start, source, held_out, plan)
        for line in [chosen.line(), *_describe(job, dry_run)]:
            reporter.say(f"train: {line}")
        if dry_run:
            return DryRun(plan)
        with run_folder(
            folder / TRAINING_NAME,
            TableTraining,
            _signature(job),
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
            return StageOutput(context.finish(_train(job, context)))


@dataclass(frozen=True)
class _TableJob:
    """What is known of a run before anything is built."""

    settings: PipelineSettings
    task: Task
    start: StartWeights
    source: TableSource
    held_out: TableSource | None
    plan: RunPlan

    @property
    def targets(self) -> WordTargets:
        """What is predicted."""
        share = self.task.settings.masked_lm_probability
        return WordTargets(self.task.head.kind, self.settings.training.seed, share, self.task.vocabulary)


def _check_settings(training: TrainingSettings, evaluation_data: Path | None) -> None:
    if training.target_masked_lm_accuracy is not None and evaluation_data is None:
        raise InputError("training.target_masked_lm_accuracy: needs evaluation data; pass --evaluation-data")
    if training.init_checkpoint is not None:
        raise InputError("training.init_checkpoint: for packed records; on a packed table, give its folder with --model")
    for name, usual in (("loss", "token"), ("measure_speedup", False)):
        value = getattr(training, name)
        if value != usual:
            raise InputError(f"training.{name} = {value}: for packed records only; a packed table needs {usual}")


# --- the model that a run begins with


def _start(path: Path | None, settings: PipelineSettings, source: TableSource) -> tuple[Task, StartWeights]:
    """The task and the weights of `--model`; without one, of the sizes in the settings."""
    if path is not None and path.is_dir():
        task = _task(_task_of_folder(path), settings, source)
        return task, start_weights(path, task)
    config = _fresh(path, settings, source)
    task = _task(_word_task(config), settings, source)
    return task, _fresh_weights(path or Path("the settings"), config, task.head)


def _task(kind: TaskKind, settings: PipelineSettings, source: TableSource) -> Task:
    vocabulary = vocabulary_of(source.tokenizer) if kind == _MASKED else NO_VOCABULARY
    return task_named(kind)(settings.task.model_copy(update={"name": kind}), (), vocabulary)


def _task_of_folder(path: Path) -> TaskKind:
    if is_bert(path):
        file = path / "config.json"
        return _word_task(read_config(file) if file.is_file() else BertConfig())
    from gaudi_bert.pytorch.encoder_weights import read_encoder_config

    return _word_task(read_encoder_config(path / "config.json"))


def _word_task(config: BertConfig | EncoderConfig) -> TaskKind:
    if isinstance(config, BertConfig):
        return "causal-language-modelling" if config.attention == "causal" else _MASKED
    from gaudi_bert.pytorch.classes import word_task_of

    return word_task_of(config)


def _fresh(path: Path | None, settings: PipelineSettings, source: TableSource) -> BertConfig | EncoderConfig:
    """The config of a file, a name or a type; what it leaves open comes from the table and its tokenizer."""
    open_values = {"vocab_size": source.tokenizer.vocabulary_size, "max_position_embeddings": source.length}
    if path is None or str(path) in MODELS:
        chosen = {name: value for name, value in settings.model.model_dump().items() if value is not None}
        return BertConfig(**{**open_values, **chosen, **MODELS.get(str(path), {})})
    is_file = path.is_file() or path.suffix == ".json"
    values: Any = read_json(path) if is_file else {"model_type": str(path)}
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InputError(f"{path}: names no model_type; give the config.json of a model of transformers")
    if values["model_type"] == "bert":
        return BertConfig.from_json({**open_values, **values})
    return _fresh_encoder(path, values, is_file, source)


def _fresh_encoder(path: Path, values: Mapping[str, Any], is_file: bool, source: TableSource) -> EncoderConfig:
    from gaudi_bert.pytorch.classes import known_types
    from gaudi_bert.pytorch.encoder_weights import fresh_config, read_encoder_config

    if not is_file and values["model_type"] not in known_types():
        near = difflib.get_close_matches(str(path), [*MODELS, *known_types()], n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "give a folder, a config.json, or a type of transformers"
        raise InputError(f"--model {shortened(str(path))}: {hint}")
    given = read_encoder_config(path).values if is_file else values
    tokenizer = source.tokenizer
    return fresh_config(given, tokenizer.vocabulary_size, tokenizer.token_ids(), source.length)


def _fresh_weights(path: Path, config: BertConfig | EncoderConfig, head: TaskHead) -> StartWeights:
    if isinstance(config, BertConfig):
        architecture = task_named(head.kind).architecture
        return StartWeights(path, "fresh weights", config, config.sizes, architecture, {}, (), "")
    from gaudi_bert.pytorch.classes import class_of, config_of
    from gaudi_bert.pytorch.encoder_weights import sizes_of

    architecture = class_of(config_of(config, head), head).__name__
    return StartWeights(path, "fresh weights", config, sizes_of(config, head), architecture, {}, (), "")


# --- the run


def _describe(job: _TableJob, dry_run: bool) -> list[str]:
    start, source, training = job.start, job.source, job.plan.settings
    metadata = source.metadata
    return [
        f"{start.architecture} ({start.path.name}, {start.kind}): {count_of(start.sizes.layers, 'layer')}, hidden size "
        f"{start.sizes.hidden_size}, vocabulary {start.sizes.vocab_size:,}; {job.task.name}",
        f"{source.path}: {metadata.packs:,} packs of {source.length}, {metadata.packing_factor:.3f} sequences per pack, "
        f"{metadata.efficiency:.2%} real tokens",
        f"{training.optimizer}, learning rate {training.learning_rate:g}",
        *job.plan.short_lines(),
        *(job.plan.table() if dry_run else []),
    ]


def _signature(job: _TableJob) -> Signature:
    """What the weights depend on."""
    section = job.settings.training.model_dump(exclude=free_settings(TrainingSettings) | {"init_checkpoint"})
    inputs = {
        "data": job.source.identity,
        "evaluation_data": job.held_out.identity if job.held_out is not None else None,
        "weights": job.start.identity,
    }
    task = {"name": job.task.name, "masked_lm_probability": job.task.settings.masked_lm_probability}
    return Signature("train", {"model": job.start.config.to_json(), "training": section, "task": task}, inputs)


def _train(job: _TableJob, context: RunContext[TableTraining]) -> TableTraining:
    settings, communicator = job.plan.settings, context.communicator
    spec = ModelSpec(job.start.config, job.task.head)
    model = context.engine.build(spec, context.device, seed=settings.seed, compiled=context.compiled)
    evaluator = None if job.held_out is None else _TableEvaluator(job, job.held_out, model, communicator)
    steps = job.plan.accumulation_steps
    updates = context.engine.updates(model, settings, communicator, steps)
    step = TrainingStep(updates, communicator, settings, TaskObjective(job.task), steps, _denominators(job))
    progress = Progress()
    if communicator.is_first:
        progress = resume_run(context.checkpoints, model, updates, context.reporter.say)
        if progress.update == 0:
            model.load_values(job.start.variables)
    progress = share_state(progress, model, updates, communicator)
    order = TrainingOrder(settings.seed, settings.shuffle_packs, communicator.rank, communicator.size, progress.packs)
    batches = table_batches(job.source, job.targets, settings.micro_batch_packs, order)
    stored_settings = {
        "model": job.start.config.to_json(),
        "task": job.task.name,
        "training": settings.model_dump(mode="json", exclude={"init_checkpoint", *OF_THE_MACHINE}),
        COMPILED_KEY: context.compiled,
    }
    loop = TrainingLoop(context, job.plan, step, model, batches, progress, stored_settings, evaluator)
    loop.run()
    if communicator.is_first:
        values = model.values()
        write_task_folder(context.folder, job.start, job.task, values, job.source.tokenizer, job.source.length)
    return _result(job, loop)


def _denominators(job: _TableJob) -> LossDenominators:
    """What the losses are divided by; `balanced` with the words that a pack predicts on average."""
    metadata, targets = job.source.metadata, job.targets
    words = targets.share * metadata.tokens if targets.kind == _MASKED else metadata.tokens - metadata.sequences
    return LossDenominators(job.settings.training.loss_normalization, (words / metadata.packs, 1.0))


class _TableEvaluator:
    """Evaluates a model on a packed table: every sequence once, each with the same masks whatever its pack."""

    def __init__(self, job: _TableJob, held_out: TableSource, model: Model, communicator: Communicator) -> None:
        self._job, self._held_out, self._model, self._communicator = job, held_out, model, communicator

    def run(self) -> WordEvaluation:
        """Evaluate; every process calls it at the same time."""
        job, communicator, settings = self._job, self._communicator, self._job.plan.settings
        words = np.zeros(job.start.sizes.vocab_size, np.float64)
        sums = np.zeros(4, np.float64)
        batches = evaluation_table_batches(
            self._held_out,
            job.targets,
            settings.micro_batch_packs,
            communicator.rank,
            communicator.size,
            settings.evaluate_packs,
        )
        for number, batch in enumerate(batches):
            communicator.note("an evaluation", slow=number == 0)
            sums[:3] += self._model.evaluate(batch)[1].astype(np.float64)
            sums[3] += batch["sequence_weights"].sum()
            words += np.bincount(batch["targets"][batch["target_weights"] > 0], minlength=len(words))
        sums, words = np.split(communicator.sum_array(np.concatenate([sums, words])), [4])
        if not sums[1]:
            raise InputError(f"{self._held_out.path}: holds no word to predict; give a table with longer texts")
        return WordEvaluation(
            **_figures(sums[0] / sums[1], sums[2] / sums[1]),
            unigram_baseline=majority_share(words),
            sequences=int(sums[3]),
            words=int(sums[1]),
        )


def _figures(loss: float, accuracy: float) -> dict[str, float]:
    loss, accuracy = float(loss), min(float(accuracy), 1.0)
    return {"loss": loss, "accuracy": accuracy, "perplexity": math.exp(min(loss, 700.0))}


def _result(job: _TableJob, loop: TrainingLoop) -> TableTraining:
    plan, progress, report = loop.plan, loop.progress, loop.report
    figures = report.figures.as_json() if report is not None else {}
    return TableTraining(
        task=job.task.name,
        model=job.start.architecture,
        updates=progress.update,
        sequences=progress.sequences,
        tokens=progress.tokens,
        processes=plan.processes,
        sequences_per_second=report.sequences_per_second if report is not None else None,
        tokens_per_second=report.tokens_per_second if report is not None else None,
        slots_per_second=report.slots_per_second if report is not None else None,
        packing_factor=plan.packing_factor,
        sequences_per_update=plan.sequences_per_update,
        reached_target=loop.reached_target,
        training=WordFigures(**_figures(figures["loss"], figures["accuracy"])) if figures else None,
        evaluation=cast(WordEvaluation | None, loop.evaluation),
    )
