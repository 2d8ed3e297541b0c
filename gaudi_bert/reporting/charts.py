"""The pictures of the report, each a function of plain numbers that returns SVG text.

Letters: L = max_sequence_length. A row is one record of L slots: a sequence before packing, a pack after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.artefacts.training import MetricsLine
from gaudi_bert.reporting.drawing import colour, hint, new_axes, new_figure, short_number, svg_text
from gaudi_bert.reporting.figures import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["curve_chart", "fill_charts", "slots_chart", "strategies_chart"]

Counts: TypeAlias = NDArray[np.int64]

_WIDTH = 460
_MOST_BARS = 48
_SHADES = 5
_DEEP_SHADES = (2, 4)  # light ones, on which words are dark
_LABEL: dict[str, Any] = {"fontsize": 12, "color": colour("ink")}
_TICK: dict[str, Any] = {"fontsize": 11.5, "color": colour("soft")}
# A row above the axes, from their left end on.
_LEGEND: dict[str, Any] = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1.05),
    "ncols": 3,
    "frameon": False,
    "borderaxespad": 0,
    "borderpad": 0,
    "handlelength": 1.2,
    "handletextpad": 0.5,
    "columnspacing": 1.6,
    "fontsize": 12,
    "labelcolor": colour("ink"),
}


def _percent_tick(value: float, position: int = 0) -> str:
    return f"{value:.3g}%"


def fill_charts(before: Counts, after: Counts | None) -> list[str]:
    """How many real tokens the rows hold: a picture before packing and, where it is known, one after it.

    Both have the same scale. Where full rows outnumber all others, their bar is cut, and its share written on it.

    Args:
        before, after: int64 [L], rows that hold 1, 2, ..., L tokens.
    """
    width = -(-len(before) // _MOST_BARS)
    # Bins end at L, so that the last one holds the rows that are full or nearly so.
    edges = [max(0, edge) for edge in range(len(before), -width, -width)][::-1]
    spans = list(itertools.pairwise(edges))
    panels = [(before, "before packing", "before")]
    if after is not None:
        panels.append((after, "after packing", "real"))
    shares = [[100 * counts[low:high].sum() / max(counts.sum(), 1) for low, high in spans] for counts, _, _ in panels]
    highest = max(max(map(max, shares)), 1e-9)
    partial = max((share for panel in shares for share in panel[:-1]), default=0.0)
    scale = 2 * partial if 0 < 3 * partial < highest else highest
    return [
        _fill_chart(share, spans, scale, f"real tokens in a row {when}", role)
        for share, (_, when, role) in zip(shares, panels, strict=True)
    ]


def _fill_chart(shares: Sequence[float], spans: Sequence[tuple[int, int]], scale: float, title: str, role: str) -> str:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    slots, top = spans[-1][1], 1.08 * scale
    figure = new_figure(_WIDTH, 176)
    axes = new_axes(figure, 48, 18, 12, 40)
    for (low, high), share in zip(spans, shares, strict=True):
        if share > 0:
            width = 0.84 * (high - low)
            bars = axes.bar((low + high) / 2, min(share, top), width, color=colour(role))
            bars[0].set_gid(hint(f"{low + 1} to {high} tokens: {share:.2f} % of rows"))
        if share > top:
            _cut_bar(axes, (low, high), share, top)
    axes.set_xlim(0, slots)
    axes.set_ylim(0, top)
    axes.set_xticks([slots * quarter // 4 for quarter in range(5)])
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent_tick))
    axes.grid(axis="y", color=colour("rule"))
    axes.set_xlabel(title, **_TICK)
    return svg_text(figure, f"Share of rows by {title}")


def _cut_bar(axes: Axes, span: tuple[int, int], share: float, top: float) -> None:
    """A slanted gap through a bar that is too high to show, and its share beside it."""
    low, high = span
    axes.plot([low - 1, high + 1], [0.89 * top, 0.95 * top], color=colour("sheet"), linewidth=3.5, clip_on=False)
    words = f"{percent(share / 100)} of rows: {f'{low + 1} to {high}' if high - low > 1 else high} tokens"
    axes.text(low - 0.02 * high, 0.92 * top, words, ha="right", va="center", **_LABEL)


def slots_chart(rows_before: int, rows_after: int, tokens: int, slots: int, lower_bound: int | None) -> str:
    """Slots before and after packing, to scale: real tokens and padding; the proven bound as a line."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = new_figure(_WIDTH, 170)
    axes = new_axes(figure, 16, 12, 34, 40)
    for place, when, rows in ((1.4, "before", rows_before), (0.4, "after", rows_after)):
        padding = rows * slots - tokens
        real_bar = axes.barh(place, tokens, 0.52, color=colour("real"), label="real tokens")
        padding_bar = axes.barh(place, padding, 0.52, tokens, color=colour("padding"), label="padding")
        real_bar[0].set_gid(hint(f"{tokens:,} real tokens"))
        padding_bar[0].set_gid(hint(f"{padding:,} slots of padding"))
        share = percent(tokens / (rows * slots), 2)
        axes.text(0, place + 0.32, f"{when}: {rows:,} rows, {share} real tokens", **_LABEL)
    axes.set_xlim(0, rows_before * slots)
    axes.set_ylim(0, 2)
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(short_number))
    axes.set_xlabel("slots", **_TICK)
    axes.legend(handles=[real_bar, padding_bar], **(_LEGEND | {"bbox_to_anchor": (0, 1.1)}))
    if lower_bound is not None:
        axes.plot([lower_bound * slots] * 2, [0.08, 0.69], color=colour("bound"), linewidth=2)
        words = f"| proven bound {lower_bound:,} rows"
        axes.text(1, 1.125, words, ha="right", fontsize=12, color=colour("bound"), transform=axes.transAxes)
    return svg_text(figure, f"{rows_before} rows before packing, {rows_after} after it")


