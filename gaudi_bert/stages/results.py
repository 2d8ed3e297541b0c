"""What the data stages return: frozen and typed. Dictionaries begin where `cli/output.py` prints.

The content of an artefact comes as its own model. `skipped` says that it was finished already; `seconds` is what this run
took. A field with a default is one that is not always known: it is left out of `--json` where it keeps its default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gaudi_bert.artefacts.examples import PreparedExamples
    from gaudi_bert.artefacts.plan import PlanTotals
    from gaudi_bert.artefacts.tables import TableMetadata, TableVerification
    from gaudi_bert.artefacts.verification import Verification

__all__ = [
    "CopiesResult",
    "GroupsResult",
    "HistogramResult",
    "PackResult",
    "PackTableResult",
    "PlanResult",
    "PrepareResult",
    "PreparedShard",
    "ReportResult",
    "VerifyResult",
    "VerifyTableResult",
    "WriteResult",
]


@dataclass(frozen=True)
class PrepareResult:
    """Finished examples."""

    examples: PreparedExamples
    skipped: bool


@dataclass(frozen=True)
class PreparedShard:
    """One shard of examples that are not finished: the sections that are left to other shards."""

    missing_sections: tuple[str, ...]


@dataclass(frozen=True)
class HistogramResult:
    """What was counted; `mean_length` in tokens."""

    sequences: int
    tokens: int
    files: int
    bytes: int
    max_sequence_length: int
    max_predictions: int
    mean_length: float
    skipped: bool = False


@dataclass(frozen=True)
class PlanResult:
    """The quality of a plan."""

    totals: PlanTotals
    seconds: float
    skipped: bool = False


@dataclass(frozen=True)
class WriteResult:
    """The totals of a packed folder; `bytes` of all its shards."""

    sequences: int
    packs: int
    tokens: int
    padding_tokens: int
    efficiency: float
    packing_factor: float
    lower_bound: int
    gap: int
    algorithm: str
    depth: int
    masked_slots: int
    shards: int
    bytes: int
    seconds: float | None = None
    skipped: bool = False


@dataclass(frozen=True)
class GroupsResult:
    """Some groups of a packed folder that is not finished: those of one shard of the work."""

    groups: int
    groups_written: int
    sequences: int
    packs: int
    tokens: int


@dataclass(frozen=True)
class CopiesResult:
    """Where the packs were written for other trainers, as far as that was asked for."""

    parquet: str | None = None
    predecessor_metadata: str | None = None


@dataclass(frozen=True)
class VerifyResult:
    """What the proof found."""

    verification: Verification
    skipped: bool = False


@dataclass(frozen=True)
class PackResult:
    """Histogram, plan and write in one, and the proof where it was asked for."""

    planned: PlanResult
    written: WriteResult
    verified: VerifyResult | None = None


@dataclass(frozen=True)
class VerifyTableResult:
    """What the proof of a packed table found."""

    verification: TableVerification
    skipped: bool = False


@dataclass(frozen=True)
class PackTableResult:
    """A packed table, and the proof where it was asked for."""

    metadata: TableMetadata
    verified: VerifyTableResult | None = None
    seconds: float | None = None
    skipped: bool = False


@dataclass(frozen=True)
class ReportResult:
    """The page, its size, and the figures of its summary by name."""

    report: str
    bytes: int
    figures: dict[str, str]
