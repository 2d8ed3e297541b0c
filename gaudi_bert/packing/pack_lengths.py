"""The public functions `pack_lengths`, which assigns sequences to packs, and `pack_histogram`, which packs a histogram of
lengths.

    packs = pack_lengths([len(text) for text in texts], 512)
    rows = [[texts[index] for index in pack] for pack in packs]

`pack_lengths` counts the lengths, packs their histogram (`algorithms`), and assigns the sequences to the slots by a seeded
permutation, in the same way as `gaudi-bert write` does within a group. The result depends only on the lengths, the settings
and the seed. Inputs and outputs are arrays; no other type of this package is needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args, overload

import numpy as np
from numpy.typing import ArrayLike

from gaudi_bert.common.arrays import IntArray, check_integer
from gaudi_bert.common.errors import ArgumentError, InputError, short_repr
from gaudi_bert.common.features import PackingMetrics
from gaudi_bert.common.progress import Reporter, format_seconds
from gaudi_bert.common.sampling import sample_packs
from gaudi_bert.packing.algorithms import pack_histogram as pack_counts
from gaudi_bert.packing.histogram import MAX_ROW_LENGTH, Histogram, count_lengths, resize_histogram, validate_lengths
from gaudi_bert.packing.strategies import Effort, OperationBudget, Packing

Algorithm = Literal["nnls", "optimal", "nnlshp", "ennlshp", "spfhp", "lpfhp", "greedy", "ffd", "none"]
# The seed that is used by default.
DEFAULT_SEED = 12345


@dataclass(frozen=True, eq=False, repr=False)
class Packs:
    """A collection of packs in random order. Each pack is an array of sequence numbers.

    Pack p contains `indices[offsets[p] : offsets[p + 1]]`.

    Slices and shards are `Packs` as well. `pack_lengths` returns the subclass `PackedLengths`, which adds the packing's
    metrics.

    Attributes:
        indices: int64 [sequences], the sequence numbers from 0, pack by pack; read-only.
        offsets: int64 [packs + 1], where each pack begins; read-only.
    """

    indices: IntArray
    offsets: IntArray

    def __post_init__(self) -> None:
        self.indices.flags.writeable = False
        self.offsets.flags.writeable = False

    def __len__(self) -> int:
        """Return the number of packs."""
        return self.offsets.size - 1

    @overload
    def __getitem__(self, pack: int) -> IntArray: ...
    @overload
    def __getitem__(self, pack: slice) -> Packs: ...
    def __getitem__(self, pack: int | slice) -> IntArray | Packs:
        """Return the sequence numbers of one pack, an int64 array. For a slice, return the selected packs."""
        if isinstance(pack, slice):
            starts, sizes = self.offsets[:-1][pack], np.diff(self.offsets)[pack]
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
            return Packs(self.indices[np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)], offsets)
        try:
            index = range(len(self))[pack]
        except IndexError:
            raise IndexError(
                f"packs[{pack}] does not exist, because there are only {len(self):,} packs, numbered from 0"
            ) from None
        except TypeError:
            raise TypeError(
                f"packs[{short_repr(pack)}]: the index must be an integer, or a slice such as [2:5] for several packs"
            ) from None
        return self.indices[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        """Iterate over the packs. Each is an int64 array of sequence numbers."""
        return (self.indices[start:end] for start, end in zip(self.offsets[:-1], self.offsets[1:], strict=True))

    def __repr__(self) -> str:
        return f"Packs({self.indices.size:,} sequences in {len(self):,} packs)"

    def shard(self, rank: int, size: int) -> Packs:
        """Return the packs of one of `size` workers: pack `rank` and every `size`-th pack after it.

        Together the shards contain every pack once, and their sizes differ by at most one.

        Args:
            rank: the number of the worker, from 0 to `size` - 1.
            size: the number of workers.

        Raises:
            ArgumentError: `rank` or `size` is out of range.
        """
        size = check_integer("size", size, 1)
        rank = check_integer("rank", rank, 0, size - 1)
        return self[rank::size]


@dataclass(frozen=True, eq=False, repr=False)
class PackedLengths(Packs, PackingMetrics):
    """The packs that `pack_lengths` returns, with the metrics of the packing.

    Attributes:
        max_sequence_length: slots of a pack, in tokens.
        algorithm: the algorithm that produced the packs.
    """

    max_sequence_length: int
    algorithm: str

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, efficiency {self.efficiency:.6f}, {self.gap:,} above the proven bound)"

    def _repr_html_(self) -> str:
        """Render the metrics and a bar chart of sequences per pack, for notebooks."""
        rows = {
            "sequences": f"{self.sequences:,}",
            "packs": f"{self.packs:,} of {self.max_sequence_length:,} slots",
            "proven minimum": f"{self.lower_bound:,}",
            "efficiency": f"{100 * self.efficiency:.2f} % of the slots hold tokens",
            "sequences per pack": f"{self.packing_factor:.3f}",
            "algorithm": self.algorithm,
        }
        cells = "".join(f"<tr><th style='text-align:left'>{name}</th><td>{value}</td></tr>" for name, value in rows.items())
        return f"<div><table>{cells}</table>{_draw_depth_histogram(np.diff(self.offsets))}</div>"


@dataclass(frozen=True, eq=False)
class PackedHistogram(PackingMetrics):
    """The packing that `pack_histogram` found, with its metrics. Packs with the same lengths form a strategy, which is
    stored once with its number of packs.

    Attributes:
        strategies: sorted tuples of lengths that share a pack.
        counts: int64 [strategies], the number of packs of each strategy; read-only.
        max_sequence_length: slots of a pack, in tokens.
        algorithm: the algorithm that produced the packs.
    """

    strategies: tuple[tuple[int, ...], ...]
    counts: IntArray
    max_sequence_length: int
    algorithm: str

    def __post_init__(self) -> None:
        self.counts.flags.writeable = False


def pack_lengths(
    lengths: ArrayLike | Iterable[int],
    max_sequence_length: int,
    *,
    depth: int | Literal["max"] = "max",
    algorithm: Algorithm = "optimal",
    seed: int = DEFAULT_SEED,
    effort: Effort = "bounded",
) -> PackedLengths:
    """Pack sequences of the given lengths into rows of equal length. Each sequence is put into exactly one row.

    Args:
        lengths: integers from 1 to `max_sequence_length`, one per sequence, as an array, a list or any iterable. If it is
            empty, so is the result.
        max_sequence_length: slots of a pack, in tokens.
        depth: the maximum number of sequences per pack, or "max" for no limit.
        algorithm: `optimal`, `nnls`, `lpfhp`, `spfhp`, `ffd`, `nnlshp`, `ennlshp`, `greedy` or `none`.
        seed: determines which sequences of a length go into which pack, and the order of the packs.
        effort: for `optimal` only. "bounded" searches for fewer packs for about a second, or longer if many packs may be
            saved. "unlimited" continues the search for the last pack, which may take minutes.

    Returns:
        The packs in random order, with the metrics of the packing.

    Raises:
        ArgumentError: an argument is invalid. ArgumentError is a ValueError, and its message names the index and the value.

    Example:
        >>> from gaudi_bert import pack_lengths
        >>> packs = pack_lengths([300, 212, 100, 412, 512], 512)
        >>> sorted(sorted(pack.tolist()) for pack in packs)
        [[0, 1], [2, 3], [4]]
        >>> packs.efficiency
        1.0
    """
    seed = check_integer("seed", seed, 0)
    checked = validate_lengths(lengths, max_sequence_length)
    packing = _pack_and_prove_lower_bound(count_lengths(checked, int(max_sequence_length)), depth, algorithm, seed, effort)
    indices, offsets = sample_packs(checked, list(packing.strategy_counts.items()), seed, 0, np.int64)
    return PackedLengths(
        **_extract_packing_metrics(packing),
        indices=indices,
        offsets=offsets,
        max_sequence_length=packing.histogram.max_sequence_length,
        algorithm=packing.algorithm_used,
    )


def pack_histogram(
    counts: ArrayLike,
    max_sequence_length: int | None = None,
    *,
    depth: int | Literal["max"] = "max",
    algorithm: Algorithm = "optimal",
    seed: int = DEFAULT_SEED,
    effort: Effort = "bounded",
) -> PackedHistogram:
    """Pack a histogram of sequence lengths. The work depends on the row length, but not on the number of sequences.

    Args:
        counts: integers from 0, the number of sequences of length 1, 2, and so on.
        max_sequence_length: slots of a pack, in tokens. By default the number of entries of `counts`.
        depth: the maximum number of sequences per pack, or "max" for no limit.
        algorithm: the same choices as for `pack_lengths`.
        seed: the seed of `greedy`, which is the only randomized algorithm.
        effort: as for `pack_lengths`.

    Returns:
        The strategies and the number of packs of each, with the metrics of the packing.

    Raises:
        ArgumentError: an argument is invalid. ArgumentError is a ValueError, and its message names the length and the value.

    Example:
        >>> from gaudi_bert import pack_histogram
        >>> packed = pack_histogram([0, 2, 4, 0, 0, 3])
        >>> packed.strategies
        ((2, 2), (3, 3), (6,))
        >>> packed.counts.tolist()
        [1, 2, 3]
        >>> packed.gap
        0
    """
    seed = check_integer("seed", seed, 0)
    try:
        given: Any = counts
        size = given.size if isinstance(given, np.ndarray) else len(given) if hasattr(given, "__len__") else 0
        histogram = Histogram(size, given)
        if max_sequence_length is not None:
            histogram = resize_histogram(
                histogram, check_integer("max_sequence_length", max_sequence_length, 1, MAX_ROW_LENGTH)
            )
    except InputError as error:
        raise ArgumentError(str(error)) from None
    if histogram.sequences == 0:
        raise ArgumentError("`counts` contains no sequences; pass the number of sequences of length 1, 2, and so on")
    packing = _pack_and_prove_lower_bound(histogram, depth, algorithm, seed, effort)
    return PackedHistogram(
        **_extract_packing_metrics(packing),
        strategies=tuple(packing.strategy_counts),
        counts=np.fromiter(packing.strategy_counts.values(), np.int64, len(packing.strategy_counts)),
        max_sequence_length=histogram.max_sequence_length,
        algorithm=packing.algorithm_used,
    )


def _pack_and_prove_lower_bound(histogram: Histogram, depth: int | str, algorithm: str, seed: int, effort: str) -> Packing:
    """Pack a histogram, check the packing, and prove a lower bound. Raise ArgumentError if an argument is invalid."""
    if effort not in get_args(Effort):
        raise ArgumentError(f"effort must be {' or '.join(get_args(Effort))}, but is {short_repr(effort)}")
    try:
        with _report_progress_if_long(f"packing {histogram.sequences:,} sequences by {algorithm}") as budget:
            return pack_counts(histogram, algorithm, depth, seed=seed, effort=cast(Effort, effort), budget=budget)
    except InputError as error:
        raise ArgumentError(str(error)) from None


# The delay before the first progress line, and the interval between further lines.
SILENT_SECONDS, BETWEEN_LINES_SECONDS = 2.0, 10.0


@contextmanager
def _report_progress_if_long(description: str) -> Iterator[OperationBudget]:
    """Write progress lines to standard error if the `with` block takes longer than two seconds.

    Yields:
        A `OperationBudget` without limit. The progress lines show its spent operations.
    """
    budget, started, ended = OperationBudget(), time.monotonic(), threading.Event()

    def write_progress_lines() -> None:
        """Write a progress line after two seconds and then every ten seconds, until the `with` block ends."""
        pause = SILENT_SECONDS
        while not ended.wait(pause):
            done = f"{budget.spent / 1e9:.1f} billion operations" if budget.spent else "heuristics are running"
            Reporter().say(f"{description}: {format_seconds(time.monotonic() - started)} so far, {done}")
            pause = BETWEEN_LINES_SECONDS

    watching = threading.Thread(target=write_progress_lines, daemon=True)
    watching.start()
    try:
        yield budget
    finally:
        ended.set()
        watching.join()


# The maximum number of bars in the chart, the width of a bar, and the height of the chart. Sizes are in pixels.
_BARS, _BAR_WIDTH, _BAR_HEIGHT = 16, 26, 60


def _draw_depth_histogram(pack_sizes: IntArray) -> str:
    """Return an SVG bar chart of the number of packs with 1, 2, ... sequences. Larger packs are counted in the last bar.

    Bars and labels have the colour of the surrounding text, so that they work in light and dark notebooks.
    """
    if not pack_sizes.size:
        return ""
    counts = np.bincount(np.minimum(pack_sizes, _BARS))[1:]
    parts = []
    for index, count in enumerate(counts.tolist()):
        height, x = max(_BAR_HEIGHT * count / counts.max(), 1.0 if count else 0.0), index * _BAR_WIDTH
        label = f"{index + 1}+" if index + 1 == _BARS else f"{index + 1}"
        parts.append(
            f"<rect x='{x + 2}' y='{_BAR_HEIGHT - height:.1f}' width='{_BAR_WIDTH - 4}' "
            f"height='{height:.1f}' opacity='0.6'>"
            f"<title>{count:,} packs of {label} sequences</title></rect>"
            f"<text x='{x + _BAR_WIDTH // 2}' y='{_BAR_HEIGHT + 13}' font-size='11' text-anchor='middle'>{label}</text>"
        )
    width = len(counts) * _BAR_WIDTH
    return (
        f"<svg role='img' aria-label='packs by their number of sequences' width='{width}' height='{_BAR_HEIGHT + 18}' "
        f"fill='currentColor' xmlns='http://www.w3.org/2000/svg'>{''.join(parts)}</svg><div>packs by sequences in each</div>"
    )


def _extract_packing_metrics(packing: Packing) -> dict[str, int]:
    """Return the metrics of a packing as a dictionary with the field names of `PackingMetrics` as keys."""
    return {field.name: getattr(packing, field.name) for field in fields(PackingMetrics)}