def strategies_chart(mixture: Mapping[tuple[int, ...], int], slots: int, most: int = 12) -> str:
    """The strategies used most, each as a row of its sequences to scale, longest first, with its share of all packs."""
    packs = max(sum(mixture.values()), 1)
    top = sorted(mixture.items(), key=lambda item: (-item[1], item[0]))[:most]
    step, right = 24, 128
    figure = new_figure(_WIDTH, step * len(top) + 30)
    axes = new_axes(figure, 2, right, 4, 26)
    units = slots / (_WIDTH - right - 2)
    axes.set_axis_off()
    axes.set_xlim(0, slots)
    axes.set_ylim(max(step * len(top), 1), 0)
    for row, (strategy, count) in enumerate(top):
        _row_of_strategy(axes, sorted(strategy, reverse=True), slots, step * row, step - 6, units)
        axes.text(slots + 8 * units, step * row + 9, f"{count:,}", va="center", **_LABEL)
        axes.text(slots + right * units, step * row + 9, f"{100 * count / packs:.1f} %", ha="right", va="center", **_TICK)
    shown = sum(count for _, count in top)
    words = f"{len(top)} of {len(mixture):,} strategies: {100 * shown / packs:.1f} % of {packs:,} packs"
    figure.text(2 / _WIDTH, 8 / (step * len(top) + 30), words, **_TICK)
    return svg_text(figure, "The strategies used most")


def _row_of_strategy(axes: Axes, lengths: Sequence[int], slots: int, y: float, height: float, units: float) -> None:
    """One strategy from `y` down; `units` are the slots that one unit of the picture is wide."""
    start = 0
    for index, length in enumerate(lengths):
        shade = index % _SHADES
        bars = axes.barh(y + height / 2, max(length - units, units / 2), height, start, color=colour(f"shade{shade}"))
        bars[0].set_gid(hint(f"{length} tokens"))
        if length > (8 * len(str(length)) + 4) * units:
            ink = colour("deep" if shade in _DEEP_SHADES else "inside")
            axes.text(start + length / 2, y + height / 2, str(length), ha="center", va="center", fontsize=11, color=ink)
        start += length
    if start < slots:
        bars = axes.barh(y + height / 2, slots - start, height, start, color=colour("padding"))
        bars[0].set_gid(hint(f"{slots - start} slots of padding"))


def curve_chart(metrics: Sequence[MetricsLine], name: str, title: str, baseline: float | None = None) -> str:
    """A figure over the sequences seen, in training (line) and on held-out documents (dots).

    Args:
        metrics: the lines of metrics.jsonl.
        name: which of their figures; an accuracy is shown in percent and from 0, a loss from just below its lowest value.
        title: what the picture shows.
        baseline: a horizontal line, the accuracy without any learning.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    is_accuracy = name.endswith("accuracy")
    figure = new_figure(_WIDTH, 250)
    axes = new_axes(figure, 48, 12, 30, 40)
    train, held_out = (
        [(line.sequences, getattr(line, name) * (100 if is_accuracy else 1)) for line in metrics if line.kind == kind]
        for kind in ("train", "evaluation")
    )
    if train:
        axes.plot(
            *zip(*train, strict=True), color=colour("real"), linewidth=2, marker="o" * (len(train) == 1), label="training"
        )
    if held_out:
        style: dict[str, Any] = {
            "color": colour("held"),
            "linewidth": 1.2,
            "marker": "o",
            "markersize": 7,
            "markeredgewidth": 0,
        }
        axes.plot(*zip(*held_out, strict=True), label="held out", **style)
    if baseline is not None:
        label = f"unigram baseline, {100 * baseline:.1f} %"
        axes.axhline(100 * baseline, color=colour("baseline"), linewidth=2, linestyle=(0, (1, 2)), label=label)
    values = [value for _, value in [*train, *held_out]] + ([100 * baseline] if baseline is not None else [])
    axes.set_xlim(0, max([seen for seen, _ in [*train, *held_out]], default=1) or 1)
    axes.set_ylim(*_limits(values, is_accuracy))
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(short_number))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent_tick if is_accuracy else short_number))
    axes.grid(axis="y", color=colour("rule"))
    axes.set_xlabel("sequences seen", **_TICK)
    if values:
        axes.legend(**_LEGEND)
    return svg_text(figure, title)


def _limits(values: Sequence[float], is_accuracy: bool) -> tuple[float, float]:
    highest = max([*values, 1e-9])
    lowest = min([*values, highest])
    # A loss that hardly moved is shown from 0, or its noise would look like learning.
    if is_accuracy or highest - lowest < 0.2 * highest:
        return 0, 1.08 * highest
    margin = 0.08 * (highest - lowest)
    return lowest - margin, highest + margin
