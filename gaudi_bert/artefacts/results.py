"""What stages return: frozen and typed, and the object of each that `--json` prints (`to_json`).

That is an object of its fields, or what its `as_json` makes of them: an artefact is printed as it is stored. A field with a
default is one that is not always known (not skipped, not measured): it is omitted where it has its default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from gaudi_bert.common.errors import InputError, enumerated
from gaudi_bert.common.progress import count_of

if TYPE_CHECKING:  # it needs numpy, and `run` starts without it
    from gaudi_bert.artefacts.packed import PackedMetadata, Verification
    from gaudi_bert.artefacts.plan import PlanTotals

Content = TypeVar("Content", covariant=True)


class Figures(Protocol):
    """How well sequences are packed, as plans and metadata state it."""

    @property
    def sequences(self) -> int:
        """How many there are."""
        ...

    @property
    def packs(self) -> int:
        """How many hold them."""
        ...

    @property
    def packing_factor(self) -> float:
        """Sequences per pack."""
        ...

    @property
    def efficiency(self) -> float:
        """Tokens per slot."""
        ...

    @property
    def gap(self) -> int:
        """Packs above the proven bound."""
        ...


def packing_lines(packed: Figures, skipped: bool, rows: int | None = None) -> list[str]:
    """Return what became of sequences, or of the `rows` of a table that they come from; and how full the packs are."""
    more = f"{packed.gap:,} more than the proven minimum"
    proven = more if packed.gap else "proven: none fewer is possible"
    sequences = count_of(packed.sequences, "sequence")
    if rows is not None and rows != packed.sequences:
        sequences = f"{count_of(rows, 'row')} ({sequences})"
    return [
        f"{sequences} became {count_of(packed.packs, 'pack')} "
        f"({packed.packing_factor:.2f} times fewer), {proven}{skipped_note(skipped)}",
        f"{100 * packed.efficiency:.2f} % of the slots hold tokens",
    ]


def algorithm_line(algorithm: str, used: Iterable[str], depth: int | None) -> str:
    """Return which algorithms packed; `used` are those that `algorithm` chose."""
    others = [name for name in used if name != algorithm]
    heuristics = f" (by {enumerated(others)})" if others else ""
    return f"algorithm {algorithm}{heuristics}, depth {depth}"


def skipped_note(skipped: bool) -> str:
    """Return ` (already there, nothing to do)` where a stage had nothing to do."""
    return " (already there, nothing to do)" if skipped else ""


def to_json(result: Any) -> Any:
    """`result` as JSON holds it: objects as dictionaries, anything else as it is."""
    if hasattr(result, "as_json"):
        return result.as_json()
    if is_dataclass(result):
        return fields_as_json(result)
    if isinstance(result, Mapping):
        return {name: to_json(value) for name, value in result.items()}
    return [to_json(value) for value in result] if isinstance(result, list | tuple) else result


def fields_as_json(result: Any, *others: str) -> dict[str, Any]:
    """The fields of a data class but for `others`; without those that keep their default."""
    known = [field for field in fields(result) if field.name not in others]
    return {
        field.name: to_json(getattr(result, field.name)) for field in known if getattr(result, field.name) != field.default
    }


@dataclass(frozen=True)
class StageOutput(Generic[Content]):
    """The result of a stage, the seconds that it took where they are measured, and whether it was finished already."""

    content: Content
    seconds: float | None = None
    skipped: bool = False

    def as_json(self) -> dict[str, Any]:
        """The content's summary and the other fields; `prepare` always prints whether it was skipped."""
        from gaudi_bert.artefacts.examples import PreparedExamples

        content: Any = self.content
        skipped = {"skipped": self.skipped} if isinstance(content, PreparedExamples) else {}
        return {**content.summary(), **fields_as_json(self, "content"), **skipped}

    def lines(self, **how: Any) -> list[str]:
        """Return the lines for people: those of the content, which takes `how` to print it."""
        content: Any = self.content
        lines: list[str] = content.lines(skipped=self.skipped, **how)
        return lines


@dataclass(frozen=True)
class PreparedShard:
    """One shard of examples that are not finished: the sections of other shards."""

    missing_sections: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The fields, and that it is not all."""
        return {"finished": False, **fields_as_json(self)}


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

    def lines(self, **_: Any) -> list[str]:
        """Return the line of a part."""
        if not self.groups:
            return ["nothing to do: there are fewer groups than parts"]
        there = "" if self.groups_written else " (all were there already, nothing to do)"
        counted = f"{count_of(self.sequences, 'sequence')} in {count_of(self.packs, 'pack')}{there}"
        return [f"{count_of(self.groups, 'group')}: {counted}; --finish completes the work when all parts are done"]


def of_all(result: StageOutput[Content] | GroupsResult) -> StageOutput[Content]:
    """The result of a run that does all parts, or finishes; one of a part is refused."""
    if isinstance(result, GroupsResult):
        raise InputError("only a part of the work is done, and all of it is needed here; leave out --shard")
    return result


@dataclass(frozen=True)
class PackResult:
    """A packed folder, the plan of packed TFRecords, and the proof where it was requested."""

    written: StageOutput[PackedMetadata]
    planned: StageOutput[PlanTotals] | None = None
    verified: StageOutput[Verification] | None = None

    def as_json(self) -> dict[str, Any]:
        """The keys of the plan and of the folder in one, and the proof."""
        planned = {} if self.planned is None else self.planned.as_json()
        verified = {} if self.verified is None else {"verify": self.verified.as_json()}
        return {**planned, **self.written.as_json(), **verified}

    def lines(self, **how: Any) -> list[str]:
        """Return the lines of the folder, of how it was planned, and of the proof."""
        skipped = self.written.skipped or (self.planned is not None and self.planned.skipped)
        lines: list[str] = replace(self.written, skipped=skipped).lines(**how)
        if how.get("verbose") and self.planned is not None:
            lines += self.planned.content.how_it_was_planned()
        proof = [] if self.verified is None else self.verified.lines()
        return [*lines, *(f"verified: {line}" for line in proof)]


@dataclass(frozen=True)
class ByRowLength(Generic[Content]):
    """What was done with the packed table of each length of rows, ascending."""

    tables: Mapping[int, Content]

    def lines(self, **how: Any) -> list[str]:
        """Return the lines of each length, and at the end those that are of all."""
        tables: Mapping[int, Any] = self.tables
        out = how.pop("out", None)
        lines = {
            length: each.lines(**how, **({} if out is None else {"out": out / f"rows-{length}"}))
            for length, each in tables.items()
        }
        first, *others = lines.values()
        of_all = [line for line in first if all(line in other for other in others)]
        own = [f"rows of {length:,}: {line}" for length, each in lines.items() for line in each if line not in of_all]
        return [*own, *of_all]


@dataclass(frozen=True)
class GivenRecords:
    """`prepare` had nothing to do: the pipeline names its own records."""

    records: str


@dataclass(frozen=True)
class NothingToCount:
    """`histogram` had nothing to do: there are fewer files than parts."""

    files: int
    skipped: bool = False

    def lines(self, **_: Any) -> list[str]:
        """Return the line of a part without files."""
        return ["nothing to do: there are fewer files than parts"]


@dataclass(frozen=True)
class NothingHeldOut:
    """`evaluate` had nothing to do: the pipeline holds no evaluation data out."""


@dataclass(frozen=True)
class ReportResult:
    """The page, its size, and the figures of its summary by name."""

    report: str
    bytes: int
    figures: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """The figures next to the other fields."""
        return {**fields_as_json(self, "figures"), **self.figures}
