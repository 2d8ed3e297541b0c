"""What a run would be: for each step its image, its pods and what they ask for, and roughly how long it takes (`--dry-run`).

Times are orders of magnitude, for planning a day and not for comparing machines. Data stages are counted in bytes: the
speeds are those seen on two busy cores. Training is counted in floating-point operations, forward and backward, for each
slot of a pack: 6 for every weight of the encoder, 12 L H per layer for attention, and 6 for every weight of the output layer
at the share of positions that is masked; a third of that for evaluation, which has no backward pass. The speed of a core was
seen with the demo; that of a card is what published logs of the vendor's deleted script (Habana Model-References) on 8 cards
amount to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path
from typing import Any

from gaudi_bert.artefacts.plan import PlanTotals, read_plan
from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.built_in_texts import BUILT_IN_TEXTS
from gaudi_bert.common.progress import human_seconds
from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.images import stage_image
from gaudi_bert.runners.stage_table import STAGES, Stage

__all__ = ["StagePreview", "preview_stages"]

PREPARE_BYTES_PER_SECOND = 4e6
RECORD_BYTES_PER_SECOND = 200e6
CORE_OPERATIONS_PER_SECOND = 30e9
CARD_OPERATIONS_PER_SECOND = 30e12
# Bytes of examples for one byte of text.
EXPANSION = 1.8
START_SECONDS = 5.0


@dataclass(frozen=True)
class StagePreview:
    """One stage to come.

    Attributes:
        stage: its name.
        image: the container image, where it runs in one.
        containers: how many work side by side.
        cpu, memory, cards: what each asks for in a container.
        seconds: roughly how long it takes; None where the size of its input is not known yet.
    """

    stage: str
    image: str
    containers: int
    cpu: str
    memory: str
    cards: int
    seconds: float | None

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)

    def __str__(self) -> str:
        count = f"{self.containers} x " if self.containers > 1 else ""
        cards = f", {self.cards} card{'s' if self.cards > 1 else ''}" if self.cards else ""
        took = "time unknown before the data are there" if self.seconds is None else f"about {human_seconds(self.seconds)}"
        return f"{self.stage}: {count}{self.image} ({self.cpu} cpu, {self.memory}{cards}), {took}"


def preview_stages(
    settings: PipelineSettings, stages: Sequence[str], work: Path, pipeline_folder: Path
) -> list[StagePreview]:
    """The stages to come, in order, for the data that are there now."""
    folder = WorkFolder.of(settings, work, pipeline_folder)
    return [_preview(settings, STAGES[stage], folder, pipeline_folder) for stage in stages]


def _preview(settings: PipelineSettings, stage: Stage, folder: WorkFolder, pipeline_folder: Path) -> StagePreview:
    resources = settings.resources
    asked = resources.training if stage.trains else resources.data
    containers = resources.workers if stage.distributed else resources.data_workers if stage.shared else 1
    return StagePreview(
        stage=stage.name,
        image=stage_image(settings.images, stage),
        containers=containers,
        cpu=asked.cpu,
        memory=asked.memory_limit or asked.memory,
        cards=resources.cards if stage.distributed else min(resources.cards, 1) if stage.trains else 0,
        seconds=_seconds(settings, stage, folder, pipeline_folder),
    )


def _seconds(settings: PipelineSettings, stage: Stage, folder: WorkFolder, pipeline_folder: Path) -> float | None:
    if stage.name == "train":
        return _training_seconds(settings, folder)
    if stage.name == "evaluate":
        return _evaluation_seconds(settings, folder)
    if stage.trains:
        return None  # what tasks take is known when their rows are tokenized
    if not stage.parallel:
        return START_SECONDS
    text_bytes = _text_bytes(settings, pipeline_folder)
    processes = settings.resources.data_processes * (settings.resources.data_workers if stage.shared else 1)
    if stage.name == "prepare":
        work = None if text_bytes is None else text_bytes * settings.prepare.duplicates / PREPARE_BYTES_PER_SECOND
    else:
        size = _record_bytes(settings, folder, text_bytes)
        work = None if size is None else size / RECORD_BYTES_PER_SECOND
    return None if work is None else START_SECONDS + work / processes


def _text_bytes(settings: PipelineSettings, pipeline_folder: Path) -> int | None:
    """Bytes of the text, None where there is none to be seen from here."""
    text = settings.prepare.text
    total = 0
    for name in (text,) if isinstance(text, str) else text or ():
        if name in BUILT_IN_TEXTS:
            total += BUILT_IN_TEXTS[name]
            continue
        paths = [Path(found) for found in glob(str(pipeline_folder / name))]
        total += sum(_size(path) for path in paths)
    return total or None


def _record_bytes(settings: PipelineSettings, folder: WorkFolder, text_bytes: int | None) -> float | None:
    """Bytes of the unpacked records: those that are there, or those that the text will make."""
    there = sum(_size(Path(found)) for name in folder.splits for found in glob(str(folder.split(name).records)))
    if there:
        return there
    return None if text_bytes is None else text_bytes * settings.prepare.duplicates * EXPANSION


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(child.stat().st_size for child in path.rglob("*") if child.is_file())
    return path.stat().st_size


def _training_seconds(settings: PipelineSettings, folder: WorkFolder) -> float:
    training, resources = settings.training, settings.resources
    # Without a plan, one sequence per pack is taken, so that the time is rather too long.
    planned = _plan_totals(folder, "train")
    factor = 1.0 if planned is None else planned.packing_factor
    packs = training.updates * training.global_batch_sequences / factor
    return START_SECONDS + packs * _operations_per_pack(settings) / resources.workers / _speed(resources.cards)


def _evaluation_seconds(settings: PipelineSettings, folder: WorkFolder) -> float | None:
    """Once packed and once unpacked; None before the evaluation data are planned."""
    if not folder.has_evaluation:
        return START_SECONDS
    planned = _plan_totals(folder, "evaluation")
    if planned is None:
        return None
    rows = planned.packs * (1 + planned.packing_factor)
    return START_SECONDS + rows * _operations_per_pack(settings) / 3 / _speed(min(settings.resources.cards, 1))


def _operations_per_pack(settings: PipelineSettings) -> float:
    model, length = settings.model, settings.prepare.max_sequence_length
    hidden, vocabulary = model.hidden_size, model.vocab_size or settings.prepare.train_vocab
    encoder = model.num_hidden_layers * (4 * hidden**2 + 2 * hidden * model.intermediate_size)
    output = settings.prepare.masked_lm_probability * (hidden**2 + hidden * vocabulary)
    return length * (6 * (encoder + output) + 12 * model.num_hidden_layers * length * hidden)


def _speed(cards: int) -> float:
    """Operations per second of one container."""
    return cards * CARD_OPERATIONS_PER_SECOND or len(os.sched_getaffinity(0)) * CORE_OPERATIONS_PER_SECOND


def _plan_totals(folder: WorkFolder, split: str) -> PlanTotals | None:
    """The totals of a split's plan, None where there is no plan yet."""
    plan = folder.split(split).plan
    return read_plan(plan).totals if plan.exists() else None
