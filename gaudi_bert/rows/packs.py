"""Arrange packs of tokenized sequences in the dense arrays that a model takes, and restore the order of its outputs.

`PackedSequences` states which sequences share a pack. A `PackBatch` is a batch of its packs: it maps each token of the flat
arrays to a slot of the batch, which is a position in one of its rows. The same mapping in reverse brings the outputs of the
model back to the tokens and sequences.

Letters:
    B: packs in a batch.
    L: positions in a pack.
    S: depth, the largest number of sequences in a pack.
    N: all sequences.
    T: tokens of all sequences.
    C: values of an output.
    n, t: sequences and tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from gaudi_bert.common.arrays import AnyArray, Float32Array, Int32Array, IntArray
from gaudi_bert.common.sampling import SampledPacks, sample_packs
from gaudi_bert.packing.strategies import Strategy
from gaudi_bert.rows.types import Sequences

# What happens to the last packs if they do not fill a batch. "smaller" puts them into one smaller batch. "single" makes a
# separate batch of each pack, so that fewer batch shapes have to be compiled. "filled" adds empty packs, so that all batches
# have the same shape.
IncompleteBatch: TypeAlias = Literal["smaller", "single", "filled"]


class BatchShape(NamedTuple):
    """The shape of a batch of packs. Each pack is one row of the batch.

    Attributes:
        packs: The number of packs.
        length: The number of positions in a pack.
        depth: The largest number of sequences in a pack.
    """

    packs: int
    length: int
    depth: int


@dataclass(frozen=True)
class PackBatch:
    """A batch of packed sequences, and the position of each sequence and token in the batch. All arrays are int64.

    If there are fewer packs than the batch has room for, the packs at its end are empty.

    Attributes:
        shape: The shape of the batch.
        source: All sequences, including those that are not in the batch.
        members: [n], the numbers of the sequences in the batch, pack by pack.
        packs: [n], the pack of each sequence, counted within the batch.
        numbers_in_pack: [n], the number of each sequence in its pack, from 1.
        starts: [n], the position of the first token of each sequence ([CLS]) in its pack.
        lengths: [n], the number of tokens in each sequence.
        token_sources: [t], the position of each token of the batch in the flat arrays of the sequences.
        token_slots: [t], the slot of each token of the batch, which is pack * L + position.
    """

    shape: BatchShape
    source: Sequences = field(repr=False)
    members: IntArray
    packs: IntArray
    numbers_in_pack: IntArray
    starts: IntArray
    lengths: IntArray
    token_sources: IntArray = field(repr=False)
    token_slots: IntArray = field(repr=False)

    @property
    def pack_count(self) -> int:
        """The number of packs in the batch. Empty packs at its end are not counted."""
        return int(self.packs[-1]) + 1 if len(self.packs) else 0

    def scatter_token_values(self, values_T: AnyArray, fill: float = 0) -> AnyArray:
        """Copy one value per token to the token's position in the batch, and return an array [B, L].

        Args:
            values_T: One value for each token of all sequences.
            fill: The value of slots without a token.
        """
        return self._scatter_batch_tokens(values_T[self.token_sources], fill)

    def _scatter_batch_tokens(self, values_t: AnyArray, fill: float = 0) -> AnyArray:
        """Copy one value per token of the batch to the token's position in the batch, and return an array [B, L]."""
        slots = np.full(self.shape.packs * self.shape.length, fill, values_t.dtype)
        slots[self.token_slots] = values_t
        return slots.reshape(self.shape.packs, self.shape.length)

    def scatter_sequence_values(self, values: AnyArray, fill: float = 0) -> AnyArray:
        """Copy one value per sequence to the sequence's position in the batch, and return an array [B, S] or [B, S, C].

        Args:
            values: [n] or [n, C], one value or vector for each sequence of the batch.
            fill: The value of places without a sequence.
        """
        slots = np.full((self.shape.packs, self.shape.depth, *values.shape[1:]), fill, values.dtype)
        slots[self.packs, self.numbers_in_pack - 1] = values
        return slots

    def scatter_outputs(self, outputs: AnyArray, all_outputs: AnyArray, *, per_token: bool) -> None:
        """Copy the model's outputs for this batch into the array of all outputs, in the original order of the sequences.

        Args:
            outputs: [B, S, C], or [B, L, C] with `per_token`.
            all_outputs: [N, C], or [T, C] with `per_token`. Filled in place.
            per_token: Whether the model has one output per token instead of one per sequence.
        """
        if per_token:
            all_outputs[self.token_sources] = outputs.reshape(-1, *outputs.shape[2:])[self.token_slots]
        else:
            all_outputs[self.members] = outputs[self.packs, self.numbers_in_pack - 1]

    def features(self) -> dict[str, Int32Array | Float32Array]:
        """Return the arrays of this batch that a model takes as input, by name.

        The encoder takes `input_ids`, `input_mask`, `segment_ids` and `positions`, all int32 [B, L]. `input_mask` contains
        the number of the sequence that each token belongs to, and 0 for padding. `sequence_positions` and `last_positions`,
        int32 [B, S], state where each sequence begins and ends. `sequence_weights`, float32 [B, S], is 1 for each sequence
        and 0 for places without a sequence.
        """
        numbers_t = np.repeat(self.numbers_in_pack, self.lengths)
        positions_t = self.token_slots - np.repeat(self.packs * self.shape.length + self.starts, self.lengths)
        return {
            "input_ids": self.scatter_token_values(self.source.input_ids).astype(np.int32, copy=False),
            "input_mask": self._scatter_batch_tokens(numbers_t.astype(np.int32)),
            "segment_ids": self.scatter_token_values(self.source.segment_ids).astype(np.int32, copy=False),
            "positions": self._scatter_batch_tokens(positions_t.astype(np.int32)),
            "sequence_positions": self.scatter_sequence_values(self.starts.astype(np.int32)),
            "last_positions": self.scatter_sequence_values((self.starts + self.lengths - 1).astype(np.int32)),
            "sequence_weights": self.scatter_sequence_values(np.ones(len(self.members), np.float32)),
        }


