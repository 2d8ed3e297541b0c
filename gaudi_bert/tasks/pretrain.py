"""Stage train on a packed table: any model of words, masked or next ones, from fresh weights or from given ones.

`training/run.py` names the steps of the run, and its folder is that of any. At its end it also holds the model as
`transformers` opens it (`config.json`, `model.safetensors`, the tokenizer), so it is what `finetune --model` takes.
"""

from __future__ import annotations

import difflib
import glob
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.examples import TokenisedTexts
from gaudi_bert.artefacts.pack_kinds import RowTables, pack_kind, settings_paths
from gaudi_bert.artefacts.packed import TableMetadata
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.store.mirrored_folder import fetch, local_copy, mirrored
from gaudi_bert.artefacts.training import TableTraining, WordEvaluation, WordFigures
from gaudi_bert.artefacts.work_folder import TRAINING_NAME
from gaudi_bert.common.arrays import Float32Array, FloatArray
from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.common.files import in_store, shown_location
from gaudi_bert.common.progress import Reporter, count_of
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.config.shipped import MODELS, name_of_sizes
from gaudi_bert.config.values import free_settings
from gaudi_bert.engines.protocol import Model, ModelSpec
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
    PackedTable,
    WordTargets,
    check_same_tokens,
    check_table_fits,
    evaluation_table_batches,
    open_packed_table,
    table_batches,
)
from gaudi_bert.training.evaluate import EvaluationBatch, count_values, majority_share
from gaudi_bert.training.input.batches import Batch, TrainingOrder
from gaudi_bert.training.loop import TrainingLoop
from gaudi_bert.training.model_files import read_config
from gaudi_bert.training.objective import LossDenominators
from gaudi_bert.training.results import DryRun
from gaudi_bert.training.run import Job, run_job
from gaudi_bert.training.run_plan import TABLE_KEYS, RunPlan
from gaudi_bert.training.train import model_config

_MASKED: TaskKind = "masked-language-modelling"
_FRESH = "fresh weights"


def is_table_of_tokens(data: Path, store: StoreSettings | None = None) -> bool:
    """Whether `data` is a packed table, on a disk or in an object store; anything else is packed or unpacked records."""
    if not in_store(data) and not os.path.lexists(data) and not glob.glob(os.fspath(data)):
        raise InputError(f"{data}: no such folder or file, and no file matches it as a pattern; check the path")
    with mirrored(data, store) if in_store(data) else nullcontext(data) as folder:
        tokenised = folder / TokenisedTexts.file_name
        if in_store(data):
            fetch(TableMetadata.path_in(folder), RowTables.path_in(folder), tokenised, *settings_paths(folder))
        is_packed = pack_kind(folder) == "table" or RowTables.path_in(folder).is_file()
        is_tokenised = tokenised.is_file()
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
    """Train a model of words; `resume`, `overwrite` and `dry_run` are as of `run_job`.

    Args:
        settings: `model`, `training` and `task.masked_lm_probability` are used.
        data: a packed table.
        model: a folder with weights; a config.json or a type of `transformers`: fresh weights; None: a BERT of `model`.
        evaluation_data: another packed table of the same tokenizer; None for none.
    """
    _check_settings(settings.training, evaluation_data)
    with ExitStack() as stack:
        source, held_out = (
            None if each is None else open_packed_table(stack.enter_context(local_copy(each, settings.store)))
            for each in (data, evaluation_data)
        )
        given = None if model is None else stack.enter_context(local_copy(model, settings.store))
        job = _TableJob(settings, cast(PackedTable, source), held_out, given)
        return run_job(job, settings, out, reporter=reporter, resume=resume, overwrite=overwrite, dry_run=dry_run)


