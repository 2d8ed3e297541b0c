"""`doctor --graph`: is a training step fit for Gaudi, and what does it cost; no card is needed.

The step is that of pretraining, or of a task. Its sizes are those of the packed data, or of the rows and the weights, where
they exist; else of the settings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from gaudi_bert.artefacts.base import METADATA_NAME
from gaudi_bert.artefacts.packed import Metadata
from gaudi_bert.artefacts.results import fields_as_json
from gaudi_bert.common.arrays import AnyArray, BatchArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import path_below
from gaudi_bert.common.progress import Reporter, human_bytes
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.sections import TaskName
from gaudi_bert.engines.choose import choose_engine, load_engine
from gaudi_bert.engines.graph_report import CardFit, GraphReport
from gaudi_bert.engines.protocol import ModelSpec, StepSpec
from gaudi_bert.model.config import BertConfig, EncoderConfig
from gaudi_bert.model.features import BatchSizes, packed_shapes
from gaudi_bert.model.heads import PretrainingHead, TaskHead
from gaudi_bert.rows.fields import read_label_names
from gaudi_bert.rows.packs import BatchShape, Packs, lay_out_packs
from gaudi_bert.rows.types import TASKS_WITH_LABELS, Sequences
from gaudi_bert.tasks.finetune import job_of
from gaudi_bert.tasks.finetune_job import FineTuneInput
from gaudi_bert.tasks.kinds.task import Draw, Task, Vocabulary, learns_pairs, task_named
from gaudi_bert.tasks.models.task_models import start_weights
from gaudi_bert.tasks.pairs import pair_features
from gaudi_bert.training.input.batches import TrainingOrder
from gaudi_bert.training.model_files import model_config
from gaudi_bert.training.run_plan import RunPlan

_PROBLEMS_SHOWN = 20
_UNPACKED = "the settings; nothing is packed yet, so one sequence per pack is assumed"


@dataclass(frozen=True)
class GraphResult:
    """Whether a pipeline's training step is fit for Gaudi, and what it costs.

    `sizes_from` is the origin of its sizes; `task` is empty for pretraining.
    """

    pipeline: str
    engine: str
    sizes_from: str
    sizes: BatchSizes
    vocabulary: int
    precision: str
    accumulation_steps: int
    report: GraphReport
    task: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields, and those of the report; the vocabulary is one of the sizes."""
        sizes = {**self.sizes._asdict(), "vocabulary": self.vocabulary}
        shown = {**fields_as_json(self, "report", "vocabulary"), "sizes": sizes}
        return {**shown, "fit": self.report.is_fit, **fields_as_json(self.report)}


def check_graph(settings: PipelineSettings, packed: Path, pipeline_folder: Path, *, task: str | None = None) -> GraphResult:
    """Trace a training step, check it, and say what it costs.

    It is that of pretraining, or of the task that the settings name; where they have both stages, only if `task` names it
    too. `packed` is the folder of packed data, if any; other relative paths are from `pipeline_folder`.
    """
    of_task = settings.task.name is not None and (task is not None or not (settings.pretrains and settings.finetunes))
    section = settings.finetune if of_task else settings.training
    origin, step = _of_task(settings, packed, pipeline_folder) if of_task else _of_pretraining(settings, packed)
    is_bert = isinstance(step.model.config, BertConfig)
    chosen = choose_engine(section.engine, is_bert=is_bert, key=f"{section.section_name}.engine")
    report = load_engine(chosen.name).report_on_step(step, section, settings.gaudi.hccl_memory_MB)
    return GraphResult(
        pipeline=settings.name,
        engine=chosen.name,
        sizes_from=origin,
        sizes=_sizes(step),
        vocabulary=_vocabulary(step.model),
        precision=section.precision,
        accumulation_steps=step.accumulation_steps,
        report=report,
        task=settings.task.name or "" if of_task else "",
    )


def _sizes(step: StepSpec) -> BatchSizes:
    """Of a micro-batch; without slots where nothing is masked."""

    def size(*names: str) -> int:
        return next((step.features[name][0][0] for name in names if name in step.features), 0)

    slots, depth = size("masked_lm_positions", "masked_positions"), size("sequence_weights", "next_sentence_weights")
    return BatchSizes(step.packs, size("input_ids"), slots, depth)


