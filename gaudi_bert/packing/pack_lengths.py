"""The packer as a library: lengths in, packs out; or a histogram in, strategies out. The only type to handle is the array.

    packs = pack_lengths([len(text) for text in texts], 512)
    rows = [[texts[index] for index in pack] for pack in packs]

Lengths are counted, their histogram is packed (`algorithms`), and the sequences are dealt to the packs by the seed
(`common.dealing`), as `gaudi-bert write` deals those of a group. The result is a function of lengths, settings and seed.
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

from gaudi_bert.common.arrays import IntArray, whole_number
from gaudi_bert.common.dealing import deal_sequences
from gaudi_bert.common.errors import ArgumentError, InputError, shown
from gaudi_bert.common.features import PackingFigures
from gaudi_bert.common.progress import Reporter, human_seconds
from gaudi_bert.packing.algorithms import pack_histogram as pack_counts
from gaudi_bert.packing.histogram import MAX_ROW_LENGTH, Histogram, count_lengths, resize_histogram, validate_lengths
from gaudi_bert.packing.strategies import Effort, Packing, WorkBudget

Algorithm = Literal["nnls", "optimal", "nnlshp", "ennlshp", "spfhp", "lpfhp", "greedy", "ffd", "none"]
DEFAULT_SEED = 12345


@dataclass(frozen=True, eq=False, repr=False)
class Packs:
    """Packs in a random order: pack p holds the sequences `indices[offsets[p] : offsets[p + 1]]`.

    It is a sequence of arrays: slices and shards are `Packs` too, and so is what `pack_lengths` returns, with its figures.

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

    @overload
    def __getitem__(self, pack: int) -> IntArray: ...
    @overload
    def __getitem__(self, pack: slice) -> Packs: ...
    def __getitem__(self, pack: int | slice) -> IntArray | Packs:
        """The sequences of one pack, int64 [1 .. depth]; or some packs, as lists have it."""
        if isinstance(pack, slice):
            return self._select(pack)
        try:
            index = range(len(self))[pack]
        except IndexError:
            raise IndexError(f"packs[{pack}]: there are {len(self):,} packs, numbered from 0") from None
        except TypeError:
            raise TypeError(f"packs[{shown(pack)}]: choose a pack by its number, several by a slice such as [2:5]") from None
        return self.indices[self.offsets[index] : self.offsets[index + 1]]

    def _select(self, chosen: slice) -> Packs:
        starts, sizes = self.offsets[:-1][chosen], np.diff(self.offsets)[chosen]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
        return Packs(self.indices[positions], offsets)

    def __iter__(self) -> Iterator[IntArray]:
        """The sequences of each pack."""
        return (self.indices[start:end] for start, end in zip(self.offsets[:-1], self.offsets[1:], strict=True))

    def __repr__(self) -> str:
        return f"Packs({self.indices.size:,} sequences in {len(self):,} packs)"

    def shard(self, rank: int, size: int) -> Packs:
        """Every `size`-th pack from pack `rank` on: the share of one of `size` workers. Share sizes differ by at most one.

        Raises:
            ArgumentError: `rank` is not in 0 .. size - 1.
        """
        size = whole_number("size", size, 1)
        rank = whole_number("rank", rank, 0, size - 1)
        return self._select(slice(rank, None, size))


