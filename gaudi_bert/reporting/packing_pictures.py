"""Pictures of packings and of learning curves, for `estimate --picture` and for the report.

Each `draw_` function returns a matplotlib `Figure` and opens no window. matplotlib is imported inside the functions, so that
importing this module is fast. The files contain neither a date nor random identifiers, so equal data give equal files.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The colours of the pictures. Padding is grey and half transparent, so that it looks pale on both light and dark pages.
BLUE, ORANGE, RED, GREY, DARK_GREY = "#3b78c4", "#d9731a", "#d6453d", "#7d889966", "#7d8899"
# The colours of text and lines on a light page and on a dark page. Both have a contrast of at least 4.5:1.
INK, INK_ON_DARK = "#465162", "#b3bfd0"
# The colours of the sequences in a picture of a row. They are easy to distinguish from the colour of padding.
_SEQUENCE_COLOURS = ("#2f6bb8", "#e08a2b", "#7a4fb5", "#2a9d8f", "#c2457a")
_NUMBER_COLOURS = ("white", "black", "white", "black", "white")
_PAGE_FONT = 17
_MAX_STRATEGIES, _MAX_BARS, _MAX_DECIMALS = 30, 48, 9


def draw_histogram(counts: Sequence[int], packs: int, lower_bound: int, prices: Sequence[int]) -> Figure:
    """Draw the number of sequences of each length as bars, and the price of each length as a line. A price is the weight of
    a length in the proof of the lower bound.

    Args:
        counts: The number of sequences of length 1 to L.
        packs: The number of packs of the packing, for the title.
        lower_bound: The proven minimum number of packs, for the title.
        prices: The price of each length from 1 to L in the certificate of the packing. They are drawn as fractions of the
            highest price.
    """
    figure, axes = _create_figure()
    lengths = range(1, len(counts) + 1)
    axes.bar(lengths, counts, width=1.0, color=BLUE, label="sequences")
    axes.set_yscale("symlog", linthresh=max(1, max(counts, default=1) / 1000))
    sequences = sum(counts)
    tokens = sum(length * count for length, count in zip(lengths, counts, strict=True))
    efficiency = 100 * tokens / max(sequences * len(counts), 1)
    axes.set(
        xlabel="length in tokens",
        ylabel="sequences of this length",
        title=f"{sequences:,} sequences; without packing, {efficiency:.1f} % of the slots hold tokens\n"
        f"no packing has fewer than {lower_bound:,} packs; this one has {packs:,}",
    )
    right = axes.twinx()
    highest = max(1, *prices)
    right.plot(lengths, [price / highest for price in prices], color=ORANGE, label="price in the proof of the bound")
    right.set(ylabel="price as a fraction of the highest", ylim=(0, 1.05))
    right.legend(loc="upper left", frameon=False)
    return figure


def draw_strategy_counts(
    strategy_counts: Mapping[tuple[int, ...], int], max_sequence_length: int, max_strategies: int = _MAX_STRATEGIES
) -> Figure:
    """Draw the most frequent strategies (the sequence lengths that share a pack). Each strategy is shown as a row of
    sequences and padding, to scale.

    Args:
        strategy_counts: The number of packs of each strategy. A strategy is a tuple of sequence lengths.
        max_sequence_length: The number of slots of a pack.
        max_strategies: The maximum number of strategies to draw. If it is not the default, the text is larger, because the
            report needs larger text.
    """
    shown = sorted(strategy_counts, key=lambda strategy: (-strategy_counts[strategy], strategy))[:max_strategies]
    size = 7 if max_strategies == _MAX_STRATEGIES else _PAGE_FONT - 2
    figure, axes = _create_figure(height=1.2 + 0.023 * size * len(shown))
    packs = sum(strategy_counts.values())
    for row, strategy in enumerate(shown):
        start = 0
        for slot, length in enumerate(sorted(strategy, reverse=True)):
            shade = slot % len(_SEQUENCE_COLOURS)
            axes.barh(row, length, left=start, color=_SEQUENCE_COLOURS[shade], edgecolor="white", linewidth=0.5)
            if length > 0.05 * max_sequence_length:
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size, "color": _NUMBER_COLOURS[shade]}
                axes.text(start + length / 2, row, str(length), **style)
            start += length
        axes.barh(row, max_sequence_length - start, left=start, color=GREY)
        percentage = f"{100 * strategy_counts[strategy] / packs:.2f} %"
        axes.text(max_sequence_length * 1.01, row, percentage, va="center", fontsize=size)
    axes.invert_yaxis()
    covered = 100 * sum(strategy_counts[strategy] for strategy in shown) / max(packs, 1)
    axes.set(
        yticks=[],
        xlim=(0, max_sequence_length),
        xlabel="slots of a pack; right: share of all packs",
        title=f"{len(shown)} of {len(strategy_counts):,} strategies, {covered:.1f} % of {packs:,} packs",
    )
    return figure


def draw_row_fill(before: NDArray[np.int64], after: NDArray[np.int64] | None) -> Figure:
    """Draw one histogram of the number of tokens per row before packing, and one after packing, with the same vertical
    scale.

    If the last bar (full rows) is much higher than all others, it is cut off, and its value is written above it.

    Args:
        before: int64 [L], the number of rows with 1, 2, ..., L tokens before packing.
        after: The same after packing. If it is None, only one histogram is drawn.
    """
    panels = [(before, "before packing", DARK_GREY)] + ([(after, "after packing", BLUE)] if after is not None else [])
    figure, axes = _create_figure(height=2.7 * len(panels), rows=len(panels))
    slots = len(before)
    width = -(-slots // _MAX_BARS)
    # The histogram shows how many tokens the rows contain. Compute the edges of its bins from the right. The last bin then
    # contains exactly the rows that are full or nearly full.
    edges = [max(0, edge) for edge in range(slots, -width, -width)][::-1]
    spans = list(itertools.pairwise(edges))
    shares = [[100 * counts[low:high].sum() / max(counts.sum(), 1) for low, high in spans] for counts, _, _ in panels]
    highest = max(max(map(max, shares)), 1e-9)
    partial = max((share for panel in shares for share in panel[:-1]), default=0.0)
    top = 1.08 * (2 * partial if 0 < 3 * partial < highest else highest)
    for panel, share, (_, when, colour) in zip(axes, shares, panels, strict=True):
        middles, widths = zip(*(((low + high) / 2, 0.84 * (high - low)) for low, high in spans), strict=True)
        panel.bar(middles, share, widths, color=colour)
        if share[-1] > top:
            lengths = f"{spans[-1][0] + 1} to {slots}" if width > 1 else str(slots)
            title = f"{format_percent(share[-1] / 100)} of rows: {lengths} tokens ↑"
            panel.set_title(title, loc="right", fontsize="medium")
        panel.set(xlim=(0, slots), ylim=(0, top), xlabel=f"tokens in a row {when}", ylabel="% of rows")
        panel.grid(axis="y", alpha=0.3)
    return figure


def draw_slot_usage(rows_before: int, rows_after: int, tokens: int, slots: int, lower_bound: int) -> Figure:
    """Draw tokens and padding as two bars to scale, before and after packing. A line marks the proven minimum.

    Args:
        rows_before: The number of rows before packing, which is the number of sequences.
        rows_after: The number of packs.
        tokens: The number of tokens in all rows.
        slots: The number of slots of a row.
        lower_bound: The proven minimum number of packs.
    """
    figure, axes = _create_figure(height=3.2)
    for bar, (when, rows) in enumerate((("before", rows_before), ("after", rows_after))):
        axes.barh(bar, tokens, 0.44, color=BLUE, label="tokens" if bar else None)
        axes.barh(bar, rows * slots - tokens, 0.44, tokens, color=GREY, label="padding" if bar else None)
        share = format_percent(tokens / (rows * slots), 2)
        axes.text(0.005 * rows_before * slots, bar - 0.25, f"{when}: {rows:,} rows, {share} tokens", va="bottom")
    axes.plot([lower_bound * slots] * 2, [0.78, 1.4], color=RED, label=f"proven bound: {lower_bound:,} rows")
    axes.set(xlim=(0, rows_before * slots), ylim=(1.6, -0.6), yticks=[], xlabel="slots")
    axes.xaxis.set_major_formatter(_make_short_number_formatter())
    _add_legend_above(axes)
    return figure


def draw_efficiency_over_depth(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the efficiency of each algorithm as a curve over the packing depth.

    Args:
        rows: Estimates with the keys `algorithm`, `depth` (a number or "max") and `efficiency` (0 to 1).
    """
    figure, axes = _create_figure()
    numbers = sorted({row["depth"] for row in rows if row["depth"] != "max"})
    depths = [*numbers, *(["max"] if any(row["depth"] == "max" for row in rows) else [])]
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        own = {row["depth"]: 100 * row["efficiency"] for row in rows if row["algorithm"] == algorithm}
        positions = [position for position, depth in enumerate(depths) if depth in own]
        line_style = "--" if algorithm == "optimal" else "-"
        values = [own[depths[position]] for position in positions]
        axes.plot(positions, values, line_style, marker="o", markersize=4, label=algorithm)
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set(xlabel="depth: largest number of sequences in a pack", ylabel="efficiency, % of slots that hold tokens")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def draw_unpadding(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the speed-up of packing and of un-padding (rows of varying length) as curves over the number of accelerators.

    The speed-up of packing is constant. The speed-up of un-padding decreases, because all accelerators wait for the one with
    the longest rows.

    Args:
        rows: For each number of accelerators, the fields of an `UnpaddingEstimate`: un-padding as extrapolated in the
            packing paper, ideal un-padding of these data, and packing.
    """
    figure, axes = _create_figure()
    accelerators = [row["accelerators"] for row in rows]
    for key, colour, marker, label in (
        ("unpadding", ORANGE, "o", "un-padding, as measured on 8 GPUs (packing paper)"),
        ("ideal_unpadding", GREY, ".", "un-padding of these data, ideal"),
        ("packing", BLUE, "", "packing of these data"),
    ):
        axes.plot(accelerators, [row[key] for row in rows], marker=marker, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(accelerators, [str(count) for count in accelerators])
    axes.set(xlabel="accelerators", ylabel="speed-up over padding", ylim=(1.0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def draw_learning_curve(
    training: Sequence[tuple[int, float]],
    held_out: Sequence[tuple[int, float]],
    *,
    is_accuracy: bool,
    baseline: tuple[str, float] | None = None,
) -> Figure:
    """Draw a loss or an accuracy, in training and on held-out documents, as curves over the number of sequences.

    The vertical axis of an accuracy begins at 0, unless all values are high. Otherwise, the axis covers the range of the
    values, but at least a tenth of the highest value.

    Args:
        training: The points (number of sequences, value) in training, which are drawn as a line.
        held_out: The points (number of sequences, value) on held-out documents, which are drawn as dots on a line.
        is_accuracy: Whether the values are accuracies from 0 to 1, which are labelled as percentages.
        baseline: The name and the value of the accuracy that is reached without learning. It is drawn as a horizontal line.
    """
    figure, axes = _create_figure(height=3.6)
    if is_accuracy:
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g}\u00a0%")
    if training:
        axes.plot(*zip(*training, strict=True), color=BLUE, marker="o" if len(training) == 1 else None, label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color=ORANGE, marker="o", linewidth=1, label="held out")
    if baseline is not None:
        name, height = baseline
        axes.axhline(height, color=DARK_GREY, linestyle=":", label=f"{name}, {format_percent(height)}")
    values = [value for _, value in [*training, *held_out]] + ([baseline[1]] if baseline is not None else [])
    highest = max([*values, 1e-9])
    lowest = min([*values, highest])
    if is_accuracy and (lowest < 0.5 * highest or not (training or held_out)):
        axes.set_ylim(0, 1.08 * highest)
    else:
        # If the values hardly change, an axis that covers only their range would make noise look like learning. Therefore
        # the axis covers at least a tenth of the highest value.
        height = max(highest - lowest, 0.1 * highest)
        axes.set_ylim(highest - 1.06 * height, highest + 0.06 * height)
    last = max([seen for seen, _ in [*training, *held_out]], default=1) or 1
    axes.set(xlim=(0, 1.02 * last), xlabel="number of sequences")  # with a margin, so that the last dot is not cut off
    axes.xaxis.set_major_formatter(_make_short_number_formatter())
    axes.grid(axis="y", alpha=0.3)
    if values:
        _add_legend_above(axes)
    return figure


# --- style, output and helpers of all pictures


@contextmanager
def use_page_style() -> Iterator[None]:
    """Apply the style of the report to all pictures that are drawn in the `with` block.

    The text is larger and dark grey, and the background is transparent. Pictures are 8 inches wide. On a phone, where
    they are 345 pixels wide, their text is 10 pixels high.
    """
    import matplotlib

    style: dict[Any, Any] = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": _PAGE_FONT,
        "axes.titlesize": "medium",
        "figure.constrained_layout.hspace": 0.08,
        "lines.linewidth": 2.5,
        "lines.markersize": 8,
        "font.sans-serif": ["DejaVu Sans"],
    }
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    style |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none")
    with matplotlib.rc_context(style):
        yield


def encode_picture(figure: Figure, picture_format: str) -> bytes:
    """Return a picture as the bytes of a PNG or SVG file.

    Args:
        figure: The picture.
        picture_format: The format of the file, "png" or "svg".
    """
    import matplotlib

    buffer = io.BytesIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type") if picture_format == "svg" else ("Software",))
    with matplotlib.rc_context({"svg.hashsalt": "gaudi-bert", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=picture_format, dpi=120, metadata=metadata)
    return buffer.getvalue()


def add_dark_mode_style(svg: bytes) -> bytes:
    """Add a style sheet to an SVG that was drawn with `use_page_style`, and return the new SVG. The style makes text and
    lines light in dark mode.
    """
    rules = "".join(f'[style*="{what}: {INK}"]{{{what}:{INK_ON_DARK}!important}}' for what in ("fill", "stroke"))
    start = svg.index(b">", svg.index(b"<svg")) + 1
    return svg[:start] + f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>".encode() + svg[start:]


def get_picture_format(path: Path) -> str:
    """Return the format that the suffix of a picture file stands for, "png" or "svg".

    Raises:
        InputError: The name has another ending.
    """
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in ("png", "svg"):
        raise InputError(f"{path}: pictures can only be saved as .png or .svg; change the file name")
    return suffix


def save_picture(figure: Figure, path: Path) -> None:
    """Write a picture to a .png or .svg file, atomically."""
    content = encode_picture(figure, get_picture_format(path))
    with atomic_file(path) as handle:
        handle.write(content)


def format_percent(fraction: float, decimals: int = 1) -> str:
    """Format a fraction from 0 to 1 as a percentage with a no-break space. For example, 0.9949 becomes "99.5 %".

    If the percentage would be rounded to 0 or 100 although the fraction is neither 0 nor 1, it gets more decimals.
    """
    while 0 < fraction < 1 and decimals < _MAX_DECIMALS and round(100 * fraction, decimals) in (0, 100):
        decimals += 1
    return f"{100 * fraction:.{decimals}f}\u00a0%"


def _create_figure(height: float = 4.5, rows: int | None = None) -> tuple[Figure, Any]:
    """Create a figure that is 8 inches wide, and return it with its axes.

    Args:
        height: The height in inches.
        rows: If it is a number, return an array of this many axes, one below the other, instead of single axes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot() if rows is None else figure.subplots(rows, squeeze=False)[:, 0]


def _add_legend_above(axes: Any) -> None:
    """Add a legend above the axes. It has two columns, because the screen of a phone is too narrow for three."""
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), handlelength=1.2, columnspacing=1.2)


def _make_short_number_formatter() -> Any:
    """Create a matplotlib tick formatter that shortens large numbers, for example from "2000000" to "2 M"."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter()
