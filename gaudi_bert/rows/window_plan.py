"""Choose how a window of sequences is packed for prediction, so that the computation costs least.

A window contains the sequences of a few thousand consecutive rows of a file, which are packed, computed and written
together. Short rows of a batch cost less per token because attention spans the row, and long rows contain less padding.
Therefore a few combinations of row lengths are packed by best fit, and the cheapest is used. A compiler needs time for every
new row length, so all windows use the same few lengths. The choice depends only on the lengths in the window, so that a run
that is repeated after a kill makes the same choice. Nothing here needs TensorFlow.

Letters:
    N: sequences of a window.
    T: tokens of all sequences.
    G: candidate row lengths for rows of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Float32Array, IntArray
from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.packing.algorithms import run_algorithm
from gaudi_bert.packing.heuristics import OpenPacks, fill_open_packs
from gaudi_bert.packing.row_lengths import estimate_row_cost
from gaudi_bert.packing.strategies import StrategyCounts, count_packs, count_slots
from gaudi_bert.rows.packs import BatchShape, IncompleteBatch, PackBatch, PackedSequences, fill_planned_packs
from gaudi_bert.rows.types import Sequences

# Several sequences share a row only if separate rows would have an estimated cost that is at least 2 % higher.
LEAST_GAIN = 1.02

LENGTH_STEP_UNPACKED = 32
_ALGORITHM = "lpfhp"  # best fit
MAX_ROW_LENGTHS = 4
_USUAL_LENGTHS = (64, 128, 256, 512)
_LENGTH_STEP = 16
# Even a short sequence has four tokens: [CLS], two word pieces and [SEP]. The number of sequences in a row is therefore
# limited to the row length divided by 4.
_TOKENS_PER_SEQUENCE = 4


@dataclass(frozen=True)
class RowLengthPacks:
    """All packs of one row length that are planned for a window of sequences.

    Attributes:
        length: The length of a row in tokens.
        depth: The largest number of sequences in a row.
        packs: The packs. Their members are numbers of sequences in the window.
    """

    length: int
    depth: int
    packs: SampledPacks


@dataclass(frozen=True)
class WindowPlan:
    """A plan for a window, which is a list of sequences that are packed together. The plan assigns the sequences to packs of
    one or several row lengths.

    Attributes:
        parts: The packs of each row length.
        tokens: The number of tokens in the window.
        slots: The number of slots in all rows.
        gain: The estimated cost of one sequence per row, padded to the longest, divided by the cost of this plan. It is 1 if
            nothing is packed.
    """

    parts: tuple[RowLengthPacks, ...]
    tokens: int
    slots: int
    gain: float


@dataclass(frozen=True)
class PackRunner:
    """Runs a model, batch by batch, on the packs of a window, which is a list of sequences that are packed together.

    Attributes:
        compute: Returns the outputs for the features of a batch (`rows/packs.py`): float32 [B, S, C], or [B, L, C] with
            `per_token`.
        per_token: Whether the model has one output per token instead of one per sequence.
        width: The number of values C in an output.
        batch_tokens: The number of slots in a batch. A CPU is fastest at about the default.
        incomplete: How the last packs of a row length are computed if they do not fill a batch.
        map_batches: Calls a function for every batch, and returns the results in order. It may call the function in several
            threads at the same time. The default, `map`, computes one batch after the other.
    """

    compute: Callable[[BatchArrays], Float32Array]
    per_token: bool
    width: int
    batch_tokens: int = 1024
    incomplete: IncompleteBatch = "single"
    map_batches: Callable[[Callable[[PackBatch], int], Iterable[PackBatch]], Iterable[int]] = map

    def run(
        self, sequences: Sequences, plan: WindowPlan, on_batch_end: Callable[[int], None] = lambda slots: None
    ) -> Float32Array:
        """Run the model on all packs of a window. Return the outputs of each sequence, float32 [N, C], or of each token,
        float32 [T, C].

        Args:
            sequences: The sequences of the window.
            plan: The packs of the window.
            on_batch_end: Called after each batch with the number of slots that were computed.
        """
        count = len(sequences.input_ids) if self.per_token else len(sequences)
        outputs: Float32Array = np.zeros((count, self.width), np.float32)

        def compute_and_scatter(batch: PackBatch) -> int:
            """Run the model on a batch, store the outputs of its sequences or tokens, and return the number of token
            positions in its packs.
            """
            batch.scatter_outputs(self.compute(batch.features()), outputs, per_token=self.per_token)
            return batch.pack_count * batch.shape.length

        for slots in self.map_batches(compute_and_scatter, self._iterate_batches(sequences, plan)):
            on_batch_end(slots)
        return outputs

    def _iterate_batches(self, sequences: Sequences, plan: WindowPlan) -> Iterator[PackBatch]:
        """Yield all packs of a window of sequences in batches."""
        for part in plan.parts:
            shape = BatchShape(max(1, self.batch_tokens // part.length), part.length, part.depth)
            yield from PackedSequences(sequences, part.packs).batches(shape, self.incomplete)

    def find_non_finite_row(self, outputs: Float32Array, sequences: Sequences) -> int | None:
        """Return the index of the first row with an output that is not finite. Return None if all outputs are finite."""
        if np.isfinite(outputs).all():
            return None
        first = int(np.flatnonzero(~np.isfinite(outputs).all(axis=1))[0])
        if self.per_token:
            first = int(np.searchsorted(sequences.offsets, first, "right")) - 1
        return int(sequences.row[first])


def plan_window(
    lengths: IntArray,
    *,
    hidden_size: int,
    packed: bool = True,
    fixed_row_length: int | None = None,
    max_row_length: int | None = None,
) -> WindowPlan:
    """Choose row lengths for a window of sequences, pack the sequences into rows of these lengths, and return the plan.

    Args:
        lengths: int64 [N], the lengths of the sequences.
        hidden_size: The hidden size of the model, which is needed to estimate the cost of a row.
        packed: Whether sequences may share a row. Otherwise each sequence gets its own row, and all rows have the same
            length.
        fixed_row_length: The only row length, for accelerators that compile each shape. None to choose the lengths.
        max_row_length: The largest possible row length, for models with a limited number of positions. None for no limit.
    """
    tokens, longest = int(lengths.sum()), int(lengths.max(initial=1))
    rounded_up = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    rounded = fixed_row_length or min(rounded_up, max_row_length or rounded_up)
    unpacked_cost = len(lengths) * estimate_row_cost(rounded, hidden_size)
    alone, alone_cost = [rounded], unpacked_cost
    if packed and fixed_row_length is None:
        alone, alone_cost = _choose_row_lengths(
            _count_lengths(lengths, rounded), rounded, lambda row: estimate_row_cost(row, hidden_size)
        )
    choices = _iterate_candidate_row_lengths(longest, rounded, fixed_row_length, max_row_length) if packed else ()
    solved = [_pack_into_rows(lengths, row_lengths) for row_lengths in choices]

    def cost(mixtures: list[tuple[int, StrategyCounts]]) -> float:
        """Return the estimated cost of computing all planned packs, which have one or two row lengths."""
        return sum(
            count_packs(strategy_counts) * estimate_row_cost(length, hidden_size) for length, strategy_counts in mixtures
        )

    best = min(solved, key=cost, default=None)
    if best is not None and alone_cost >= LEAST_GAIN * cost(best):
        parts, gain = tuple(_assign_sequences(lengths, best)), unpacked_cost / cost(best)
    else:
        parts, gain = tuple(_put_one_sequence_per_row(lengths, alone)), 1.0
    return WindowPlan(parts, tokens, sum(len(part.packs) * part.length for part in parts), gain)


def _put_one_sequence_per_row(lengths: IntArray, row_lengths: list[int]) -> Iterator[RowLengthPacks]:
    """Put every sequence into a row of its own, with the shortest row length that is sufficient. Yield the packs of each row
    length.
    """
    index_of_row = np.searchsorted(row_lengths, lengths)
    for index, length in enumerate(row_lengths):
        members = np.flatnonzero(index_of_row == index)
        yield RowLengthPacks(length, 1, SampledPacks(members, np.arange(len(members) + 1, dtype=np.int64)))


def _count_lengths(lengths: IntArray, longest: int) -> IntArray:
    """Return the number of sequences of each length from 1 to `longest`, int64 [longest]."""
    return np.bincount(lengths, minlength=longest + 1)[1:]


def compute_max_sequences_per_row(row_length: int) -> int:
    """Return the largest number of sequences that a row of this length may contain.

    It depends only on the row length, so that batches have few different shapes.
    """
    return max(1, row_length // _TOKENS_PER_SEQUENCE)


def _iterate_candidate_row_lengths(
    longest: int, rounded: int, fixed_row_length: int | None, max_row_length: int | None
) -> Iterator[tuple[int, ...]]:
    """Yield the combinations of row lengths to try. A combination is a single length for all rows, or a long and a short
    length.
    """
    if fixed_row_length is not None:
        yield (fixed_row_length,)
        return
    usual = [length for length in _USUAL_LENGTHS if longest <= length <= (max_row_length or length)]
    for long in dict.fromkeys([rounded, *usual]):
        yield (long,)
        yield from ((long, short) for short in _USUAL_LENGTHS if short < longest)


def _pack_into_rows(lengths: IntArray, row_lengths: tuple[int, ...]) -> list[tuple[int, StrategyCounts]]:
    """Plan packs for rows of one or two lengths. For each row length, return how many packs contain which sequence lengths.

    Long rows take all sequences that are too long for short rows. Then they are filled with other sequences by best fit. The
    short rows take the remaining sequences.
    """
    long, *short = row_lengths
    counts = _count_lengths(lengths, long)
    if not short:
        return [(long, run_algorithm(counts, _ALGORITHM, compute_max_sequences_per_row(long)).strategy_counts)]
    must = counts.copy()
    must[: short[0]] = 0
    long_packs = run_algorithm(must, _ALGORITHM, compute_max_sequences_per_row(long)).strategy_counts
    rows = OpenPacks.from_strategy_counts(long_packs, long, compute_max_sequences_per_row(long))
    remaining = counts[: short[0]].copy()
    for length in range(short[0], 0, -1):
        remaining[length - 1] = fill_open_packs(rows, length, int(remaining[length - 1]))
    return [
        (long, rows.close_all_packs()),
        (short[0], run_algorithm(remaining, _ALGORITHM, compute_max_sequences_per_row(short[0])).strategy_counts),
    ]


def _assign_sequences(lengths: IntArray, mixtures: list[tuple[int, StrategyCounts]]) -> Iterator[RowLengthPacks]:
    """Fill the planned packs, which specify only sequence lengths, with sequences of the window. Yield the packs of each row
    length.
    """
    free = np.arange(len(lengths), dtype=np.int64)
    for length, strategy_counts in mixtures:
        if not strategy_counts:
            continue
        slots_of_length = count_slots(strategy_counts, length)
        order = np.argsort(lengths[free], kind="stable")
        of_length = lengths[free][order]
        rank = np.arange(len(free)) - np.searchsorted(of_length, of_length)
        is_own = (of_length <= length) & (rank < slots_of_length[np.minimum(of_length, length) - 1])
        own, free = np.sort(free[order][is_own]), np.sort(free[order][~is_own])
        yield RowLengthPacks(
            length, compute_max_sequences_per_row(length), fill_planned_packs(own, lengths, strategy_counts, seed=0)
        )


# --- rows of one sequence each


def _choose_row_lengths(counts: IntArray, longest: int, cost: Callable[[int], float]) -> tuple[list[int], float]:
    """Choose the row lengths that cost least if every row contains a single sequence. Return the row lengths and the total
    cost.

    Args:
        counts: int64, the number of sequences of each length, from 1.
        longest: The largest row length.
        cost: Returns the cost of a row of the given length.

    Returns:
        At most MAX_ROW_LENGTHS lengths, ascending and without unused lengths, and the total cost.
    """
    grid = np.append(np.arange(LENGTH_STEP_UNPACKED, longest, LENGTH_STEP_UNPACKED), longest)
    below_G = np.cumsum(np.pad(counts, (0, max(0, longest - len(counts)))))[grid - 1]
    costs_G = np.array([cost(int(length)) for length in grid])
    # Find the cheapest row lengths by dynamic programming. `best_G[j]` is the lowest cost of all sequences with at most
    # `grid[j]` tokens. At first, all of their rows are `grid[j]` tokens long. Each iteration allows one more row length.
    best_G = below_G * costs_G
    before = []
    for _ in range(MAX_ROW_LENGTHS - 1):
        totals_GG = best_G[:, np.newaxis] + (below_G - below_G[:, np.newaxis]) * costs_G
        totals_GG[np.tril_indices(len(grid), -1)] = np.inf
        before.append(totals_GG.argmin(axis=0))
        best_G = totals_GG.min(axis=0)
    chosen = [len(grid) - 1]
    for choices in reversed(before):
        chosen.append(int(choices[chosen[-1]]))
    lengths = np.unique(chosen)
    sequences = np.diff(below_G[lengths], prepend=0)
    return [int(length) for length in grid[lengths[sequences > 0]]], float(best_G[-1])