def _vocabulary(model: ModelSpec) -> int:
    if isinstance(model.config, BertConfig):
        return model.config.vocab_size
    from gaudi_bert.pytorch.encoder_weights import sizes_of

    return sizes_of(model.config, model.head).vocab_size


# --- pretraining


def _of_pretraining(settings: PipelineSettings, packed: Path) -> tuple[str, StepSpec]:
    origin, sizes, packing_factor, vocabulary = _packed_sizes(settings, packed)
    cards = settings.resources.processes_per_worker
    plan = RunPlan(
        settings.training.of_run(),
        packing_factor,
        processes=settings.resources.workers * cards,
        processes_per_worker=cards,
        slots_per_pack=sizes.positions,
        packs=None,
    )
    config = model_config(settings.model, vocabulary, sizes.positions)
    features = {name: (tuple(shape[1:]), kind) for name, (shape, kind) in packed_shapes(sizes).items()}
    model = ModelSpec(config, PretrainingHead(settings.training.loss))
    return origin, StepSpec(model, features, sizes.packs, plan.accumulation_steps)


def _packed_sizes(settings: PipelineSettings, packed: Path) -> tuple[str, BatchSizes, float, int | None]:
    """Where the sizes are from, those of a micro-batch, the packing factor, and the vocabulary, where it is known."""
    packs = settings.training.micro_batch_packs
    if (packed / METADATA_NAME).exists():
        metadata = Metadata.read(packed)
        sizes = BatchSizes(packs, metadata.max_sequence_length, metadata.masked_slots, metadata.depth)
        vocabulary = metadata.vocabulary.size if metadata.vocabulary is not None else None
        return str(packed), sizes, metadata.packing_factor, vocabulary
    prepare, packing = settings.prepare, settings.packing
    depth = prepare.max_sequence_length if packing.depth == "max" else packing.depth
    masked_slots = packing.masked_slots or prepare.max_predictions + depth
    return (
        _UNPACKED,
        BatchSizes(packs, prepare.max_sequence_length, masked_slots, depth),
        1.0,
        prepare.train_vocab if prepare.vocab is None and prepare.records is None else None,
    )


# --- a task


def _of_task(settings: PipelineSettings, packed: Path, pipeline_folder: Path) -> tuple[str, StepSpec]:
    section, resources = settings.finetune, settings.resources
    processes = resources.workers * resources.processes_per_worker
    data, vocabulary = (
        None if text is None else path_below(pipeline_folder, text) for text in (section.data, section.vocab)
    )
    if settings.task.labels is not None:
        labels = str(path_below(pipeline_folder, settings.task.labels))
        settings = settings.model_copy(update={"task": settings.task.model_copy(update={"labels": labels})})
    model = None if section.init_checkpoint is None else Path(section.init_checkpoint)
    if model is not None and data is not None and data.is_file():
        return str(data), _of_rows(settings, FineTuneInput(data, None, model, vocabulary), processes)
    origin = f"{_UNPACKED}{', two of each row' * learns_pairs(settings.task)}"
    return origin, _of_task_settings(settings, model, packed, processes)


def _of_rows(settings: PipelineSettings, files: FineTuneInput, processes: int) -> StepSpec:
    """The step of the run that `finetune` would begin; of rows of several lengths that of the longest."""
    job = job_of(settings, files, Path())
    job.prepare(Reporter(quiet=True))
    plan = job.plan(processes)
    order = TrainingOrder(plan.settings.seed, plan.settings.shuffle_packs, size=processes)
    batches = islice(job.batches(plan, order), plan.accumulation_steps)
    batch = max(batches, key=lambda each: each["input_ids"].shape[1])
    return _step(job.spec, batch, plan.accumulation_steps, settings)


