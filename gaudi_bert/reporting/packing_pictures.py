"""Pictures of a packing: the lengths with their proven prices, the mixture of strategies, efficiency over depth, scaling.

Every function takes plain data and returns a matplotlib `Figure` that belongs to no window. matplotlib is imported inside,
so that importing this module costs nothing. `save_picture` writes PNG or SVG without a date: equal data, equal file.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "draw_comparison",
    "draw_efficiency_over_depth",
    "draw_histogram",
    "draw_mixture",
    "draw_unpadding",
    "picture_bytes",
    "save_picture",
]

BLUE, ORANGE, GREY = "#1f5fa8", "#d9731a", "#c8c8c8"
SHADES = ("#1f5fa8", "#5b93cf", "#a9c7e8", "#7a6bb0", "#b9aedb")
MOST_STRATEGIES = 30


def draw_histogram(
    counts: Sequence[int], packs: int | None = None, lower_bound: int | None = None, prices: Sequence[int] | None = None
) -> Figure:
    """Sequences of each length, what packs they need at least, and the price of each length in the proof of that.

    Args:
        counts: sequences of length 1 .. L.
        packs: packs of the plan, for the title.
        lower_bound: packs that no packing can do without.
        prices: integer prices of the certificate, length 1 .. L; drawn as shares of the dearest.
    """
    figure, axes = _figure()
    lengths = range(1, len(counts) + 1)
    axes.bar(lengths, counts, width=1.0, color=BLUE, label="sequences")
    axes.set_yscale("symlog", linthresh=max(1, max(counts, default=1) / 1000))
    axes.set_xlabel("length in tokens")
    axes.set_ylabel("sequences of this length")
    sequences = sum(counts)
    tokens = sum(length * count for length, count in zip(lengths, counts, strict=True))
    title = f"{sequences:,} sequences, {100 * tokens / max(sequences * len(counts), 1):.1f} % of unpacked slots are tokens"
    if lower_bound is not None:
        title += f"\nno packing has fewer than {lower_bound:,} packs"
    if packs is not None:
        title += f"; this one has {packs:,}"
    axes.set_title(title)
    if prices is not None and max(prices, default=0) > 0:
        right = axes.twinx()
        right.plot(lengths, [price / max(prices) for price in prices], color=ORANGE, label="price that proves the bound")
        right.set_ylabel("price, share of the dearest")
        right.set_ylim(0, 1.05)
        right.legend(loc="upper left", frameon=False)
    return figure


def draw_mixture(mixture: Mapping[tuple[int, ...], int], max_sequence_length: int) -> Figure:
    """The strategies used most, each as a row of its sequences, with its share of all packs; padding is grey."""
    figure, axes = _figure()
    shown = sorted(mixture, key=lambda strategy: (-mixture[strategy], strategy))[:MOST_STRATEGIES]
    packs = sum(mixture.values())
    for row, strategy in enumerate(shown):
        start = 0
        for place, length in enumerate(sorted(strategy, reverse=True)):
            axes.barh(row, length, left=start, color=SHADES[place % len(SHADES)], edgecolor="white", linewidth=0.5)
            start += length
        axes.barh(row, max_sequence_length - start, left=start, color=GREY)
        share = f"{100 * mixture[strategy] / packs:.2f} %"
        axes.text(max_sequence_length * 1.01, row, share, va="center", fontsize=7)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlim(0, max_sequence_length)
    axes.set_xlabel("slots of one pack; right: share of all packs")
    covered = sum(mixture[strategy] for strategy in shown)
    axes.set_title(f"{len(shown)} of {len(mixture):,} strategies, {100 * covered / max(packs, 1):.1f} % of {packs:,} packs")
    return figure


def draw_efficiency_over_depth(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Efficiency of each algorithm over depth.

    Args:
        rows: `algorithm`, `depth` (a number or "max") and `efficiency` (0..1) of each estimate.
    """
    figure, axes = _figure()
    numbers = sorted({row["depth"] for row in rows if row["depth"] != "max"})
    depths = [*numbers, *(["max"] if any(row["depth"] == "max" for row in rows) else [])]
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        own = {row["depth"]: 100 * row["efficiency"] for row in rows if row["algorithm"] == algorithm}
        places = [place for place, depth in enumerate(depths) if depth in own]
        line = "--" if algorithm == "optimal" else "-"
        axes.plot(places, [own[depths[place]] for place in places], line, marker="o", markersize=4, label=algorithm)
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set_xlabel("depth: most sequences per pack")
    axes.set_ylabel("efficiency, % of slots that hold a token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def draw_comparison(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Packs above the proven bound, a dot for each packer, ours in another colour; the scale is logarithmic.

    Args:
        rows: `name`, `ours`, `gap` (packs) and `share` (of the bound) of each packer, from above.
        title: what was packed.
    """
    figure, axes = _figure()
    percents = [100 * row["share"] for row in rows]
    least = min((value for value in percents if value > 0), default=1.0)
    left = 10.0 ** (math.floor(math.log10(least)) - 1)
    most = max(*percents, 10 * left)
    for place, (row, value) in enumerate(zip(rows, percents, strict=True)):
        axes.axhline(place, color=GREY, linewidth=0.6, zorder=0)
        axes.plot(max(value, left), place, "o", markersize=9, color=BLUE if row["ours"] else ORANGE, clip_on=False)
        words = f"{row['gap']:,} ({value:.2g} %)" if row["gap"] else "0: no packing needs fewer"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(
            words, (max(value, left), place), (11, 0), textcoords="offset points", va="center", fontsize=9, bbox=box
        )
    axes.set_xscale("log")
    axes.set_xlim(left, most * (most / left) ** 0.35)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.tick_params(axis="y", length=0, pad=9)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("packs above the bound, % of the bound (logarithmic)")
    axes.set_title(title, loc="left", fontsize=11)
    return figure


def draw_unpadding(
    accelerators: Sequence[int], unpadding: Sequence[float], ideal: Sequence[float], packing: float
) -> Figure:
    """Speed-up over the number of accelerators: packing is the same everywhere, un-padding waits for the slowest.

    Args:
        accelerators: how many.
        unpadding: expected speed-up of each, as the paper extrapolates it.
        ideal: the same for an ideal un-padding of these data.
        packing: packing factor.
    """
    figure, axes = _figure()
    axes.plot(accelerators, unpadding, marker="o", color=ORANGE, label="un-padding, as measured on 8 GPUs (paper E)")
    axes.plot(accelerators, ideal, marker=".", color=GREY, label="un-padding of these data, ideal")
    axes.axhline(packing, color=BLUE, label="packing of these data")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(accelerators), [str(count) for count in accelerators])
    axes.set_xlabel("accelerators")
    axes.set_ylabel("speed-up over padding")
    axes.set_ylim(bottom=1.0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def picture_bytes(figure: Figure, kind: str) -> bytes:
    """`figure` as "png" or "svg"; without date or random identifiers."""
    import matplotlib

    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "gaudi-bert", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind, dpi=120, metadata=metadata)
    return buffer.getvalue()


def save_picture(figure: Figure, path: Path) -> None:
    """Write `figure` to `path`, whole or not at all.

    Raises:
        InputError: the name ends neither in .png nor in .svg.
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise InputError(f"{path}: a picture is written as .png or .svg; give it one of these endings")
    with atomic_file(Path(path)) as handle:
        handle.write(picture_bytes(figure, kind))


def _figure() -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()
