"""The options with which a stage is run, and the types of its results.

N machines can share the work of a stage. Machine K does part (K, N), which consists of the groups or input files with the
numbers K, K + N, and so on. If the stage has a final file, a run with `finish` checks that all groups are complete, and
writes this file.

`--json` prints each result as a JSON object (`to_json`), which contains the fields of the result or the value of its
`as_json` method. A field that has its default value is omitted, because it may not have been measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter, format_count
from gaudi_bert.config.options import check_option_combination

if TYPE_CHECKING:  # these modules are slow to import, and `run` and `--help` do not need them
    from gaudi_bert.artefacts.packed import PackedMetadata, PackedTotals, Verification
    from gaudi_bert.artefacts.plan import PlanTotals
    from gaudi_bert.config.places import StoreSettings

_Group = TypeVar("_Group")
Content = TypeVar("Content", covariant=True)
NOTHING_TO_DO = " (exists already, nothing to do)"


@dataclass(frozen=True)
class StageRun:
    """The options for one run of a stage. They do not affect the bytes that the stage writes.

    Attributes:
        reporter: Receives progress and messages.
        overwrite: Replace a result that was written with other settings. Otherwise such a result is an error.
        workers: The number of processes or threads, or None for one per core.
        store: The settings of the object store, or None for the defaults.
        part: (K, N) to do only part K of N, or None to do all parts.
        finish: Only check that all parts are complete, and write the final file.

    Raises:
        InputError: Both `part` and `finish` are given.
    """

    reporter: Reporter
    overwrite: bool = False
    workers: int | None = None
    store: StoreSettings | None = None
    part: tuple[int, int] | None = None
    finish: bool = False

    def __post_init__(self) -> None:
        check_option_combination({"--shard": self.part, "--finish": self.finish})

    @property
    def runs_whole_stage(self) -> bool:
        """Whether the run processes all parts itself, and then also writes the final file."""
        return self.part is None and not self.finish

    def select_items_of_this_run(self, items: Sequence[_Group]) -> Sequence[_Group]:
        """Return the groups or files that this run has to process. Part K of N consists of every N-th item, starting with
        item K.
        """
        number, parts = self.part or (0, 1)
        return items[number::parts]


# --- results


def to_json(result: Any) -> Any:
    """Convert the result of a command to JSON values. Objects become dictionaries, and all other values are kept."""
    if hasattr(result, "as_json"):
        return result.as_json()
    if is_dataclass(result):
        return _fields_as_json(result)
    if isinstance(result, Mapping):
        return {name: to_json(value) for name, value in result.items()}
    return [to_json(value) for value in result] if isinstance(result, list | tuple) else result


def _fields_as_json(result: Any, *omitted: str) -> dict[str, Any]:
    """Return the fields of a data class as JSON values. Omit the fields in `omitted`, and fields that have their default
    value.
    """
    return {
        field.name: to_json(getattr(result, field.name))
        for field in fields(result)
        if field.name not in omitted and getattr(result, field.name) != field.default
    }


@dataclass(frozen=True)
class StageOutput(Generic[Content]):
    """The final file of a completed stage, how long the stage took, and whether an earlier run had already completed it.

    Attributes:
        content: The content of the final file.
        seconds: The time that the stage took, or None if it was not measured.
        skipped: Whether an earlier run had already finished the stage.
    """

    content: Content
    seconds: float | None = None
    skipped: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the summary of the content and the other fields as JSON values.

        Fields with their default value are omitted. Only the result of `prepare` always contains `skipped`.
        """
        from gaudi_bert.artefacts.examples import PreparedExamples

        content: Any = self.content
        skipped = {"skipped": self.skipped} if isinstance(content, PreparedExamples) else {}
        return {**content.summary(), **_fields_as_json(self, "content"), **skipped}

    def format_lines(self, **options: Any) -> list[str]:
        """Return lines of text that describe the result. The first line states whether an earlier run had already written
        the output.

        Args:
            options: Arguments that are passed to the `format_lines` method of the content.
        """
        content: Any = self.content
        first, *others = content.format_lines(**options)
        return [first + NOTHING_TO_DO * self.skipped, *others]


