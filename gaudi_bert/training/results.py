"""What the stages of the model are given and return: frozen and typed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaudi_bert.artefacts.results import fields_as_json
from gaudi_bert.engines.graph_report import GraphReport
from gaudi_bert.model.features import BatchSizes
from gaudi_bert.training.run_plan import RunPlan


@dataclass(frozen=True)
class DryRun:
    """What training or fine-tuning would be."""

    plan: RunPlan

    def as_json(self) -> dict[str, Any]:
        """The plan, and that it is one."""
        return {"dry_run": True, **self.plan.as_json()}


@dataclass(frozen=True)
class FineTuneInput:
    """The files of a run.

    `vocabulary` is a folder with the tokenizer, where it is not next to the weights.
    """

    data: Path
    evaluation_data: Path | None
    model: Path
    vocabulary: Path | None = None


@dataclass(frozen=True)
class VerifyModelResult:
    """How far packed is from unpacked.

    Outputs and losses have their largest difference; `gradient` is the largest difference of a variable's gradient, as a
    share of its norm, and `gradient_of` that variable. `leaks` counts the sequences that changed when a neighbour in their
    pack did, of `leak_comparisons`.
    """

    weights: str
    data: str
    packs: int
    sequences: int
    hidden_states: float
    pooled_output: float
    masked_lm_logits: float
    next_sentence_logits: float
    masked_lm_loss: float
    next_sentence_loss: float
    gradient: float
    gradient_of: str
    per_sequence_loss_difference: float
    leaks: int
    leak_comparisons: int


@dataclass(frozen=True)
class ExportResult:
    """What was written: its files, the model's parameters, the vocabulary next to it, a SavedModel's sizes."""

    format: str
    files: tuple[str, ...]
    parameters: int
    vocabulary: str | None
    sizes: dict[str, int] | None = None


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