@dataclass(frozen=True, eq=False, repr=False)
class PackedLengths(Packs, PackingFigures):
    """Result of `pack_lengths`: all packs, and how good they are.

    Attributes:
        max_sequence_length: slots of a pack, in tokens.
        algorithm: what packed.
    """

    max_sequence_length: int
    algorithm: str

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, efficiency {self.efficiency:.6f}, {self.gap:,} above the proven bound)"

    def _repr_html_(self) -> str:
        """For notebooks: the figures, and how many packs hold how many sequences."""
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
class PackedHistogram(PackingFigures):
    """Result of `pack_histogram`: how a histogram is packed, and how good that is.

    Attributes:
        strategies: sorted tuples of lengths that share a pack.
        counts: int64 [strategies], how many packs there are of each; read-only.
        max_sequence_length: slots of a pack, in tokens.
        algorithm: what packed.
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
    """Pack sequences of these lengths into rows of one length, every sequence into exactly one.

    Args:
        lengths: integers from 1 to `max_sequence_length`, one per sequence: an array, a list, any iterable; of none,
            the result is empty.
        max_sequence_length: slots of a pack, in tokens.
        depth: most sequences per pack, or "max" for no limit.
        algorithm: `optimal`, `nnls`, `lpfhp`, `spfhp`, `ffd`, `nnlshp`, `ennlshp`, `greedy`, `none`.
        seed: which sequences of a length go where, and the order of the packs.
        effort: of `optimal`: "bounded" searches for fewer packs for about a second, or longer where many may be saved;
            "unlimited" searches on for the last pack, which may take minutes.

    Raises:
        ArgumentError: a ValueError, which names the index and the wrong value.
    """
    seed = whole_number("seed", seed, 0)
    checked = validate_lengths(lengths, max_sequence_length)
    packing = _pack_and_prove(count_lengths(checked, int(max_sequence_length)), depth, algorithm, seed, effort)
    indices, offsets = deal_sequences(checked, list(packing.strategy_counts.items()), seed, 0, np.int64)
    return PackedLengths(
        **_packing_figures(packing),
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
    """Pack a histogram of lengths; the cost depends on the longest row, not on how many sequences there are.

    Args:
        counts: integers from 0: how many sequences there are of length 1, 2, ...
        max_sequence_length: slots of a pack, in tokens; by default as many as `counts` has entries.
        depth: most sequences per pack, or "max" for no limit.
        algorithm: as `pack_lengths`.
        seed: of `greedy`, the only algorithm that draws.
        effort: as `pack_lengths`.

    Raises:
        ArgumentError: a ValueError, which names the length and the wrong value.
    """
    seed = whole_number("seed", seed, 0)
    try:
        given: Any = counts
        size = given.size if isinstance(given, np.ndarray) else len(given) if hasattr(given, "__len__") else 0
        histogram = Histogram(size, given)
        if max_sequence_length is not None:
            histogram = resize_histogram(
                histogram, whole_number("max_sequence_length", max_sequence_length, 1, MAX_ROW_LENGTH)
            )
    except InputError as error:
        raise ArgumentError(str(error)) from None
    if histogram.sequences == 0:
        raise ArgumentError("counts holds no sequence; counts[0] is how many there are of length 1")
    packing = _pack_and_prove(histogram, depth, algorithm, seed, effort)
    return PackedHistogram(
        **_packing_figures(packing),
        strategies=tuple(packing.strategy_counts),
        counts=np.fromiter(packing.strategy_counts.values(), np.int64, len(packing.strategy_counts)),
        max_sequence_length=histogram.max_sequence_length,
        algorithm=packing.algorithm_used,
    )


def _pack_and_prove(histogram: Histogram, depth: int | str, algorithm: str, seed: int, effort: str) -> Packing:
    """The packing of a histogram, checked and proven; what it rejects is an argument of the caller."""
    if effort not in get_args(Effort):
        raise ArgumentError(f"effort is {shown(effort)}; it must be one of {', '.join(get_args(Effort))}")
    try:
        with _report_if_long(f"packing {histogram.sequences:,} sequences by {algorithm}") as work:
            return pack_counts(histogram, algorithm, depth, seed=seed, effort=cast(Effort, effort), work=work)
    except InputError as error:
        raise ArgumentError(str(error)) from None


SILENT_SECONDS, BETWEEN_LINES_SECONDS = 2.0, 10.0


@contextmanager
def _report_if_long(what: str) -> Iterator[WorkBudget]:
    """Report on standard error after two seconds and then every ten; the `WorkBudget` counts what is done."""
    work, started, ended = WorkBudget(), time.monotonic(), threading.Event()

    def watch() -> None:
        pause = SILENT_SECONDS
        while not ended.wait(pause):
            done = f"{work.spent / 1e9:.1f} billion operations" if work.spent else "the first look"
            Reporter().say(f"{what}: {human_seconds(time.monotonic() - started)} so far, {done}")
            pause = BETWEEN_LINES_SECONDS

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield work
    finally:
        ended.set()
        watching.join()


_BARS, _BAR_WIDTH, _BAR_HEIGHT = 16, 26, 60


def _draw_depth_histogram(sizes: IntArray) -> str:
    """A bar for each number of sequences in a pack, the deepest packs together; in the colour of the text."""
    if not sizes.size:
        return ""
    counts = np.bincount(np.minimum(sizes, _BARS))[1:]
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


def _packing_figures(packing: Packing) -> dict[str, int]:
    """The five numbers of `PackingFigures`."""
    return {field.name: getattr(packing, field.name) for field in fields(PackingFigures)}
