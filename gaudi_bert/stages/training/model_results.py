"""What the stages of the model return: frozen and typed, as `results.py` has it for those of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gaudi_bert.artefacts.finetuning import FineTuning
    from gaudi_bert.artefacts.training import EvaluationResult, TrainingResult
    from gaudi_bert.training.graph.report import GraphReport
    from gaudi_bert.training.run_plan import RunPlan

__all__ = [
    "EvaluateResult",
    "ExportResult",
    "FeedingFinding",
    "FineTuneDryRun",
    "FineTuneResult",
    "GraphResult",
    "GraphSizes",
    "TrainDryRun",
    "TrainResult",
    "VerifyHuggingFaceResult",
    "VerifyModelResult",
]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended; `skipped` where it was finished already."""

    training: TrainingResult
    skipped: bool = False


@dataclass(frozen=True)
class TrainDryRun:
    """What a run would be."""

    plan: RunPlan


@dataclass(frozen=True)
class FineTuneResult:
    """How good the model is; `skipped` where it was finished already."""

    finetuning: FineTuning
    skipped: bool = False


@dataclass(frozen=True)
class FineTuneDryRun:
    """What fine-tuning would be."""

    plan: RunPlan


@dataclass(frozen=True)
class EvaluateResult:
    """What an evaluation found; `skipped` where it was made already."""

    evaluation: EvaluationResult
    skipped: bool = False


@dataclass(frozen=True)
class FeedingFinding:
    """What a way of feeding packs to a model does; `alone` and `neighbour` are None where the model refused it.

    Attributes:
        way: its name.
        right: whether every sequence is treated as if it stood alone.
        alone: largest difference between packed and alone.
        neighbour: largest change by a changed neighbour.
        refusal: what the model said.
    """

    way: str
    right: bool
    alone: float | None
    neighbour: float | None
    refusal: str


@dataclass(frozen=True)
class VerifyHuggingFaceResult:
    """Which ways of feeding packs to a `transformers` model are right.

    Attributes:
        model: its folder.
        model_type: as its config names it.
        attention: what it computes attention with.
        right: the names of the right ways.
        findings: of each way that was tried.
    """

    model: str
    model_type: str
    attention: str
    right: tuple[str, ...]
    findings: tuple[FeedingFinding, ...]


@dataclass(frozen=True)
class VerifyModelResult:
    """How far packed is from unpacked.

    Attributes:
        weights: where they come from; "random" without a checkpoint.
        data: where it comes from; "random" without any.
        packs: packs compared.
        sequences: sequences in them.
        hidden_states: the largest difference of the encoder's outputs, and so on for the other outputs and the losses.
        gradient: the largest difference of a variable's gradient, as a share of its norm.
        gradient_of: that variable.
        per_sequence_loss_difference: the difference of the masked-LM loss that is a mean over sequences.
        leaks: sequences that changed when a neighbour in their pack did.
        leak_comparisons: sequences beside a changed one.
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
    """What was written: its files, the model's parameters, the vocabulary that lies beside it, a SavedModel's sizes."""

    format: str
    files: tuple[str, ...]
    parameters: int
    vocabulary: str | None
    sizes: dict[str, int] | None = None


@dataclass(frozen=True)
class GraphSizes:
    """The sizes of a micro-batch, and of the model's vocabulary."""

    packs: int
    positions: int
    masked_slots: int
    depth: int
    vocabulary: int


@dataclass(frozen=True)
class GraphResult:
    """Whether a pipeline's training step is fit for Gaudi, and what it costs; `sizes_from` says where its sizes are from."""

    pipeline: str
    sizes_from: str
    sizes: GraphSizes
    precision: str
    accumulation_steps: int
    report: GraphReport
