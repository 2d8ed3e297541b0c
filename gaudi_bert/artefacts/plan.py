"""plan.json: which lengths share a pack, how often, group by group, and the prices that prove the bound of each group."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from gaudi_bert.artefacts.base import Artefact, Count, Length, Positive, Sha256, Share
from gaudi_bert.artefacts.packed import InputFile, VocabularyInfo
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.figures import PackingFigures

LARGEST_SHARD_MULTIPLE = 4096
"""As in the settings: a group has at least this many files."""

MOST_SEQUENCES_PER_BYTE = 64
"""Of any file: DEFLATE shrinks at most 1032 times, and a record takes 16 bytes before anything is in it."""

Strategy = Annotated[tuple[Length, ...], Field(min_length=1)]
"""The lengths of the sequences of a pack, in order."""


class PlannedFile(InputFile):
    """An input file, as the histogram describes it."""

    bytes: Positive
    sequences: Count


class SmallerBudget(Artefact):
    """With so many masked slots per pack, there would be so many packs."""

    masked_slots: Count
    packs: Positive


class PlanTotals(Artefact):
    """The quality of the plan over all groups.

    Attributes:
        token_bound: packs that the tokens alone need.
        masked_slots_needed: masked positions of the fullest pack; None where the data did not say.
        smaller_masked_slots: what fewer masked slots would cost.
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
    smaller_masked_slots: tuple[SmallerBudget, ...]

    @model_validator(mode="after")
    def _budgets_descend(self) -> PlanTotals:
        budgets = [self.masked_slots_needed or 0, *(smaller.masked_slots for smaller in self.smaller_masked_slots)]
        if budgets[0] > (self.masked_slots or 0) or budgets != sorted(set(budgets), reverse=True):
            raise ValueError(f"masked slots {budgets} do not fall from at most {self.masked_slots}")
        return self


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


def totals_of(
    groups: Sequence[PlannedGroup], max_sequence_length: int, algorithm: str, masked_slots: int | None
) -> dict[str, Any]:
    """The totals of a plan of these groups, but for what only the masked positions of the data tell."""
    strategies = {strategy for group in groups for strategy, _ in group.strategies}
    return {
        **PackingFigures.total(groups, max_sequence_length).stored(),
        "depth_used": max(map(len, strategies)),
        "strategies_used": len(strategies),
        "algorithm": algorithm,
        "algorithms_used": tuple(sorted({group.algorithm_used for group in groups})),
        "token_bound": sum(-(-group.tokens // max_sequence_length) for group in groups),
        "groups": len(groups),
        "masked_slots": masked_slots,
    }


class Plan(Artefact):
    """The content of plan.json; a plan that was made from counts without files can only be looked at."""

    remedy = "make the plan again"
    line_per_entry = ("files", "groups")

    format_version: Literal[1]
    algorithm: str
    depth: Length
    max_sequence_length: Length
    max_predictions: Length | None
    masked_slots: Length | None
    seed: int
    shard_multiple: int = Field(ge=1, le=LARGEST_SHARD_MULTIPLE)
    shard_bytes: Positive
    histogram_sha256: Sha256
    vocabulary: VocabularyInfo | None
    writable: bool
    totals: PlanTotals
    files: tuple[PlannedFile, ...]
    groups: Annotated[tuple[PlannedGroup, ...], Field(min_length=1)]

    @cached_property
    def sha256(self) -> str:
        """The identity of all that the plan says."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode("utf-8")).hexdigest()

    @cached_property
    def mixture(self) -> dict[tuple[int, ...], int]:
        """How often each strategy is used, over all groups."""
        mixture: Counter[tuple[int, ...]] = Counter()
        for group in self.groups:
            for strategy, count in group.strategies:
                mixture[strategy] += count
        return dict(mixture)

    @model_validator(mode="after")
    def _adds_up(self) -> Plan:
        for number, group in enumerate(self.groups):
            _check_group(number, group, self.depth, self.max_sequence_length)
        right = totals_of(self.groups, self.max_sequence_length, self.algorithm, self.masked_slots)
        for key, value in right.items():
            if getattr(self.totals, key) != value:
                raise ValueError(f"totals.{key} is {getattr(self.totals, key)}, the groups add up to {value}")
        if self.writable != bool(self.files):
            raise ValueError(f"writable is {self.writable}, but there are {len(self.files)} files")
        return self


class WritablePlan(Plan):
    """A plan made from records: every file is known, and how many masked positions its sequences have."""

    max_predictions: Length
    masked_slots: Length
    writable: Literal[True]
    files: Annotated[tuple[PlannedFile, ...], Field(min_length=1)]

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read and check a plan to write by."""
        plan = Plan.read(path)
        if not plan.files:
            raise InputError(f"{path}: made from counts without files; plan from what `gaudi-bert histogram RECORDS` wrote")
        return cls.parse(dict(plan), str(path), cls.remedy)

    @model_validator(mode="after")
    def _holds_every_file_once(self) -> WritablePlan:
        if sorted(name for group in self.groups for name in group.files) != sorted(file.name for file in self.files):
            raise ValueError("the groups do not hold every file once")
        files = {file.name: file for file in self.files}
        for file in self.files:
            if file.sequences > MOST_SEQUENCES_PER_BYTE * file.bytes:
                raise ValueError(f"{file.sequences} sequences in a file of {file.bytes} bytes are more than fit")
        for number, group in enumerate(self.groups):
            if group.sequences != sum(files[name].sequences for name in group.files):
                raise ValueError(f"group {number} holds {group.sequences} sequences, its files hold others")
        return self


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
