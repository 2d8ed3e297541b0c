"""plan.json: which lengths share a pack, how often, group by group, and the prices that prove the bound of each group.

A plan is read at once: one of 20,000 groups takes 250 MiB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from gaudi_bert.artefacts.base import Artefact, Count, InputFile, Length, Positive, Sha256, Share, VocabularyInfo
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import PackingMetrics, describe_algorithm, describe_packing
from gaudi_bert.common.files import json_digest
from gaudi_bert.common.progress import format_count

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
        return [*describe_packing(self), *(self.choice_lines() if verbose else [])]

    def choice_lines(self) -> list[str]:
        """Return how the packs were chosen."""
        tokens = f"the tokens alone need {format_count(self.token_bound, 'pack')}"
        masked = f"{self.masked_slots} masked slots per pack (the data need {self.masked_slots_needed})"
        lines = [tokens, describe_algorithm(self.algorithm, self.algorithms_used, self.depth_used)]
        return [*lines, masked] if self.masked_slots_needed else lines


class PlannedGroup(Artefact):
    """A group: its files, how often each strategy is used, and the integer prices that prove its bound.

    Attributes:
        bound_prices: the price of a sequence of length 1, 2, ...; None where nothing was proven.
    """

    omits_defaults = True

    files: tuple[InputFile, ...]
    sequences: Positive
    packs: Positive
    lower_bound: Count
    algorithm_used: str
    strategies: tuple[tuple[Strategy, Positive], ...]
    bound_prices: tuple[Count, ...] | None

    @property
    def tokens(self) -> int:
        """Tokens of all its sequences."""
        return sum(sum(strategy) * count for strategy, count in self.strategies)

    @property
    def input_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.bytes for file in self.files)

    def check(self, depth: int, max_sequence_length: int) -> None:
        """Raise a ValueError unless the strategies hold the sequences of the files, and each fits a pack."""
        sequences = sum(len(strategy) * count for strategy, count in self.strategies)
        in_files = sum(file.sequences for file in self.files)
        if (sequences, sum(count for _, count in self.strategies)) != (self.sequences, self.packs):
            raise ValueError("its strategies do not add up")
        if self.files and self.sequences != in_files:
            raise ValueError(f"holds {self.sequences} sequences, its files hold {in_files}")
        for file in self.files:
            if file.sequences > _MOST_SEQUENCES_PER_BYTE * file.bytes:
                raise ValueError(f"{file.sequences} sequences in a file of {file.bytes} bytes are more than fit")
        for strategy, _ in self.strategies:
            if len(strategy) > depth or sum(strategy) > max_sequence_length:
                raise ValueError(f"strategy {list(strategy)} does not fit {max_sequence_length} slots")
        if self.bound_prices is not None and len(self.bound_prices) != max_sequence_length:
            raise ValueError(f"has {len(self.bound_prices)} prices for lengths 1 to {max_sequence_length}")


def totals_of(groups: Sequence[PlannedGroup], max_sequence_length: int, algorithm: str) -> dict[str, Any]:
    """Return the totals of a plan of these groups, but for the masked slots."""
    sequences, packs, tokens, bound = (
        sum(getattr(group, key) for group in groups) for key in ("sequences", "packs", "tokens", "lower_bound")
    )
    strategies = {strategy for group in groups for strategy, _ in group.strategies}
    return {
        **PackingMetrics(sequences, packs, tokens, packs * max_sequence_length, bound).to_json_fields(),
        "depth_used": max(map(len, strategies), default=0),
        "strategies_used": len(strategies),
        "algorithm": algorithm,
        "algorithms_used": tuple(sorted({group.algorithm_used for group in groups})),
        "token_bound": sum(-(-group.tokens // max_sequence_length) for group in groups),
        "groups": len(groups),
    }


class Plan(Artefact):
    """The content of plan.json; a plan of counts without files can only be inspected.

    `bad_files` could not be read and are in no group.
    """

    remedy = "make the plan again"
    line_per_entry = ("groups",)
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
    bad_files: tuple[InputFile, ...] = ()
    groups: Annotated[tuple[PlannedGroup, ...], Field(min_length=1)]

    @property
    def sha256(self) -> str:
        """The identity of the plan's content."""
        return json_digest(self.as_json())

    @cached_property
    def strategy_counts(self) -> dict[tuple[int, ...], int]:
        """Packs of each strategy, over all groups."""
        strategy_counts: Counter[tuple[int, ...]] = Counter()
        for group in self.groups:
            for strategy, count in group.strategies:
                strategy_counts[strategy] += count
        return dict(strategy_counts)

    @model_validator(mode="after")
    def _adds_up(self) -> Plan:
        for number, group in enumerate(self.groups):
            try:
                group.check(self.depth, self.max_sequence_length)
            except ValueError as error:
                raise ValueError(f"group {number}: {error}") from error
        names = [file.name for group in self.groups for file in group.files]
        if len(set(names)) != len(names):
            raise ValueError("each file must be in exactly one group")
        right = {**totals_of(self.groups, self.max_sequence_length, self.algorithm), "masked_slots": self.masked_slots}
        for key, value in right.items():
            if getattr(self.totals, key) != value:
                raise ValueError(f"totals.{key} is {getattr(self.totals, key)}, the groups add up to {value}")
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
        return cls.parse({key: getattr(plan, key) for key in cls.model_fields}, str(path), cls.remedy)
