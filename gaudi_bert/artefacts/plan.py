"""plan.json: which lengths share a pack, how often, group by group, and the prices that prove the bound of each group.

plan.json itself holds settings, totals and a table of parts; `plan-KKKKK.json` next to it are the parts: up to 64 groups
each, with their files. So a reader of some groups reads only the parts that hold them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator
from typing_extensions import Self

from gaudi_bert.artefacts.base import Artefact, Count, InputFile, Length, Positive, Sha256, Share, VocabularyInfo
from gaudi_bert.artefacts.printed import algorithm_line, packing_lines
from gaudi_bert.artefacts.store.mirrored_folder import fetch
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import PackingFigures
from gaudi_bert.common.files import read_file
from gaudi_bert.common.progress import count_of

_LARGEST_SHARD_MULTIPLE = 4096
"""As in the settings: a group has at least this many files."""

_MOST_SEQUENCES_PER_BYTE = 64
"""Of any file: DEFLATE shrinks at most 1032 times, and a record takes 16 bytes before anything is in it."""

Strategy = Annotated[tuple[Length, ...], Field(min_length=1)]
"""The lengths of the sequences of a pack, in order."""


class PlanTotals(Artefact):
    """The quality of the plan over all groups.

    Attributes:
        token_bound: packs that the tokens alone need.
        masked_slots_needed: masked positions of the fullest pack; None where the data did not say.
    """

    packs: Positive
    lower_bound: Count
    gap: Count
    padding_tokens: Count
    efficiency: Share
    packing_factor: float = Field(ge=1)
    depth_used: Positive
    strategies_used: Positive
    algorithm: str
    algorithms_used: tuple[str, ...]
    sequences: Positive
    tokens: Positive
    token_bound: Count
    groups: Positive
    masked_slots: Count | None
    masked_slots_needed: Count | None

    @model_validator(mode="after")
    def _has_the_masked_slots_that_are_needed(self) -> PlanTotals:
        if (self.masked_slots_needed or 0) > (self.masked_slots or 0):
            raise ValueError(f"masked_slots is {self.masked_slots}; {self.masked_slots_needed} are needed")
        return self

    def lines(self, verbose: bool = False) -> list[str]:
        """Return the plan for people; where `verbose`, also how the packs were chosen."""
        return [*packing_lines(self), *(self.choice_lines() if verbose else [])]

    def choice_lines(self) -> list[str]:
        """Return how the packs were chosen."""
        lines = [
            f"the tokens alone need {count_of(self.token_bound, 'pack')}",
            algorithm_line(self.algorithm, self.algorithms_used, self.depth_used),
        ]
        if self.masked_slots_needed:
            lines.append(f"{self.masked_slots} masked slots per pack (the data need {self.masked_slots_needed})")
        return lines


class PlannedGroup(Artefact):
    """A group: the names of its files, how often each strategy is used, and the integer prices that prove its bound.

    Attributes:
        bound_prices: the price of a sequence of length 1, 2, ...; None where nothing was proven.
    """

    files: tuple[str, ...]
    sequences: Positive
    packs: Positive
    lower_bound: Count
    algorithm_used: str
    strategies: tuple[tuple[Strategy, Positive], ...]
    bound_prices: tuple[Count, ...] | None

    @property
    def tokens(self) -> int:
        """Of all its sequences."""
        return sum(sum(strategy) * count for strategy, count in self.strategies)


def totals_of(groups: Iterable[PlannedGroup], max_sequence_length: int, algorithm: str) -> dict[str, Any]:
    """The totals of a plan of these groups, taken one at a time, but for the masked slots."""
    strategies: set[tuple[int, ...]] = set()
    algorithms: set[str] = set()
    count = sequences = packs = tokens = lower_bound = token_bound = 0
    for group in groups:
        count, sequences, packs = count + 1, sequences + group.sequences, packs + group.packs
        of_group = group.tokens
        tokens, lower_bound = tokens + of_group, lower_bound + group.lower_bound
        token_bound += -(-of_group // max_sequence_length)
        strategies.update(strategy for strategy, _ in group.strategies)
        algorithms.add(group.algorithm_used)
    return {
        **PackingFigures(sequences, packs, tokens, packs * max_sequence_length, lower_bound).stored(),
        "depth_used": max(map(len, strategies)),
        "strategies_used": len(strategies),
        "algorithm": algorithm,
        "algorithms_used": tuple(sorted(algorithms)),
        "token_bound": token_bound,
        "groups": count,
    }


def most_needed(needed: Iterable[int | None]) -> int | None:
    """Masked positions of the fullest pack of all; None where no data tells."""
    return max((count for count in needed if count is not None), default=None)


GROUPS_OF_A_PART = 64


class PlanPart(Artefact):
    """plan-KKKKK.json: groups that follow each other, and what the totals need of them.

    The masked slots are as in the totals, of these groups; the smaller ones by their own fullest pack.
    """

    remedy = "make the plan again"
    line_per_entry = ("files", "groups")

    format_version: Literal[2]
    part: Count
    signature_sha256: Sha256
    depth: Length
    masked_slots: Length | None
    masked_slots_needed: Count | None
    files: tuple[InputFile, ...]
    groups: Annotated[tuple[PlannedGroup, ...], Field(min_length=1, max_length=GROUPS_OF_A_PART)]


class ListedPart(Artefact):
    """The entry of a part in plan.json: its size and digest, and for each of its groups the packs and the input bytes."""

    bytes: Positive
    sha256: Sha256
    packs: tuple[Positive, ...] = Field(min_length=1, max_length=GROUPS_OF_A_PART)
    input_bytes: tuple[Count, ...]


def part_path(plan: Path, part: int) -> Path:
    """The path of a part of `plan`."""
    return plan.with_name(f"{plan.stem}-{part:05d}.json")


def files_sha256(sizes: Iterable[tuple[str, int]]) -> str:
    """The identity of names and sizes of files, in any order: to compute it, files are listed and not read."""
    return hashlib.sha256(json.dumps(sorted(sizes)).encode("utf-8")).hexdigest()


class Plan(Artefact):
    """The content of plan.json; a plan of counts without files can only be inspected.

    `bad_files` could not be read and are in no group; `files_sha256` is of all others.
    """

    remedy = "make the plan again"
    line_per_entry = ("parts",)
    rare = ("bad_files",)

    format_version: Literal[2]
    algorithm: str
    depth: Length
    max_sequence_length: Length
    max_predictions: Length | None
    masked_slots: Length | None
    seed: int
    shard_multiple: int = Field(ge=1, le=_LARGEST_SHARD_MULTIPLE)
    shard_bytes: Positive
    histogram_sha256: Sha256
    vocabulary: VocabularyInfo | None
    writable: bool
    totals: PlanTotals
    files_sha256: Sha256
    bad_files: tuple[InputFile, ...] = ()
    parts: Annotated[tuple[ListedPart, ...], Field(min_length=1)]

    _source: Path = PrivateAttr(default=Path())
    _last_read: tuple[int, PlanPart] | None = PrivateAttr(default=None)

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read and check a plan, but not yet its parts."""
        return super().read(path).with_path(Path(path))

    def with_path(self, path: Path) -> Self:
        """This plan, whose parts are next to `path`."""
        self._source = path
        return self

    @property
    def path(self) -> Path:
        """Where it was read."""
        return self._source

    @cached_property
    def sha256(self) -> str:
        """The identity of the plan's content."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode("utf-8")).hexdigest()

    @cached_property
    def group_packs(self) -> tuple[int, ...]:
        """Packs of each group."""
        return tuple(packs for part in self.parts for packs in part.packs)

    @property
    def group_count(self) -> int:
        """How many groups there are."""
        return self.totals.groups

    def input_bytes(self, group: int) -> int:
        """Of all files of a group."""
        return self.parts[group // GROUPS_OF_A_PART].input_bytes[group % GROUPS_OF_A_PART]

    def group(self, number: int) -> PlannedGroup:
        """A group; the part that holds it is read, and stays in memory until another is."""
        return self._part(number // GROUPS_OF_A_PART).groups[number % GROUPS_OF_A_PART]

    def group_files(self, number: int) -> tuple[InputFile, ...]:
        """The files of a group."""
        files = {file.name: file for file in self._part(number // GROUPS_OF_A_PART).files}
        return tuple(files[name] for name in self.group(number).files)

    def each_group(self) -> Iterator[PlannedGroup]:
        """All groups, part by part."""
        return (self.group(number) for number in range(self.group_count))

    def each_file(self) -> Iterator[InputFile]:
        """All files, part by part."""
        for part in range(len(self.parts)):
            yield from self._part(part).files

    def _part(self, number: int) -> PlanPart:
        if self._last_read is None or self._last_read[0] != number:
            self._last_read = number, self._read_part(number)
        return self._last_read[1]

    def _read_part(self, number: int) -> PlanPart:
        listed, path = self.parts[number], part_path(self.path, number)
        fetch(path)
        try:
            data = read_file(path)
        except OSError as error:
            raise InputError(f"{path}: a part of the plan, cannot read: {error.strerror}; {self.remedy}") from error
        if len(data) != listed.bytes or hashlib.sha256(data).hexdigest() != listed.sha256:
            raise InputError(f"{path}: is not the part that {self.path.name} lists; {self.remedy}")
        part = PlanPart.parse(data, str(path), self.remedy)
        first = number * GROUPS_OF_A_PART
        bytes_of_files = {file.name: file.bytes for file in part.files}
        try:
            for group in enumerate(part.groups, start=first):
                _check_group(*group, self.depth, self.max_sequence_length)
            _check_files(part.groups, part.files, first)
            if tuple(group.packs for group in part.groups) != listed.packs:
                raise ValueError("its groups do not have the packs of the table of parts")
            if tuple(sum(bytes_of_files[name] for name in group.files) for group in part.groups) != listed.input_bytes:
                raise ValueError("its files do not have the sizes of the table of parts")
        except ValueError as error:
            raise InputError(f"{path}: {error}; {self.remedy}") from error
        return part

    @cached_property
    def mixture(self) -> dict[tuple[int, ...], int]:
        """How often each strategy is used, over all groups."""
        mixture: Counter[tuple[int, ...]] = Counter()
        for group in self.each_group():
            for strategy, count in group.strategies:
                mixture[strategy] += count
        return dict(mixture)

    def check_totals(self) -> None:
        """The totals are those of all groups, and no file is in two of them; all parts are read for it."""
        seen: set[str] = set()
        needed: list[int | None] = []

        def each_group() -> Iterator[PlannedGroup]:
            for part in map(self._part, range(len(self.parts))):
                needed.append(part.masked_slots_needed)
                for group in part.groups:
                    if not seen.isdisjoint(group.files):
                        raise ValueError("each file must be in exactly one group")
                    seen.update(group.files)
                    yield group

        try:
            right = totals_of(each_group(), self.max_sequence_length, self.algorithm)
            for key, value in {**right, "masked_slots_needed": most_needed(needed)}.items():
                if getattr(self.totals, key) != value:
                    raise ValueError(f"totals.{key} is {getattr(self.totals, key)}, the groups add up to {value}")
        except ValueError as error:
            raise InputError(f"{self.path}: {error}; {self.remedy}") from error

    @model_validator(mode="after")
    def _adds_up(self) -> Plan:
        """The table of parts agrees with the totals as far as it can."""
        groups = [len(part.packs) for part in self.parts]
        if any(len(part.input_bytes) != len(part.packs) for part in self.parts) or set(groups[:-1]) - {GROUPS_OF_A_PART}:
            raise ValueError(f"each part but the last has {GROUPS_OF_A_PART} groups, with packs and input_bytes of each")
        totals, packs = self.totals, sum(self.group_packs)
        slots = packs * self.max_sequence_length
        figures = PackingFigures(totals.sequences, packs, totals.tokens, slots, totals.lower_bound).stored()
        others = {"groups": sum(groups), "masked_slots": self.masked_slots, "algorithm": self.algorithm}
        for key, right in {**figures, **others}.items():
            if getattr(self.totals, key) != right:
                raise ValueError(f"totals.{key} is {getattr(self.totals, key)}, the parts say {right}")
        return self


class WritablePlan(Plan):
    """A plan of records: every file is known, and how many masked positions its sequences have."""

    max_predictions: Length
    masked_slots: Length
    writable: Literal[True]

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read and check a plan to write by."""
        plan = Plan.read(path)
        if not plan.writable:
            raise InputError(f"{path}: planned from counts without files; plan from `gaudi-bert histogram RECORDS`")
        content = {key: getattr(plan, key) for key in cls.model_fields}
        return cls.parse(content, str(path), cls.remedy).with_path(Path(path))

    def with_shards(self, shards: Mapping[str, int]) -> Self:
        """This plan with another `shard_multiple` or `shard_bytes`: it is another plan, of the same packs."""
        if not shards:
            return self
        content = {key: getattr(self, key) for key in type(self).model_fields}
        return self.parse({**content, **shards}, str(self.path), self.remedy).with_path(self.path)