def _of_task_settings(settings: PipelineSettings, model: Path | None, packed: Path, processes: int) -> StepSpec:
    """The step of packs of one sequence each, of a model with two labels where no file names them."""
    section, name = settings.finetune, cast(TaskName, settings.task.name)
    labels: tuple[str, ...] = ()
    if name in TASKS_WITH_LABELS:
        labels = read_label_names(Path(settings.task.labels)) if settings.task.labels else ("0", "1")
    config: BertConfig | EncoderConfig
    if model is not None:
        start = start_weights(model, task_named(name)(settings.task, labels))
        config, sizes = start.config, start.sizes
    else:
        _, pack, _, words = _packed_sizes(settings, packed)
        config = model_config(settings.model, words, pack.positions)
        sizes = config.sizes
    length = section.row_lengths[-1] if isinstance(section.row_lengths, tuple) else section.max_sequence_length
    if length > sizes.positions:
        raise InputError(
            f"finetune.max_sequence_length = {length}: the model has {sizes.positions} positions; set it to no more"
        )
    task = task_named(name)(settings.task, labels, Vocabulary(sizes.vocab_size, (), 0))
    if isinstance(config, BertConfig) and task.head.is_causal:
        config = replace(config, attention="causal")
    sequences = section.batch_sequences * (2 if learns_pairs(settings.task) else 1)  # a row has two texts at least
    steps = -(-sequences // (section.micro_batch_packs * processes))
    shape = BatchShape(
        -(-sequences // (steps * processes)), length, length if section.depth == "max" else int(section.depth)
    )
    batch = _batch_of_task(task, shape, learns_pairs(settings.task))
    return _step(ModelSpec(config, task.head), batch, steps, settings)


def _batch_of_task(task: Task, shape: BatchShape, paired: bool) -> BatchArrays:
    """A batch with one sequence of one token."""
    one, head = np.zeros(1, np.int64), task.head
    target: AnyArray = np.zeros(1, np.int32)
    if isinstance(head, TaskHead):
        values = {"multi-label": (1, head.width), "question-answering": (1, 2)}.get(head.kind, (1,))
        is_number = head.kind in ("multi-label", "regression", "reranking")
        target = np.zeros(values, np.float32 if is_number else np.int32)
    bounds = np.arange(2)
    sequences = Sequences(one, bounds, np.zeros(1, np.int32), np.zeros(1, np.int8), target=target)
    placed = lay_out_packs(sequences, Packs(one, bounds), one, shape)
    targets = pair_features(placed, one) if paired else task.target_features(sequences, placed, Draw(0, 0))
    return {**placed.features(sequences), **targets}


def _step(model: ModelSpec, batch: BatchArrays, accumulation_steps: int, settings: PipelineSettings) -> StepSpec:
    features = {name: (values.shape[1:], values.dtype.name) for name, values in batch.items()}
    return StepSpec(model, features, len(batch["input_ids"]), accumulation_steps, learns_pairs(settings.task))


# --- for people


def describe_graph(result: GraphResult) -> list[str]:
    """The result for people."""
    sizes, report = result.sizes, result.report
    lines = [
        f"{result.pipeline}{result.task and f', {result.task}'}: micro-batches of {sizes.packs} packs x {sizes.positions} "
        f"positions,{f' {sizes.masked_slots} masked slots,' * (sizes.masked_slots > 0)} depth {sizes.depth}, "
        f"vocabulary {result.vocabulary:,} "
        f"(from {result.sizes_from})",
        f"matrix products: {report.flops_per_micro_batch / 1e9:,.1f} GFLOP per micro-batch, "
        f"{report.flops_per_update / 1e9:,.1f} GFLOP per update ({result.accumulation_steps:,} micro-batches per card)",
        f"memory of a card: {report.parameters:,} parameters {human_bytes(report.parameter_bytes)}, "
        f"optimizer {human_bytes(report.optimizer_bytes)}, gradient {human_bytes(report.gradient_bytes)}, "
        f"activations for the backward pass {human_bytes(report.activation_bytes)}, "
        f"at its peak {human_bytes(report.peak_bytes)} ({result.precision}, estimated)",
        *(_card_line(card, sizes.packs) for card in report.cards),
    ]
    shown = [
        f"fix      {problem.kind}: {problem.type} {problem.operation} in {problem.graph}: {problem.found}"
        for problem in report.problems[:_PROBLEMS_SHOWN]
    ]
    hidden = len(report.problems) - len(shown)
    fit = "fit for Gaudi: static shapes, no host calls, no 64-bit data, no strings"
    return [
        *lines,
        *shown,
        *([f"... and {hidden:,} more"] if hidden > 0 else []),
        "not fit for Gaudi" if report.problems else fit,
    ]


def _card_line(fit: CardFit, packs: int) -> str:
    if fit.most_packs == 0:
        return f"{fit.card}: not even one pack fits"
    room = "fits" if packs <= fit.most_packs else "does not fit"
    return f"{fit.card}: up to about {fit.most_packs:,} packs per micro-batch; {packs} {room}"
