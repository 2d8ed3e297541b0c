"""What passes between a stage and its caller: how it runs, and what it returns.

Machine K of N does part (K, N): of the groups that the stage writes (or of the files that it reads) number K, K + N, ...
Where a last file is written when all groups are there, a run that does nothing else is the one with `finish`.

`--json` prints an object of each result (`to_json`): of its fields, or what its `as_json` makes of them. A field with a
default is one that is not always known: it is omitted where it has its default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter, format_count

if TYPE_CHECKING:  # they are slow to load, and `run` and `--help` start without them
    from gaudi_bert.artefacts.packed import PackedMetadata, PackedSums, Verification
    from gaudi_bert.artefacts.plan import PlanTotals
    from gaudi_bert.config.places import StoreSettings

_Group = TypeVar("_Group")
Content = TypeVar("Content", covariant=True)
NOTHING_TO_DO = " (already there, nothing to do)"


@dataclass(frozen=True)
class StageRun:
    """One run of a stage; no byte of the result depends on it.

    Attributes:
        overwrite: replace the result of other settings, which is refused otherwise.
        workers: processes or threads; None for one per core.
        store: how object stores are reached; None for the defaults.
        part: (K, N), to do only part K of N; None for all parts.
        finish: do no part, but check that all are there, and write what is written last.
    """

    reporter: Reporter
    overwrite: bool = False
    workers: int | None = None
    store: StoreSettings | None = None
    part: tuple[int, int] | None = None
    finish: bool = False

    def __post_init__(self) -> None:
        if self.part is not None and self.finish:
            raise InputError("--finish and --shard exclude each other; run the shards first, then --finish once")

    @property
    def does_all(self) -> bool:
        """Whether it does all parts, and finishes."""
        return self.part is None and not self.finish

    def share_of(self, groups: Sequence[_Group]) -> Sequence[_Group]:
        """Return those of `groups` that belong to this part."""
        number, parts = self.part or (0, 1)
        return groups[number::parts]


# --- results


def to_json(result: Any) -> Any:
    """`result` as JSON holds it: objects as dictionaries, anything else as it is."""
    if hasattr(result, "as_json"):
        return result.as_json()
    if is_dataclass(result):
        return _fields_as_json(result)
    if isinstance(result, Mapping):
        return {name: to_json(value) for name, value in result.items()}
    return [to_json(value) for value in result] if isinstance(result, list | tuple) else result


def _fields_as_json(result: Any, *others: str) -> dict[str, Any]:
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
        return {**content.summary(), **_fields_as_json(self, "content"), **skipped}

    def lines(self, **how: Any) -> list[str]:
        """Return the lines of the content, the first of which reports where there was nothing to do."""
        content: Any = self.content
        first, *others = content.lines(**how)
        return [first + NOTHING_TO_DO * self.skipped, *others]


@dataclass(frozen=True)
class PlainResult:
    """Result of a run without a complete artefact of its own: `text` for people, `facts` for `--json`."""

    text: Sequence[str]
    facts: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The facts alone."""
        return dict(self.facts)

    def lines(self, **how: Any) -> list[str]:
        """Return the text, which has none of what `how` shows of a complete artefact."""
        return list(self.text)


def result_of_part(groups: int, groups_written: int, sums: PackedSums | Verification) -> PlainResult:
    """The result of a run that wrote or verified some groups of a packed folder, those of one part; `sums` are theirs."""
    facts = {"groups": groups, "groups_written": groups_written}
    facts |= {key: getattr(sums, key) for key in ("sequences", "packs", "tokens")}
    if not groups:
        return PlainResult(["nothing to do: there are fewer groups than parts"], facts)
    counted = f"{format_count(sums.sequences, 'sequence')} in {format_count(sums.packs, 'pack')}"
    there = "" if groups_written else NOTHING_TO_DO
    line = f"{format_count(groups, 'group')}: {counted}{there}; --finish completes the work when all parts are done"
    return PlainResult([line], facts)


def require_complete(result: StageOutput[Content] | PlainResult) -> StageOutput[Content]:
    """The result of a run that does all parts, or finishes; one of a part is refused."""
    if isinstance(result, PlainResult):
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

    def lines(self, out: Path, verbose: bool) -> list[str]:
        """Return for people the packs that were written to `out`, how they were planned, and the proof."""
        planned = self.planned
        skipped = self.written.skipped or (planned is not None and planned.skipped)
        lines = StageOutput(self.written.content, skipped=skipped).lines(out=out, verbose=verbose and planned is None)
        lines += planned.content.choice_lines() if verbose and planned is not None else []
        if self.verified is not None:
            sequences = format_count(self.verified.content.sequences, "sequence")
            lines.append(f"verified: every one of {sequences} is in the packs exactly once")
        return lines


@dataclass(frozen=True)
class ByRowLength(Generic[Content]):
    """Results for the packed table of each length of rows, ascending."""

    tables: Mapping[int, Content]

    def lines(self, out: Path | None = None, **how: Any) -> list[str]:
        """Return the lines of each length, and at the end those that are of all."""
        tables: Mapping[int, Any] = self.tables
        where = {} if out is None else {length: {"out": out / f"rows-{length}"} for length in tables}
        lines = {length: each.lines(**how, **where.get(length, {})) for length, each in tables.items()}
        first, *others = lines.values()
        common = [line for line in first if all(line in other for other in others)]
        own = [f"rows of {length:,}: {line}" for length, each in lines.items() for line in each if line not in common]
        return [*own, *common]
