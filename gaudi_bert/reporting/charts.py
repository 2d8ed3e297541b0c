"""The pictures of the report, each a function of plain numbers that returns SVG text.

Letters: L = max_sequence_length. A row is one record of L slots: a sequence before packing, a pack after it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from gaudi_bert.artefacts.training import MetricsLine
from gaudi_bert.reporting.figures import percent
from gaudi_bert.reporting.svg import Axis, Plot, round_ticks, short_number

__all__ = ["curve_chart", "fill_charts", "slots_chart", "strategies_chart"]

_MOST_BARS = 48
_SHADES = 5


def _percent(value: float) -> str:
    return f"{value:.3g}%"


def fill_charts(before: np.ndarray, after: np.ndarray | None) -> list[str]:
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
        _fill_chart(share, spans, scale * 1.08, f"real tokens in a row {when}", css)
        for share, (_, when, css) in zip(shares, panels, strict=True)
    ]


def _fill_chart(shares: Sequence[float], spans: Sequence[tuple[int, int]], scale: float, title: str, css: str) -> str:
    slots = spans[-1][1]
    plot = Plot(
        Axis(0, slots, title, "{:.0f}".format, _length_ticks(slots)),
        Axis(0, scale, write=_percent, ticks=round_ticks(scale * 0.98)),
        f"Share of rows by {title}",
        height=176,
        right=18,
        top=12,
    )
    plot.frame()
    for (low, high), share in zip(spans, shares, strict=True):
        if share <= 0:
            continue
        gap = 0.08 * (high - low)
        hint = f"{low + 1} to {high} tokens: {share:.2f} % of rows"
        plot.bar(low + gap, high - gap, 0, min(share, scale), css, hint)
        if share > scale:
            x = plot.across(high)
            plot.parts.append(f'<path class="cut" d="M{plot.across(low) - 3:.1f} 27L{x + 3:.1f} 21"/>')
            words = f"{percent(share / 100)} of rows: {f'{low + 1} to {high}' if high - low > 1 else high} tokens"
            plot.text(plot.across(low) - 8, 24, words, "label", "end")
    return plot.svg()


def _length_ticks(slots: int) -> list[float]:
    return [slots * quarter // 4 for quarter in range(5)]


def slots_chart(rows_before: int, rows_after: int, tokens: int, slots: int, lower_bound: int | None) -> str:
    """Slots before and after packing, to scale: real tokens and padding; the proven bound as a line."""
    total = rows_before * slots
    plot = Plot(
        Axis(0, total, "slots", ticks=round_ticks(total)),
        Axis(0, 2),
        f"{rows_before} rows before packing, {rows_after} after it",
        height=170,
        left=16,
        top=34,
    )
    plot.legend([("box", "real", "real tokens"), ("box", "padding", "padding")])
    for place, when, rows in ((1.0, "before", rows_before), (0.0, "after", rows_after)):
        bottom, top = place + 0.14, place + 0.66
        plot.bar(0, tokens, bottom, top, "real", f"{tokens:,} real tokens")
        plot.bar(tokens, rows * slots, bottom, top, "padding", f"{rows * slots - tokens:,} slots of padding")
        share = percent(tokens / (rows * slots), 2)
        plot.text(plot.left, plot.up(top) - 5, f"{when}: {rows:,} rows, {share} real tokens", "label")
    for tick in plot.x.places():
        plot.text(plot.across(tick), plot.height - 22, short_number(tick), "tick", "middle")
    plot.text(plot.width / 2, plot.height - 6, "slots", "tick", "middle")
    if lower_bound is not None:
        x = plot.across(lower_bound * slots)
        plot.parts.append(f'<path class="bound line" d="M{x:.1f} {plot.up(0.72):.1f}V{plot.up(0.08):.1f}"/>')
        plot.text(plot.width - plot.right, 18, f"| proven bound {lower_bound:,} rows", "boundtext", "end")
    return plot.svg()


def strategies_chart(mixture: Mapping[tuple[int, ...], int], slots: int, most: int = 12) -> str:
    """The strategies used most, each as a row of its sequences to scale, longest first, with its share of all packs."""
    packs = max(sum(mixture.values()), 1)
    top = sorted(mixture.items(), key=lambda item: (-item[1], item[0]))[:most]
    step = 24
    plot = Plot(
        Axis(0, slots),
        Axis(0, 1),
        "The strategies used most",
        height=step * len(top) + 30,
        left=2,
        right=128,
        top=4,
        bottom=0,
    )
    for row, (strategy, count) in enumerate(top):
        y = 4 + row * step
        _row_of_strategy(plot, sorted(strategy, reverse=True), slots, y, step - 6)
        plot.text(plot.width - plot.right + 8, y + 13, f"{count:,}", "label")
        plot.text(plot.width, y + 13, f"{100 * count / packs:.1f} %", "tick", "end")
    shown = sum(count for _, count in top)
    plot.text(
        plot.left,
        plot.height - 8,
        f"{len(top)} of {len(mixture):,} strategies: {100 * shown / packs:.1f} % of {packs:,} packs",
        "tick",
    )
    return plot.svg()


def _row_of_strategy(plot: Plot, lengths: Sequence[int], slots: int, y: float, height: float) -> None:
    start = 0
    for index, length in enumerate(lengths):
        x, width = plot.across(start), plot.across(start + length) - plot.across(start)
        plot.parts.append(
            f'<rect class="shade{index % _SHADES}" x="{x:.1f}" y="{y:.1f}" width="{max(width - 1, 0.5):.1f}" '
            f'height="{height:g}" rx="2"><title>{length} tokens</title></rect>'
        )
        if width > 8 * len(str(length)) + 4:
            plot.text(x + width / 2, y + height - 5, str(length), "inside", "middle")
        start += length
    if start < slots:
        x, width = plot.across(start), plot.across(slots) - plot.across(start)
        plot.parts.append(
            f'<rect class="padding" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" rx="2">'
            f"<title>{slots - start} slots of padding</title></rect>"
        )


def curve_chart(metrics: Sequence[MetricsLine], name: str, title: str, baseline: float | None = None) -> str:
    """A figure over the sequences seen, in training (line) and on held-out documents (dots).

    Args:
        metrics: the lines of metrics.jsonl.
        name: which of their figures; an accuracy is shown in percent and from 0, a loss from just below its lowest value.
        title: what the picture shows.
        baseline: a horizontal line, the accuracy without any learning.
    """
    train, held_out = (
        [(line.sequences, getattr(line, name)) for line in metrics if line.kind == kind] for kind in ("train", "evaluation")
    )
    values = [value for _, value in [*train, *held_out]] + ([baseline] if baseline is not None else [])
    sequences = [seen for seen, _ in [*train, *held_out]]
    plot = Plot(Axis(0, max([*sequences, 1]), "sequences seen"), _curve_axis(values, name.endswith("accuracy")), title)
    plot.frame()
    legend = [("line", "train", "training")]
    plot.line(train, "train")
    if len(train) == 1:
        plot.dots(train, "train")
    if held_out:
        legend.append(("dot", "held", "held out"))
        plot.line(held_out, "held thin")
        plot.dots(held_out, "held")
    if baseline is not None:
        legend.append(("line", "baseline", f"unigram baseline, {100 * baseline:.1f} %"))
        plot.line([(0, baseline), (plot.x.highest, baseline)], "baseline")
    plot.legend(legend)
    return plot.svg()


def _curve_axis(values: Sequence[float], is_accuracy: bool) -> Axis:
    highest = max([*values, 1e-9])
    if is_accuracy:
        return Axis(0, highest * 1.08, write=lambda value: _percent(100 * value))
    lowest = min([*values, highest])
    # A loss that hardly moved is shown from 0, or its noise would look like learning.
    if highest - lowest < 0.2 * highest:
        return Axis(0, highest * 1.08)
    margin = 0.08 * (highest - lowest)
    return Axis(lowest - margin, highest + margin, ticks=_ticks_between(lowest - margin, highest + margin))


def _ticks_between(lowest: float, highest: float) -> list[float]:
    step = round_ticks(highest - lowest)[1]
    first = math.ceil(lowest / step)
    return [index * step for index in range(first, int(highest / step) + 2)]
