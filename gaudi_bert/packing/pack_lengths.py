"""The packer as a library: lengths in, packs out; or a histogram in, strategies out. numpy and nothing else at the surface.

    packs = pack_lengths([len(text) for text in texts], 512)
    rows = [[texts[index] for index in pack] for pack in packs]

Lengths are counted, their histogram is packed (`algorithms`), and the sequences are dealt to the packs by the seed
(`common.dealing`), as `gaudi-bert write` deals those of a group. The result is a function of lengths, settings and seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import AnyArray, IntArray
from gaudi_bert.common.dealing import deal_sequences
from gaudi_bert.common.errors import ArgumentError, InputError
from gaudi_bert.packing.algorithms import pack_histogram as pack_counts
from gaudi_bert.packing.histogram import Histogram, rescaled
from gaudi_bert.packing.lengths import MOST_SLOTS, checked_lengths, histogram_of, whole_number
from gaudi_bert.packing.result import Packing

__all__ = ["PackList", "PackedHistogram", "Packs", "pack_histogram", "pack_lengths"]

DEFAULT_SEED = 12345


@dataclass(frozen=True, eq=False, repr=False)
class PackList:
    """Packs in a random order: pack p holds the sequences `indices[offsets[p] : offsets[p + 1]]`.

    Attributes:
        indices: int64 [sequences], numbers of sequences, from 0; read-only.
        offsets: int64 [packs + 1]; read-only.
    """

    indices: IntArray
    offsets: IntArray

    def __post_init__(self) -> None:
        self.indices.flags.writeable = False
        self.offsets.flags.writeable = False

    def __len__(self) -> int:
        """Number of packs."""
        return self.offsets.size - 1

    def __getitem__(self, pack: int) -> IntArray:
        """The sequences of one pack: int64 [1 .. depth]."""
        place = range(len(self))[pack]
        return self.indices[self.offsets[place] : self.offsets[place + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        """The sequences of each pack."""
        return (self.indices[start:end] for start, end in zip(self.offsets[:-1], self.offsets[1:], strict=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.indices.size:,} sequences in {len(self):,} packs)"

    def shard(self, rank: int, size: int) -> PackList:
        """Every `size`-th pack from pack `rank` on: the share of one of `size` workers. Shares differ by one pack at most.

        Raises:
            ArgumentError: `rank` is not in 0 .. size - 1.
        """
        size = whole_number(size, "size", 1)
        rank = whole_number(rank, "rank", 0, size - 1)
        starts, sizes = self.offsets[:-1][rank::size], np.diff(self.offsets)[rank::size]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
        return PackList(self.indices[places], offsets)


@dataclass(frozen=True, eq=False, repr=False)
class Packs(PackList):
    """All packs of `pack_lengths`, and how good they are.

    Attributes:
        max_sequence_length: slots of a pack.
        tokens: real tokens in all of them.
        lower_bound: packs that no packing of this depth can do without, proven.
        algorithm: what made them.
    """

    max_sequence_length: int
    tokens: int
    lower_bound: int
    algorithm: str

    @property
    def gap(self) -> int:
        """Packs above the proven bound; 0 is proven optimal."""
        return len(self) - self.lower_bound

    @property
    def efficiency(self) -> float:
        """Real tokens / slots, 0..1."""
        return self.tokens / (len(self) * self.max_sequence_length)

    @property
    def packing_factor(self) -> float:
        """Sequences per pack."""
        return self.indices.size / len(self)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, efficiency {self.efficiency:.6f}, {self.gap:,} above the proven bound)"


@dataclass(frozen=True, eq=False)
class PackedHistogram:
    """How a histogram is packed, and how good that is.

    Attributes:
        strategies: sorted tuples of lengths that share a pack.
        counts: int64 [strategies], how many packs there are of each; read-only.
        max_sequence_length: slots of a pack.
        sequences: number of sequences.
        tokens: real tokens in all of them.
        lower_bound: packs that no packing of this depth can do without, proven.
        algorithm: what made it.
    """

    strategies: tuple[tuple[int, ...], ...]
    counts: IntArray
    max_sequence_length: int
    sequences: int
    tokens: int
    lower_bound: int
    algorithm: str

    def __post_init__(self) -> None:
        self.counts.flags.writeable = False

    @property
    def packs(self) -> int:
        """Number of packs."""
        return int(self.counts.sum())

    @property
    def gap(self) -> int:
        """Packs above the proven bound; 0 is proven optimal."""
        return self.packs - self.lower_bound

    @property
    def efficiency(self) -> float:
        """Real tokens / slots, 0..1."""
        return self.tokens / (self.packs * self.max_sequence_length)

    @property
    def packing_factor(self) -> float:
        """Sequences per pack."""
        return self.sequences / self.packs


def pack_lengths(
    lengths: Any,
    max_sequence_length: int,
    *,
    depth: int | str = "max",
    algorithm: str = "optimal",
    seed: int = DEFAULT_SEED,
) -> Packs:
    """Pack sequences of these lengths into rows of one length, every sequence into exactly one.

    Args:
        lengths: whole numbers from 1 to `max_sequence_length`, one per sequence: an array, a list, any iterable.
        max_sequence_length: slots of a pack, in tokens.
        depth: most sequences per pack, or "max" for no limit.
        algorithm: `optimal`, `nnls`, `lpfhp`, `spfhp`, `ffd`, `nnlshp`, `ennlshp`, `greedy`, `none`.
        seed: which sequences of a length go where, and the order of the packs.

    Raises:
        ArgumentError: a ValueError, which names the index and the value at fault.
    """
    seed = whole_number(seed, "seed", 0)
    checked = checked_lengths(lengths, max_sequence_length)
    packing = _pack(histogram_of(checked, int(max_sequence_length)), depth, algorithm, seed)
    members = np.empty(checked.size, dtype=np.int64)
    offsets, indices = _deal(checked, packing, seed, members)
    return Packs(
        indices, offsets, packing.histogram.max_sequence_length, packing.tokens, packing.lower_bound, packing.algorithm_used
    )


def pack_histogram(
    counts: Any,
    max_sequence_length: int | None = None,
    *,
    depth: int | str = "max",
    algorithm: str = "optimal",
    seed: int = DEFAULT_SEED,
) -> PackedHistogram:
    """Pack a histogram of lengths; the cost depends on the longest row, not on how many sequences there are.

    Args:
        counts: whole numbers from 0: how many sequences there are of length 1, 2, ...
        max_sequence_length: slots of a pack, in tokens; by default as many as `counts` has entries.
        depth: most sequences per pack, or "max" for no limit.
        algorithm: as `pack_lengths`.
        seed: of `greedy`, the only algorithm that draws.

    Raises:
        ArgumentError: a ValueError, which names the length and the value at fault.
    """
    seed = whole_number(seed, "seed", 0)
    try:
        histogram = Histogram(len(counts) if hasattr(counts, "__len__") else 0, counts)
        if max_sequence_length is not None:
            histogram = rescaled(histogram, whole_number(max_sequence_length, "max_sequence_length", 1, MOST_SLOTS))
    except InputError as error:
        raise ArgumentError(str(error)) from None
    if histogram.sequences == 0:
        raise ArgumentError("counts holds no sequence; counts[0] is how many there are of length 1")
    packing = _pack(histogram, depth, algorithm, seed)
    return PackedHistogram(
        tuple(packing.mixture),
        np.fromiter(packing.mixture.values(), np.int64, len(packing.mixture)),
        histogram.max_sequence_length,
        packing.sequences,
        packing.tokens,
        packing.lower_bound,
        packing.algorithm_used,
    )


def _pack(histogram: Histogram, depth: int | str, algorithm: str, seed: int) -> Packing:
    """The packing of a histogram, checked and proven; what it refuses is an argument of ours."""
    if depth != "max":
        depth = whole_number(depth, "depth", 1)
    try:
        return pack_counts(histogram, algorithm, depth, seed=seed)
    except InputError as error:
        raise ArgumentError(str(error)) from None


def _deal(lengths: AnyArray, packing: Packing, seed: int, members: IntArray) -> tuple[IntArray, IntArray]:
    """Offsets and indices of the packs in which the sequences are dealt to the strategies."""
    return deal_sequences(lengths, list(packing.mixture.items()), seed, 0, members)
