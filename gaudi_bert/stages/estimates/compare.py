"""The stage `compare`: our algorithms and other tools' packers on the same lengths, beside the proven bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.measured import measured
from gaudi_bert.common.progress import Reporter
from gaudi_bert.stages.estimates.length_sources import histogram_of_source, read_lengths

if TYPE_CHECKING:
    from gaudi_bert.common.arrays import Int32Array
    from gaudi_bert.packing.histogram import Histogram
    from gaudi_bert.packing.peers import ListedLengths

__all__ = ["CompareResult", "CompareRow", "compare"]

OURS = ("optimal", "nnls", "lpfhp")
SEED = 12345


@dataclass(frozen=True)
class CompareRow:
    """One packer.

    Attributes:
        tool: `gaudi-bert`, or the package that packs so.
        algorithm: what that tool calls it.
        made_by: `gaudi-bert`; `package` where the other tool itself was called; `stand-in` where its heuristic was written
            anew.
        packs: number of packs.
        efficiency: real tokens / slots, 0..1.
        gap: packs above the proven bound.
        gap_share: the same, as a share of the bound.
        seconds: wall time, without compiling.
    """

    tool: str
    algorithm: str
    made_by: str
    packs: int
    efficiency: float
    gap: int
    gap_share: float
    seconds: float


class _Made(NamedTuple):
    """What a packer made, before the best bound is known."""

    tool: str
    algorithm: str
    made_by: str
    packs: int
    seconds: float


@dataclass(frozen=True)
class CompareResult:
    """What `compare` found.

    Attributes:
        source: what was asked about.
        depth: most sequences per pack; None for no limit.
        order: `as given`, or `shuffled` where only the numbers of sequences of each length are known.
        lower_bound: packs that no packing can do without, proven.
        rows: fewest packs first.
        picture: the file that was drawn.
    """

    source: str
    max_sequence_length: int
    sequences: int
    tokens: int
    depth: int | None
    order: str
    lower_bound: int
    rows: list[CompareRow]
    picture: str | None = None


def compare(
    source: str,
    *,
    max_sequence_length: int | None = None,
    depth: str | int = "max",
    picture: Path | None = None,
    reporter: Reporter,
) -> CompareResult:
    """Pack the same lengths with everybody's packer.

    Args:
        source: a file of lengths (`.npy`, `.txt`, `FILE.parquet[:COLUMN]`), a histogram.json, a shipped histogram's name, or
            TFRecords.
        max_sequence_length: slots of a pack; by default the longest length, or what the records or the histogram say.
        depth: most sequences per pack, or "max".
        picture: also draw it, as .png or .svg.
        reporter: where progress goes.

    Raises:
        InputError: a bad source, depth or picture name.
    """
    from gaudi_bert.packing.algorithms import depth_of

    if picture is not None and picture.suffix.lower() not in (".png", ".svg"):
        raise InputError(f"{picture}: a picture is written as .png or .svg; give it one of these endings")
    listed, order = _listed(source, max_sequence_length, reporter)
    most = depth_of(int(depth) if str(depth).isdigit() else depth, listed.slots)
    listed = replace(listed, depth=most)
    bound, rows = _pack_all(listed, reporter)
    result = CompareResult(
        source=source,
        max_sequence_length=listed.slots,
        sequences=listed.histogram.sequences,
        tokens=listed.histogram.tokens,
        depth=None if depth == "max" else most,
        order=order,
        lower_bound=bound,
        rows=sorted(rows, key=lambda row: row.packs),
    )
    return result if picture is None else _draw(result, picture, reporter)


def _listed(source: str, max_sequence_length: int | None, reporter: Reporter) -> tuple[ListedLengths, str]:
    """The sequences one by one, and whether their order is that of the source."""
    import numpy as np

    from gaudi_bert.common.permutation import permutation
    from gaudi_bert.packing.heuristics.greedy import shuffled_lengths
    from gaudi_bert.packing.lengths import histogram_of
    from gaudi_bert.packing.peers import ListedLengths

    read = read_lengths(source, max_sequence_length)
    if read is None:
        histogram: Histogram = histogram_of_source(source, max_sequence_length, reporter)
        shuffled: Int32Array = shuffled_lengths(histogram.counts, SEED)
        return ListedLengths(shuffled, shuffled, histogram, histogram.max_sequence_length), "shuffled"
    lengths, slots = read
    in_order: Int32Array = lengths.astype(np.int32)
    shuffled = in_order[permutation(in_order.size, SEED, "compare")]
    return ListedLengths(in_order, shuffled, histogram_of(lengths, slots), slots), "as given"


def _pack_all(listed: ListedLengths, reporter: Reporter) -> tuple[int, list[CompareRow]]:
    """The best proven bound, and a row for each packer; each packs a few lengths first, so that no time is a compiler's."""
    from gaudi_bert.packing.peers import PEERS

    few = _few_lengths()
    bounds: list[int] = []
    made: list[_Made] = []
    with reporter.task("compare", len(OURS) + len(PEERS), "packers") as task:
        for name in OURS:
            _pack_ours(few, name)
            own = measured(partial(_pack_ours, listed, name))
            bounds.append(own.result[1])
            made.append(_Made("gaudi-bert", name, "gaudi-bert", own.result[0], own.seconds))
            task.advance()
        for peer in PEERS:
            called = peer.installed if peer.callable_for(listed) else None
            count: Callable[[ListedLengths], int] = called or peer.count
            count(few)
            other = measured(partial(count, listed))
            made.append(_Made(peer.tool, peer.algorithm, "package" if called else "stand-in", other.result, other.seconds))
            task.advance()
    bound = max(bounds)
    return bound, [_row(packer, listed, bound) for packer in made]


def _row(made: _Made, listed: ListedLengths, bound: int) -> CompareRow:
    return CompareRow(
        made.tool,
        made.algorithm,
        made.made_by,
        made.packs,
        efficiency=listed.histogram.tokens / (made.packs * listed.slots),
        gap=made.packs - bound,
        gap_share=(made.packs - bound) / bound,
        seconds=round(made.seconds, 4),
    )


def _few_lengths() -> ListedLengths:
    """Enough to load every compiled kernel."""
    import numpy as np

    from gaudi_bert.packing.histogram import Histogram
    from gaudi_bert.packing.peers import ListedLengths

    counts = np.arange(1, 17)
    lengths = np.repeat(np.arange(1, 17, dtype=np.int32), counts)
    return ListedLengths(lengths, lengths, Histogram(16, counts), 3)


def _pack_ours(listed: ListedLengths, algorithm: str) -> tuple[int, int]:
    """Packs and proven bound."""
    from gaudi_bert.packing.algorithms import pack_histogram

    packing = pack_histogram(listed.histogram, algorithm, listed.depth)
    return packing.packs, packing.lower_bound


def _draw(result: CompareResult, picture: Path, reporter: Reporter) -> CompareResult:
    from gaudi_bert.reporting import packing_pictures

    rows: list[dict[str, Any]] = [
        {"name": f"{row.tool} {row.algorithm}", "ours": row.tool == "gaudi-bert", "gap": row.gap, "share": row.gap_share}
        for row in result.rows
    ]
    title = f"{result.source}: packs above the {result.lower_bound:,} that are proven necessary"
    packing_pictures.save_picture(packing_pictures.draw_comparison(rows, title), picture)
    reporter.say(f"picture: {picture}")
    return replace(result, picture=str(picture))
