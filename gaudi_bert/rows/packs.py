"""Lay out packs of tokenized sequences as the dense arrays that a model takes, and put its outputs back in row order.

A `Placement` maps each token of the flat arrays to a slot of the batch. The same mapping in reverse brings the outputs of
the model back to the tokens and sequences.

Letters:
    B: packs in a batch.
    L: positions in a pack.
    S: depth, the largest number of sequences in a pack.
    N: all sequences.
    T: tokens of all sequences.
    C: values of an output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, Float32Array, Int32Array, IntArray
from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.rows.types import Sequences


class BatchShape(NamedTuple):
    """The static shape of a batch of packs.

    Attributes:
        packs: The number of packs.
        length: The number of positions in a pack.
        depth: The largest number of sequences in a pack.
    """

    packs: int
    length: int
    depth: int


@dataclass(frozen=True)
class Placement:
    """Where some sequences are placed in a batch of packs. All arrays are int64.

    If there are fewer packs than the batch has room for, the packs at its end are empty.

    Attributes:
        shape: The shape of the batch.
        sequences: [n], the numbers of the sequences in the batch, pack by pack.
        packs: [n], the pack of each sequence, counted within the batch.
        numbers: [n], the number of each sequence in its pack, from 1.
        starts: [n], the position in its pack at which each sequence begins, with [CLS].
        lengths: [n], the number of tokens in each sequence.
        sources: [t], the position of each token of the batch in the flat arrays of the sequences.
        slots: [t], the slot of each token of the batch, which is pack * L + position.
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
        """Copy one value per token to the slots of the batch, and return them as an array [B, L].

        Args:
            values: [T], one value for each token of the flat arrays.
            fill: The value of slots without a token.
        """
        spread = np.full(self.shape.packs * self.shape.length, fill, values.dtype)
        spread[self.slots] = values[self.sources]
        return spread.reshape(self.shape.packs, self.shape.length)

    def each(self, values: AnyArray, fill: float = 0) -> AnyArray:
        """Copy one value per sequence to the places of the batch, and return them as an array [B, S] or [B, S, C].

        Args:
            values: [n] or [n, C], one value or vector for each sequence of the batch.
            fill: The value of places without a sequence.
        """
        spread = np.full((self.shape.packs, self.shape.depth, *values.shape[1:]), fill, values.dtype)
        spread[self.packs, self.numbers - 1] = values
        return spread

    def scatter_sequences(self, values_BSC: AnyArray, out_NC: AnyArray) -> None:
        """Copy the outputs for the sequences of this batch to their places in `out_NC`, the outputs of all sequences."""
        out_NC[self.sequences] = values_BSC[self.packs, self.numbers - 1]

    def scatter_tokens(self, values_BLC: AnyArray, out_TC: AnyArray) -> None:
        """Copy the outputs for the tokens of this batch to their places in `out_TC`, the outputs of all tokens."""
        out_TC[self.sources] = values_BLC.reshape(-1, *values_BLC.shape[2:])[self.slots]

    def features(self, sequences: Sequences) -> dict[str, Int32Array | Float32Array]:
        """Return the features of the batch as a dict of arrays.

        The encoder takes `input_ids`, `input_mask`, `segment_ids` and `positions`, all int32 [B, L]. `input_mask` contains
        the number of the sequence that each token belongs to, and 0 for padding. `sequence_positions` and `last_positions`,
        int32 [B, S], state where each sequence begins and ends. `sequence_weights`, float32 [B, S], is 1 for each sequence
        and 0 for places without a sequence.
        """
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
    """Lay out the chosen packs in a batch, one pack per row.

    Args:
        sequences: All sequences.
        packs: All packs. Their members are numbers of the sequences.
        chosen: int64 [b], the numbers of the packs in the batch. There are at most `shape.packs`.
        shape: The shape of the batch.
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
    """Return the numbers from 0 to size - 1 for each size, concatenated."""
    ends = np.cumsum(sizes)
    counted: IntArray = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    return counted
