"""`doctor --graph`: is a pipeline's training step fit for Gaudi, and what does it cost; no card is needed.

Sizes come from the packed data where it has been written, else from the settings.
"""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.artefacts.base import METADATA_NAME
from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.progress import human_bytes
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.values import Engine as EngineChoice
from gaudi_bert.engines.choose import choose_engine, load_engine
from gaudi_bert.engines.graph_report import CardFit
from gaudi_bert.model.features import BatchSizes
from gaudi_bert.tfrecords.packed_folder import read_metadata
from gaudi_bert.training.results import GraphResult
from gaudi_bert.training.run_plan import RunPlan
from gaudi_bert.training.train import model_config

_PROBLEMS_SHOWN = 20


def check_graph(settings: PipelineSettings, folder: WorkFolder, engine: EngineChoice | None = None) -> GraphResult:
    """Trace the training step of a pipeline, check it, and say what it costs.

    The packed data in its work folder, if any, gives the sizes.
    """
    origin, sizes, packing_factor, vocabulary = _sizes(settings, folder.split("train").packed)
    config = model_config(settings.model, vocabulary, sizes.positions)
    cards = settings.resources.processes_per_worker
    plan = RunPlan(
        settings.training.of_run(),
        packing_factor,
        processes=settings.resources.workers * cards,
        processes_per_worker=cards,
        slots_per_pack=sizes.positions,
        packs=None,
    )
    steps = plan.accumulation_steps
    chosen = choose_engine(
        settings.training.engine if engine is None else engine, key="--engine" if engine else "training.engine"
    )
    report = load_engine(chosen.name).report_on_step(config, settings.training, sizes, steps, settings.gaudi.hccl_memory_MB)
    return GraphResult(
        pipeline=settings.name,
        engine=chosen.name,
        sizes_from=origin,
        sizes=sizes,
        vocabulary=config.vocab_size,
        precision=settings.training.precision,
        accumulation_steps=steps,
        report=report,
    )


def _sizes(settings: PipelineSettings, packed: Path) -> tuple[str, BatchSizes, float, int | None]:
    """Where the sizes are from, those of a micro-batch, the packing factor, and the vocabulary, where it is known."""
    packs = settings.training.micro_batch_packs
    if (packed / METADATA_NAME).exists():
        metadata = read_metadata(packed)
        sizes = BatchSizes(packs, metadata.max_sequence_length, metadata.masked_slots, metadata.depth)
        vocabulary = metadata.vocabulary.size if metadata.vocabulary is not None else None
        return str(packed), sizes, metadata.packing_factor, vocabulary
    prepare, packing = settings.prepare, settings.packing
    depth = prepare.max_sequence_length if packing.depth == "max" else packing.depth
    masked_slots = packing.masked_slots or prepare.max_predictions + depth
    return (
        "the settings; nothing is packed yet, so one sequence per pack is assumed",
        BatchSizes(packs, prepare.max_sequence_length, masked_slots, depth),
        1.0,
        prepare.train_vocab if prepare.vocab is None and prepare.records is None else None,
    )


def describe_graph(result: GraphResult) -> list[str]:
    """The result for people."""
    sizes, report = result.sizes, result.report
    lines = [
        f"{result.pipeline}: micro-batches of {sizes.packs} packs x {sizes.positions} positions, "
        f"{sizes.masked_slots} masked slots, depth {sizes.depth}, vocabulary {result.vocabulary:,} "
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
