"""The plan file, plan.json.

For each group of input files, a plan contains the strategies (the sequence lengths that share a pack), the number of packs
for each strategy, and the prices that prove the lower bound. A plan is read completely into memory. A plan with 20,000
groups takes 250 MiB.
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
from gaudi_bert.common.files import hash_json
from gaudi_bert.common.progress import format_count

# The number of shards in each group is a multiple of `shard_multiple`. Plans with a larger `shard_multiple` than this are
# rejected. The settings of a pipeline have the same limit.
_MAX_SHARD_MULTIPLE = 4096

# The maximum number of sequences per byte of an input file. A plan that states more sequences is invalid. Each sequence is a
# record of at least 16 bytes, and DEFLATE compresses data by a factor of at most 1032.
_MAX_SEQUENCES_PER_BYTE = 64

# A packing strategy lists the lengths of the sequences in one pack, in ascending order.
Strategy = Annotated[tuple[Length, ...], Field(min_length=1)]


class PlanTotals(Artefact):
    """The metrics of a plan over all groups of input files.

    Attributes:
        packs: The number of packs.
        lower_bound: The proven minimum number of packs.
        gap: The number of packs above the lower bound.
        padding_tokens: The number of padding tokens.
        efficiency: The share of non-padding tokens in all token slots.
        packing_factor: The mean number of sequences per pack.
        depth_used: The largest number of sequences in a pack.
        strategies_used: The number of different strategies.
        algorithm: The requested algorithm.
        algorithms_used: The algorithms that produced the packs of the groups.
        sequences: The number of sequences.
        tokens: The number of non-padding tokens.
        token_bound: The number of packs that the tokens would need if they could be divided arbitrarily.
        groups: The number of groups.
        masked_slots: The number of masked slots of a pack, or None if the histogram has no masked positions.
        masked_slots_needed: The largest number of masked positions that a pack can have, or None if the histogram has no
            masked positions.
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
    def _check_masked_slots(self) -> PlanTotals:
        """Check that each pack has at least as many masked slots as its sequences need."""
        if (self.masked_slots_needed or 0) > (self.masked_slots or 0):
            raise ValueError(f"masked_slots is {self.masked_slots}, but {self.masked_slots_needed} are needed")
        return self

    def format_lines(self, verbose: bool = False) -> list[str]:
        """Return lines of text with the metrics. If `verbose` is set, also describe how the packs were chosen."""
        return [*describe_packing(self), *(self.format_algorithm_lines() if verbose else [])]

    def format_algorithm_lines(self) -> list[str]:
        """Return lines of text that describe how the packs were chosen."""
        tokens = f"the tokens alone need {format_count(self.token_bound, 'pack')}"
        masked = f"{self.masked_slots} masked slots per pack (the data need {self.masked_slots_needed})"
        lines = [tokens, describe_algorithm(self.algorithm, self.algorithms_used, self.depth_used)]
        return [*lines, masked] if self.masked_slots_needed else lines


class PlannedGroup(Artefact):
    """The packs that a plan contains for one group of input files.

    Attributes:
        files: The input files. Empty if the plan was made from counts without files.
        sequences: The number of sequences.
        packs: The number of packs.
        lower_bound: The proven minimum number of packs.
        algorithm_used: The algorithm that produced the packs.
        strategies: Pairs (strategy, number of packs that use it).
        bound_prices: The integer price of a sequence of length 1, 2, ..., which proves the lower bound. None if no prices
            were computed.
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
        """The number of tokens in all sequences of the group."""
        return sum(sum(strategy) * count for strategy, count in self.strategies)

    @property
    def input_bytes(self) -> int:
        """The total size of the group's input files in bytes."""
        return sum(file.bytes for file in self.files)

    def check_consistency(self, depth: int, max_sequence_length: int) -> None:
        """Check that the strategies contain as many sequences as the input files do, and that each strategy fits into a
        pack.

        Args:
            depth: The maximum number of sequences in a pack.
            max_sequence_length: The number of tokens in a pack.

        Raises:
            ValueError: A value of the group is wrong.
        """
        sequences = sum(len(strategy) * count for strategy, count in self.strategies)
        in_files = sum(file.sequences for file in self.files)
        if (sequences, sum(count for _, count in self.strategies)) != (self.sequences, self.packs):
            raise ValueError("the strategies do not add up to the sequences and packs of the group")
        if self.files and self.sequences != in_files:
            raise ValueError(f"the group contains {self.sequences} sequences, but its files contain {in_files}")
        for file in self.files:
            if file.sequences > _MAX_SEQUENCES_PER_BYTE * file.bytes:
                raise ValueError(f"a file of {file.bytes} bytes cannot contain {file.sequences} sequences")
        for strategy, _ in self.strategies:
            if len(strategy) > depth or sum(strategy) > max_sequence_length:
                raise ValueError(
                    f"strategy {list(strategy)} does not fit into packs of {max_sequence_length} slots and depth {depth}"
                )
        if self.bound_prices is not None and len(self.bound_prices) != max_sequence_length:
            raise ValueError(f"`bound_prices` must have {max_sequence_length} values, but has {len(self.bound_prices)}")