@dataclass(frozen=True)
class PackedSequences:
    """Tokenized sequences, and the packs that say which of them share a row.

    Attributes:
        sequences: The sequences.
        packs: The packs. Their members are numbers of the sequences.
    """

    sequences: Sequences
    packs: SampledPacks

    def build_batch(self, pack_numbers: IntArray, shape: BatchShape) -> PackBatch:
        """Arrange the given packs as a batch with one pack per row, and return the batch.

        Args:
            pack_numbers: int64 [b], the numbers of the packs. There are at most `shape.packs`.
            shape: The shape of the batch.
        """
        offsets, starts = self.sequences.offsets, self.packs.starts
        sizes = starts[pack_numbers + 1] - starts[pack_numbers]
        rows = np.repeat(np.arange(len(pack_numbers)), sizes)
        numbers = _concatenate_ranges(sizes)
        members = self.packs.members[starts[pack_numbers][rows] + numbers]
        lengths = offsets[members + 1] - offsets[members]
        tokens_before = np.cumsum(lengths) - lengths
        sequence_starts = tokens_before - tokens_before[np.searchsorted(rows, rows)] if len(members) else tokens_before
        positions = _concatenate_ranges(lengths)
        return PackBatch(
            shape=shape,
            source=self.sequences,
            members=members,
            packs=rows,
            numbers_in_pack=numbers + 1,
            starts=sequence_starts,
            lengths=lengths,
            token_sources=np.repeat(offsets[members], lengths) + positions,
            token_slots=np.repeat(rows * shape.length + sequence_starts, lengths) + positions,
        )

    def batches(
        self, shape: BatchShape, incomplete: IncompleteBatch = "filled", *, rank: int = 0, processes: int = 1
    ) -> Iterator[PackBatch]:
        """Yield all packs in batches of consecutive packs. With n processes, each process yields every n-th batch.

        Args:
            shape: The shape of a batch.
            incomplete: How the last packs are computed if they do not fill a batch.
            rank: The number of this process.
            processes: The number of processes.
        """
        for first in range(rank * shape.packs, len(self.packs), processes * shape.packs):
            remaining = np.arange(first, min(first + shape.packs, len(self.packs)))
            is_filled = len(remaining) == shape.packs or incomplete == "filled"
            size = shape.packs if is_filled else len(remaining) if incomplete == "smaller" else 1
            for start in range(0, len(remaining), size):
                yield self.build_batch(remaining[start : start + size], shape._replace(packs=size))


def fill_planned_packs(
    members: IntArray, lengths: IntArray, strategy_counts: Mapping[Strategy, int], seed: int
) -> SampledPacks:
    """Fill planned packs, which specify only the lengths of their sequences, with random sequences of these lengths. Return
    the packs in random order.

    Args:
        members: The numbers of the sequences to assign.
        lengths: int64 [N], the number of tokens in each of all sequences.
        strategy_counts: The plan: how many packs contain which lengths.
        seed: The seed of the assignment.
    """
    packs = sample_packs(lengths[members].astype(np.int32), list(strategy_counts.items()), seed, 0)
    return SampledPacks(members[packs.members], packs.starts)


def _concatenate_ranges(sizes: IntArray) -> IntArray:
    """Return the integers 0 to size - 1 for every given size, concatenated into one array."""
    ends = np.cumsum(sizes)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes, sizes)