def _check_files(groups: Sequence[PlannedGroup], files: Sequence[InputFile], first: int) -> None:
    """The groups, numbered from `first`, hold each file once, and as many sequences as their files."""
    if sorted(name for group in groups for name in group.files) != sorted(file.name for file in files):
        raise ValueError("each file must be in exactly one group")
    sequences = {file.name: file.sequences for file in files}
    for file in files:
        if file.sequences > _MOST_SEQUENCES_PER_BYTE * file.bytes:
            raise ValueError(f"{file.sequences} sequences in a file of {file.bytes} bytes are more than fit")
    for number, group in enumerate(groups, start=first):
        in_files = sum(sequences[name] for name in group.files)
        if files and group.sequences != in_files:
            raise ValueError(f"group {number} holds {group.sequences} sequences, its files hold {in_files}")


def _check_group(number: int, group: PlannedGroup, depth: int, max_sequence_length: int) -> None:
    """The strategies of the group hold its sequences, and each fits a pack."""
    sequences = sum(len(strategy) * count for strategy, count in group.strategies)
    packs = sum(count for _, count in group.strategies)
    if (sequences, packs) != (group.sequences, group.packs):
        raise ValueError(f"the strategies of group {number} do not add up")
    for strategy, _ in group.strategies:
        if len(strategy) > depth or sum(strategy) > max_sequence_length:
            raise ValueError(f"strategy {list(strategy)} of group {number} does not fit {max_sequence_length} slots")
    if group.bound_prices is not None and len(group.bound_prices) != max_sequence_length:
        raise ValueError(f"group {number} has {len(group.bound_prices)} prices for lengths 1 to {max_sequence_length}")
