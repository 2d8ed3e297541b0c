"""Stage train on a packed table: any model of words, masked or next ones, from fresh weights or from given ones.

The folder is that of any run (`training/run.py`). At its end it also holds the model as `transformers` opens it
(`config.json`, `model.safetensors`, the tokenizer), so it is what `finetune --model` takes.
"""

from __future__ import annotations

import difflib
import glob
import math
import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.examples import TokenisedTexts
from gaudi_bert.artefacts.references import METADATA_NAME, NOTES_NAME
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.store.copies import local_copy
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored
from gaudi_bert.artefacts.store.objects import in_store, shown_location
from gaudi_bert.artefacts.training import TableTraining, WordEvaluation, WordFigures
from gaudi_bert.artefacts.work_folder import TRAINING_NAME
from gaudi_bert.common.arrays import FloatArray
from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.common.progress import Reporter, count_of
from gaudi_bert.config.models import MODELS, name_of_sizes
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.config.values import free_settings
from gaudi_bert.engines.choose import load_engine
from gaudi_bert.engines.protocol import Communicator, Model, ModelSpec
from gaudi_bert.model.config import BertConfig, EncoderConfig
from gaudi_bert.model.heads import TaskKind
from gaudi_bert.model.masking import NO_VOCABULARY
from gaudi_bert.rows.tokenizer import RowTokenizer, has_tokenizer, open_tokenizer
from gaudi_bert.tables.sources import is_table
from gaudi_bert.tasks.kinds.task import Task, task_named
from gaudi_bert.tasks.models.task_models import (
    StartWeights,
    check_transformers,
    is_bert,
    start_weights,
    vocabulary_of,
    write_task_folder,
)
from gaudi_bert.tasks.objective import TaskObjective
from gaudi_bert.tasks.table_data import (
    TableSource,
    WordTargets,
    check_same_tokens,
    check_table_fits,
    evaluation_table_batches,
    open_packed_table,
    table_batches,
)
from gaudi_bert.training.evaluate import count_values, majority_share, sums_over
from gaudi_bert.training.input.batches import Batch, TrainingOrder
from gaudi_bert.training.loop import TrainingLoop
from gaudi_bert.training.model_files import read_config
from gaudi_bert.training.objective import LossDenominators
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
from gaudi_bert.training.train import model_config

_MASKED: TaskKind = "masked-language-modelling"
_FRESH = "fresh weights"