def compute_totals(groups: Sequence[PlannedGroup], max_sequence_length: int, algorithm: str) -> dict[str, Any]:
    """Compute the metrics of a plan from its groups. Return all fields of `PlanTotals` except for the two fields about
    masked slots.
    """
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
    """The content of plan.json.

    Attributes:
        algorithm: The requested algorithm.
        depth: The maximum number of sequences in a pack.
        max_sequence_length: The number of tokens in a pack, including padding.
        max_predictions: The maximum number of masked positions in a sequence, or None if it is unknown.
        masked_slots: The number of masked slots of a pack, or None if it is unknown.
        seed: The seed of the packing.
        shard_multiple: The number of shards of each group is a multiple of this.
        shard_bytes: The maximum size of a shard in bytes.
        histogram_sha256: The identity of the histogram from which the plan was made.
        vocabulary: The vocabulary of the records, or None if there is none.
        writable: Whether packs can be written by this plan. A plan of counts without files can only be inspected.
        totals: The metrics over all groups.
        bad_files: The input files that could not be read. They are in no group.
        groups: The groups.
    """

    remedy = "create the plan again"
    line_per_entry = ("groups",)
    rare = ("bad_files",)

    format_version: Literal[2]
    algorithm: str
    depth: Length
    max_sequence_length: Length
    max_predictions: Length | None
    masked_slots: Length | None
    seed: int
    shard_multiple: int = Field(ge=1, le=_MAX_SHARD_MULTIPLE)
    shard_bytes: Positive
    histogram_sha256: Sha256
    vocabulary: VocabularyInfo | None
    writable: bool
    totals: PlanTotals
    bad_files: tuple[InputFile, ...] = ()
    groups: Annotated[tuple[PlannedGroup, ...], Field(min_length=1)]

    @property
    def sha256(self) -> str:
        """The SHA-256 of the plan's content."""
        return hash_json(self.as_json())

    @cached_property
    def strategy_counts(self) -> dict[tuple[int, ...], int]:
        """The number of packs of each strategy (the sequence lengths that share a pack), over all groups."""
        strategy_counts: Counter[tuple[int, ...]] = Counter()
        for group in self.groups:
            for strategy, count in group.strategies:
                strategy_counts[strategy] += count
        return dict(strategy_counts)

    @model_validator(mode="after")
    def _check_consistency(self) -> Plan:
        """Check that each group is consistent, that no file is in two groups, and that the totals are the sums over the
        groups.
        """
        for number, group in enumerate(self.groups):
            try:
                group.check_consistency(self.depth, self.max_sequence_length)
            except ValueError as error:
                raise ValueError(f"group {number}: {error}") from error
        names = [file.name for group in self.groups for file in group.files]
        if len(set(names)) != len(names):
            raise ValueError("a file is in more than one group")
        sums = {**compute_totals(self.groups, self.max_sequence_length, self.algorithm), "masked_slots": self.masked_slots}
        for key, value in sums.items():
            if getattr(self.totals, key) != value:
                raise ValueError(f"totals.{key} is {getattr(self.totals, key)}, but the groups add up to {value}")
        return self


class WritablePlan(Plan):
    """A plan that contains everything needed to write packs, such as the names of the input files and the number of masked
    slots.
    """

    max_predictions: Length
    masked_slots: Length
    writable: Literal[True]

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read a plan, and check that packs can be written from it.

        Raises:
            InputError: The file cannot be read, is invalid, or was planned from counts without files.
        """
        plan = Plan.read(path)
        if not plan.writable:
            raise InputError(
                f"{path}: the plan was created from a histogram without counts per file, so no packs can be written from "
                "it; create it from a histogram that `gaudi-bert histogram RECORDS` wrote"
            )
        return cls.parse({key: getattr(plan, key) for key in cls.model_fields}, str(path), cls.remedy)
