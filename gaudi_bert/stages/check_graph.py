"""`doctor --graph`: is a pipeline's training step fit for Gaudi, and what does it cost; no card is needed.

Sizes come from the packed data where it has been written, else from the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.progress import human_bytes
from gaudi_bert.config import PipelineSettings
from gaudi_bert.stages.train_job import model_config

__all__ = ["check_graph", "describe_graph"]

PROBLEMS_SHOWN = 20


@dataclass(frozen=True)
class _DataSizes:
    """What the data is, or will be.

    Attributes:
        origin: where the sizes come from.
        max_sequence_length: L.
        masked_slots: Q.
        depth: S.
        packing_factor: sequences per pack.
        vocabulary_size: None where it is not known.
    """

    origin: str
    max_sequence_length: int
    masked_slots: int
    depth: int
    packing_factor: float
    vocabulary_size: int | None


def check_graph(settings: PipelineSettings, folder: WorkFolder) -> dict[str, Any]:
    """Trace the training step of a pipeline, check it, and say what it costs.

    Args:
        settings: the pipeline.
        folder: its work folder; the packed data there, if any, gives the sizes.

    Returns:
        `sizes`, `accumulation_steps`, and the figures of `GraphReport`; `fit` is False where there are `problems`.

    Raises:
        InputError: the metadata of the packed data is damaged, or the model's settings are not possible.
    """
    from gaudi_bert.model.inputs import BatchSizes
    from gaudi_bert.training.graph.report import report_on_step
    from gaudi_bert.training.run_plan import plan_run

    data = _sizes(settings, folder.split("train").packed)
    config = model_config(settings.model, data.vocabulary_size, data.max_sequence_length)
    cards = settings.resources.processes_per_worker
    plan = plan_run(
        settings.training,
        data.packing_factor,
        processes=settings.resources.workers * cards,
        processes_per_worker=cards,
        slots_per_pack=data.max_sequence_length,
        packs=None,
    )
    steps = plan.accumulation_steps
    packs = settings.training.micro_batch_packs
    sizes = BatchSizes(packs, data.max_sequence_length, data.masked_slots, data.depth)
    report = report_on_step(config, plan.settings, sizes, steps, settings.gaudi.hccl_memory_MB)
    return {
        "pipeline": settings.name,
        "sizes_from": data.origin,
        "sizes": {**sizes._asdict(), "vocabulary": config.vocab_size},
        "precision": settings.training.precision,
        "accumulation_steps": steps,
        **report.as_json(),
    }


def _sizes(settings: PipelineSettings, packed: Path) -> _DataSizes:
    from gaudi_bert.artefacts.metadata import METADATA_NAME
    from gaudi_bert.records.packed_folder import read_metadata

    if (packed / METADATA_NAME).exists():
        metadata = read_metadata(packed)
        return _DataSizes(
            origin=str(packed),
            max_sequence_length=metadata.max_sequence_length,
            masked_slots=metadata.masked_slots,
            depth=metadata.depth,
            packing_factor=metadata.packing_factor,
            vocabulary_size=metadata.vocabulary.size if metadata.vocabulary is not None else None,
        )
    prepare, packing = settings.prepare, settings.packing
    depth = prepare.max_sequence_length if packing.depth == "max" else packing.depth
    return _DataSizes(
        origin="the settings; nothing is packed yet, so a pack is taken for one sequence",
        max_sequence_length=prepare.max_sequence_length,
        masked_slots=packing.masked_slots or prepare.max_predictions + depth,
        depth=depth,
        packing_factor=1.0,
        vocabulary_size=prepare.train_vocab if prepare.vocab is None and prepare.records is None else None,
    )


def describe_graph(result: Mapping[str, Any]) -> list[str]:
    """The result for people."""
    sizes, problems = result["sizes"], result["problems"]
    lines = [
        f"{result['pipeline']}: micro-batches of {sizes['packs']} packs x {sizes['positions']} positions, "
        f"{sizes['masked_slots']} masked slots, depth {sizes['depth']}, vocabulary {sizes['vocabulary']:,} "
        f"(from {result['sizes_from']})",
        f"matrix products: {result['flops_per_micro_batch'] / 1e9:,.1f} GFLOP per micro-batch, "
        f"{result['flops_per_update'] / 1e9:,.1f} GFLOP per update "
        f"({result['accumulation_steps']:,} micro-batches per card)",
        f"memory of a card: {result['parameters']:,} parameters {human_bytes(result['parameter_bytes'])}, "
        f"optimizer {human_bytes(result['optimizer_bytes'])}, gradient {human_bytes(result['gradient_bytes'])}, "
        f"kept for the backward pass "
        f"{human_bytes(result['activation_bytes'])}, at its peak {human_bytes(result['peak_bytes'])} "
        f"({result['precision']}, estimated)",
        *(_card_line(card, sizes["packs"]) for card in result["cards"]),
    ]
    shown = [f"mend     {kind}" for kind in map(_problem_line, problems[:PROBLEMS_SHOWN])]
    hidden = len(problems) - len(shown)
    verdict = "not fit for Gaudi" if problems else "fit for Gaudi: static shapes, no host calls, no 64-bit data, no strings"
    return [*lines, *shown, *([f"... and {hidden:,} more"] if hidden > 0 else []), verdict]


def _card_line(card: Mapping[str, Any], packs: int) -> str:
    most = card["most_packs"]
    if most == 0:
        return f"{card['card']}: not even one pack fits"
    room = "fits" if packs <= most else "does not fit"
    return f"{card['card']}: up to about {most:,} packs per micro-batch; {packs} {room}"


def _problem_line(problem: Mapping[str, str]) -> str:
    return f"{problem['kind']}: {problem['type']} {problem['operation']} in {problem['graph']}: {problem['found']}"