class _TableJob(Job[TableTraining]):
    """A model of words on a packed table; `given` is what the user calls the model."""

    result_name, result_type = TRAINING_NAME, TableTraining

    def __init__(
        self, settings: PipelineSettings, source: PackedTable, held_out: PackedTable | None, given: Path | None
    ) -> None:
        self.section = settings.training
        self._settings, self._source, self._held_out = settings, source, held_out
        self._task, self._start = _start(given, settings, source)
        check_table_fits(source, self._start.sizes)
        if held_out is not None:
            check_same_tokens(source, held_out.tokenizer)
            check_table_fits(held_out, self._start.sizes)
        self.is_bert = isinstance(self._start.config, BertConfig)
        self.spec = ModelSpec(self._start.config, self._task.head)
        self.objective = TaskObjective(self._task)
        share = self._task.settings.masked_lm_probability
        self._targets = WordTargets(cast(TaskKind, self._task.name), settings.training.seed, share, self._task.vocabulary)

    def plan(self, processes: int) -> RunPlan:
        """Decide on the batches."""
        source = self._source
        if source.row_packs and self._settings.training.loss_normalization == "balanced":
            raise InputError("training.loss_normalization = balanced: for rows of one length; set it to global or local")
        return RunPlan(
            self._settings.training.of_run(),
            source.total("sequences") / source.total("packs"),
            processes=processes,
            processes_per_worker=self._settings.resources.processes_per_worker,
            slots_per_pack=source.length,
            packs=source.total("packs"),
            mean_tokens=None if source.row_packs else source.total("tokens") / source.total("sequences"),
            keys=TABLE_KEYS,
            rows=source.row_packs,
        )

    def describe(self, plan: RunPlan, dry_run: bool) -> list[str]:
        """The model, the table, the batches."""
        start, training = self._start, plan.settings
        tables = [(table.path, table.metadata) for table in self._source.tables]
        return [
            f"{start.architecture} ({start.path.name}, {start.kind}): {count_of(start.sizes.layers, 'layer')}, hidden size "
            f"{start.sizes.hidden_size}, vocabulary {start.sizes.vocab_size:,}; {self._task.name}",
            *(
                f"{path}: {packed.packs:,} packs of {packed.max_sequence_length}, {packed.packing_factor:.3f} sequences per "
                f"pack, {packed.efficiency:.2%} real tokens"
                for path, packed in tables
            ),
            f"{training.optimizer}, learning rate {training.learning_rate:g}",
            *plan.short_lines(),
            *(plan.table() if dry_run else []),
        ]

    def signature(self) -> Signature:
        """What the weights depend on."""
        section = self._settings.training.model_dump(exclude=free_settings(TrainingSettings) | {"init_checkpoint"})
        inputs = {
            "data": self._source.identity,
            "evaluation_data": self._held_out.identity if self._held_out is not None else None,
            "weights": self._start.identity,
        }
        task = {"name": self._task.name, "masked_lm_probability": self._task.settings.masked_lm_probability}
        model = self._start.config.to_json()
        return Signature("train", {"model": model, "training": section, "task": task}, inputs)

    def denominators(self) -> LossDenominators:
        """`balanced` by the words that a pack predicts on average."""
        targets, normalization = self._targets, self._settings.training.loss_normalization
        packs, sequences, tokens = (self._source.total(figure) for figure in ("packs", "sequences", "tokens"))
        words = targets.share * tokens if targets.kind == _MASKED else tokens - sequences
        return LossDenominators(normalization, (words / packs, 1.0))

    def evaluation(self, plan: RunPlan) -> _TableEvaluation | None:
        """The held-out table."""
        if self._held_out is None:
            return None
        packs, most = plan.settings.micro_batch_packs, self._settings.training.evaluate_packs
        return _TableEvaluation(self._held_out, self._targets, self._start.sizes.vocab_size, packs, most)

    def load_start(self, model: Model, reporter: Reporter) -> None:
        """Those of `--model`."""
        model.load_values(self._start.variables)

    def batches(self, plan: RunPlan, order: TrainingOrder) -> Iterator[Batch]:
        """Packs of the table, without end."""
        return table_batches(self._source, self._targets, plan.micro_batches(order.updates_done, order.packs_done), order)

    def stored(self) -> dict[str, Any]:
        """What is learnt."""
        return {"task": self._task.name}

    def finish(self, loop: TrainingLoop) -> TableTraining:
        """The model as `transformers` opens it, and the last figures."""
        context, start, source = loop.context, self._start, self._source
        if context.communicator.is_first:
            values = loop.model.values()
            write_task_folder(context.folder, start, self._task, values, source.tokenizer, source.length)
        figures = loop.report.figures.as_json() if loop.report is not None else None
        return TableTraining(
            **loop.outcome(),
            task=self._task.name,
            model=start.architecture,
            training=WordFigures(**_figures(figures["loss"], figures["accuracy"])) if figures is not None else None,
            evaluation=cast(WordEvaluation | None, loop.evaluation),
        )


def _figures(loss: float, accuracy: float) -> dict[str, float]:
    loss, accuracy = float(loss), min(float(accuracy), 1.0)
    return {"loss": loss, "accuracy": accuracy, "perplexity": math.exp(min(loss, 700.0))}


@dataclass(frozen=True)
class _TableEvaluation:
    """A packed table: every sequence once, each with the same masks whatever its pack; `take_packs` limits it."""

    source: PackedTable
    targets: WordTargets
    vocabulary: int
    batch_packs: int
    take_packs: int | None

    @property
    def sums(self) -> int:
        """Those of the head, sequences, and every word."""
        return 3 + 1 + self.vocabulary

    def batches(self, rank: int, size: int) -> Iterator[EvaluationBatch]:
        """Every pack once; the last batch is filled up."""
        batches = evaluation_table_batches(self.source, self.targets, self.batch_packs, rank, size, self.take_packs)
        return map(EvaluationBatch, batches)

    def counted(self, batch: Batch) -> FloatArray:
        """Sequences, and how often each word is to be predicted."""
        words = count_values(batch["targets"], batch["target_weights"], self.vocabulary)
        return np.concatenate([[batch["sequence_weights"].sum()], words])

    def outputs(self) -> None:
        """None are stored."""

    def figures(self, totals: FloatArray, outputs: Float32Array | None) -> WordEvaluation:
        """Loss and accuracy, and the baseline of the most frequent word."""
        (loss, weight, right), sequences, words = totals[:3], totals[3], totals[4:]
        if not weight:
            raise InputError(f"{self.source.path}: has no word to predict; give a table with longer texts")
        return WordEvaluation(
            **_figures(loss / weight, right / weight),
            unigram_baseline=majority_share(words),
            sequences=int(sequences),
            words=int(weight),
        )


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


def _start(path: Path | None, settings: PipelineSettings, source: PackedTable) -> tuple[Task, StartWeights]:
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