@dataclass(frozen=True)
class PlainResult:
    """The result of a run that did not complete its output, for example because it processed only one part. It consists of
    lines of text and JSON values.

    Attributes:
        text: The lines of text that the command prints.
        facts: The JSON values that the command prints with `--json`.
    """

    text: Sequence[str]
    facts: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON values as a dictionary."""
        return dict(self.facts)

    def format_lines(self, **options: Any) -> list[str]:
        """Return the lines of text. `options` is accepted only for compatibility with `StageOutput.format_lines`."""
        return list(self.text)


def build_partial_run_result(groups: int, groups_written: int, totals: PackedTotals | Verification) -> PlainResult:
    """Return the result of a run that wrote or verified only one part of a packed folder.

    Args:
        groups: The number of groups in the part.
        groups_written: The number of groups that this run wrote or verified. The others were already complete.
        totals: The totals of the part's groups.
    """
    facts = {"groups": groups, "groups_written": groups_written}
    facts |= {key: getattr(totals, key) for key in ("sequences", "packs", "tokens")}
    if not groups:
        return PlainResult(["there are fewer groups than parts, so this part has nothing to do"], facts)
    counted = f"{format_count(totals.sequences, 'sequence')} in {format_count(totals.packs, 'pack')}"
    state = "" if groups_written else NOTHING_TO_DO
    return PlainResult(
        [f"{format_count(groups, 'group')}: {counted}{state}; when all parts are done, run the command with --finish"], facts
    )


def require_complete(result: StageOutput[Content] | PlainResult) -> StageOutput[Content]:
    """Return the result unchanged if the stage has completed its output. Otherwise raise an error.

    Raises:
        InputError: The run did only one part of the work.
    """
    if isinstance(result, PlainResult):
        raise InputError("this run did only one part of the work, but a complete result is required; omit --shard")
    return result


@dataclass(frozen=True)
class PackResult:
    """The result of `gaudi-bert pack`.

    Attributes:
        written: The packed folder.
        planned: The plan, or None for a packed table.
        verified: The verification, or None if it was not requested.
    """

    written: StageOutput[PackedMetadata]
    planned: StageOutput[PlanTotals] | None = None
    verified: StageOutput[Verification] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the plan, the packed folder and the verification as one dictionary. The verification is the value of the
        key `verify`.
        """
        planned = {} if self.planned is None else self.planned.as_json()
        return {
            **planned,
            **self.written.as_json(),
            **({} if self.verified is None else {"verify": self.verified.as_json()}),
        }

    def format_lines(self, out: Path, verbose: bool) -> list[str]:
        """Return lines of text that describe the result.

        Args:
            out: The packed folder.
            verbose: Also describe how the packs were chosen.
        """
        planned = self.planned
        skipped = self.written.skipped or (planned is not None and planned.skipped)
        lines = StageOutput(self.written.content, skipped=skipped).format_lines(out=out, verbose=verbose and planned is None)
        lines += planned.content.format_algorithm_lines() if verbose and planned is not None else []
        if self.verified is not None:
            lines.append(
                f"verified: each of {format_count(self.verified.content.sequences, 'sequence')} is in the packs exactly once"
            )
        return lines


@dataclass(frozen=True)
class ResultsByRowLength(Generic[Content]):
    """The results for several packed tables with different row lengths.

    Attributes:
        tables: The result of each table by its row length, in ascending order.
    """

    tables: Mapping[int, Content]

    def format_lines(self, out: Path | None = None, **options: Any) -> list[str]:
        """Return lines of text that describe the results of all tables.

        Lines that are the same for all tables are returned once, at the end.

        Args:
            out: The folder that contains the tables, or None to omit it from the lines.
            options: Further arguments that are passed to the `format_lines` method of each result.
        """
        tables: Mapping[int, Any] = self.tables
        out_options = {length: {} if out is None else {"out": out / f"rows-{length}"} for length in tables}
        lines = {length: table.format_lines(**options, **out_options[length]) for length, table in tables.items()}
        first, *others = lines.values()
        common = [line for line in first if all(line in other for other in others)]
        return [
            *(f"rows of {length:,}: {line}" for length, own in lines.items() for line in own if line not in common),
            *common,
        ]