def is_table_of_tokens(data: Path, store: StoreSettings | None = None) -> bool:
    """Whether `data` is a packed table, on a disk or in an object store; anything else is packed or unpacked records."""
    if not in_store(data) and not os.path.lexists(data) and not glob.glob(os.fspath(data)):
        raise InputError(f"{data}: no such folder or file, and no file matches it as a pattern; check the path")
    with mirrored(data, store) if in_store(data) else nullcontext(data) as folder:
        notes = [folder / NOTES_NAME / METADATA_NAME, folder / TokenisedTexts.file_name]
        if in_store(data):
            fetch(*notes)
        is_packed, is_tokenised = (note.is_file() for note in notes)
    if not is_packed and (is_tokenised or (not in_store(data) and is_table(data))):
        name = shown_location(data)
        raise InputError(f"{name}: is a table that is not packed; run `gaudi-bert pack {name} --out packed/` first")
    return is_packed


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
    """Train a model of words; `resume`, `overwrite` and `dry_run` are as of `training.train.train`.

    Args:
        settings: `model`, `training` and `task.masked_lm_probability` are used.
        data: a packed table.
        model: a folder with weights; a config.json or a type of `transformers`: fresh weights; None: a BERT of `model`.
        evaluation_data: another packed table of the same tokenizer; None for none.
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
        check_table_fits(source, start.sizes)
        if held_out is not None:
            check_same_tokens(source, held_out.tokenizer)
            check_table_fits(held_out, start.sizes)
        plan = RunPlan(
            settings.training,
            source.metadata.packing_factor,
            processes=processes_of(settings, communicator, dry_run),
            processes_per_worker=settings.resources.processes_per_worker,
            slots_per_pack=source.length,
            packs=source.metadata.packs,
            mean_tokens=source.metadata.tokens / source.metadata.sequences,
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
        return WordTargets(cast(TaskKind, self.task.name), self.settings.training.seed, share, self.task.vocabulary)


def _check_settings(training: TrainingSettings, evaluation_data: Path | None) -> None:
    if training.target_masked_lm_accuracy is not None and evaluation_data is None:
        raise InputError("training.target_masked_lm_accuracy: needs evaluation data; pass --evaluation-data")
    if training.init_checkpoint is not None:
        raise InputError("training.init_checkpoint: for packed records; on a packed table, give its folder with --model")
    for name, usual in (("loss", "token"), ("measure_speedup", False)):
        value = getattr(training, name)
        if value != usual:
            raise InputError(
                f"training.{name} = {str(value).lower()}: for packed records only; a packed table needs {str(usual).lower()}"
            )


# --- the model that a run begins with


def _start(path: Path | None, settings: PipelineSettings, source: TableSource) -> tuple[Task, StartWeights]:
    """The task and the weights of `--model`; without one, a BERT of the sizes in the settings."""
    tokenizer = source.tokenizer
    if path is not None and path.is_dir():
        task = _task(_task_of_folder(path), settings, tokenizer)
        if has_tokenizer(path):
            check_same_tokens(source, open_tokenizer(path))
        return task, start_weights(path, task)
    if path is None:
        config = model_config(settings.model, tokenizer.vocabulary_size, source.length)
        task = _task(_task_of_bert(config), settings, tokenizer)
        name = name_of_sizes(settings.model) or "sizes of the settings"
        return task, StartWeights(Path(name), _FRESH, config, config.sizes, task.architecture, {}, (), "")
    check_transformers(f"--model {path}")
    from gaudi_bert.pytorch import encoder_weights as encoders

    is_file = path.suffix == ".json"
    given = encoders.read_encoder_config(path) if is_file else _config_of_type(path, encoders.known_types())
    task = _task(encoders.word_task_of(given), settings, tokenizer)
    complete = encoders.fresh_config(given.values, tokenizer.vocabulary_size, tokenizer.token_ids(), source.length)
    architecture = encoders.class_of(encoders.config_of(complete, task.head), task.head).__name__
    return task, StartWeights(path, _FRESH, complete, encoders.sizes_of(complete, task.head), architecture, {}, (), "")


def _task(kind: TaskKind, settings: PipelineSettings, tokenizer: RowTokenizer) -> Task:
    vocabulary = vocabulary_of(tokenizer) if kind == _MASKED else NO_VOCABULARY
    return task_named(kind)(settings.task.model_copy(update={"name": kind}), (), vocabulary)


def _task_of_folder(path: Path) -> TaskKind:
    file = path / "config.json"
    if is_bert(path):
        return _task_of_bert(read_config(file)) if file.is_file() else _MASKED
    from gaudi_bert.pytorch import encoder_weights

    return encoder_weights.word_task_of(encoder_weights.read_encoder_config(file))


def _task_of_bert(config: BertConfig) -> TaskKind:
    return "causal-language-modelling" if config.attention == "causal" else _MASKED


def _config_of_type(path: Path, known_types: Sequence[str]) -> EncoderConfig:
    name = str(path)
    if name not in known_types:
        near = difflib.get_close_matches(name, [*MODELS, *known_types], n=1, cutoff=0.6) if "/" not in name else []
        hint = f"did you mean {near[0]}?" if near else "not a folder; give one, a config.json, or a type of transformers"
        raise InputError(f"--model {shortened(name)}: {hint}")
    return EncoderConfig({"model_type": name})


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
    step = build_step(context, job.plan, model, TaskObjective(job.task), _denominators(job))
    progress = restore(context, step, model, lambda: model.load_values(job.start.variables))
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
        vocabulary, held_out = job.start.sizes.vocab_size, self._held_out
        rank, size, packs = communicator.rank, communicator.size, settings.micro_batch_packs
        batches = evaluation_table_batches(held_out, job.targets, packs, rank, size, settings.evaluate_packs)

        def counted(batch: Batch) -> FloatArray:
            words = count_values(batch["targets"], batch["target_weights"], vocabulary)
            return np.concatenate([[batch["sequence_weights"].sum()], words])

        totals = sums_over(batches, self._model, communicator, counted, 3 + 1 + vocabulary)
        (loss, weight, right), sequences, words = totals[:3], totals[3], totals[4:]
        if not weight:
            raise InputError(f"{held_out.path}: has no word to predict; give a table with longer texts")
        return WordEvaluation(
            **_figures(loss / weight, right / weight),
            unigram_baseline=majority_share(words),
            sequences=int(sequences),
            words=int(weight),
        )


def _figures(loss: float, accuracy: float) -> dict[str, float]:
    loss, accuracy = float(loss), min(float(accuracy), 1.0)
    return {"loss": loss, "accuracy": accuracy, "perplexity": math.exp(min(loss, 700.0))}


def _result(job: _TableJob, loop: TrainingLoop) -> TableTraining:
    figures = loop.report.figures.as_json() if loop.report is not None else None
    return TableTraining(
        **loop.outcome(),
        task=job.task.name,
        model=job.start.architecture,
        training=WordFigures(**_figures(figures["loss"], figures["accuracy"])) if figures is not None else None,
        evaluation=cast(WordEvaluation | None, loop.evaluation),
    )
