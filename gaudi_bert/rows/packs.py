"""Packs of tokenized sequences as the dense arrays that a model takes, and its answers put back into the order of the rows.

One array gives each token of the flat arrays its slot in the batch; used the other way round, it brings outputs back.

Letters: B packs of a batch, L positions of a pack, S depth (most sequences of a pack), N sequences in all, C values of an
answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, Float32Array, Int32Array, IntArray
from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.rows.types import Sequences


class BatchShape(NamedTuple):
    """The one static shape: packs of a batch, positions of a pack, most sequences of a pack."""

    packs: int
    length: int
    depth: int


@dataclass(frozen=True)
class Placement:
    """Positions of the sequences of some packs in a batch, in their order there.

    All int64. [n]: of each of the `sequences`, its pack of the batch, its number in the pack from 1, the start of its [CLS]
    in the pack, its tokens. [t]: of every token of the batch, its position in the flat arrays of the sequences (`sources`)
    and its slot as pack * L + position. Packs that are missing at the end of the batch are empty.
    """

    shape: BatchShape
    sequences: IntArray
    packs: IntArray
    numbers: IntArray
    starts: IntArray
    lengths: IntArray
    sources: IntArray = field(repr=False)
    slots: IntArray = field(repr=False)

    def tokens(self, values: AnyArray, fill: float = 0) -> AnyArray:
        """`values`, one for each token of the flat arrays, as [B, L]; `fill` where no token is."""
        spread = np.full(self.shape.packs * self.shape.length, fill, values.dtype)
        spread[self.slots] = values[self.sources]
        return spread.reshape(self.shape.packs, self.shape.length)

    def each(self, values: AnyArray, fill: float = 0) -> AnyArray:
        """`values`, one (or a vector) for each of the n sequences here, as [B, S] (or [B, S, C])."""
        spread = np.full((self.shape.packs, self.shape.depth, *values.shape[1:]), fill, values.dtype)
        spread[self.packs, self.numbers - 1] = values
        return spread

    def scatter_sequences(self, values_BSC: AnyArray, out_NC: AnyArray) -> None:
        """Put the outputs for these sequences into those of all sequences."""
        out_NC[self.sequences] = values_BSC[self.packs, self.numbers - 1]

    def scatter_tokens(self, values_BLC: AnyArray, out_TC: AnyArray) -> None:
        """Put the outputs for these tokens into those of all tokens."""
        out_TC[self.sources] = values_BLC.reshape(-1, *values_BLC.shape[2:])[self.slots]

    def features(self, sequences: Sequences) -> dict[str, Int32Array | Float32Array]:
        """Return what the encoder takes, [B, L], and where each sequence begins and ends, [B, S]."""
        packs, length, _ = self.shape
        of_token = np.repeat(np.arange(len(self.lengths)), self.lengths)
        mask = np.zeros(packs * length, np.int32)
        mask[self.slots] = self.numbers[of_token]
        positions = np.zeros(packs * length, np.int32)
        positions[self.slots] = self.slots - (self.packs * length + self.starts)[of_token]
        return {
            "input_ids": self.tokens(sequences.input_ids).astype(np.int32, copy=False),
            "input_mask": mask.reshape(packs, length),
            "segment_ids": self.tokens(sequences.segment_ids).astype(np.int32, copy=False),
            "positions": positions.reshape(packs, length),
            "sequence_positions": self.each(self.starts.astype(np.int32)),
            "last_positions": self.each((self.starts + self.lengths - 1).astype(np.int32)),
            "sequence_weights": self.each(np.ones(len(self.sequences), np.float32)),
        }


def lay_out_packs(sequences: Sequences, packs: SampledPacks, chosen: IntArray, shape: BatchShape) -> Placement:
    """Lay the chosen packs side by side.

    `chosen`, int64 [b], are numbers of packs, at most `shape.packs`.
    """
    sizes = packs.starts[chosen + 1] - packs.starts[chosen]
    rows = np.repeat(np.arange(len(chosen)), sizes)
    numbers = _counted(sizes)
    members = packs.members[packs.starts[chosen][rows] + numbers]
    lengths = sequences.offsets[members + 1] - sequences.offsets[members]
    before = np.cumsum(lengths) - lengths
    first_of_pack = np.searchsorted(rows, rows)
    starts = before - before[first_of_pack] if len(members) else before
    within = _counted(lengths)
    return Placement(
        shape=shape,
        sequences=members,
        packs=rows,
        numbers=numbers + 1,
        starts=starts,
        lengths=lengths,
        sources=np.repeat(sequences.offsets[members], lengths) + within,
        slots=np.repeat(rows * shape.length + starts, lengths) + within,
    )


def _counted(sizes: IntArray) -> IntArray:
    """0 .. size - 1 for each size, one after the other."""
    ends = np.cumsum(sizes)
    counted: IntArray = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    return counted
