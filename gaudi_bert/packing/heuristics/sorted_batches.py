"""SORT, sorted batching (paper 1 and table 1): batches of sequences of nearly equal length, each padded to its longest.

Almost no padding, but every batch has another shape, so a compiler for static shapes (Gaudi) meets a new graph at every
length, and batches are no longer random samples. For estimates only: there is nothing to write.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError

__all__ = ["SortedBatches", "sort_into_batches"]


@dataclass(frozen=True)
class SortedBatches:
    """What sorted batching would process: number of batches, tokens with padding, and different shapes to compile."""

    batches: int
    padded_tokens: int
    shapes: int


def sort_into_batches(counts: IntArray, batch_sequences: int) -> SortedBatches:
    """Sort by length, longest first, and cut into batches; the last may be smaller.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        batch_sequences: sequences a batch.

    Raises:
        InputError: `batch_sequences` is less than 1.
    """
    if batch_sequences < 1:
        raise InputError(f"batch_sequences is {batch_sequences}; it must be at least 1")
    lengths = np.arange(len(counts), 0, -1)
    ends = np.cumsum(counts[::-1])
    starts = ends - counts[::-1]
    # Batch k begins at sorted position k * batch_sequences, and its first sequence is its longest.
    begun = -(-ends // batch_sequences) - -(-starts // batch_sequences)
    sequences = int(ends[-1]) if len(ends) else 0
    padded_tokens = int(begun @ lengths) * batch_sequences
    if sequences % batch_sequences:
        last_length = int(lengths[np.flatnonzero(begun)[-1]])
        padded_tokens -= (batch_sequences - sequences % batch_sequences) * last_length
    return SortedBatches(int(begun.sum()), padded_tokens, int(np.count_nonzero(begun)))
