"""What stages return: frozen and typed. Dictionaries begin where `cli/results.py` prints.

A field with a default is one that is not always known: `--json` omits it where it has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:  # it needs numpy, and `run` starts without it
    from gaudi_bert.artefacts.plan import PlanTotals

Content = TypeVar("Content")
Proof = TypeVar("Proof")


@dataclass(frozen=True)
class StageOutput(Generic[Content]):
    """The result of a stage, the seconds that it took where they are measured, and whether it was finished already."""

    content: Content
    seconds: float | None = None
    skipped: bool = False


@dataclass(frozen=True)
class PreparedShard:
    """One shard of examples that are not finished: the sections of other shards."""

    missing_sections: tuple[str, ...]


@dataclass(frozen=True)
class TokenisedShard:
    """Tokenised texts that are not finished: how many parts belong to other shards."""

    parts: int
    missing_parts: int


@dataclass(frozen=True)
class GroupsResult:
    """Some groups of a packed folder that is not finished: those of one shard of the work."""

    groups: int
    groups_written: int
    sequences: int
    packs: int
    tokens: int


@dataclass(frozen=True)
class PackResult(Generic[Content, Proof]):
    """A packed folder, the plan of packed TFRecords, and the proof where it was requested."""

    written: StageOutput[Content]
    planned: StageOutput[PlanTotals] | None = None
    verified: StageOutput[Proof] | None = None


@dataclass(frozen=True)
class ByRowLength(Generic[Content]):
    """What was done with the packed table of each length of rows, ascending."""

    tables: Mapping[int, Content]


@dataclass(frozen=True)
class GivenRecords:
    """`prepare` had nothing to do: the pipeline names its own records."""

    records: str


@dataclass(frozen=True)
class NothingToCount:
    """`histogram` had nothing to do: there are fewer files than parts."""

    files: int
    skipped: bool = False


@dataclass(frozen=True)
class NothingHeldOut:
    """`evaluate` had nothing to do: the pipeline holds no evaluation data out."""


@dataclass(frozen=True)
class ReportResult:
    """The page, its size, and the figures of its summary by name."""

    report: str
    bytes: int
    figures: dict[str, str]
