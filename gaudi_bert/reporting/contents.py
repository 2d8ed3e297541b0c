"""What the report takes from each file of a work folder: typed, checked as it is read; the rest of a file is left alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "EvaluationFile",
    "ExamplesFile",
    "HistogramFile",
    "MetadataFile",
    "MetricsLine",
    "PackedTotals",
    "PlanFile",
    "SettingsFile",
    "VerificationFile",
]

Count = Annotated[int, Field(ge=0, le=2**62)]
Counts = Annotated[tuple[Count, ...], Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]


HasLengths = TypeVar("HasLengths", "MetadataFile", "HistogramFile")


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, strict=False)


def _checked(content: HasLengths, counts: int) -> HasLengths:
    if counts != content.max_sequence_length:
        raise ValueError(f"{counts} counts for lengths 1 to {content.max_sequence_length}")
    return content


class PackedTotals(_Content):
    """The quality of a packing, of a plan or as written."""

    packs: int = Field(ge=1)
    lower_bound: Count
    padding_tokens: Count
    efficiency: Share
    packing_factor: float = Field(ge=0)


class PlanTotals(PackedTotals):
    """Of plan.json."""

    algorithm: str
    algorithms_used: tuple[str, ...]
    strategies_used: Count


class PlanGroup(_Content):
    """A group: its strategies and how often each is used."""

    strategies: tuple[tuple[Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)], Count], ...]


class PlanFile(_Content):
    """plan.json."""

    depth: int = Field(ge=1)
    totals: PlanTotals
    groups: tuple[PlanGroup, ...]


class MetadataFile(PackedTotals):
    """metadata.json of a packed folder."""

    max_sequence_length: int = Field(ge=1)
    histogram: Counts

    @model_validator(mode="after")
    def _one_count_a_length(self) -> MetadataFile:
        return _checked(self, len(self.histogram))


class HistogramFile(_Content):
    """histogram.json."""

    max_sequence_length: int = Field(ge=1)
    counts: Counts

    @model_validator(mode="after")
    def _one_count_a_length(self) -> HistogramFile:
        return _checked(self, len(self.counts))


class ExamplesSplit(_Content):
    """A split of examples.json."""

    text_documents: Count
    text_sentences: Count
    text_tokens: Count
    unknown_tokens: Count
    sequences: int = Field(ge=1)
    tokens: Count
    masked: Count
    random_next: Count


class ExamplesVocabulary(_Content):
    """The vocabulary of examples.json."""

    size: Count
    trained: bool


class ExamplesFile(_Content):
    """examples.json, the summary of `prepare`."""

    splits: dict[Literal["train", "evaluation"], ExamplesSplit]
    vocabulary: ExamplesVocabulary


class SettingsFile(_Content):
    """The settings kept beside an artefact."""

    settings: dict[str, Any]


class VerificationFile(_Content):
    """verify.json."""

    sequences: Count


class EvaluationFile(_Content):
    """evaluation.json."""

    masked_lm_loss: float
    masked_lm_accuracy: Share
    next_sentence_loss: float
    next_sentence_accuracy: Share
    unigram_baseline: Share | None = None


class MetricsLine(_Content):
    """A line of metrics.jsonl."""

    kind: Literal["train", "evaluation"]
    sequences: Count
    masked_lm_loss: float
    masked_lm_accuracy: Share
    next_sentence_loss: float
    next_sentence_accuracy: Share
    sequences_per_second: float | None = None
    tokens_per_second: float | None = None
