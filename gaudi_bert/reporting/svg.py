"""A small plotting surface that writes SVG text: axes with round ticks, bars, lines, points.

Colours come from CSS classes of the page, so that one picture serves light, dark and paper; coordinates are written with one
decimal, so equal data gives equal text. Nothing is drawn but what is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["Axis", "Plot", "round_ticks", "short_number"]

# Of the legend, wide enough for the larger letters that the page uses on a phone.
_CHARACTER_WIDTH = 7.4


def round_ticks(highest: float, count: int = 4) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten from 0, about `count` of them, the last at or below `highest`."""
    if highest <= 0:
        return [0.0]
    rough = highest / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(int(highest / step + 1e-9) + 1)]


def short_number(value: float) -> str:
    """1500 as 1.5k, 2000000 as 2M, 0.25 as 0.25."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class Axis:
    """What an axis shows: from `lowest` to `highest`, its `title`, and how its ticks are written."""

    lowest: float
    highest: float
    title: str = ""
    write: Callable[[float], str] = short_number
    ticks: Sequence[float] | None = None

    def places(self) -> list[float]:
        """Where the ticks are."""
        ticks = self.ticks if self.ticks is not None else round_ticks(self.highest)
        return [tick for tick in ticks if self.lowest <= tick <= self.highest]


@dataclass
class Plot:
    """One pair of axes in a picture of `width` by `height` units.

    Args:
        x, y: the axes.
        label: what the picture shows, for those who cannot see it.
        top: room above the axes, for a legend.
    """

    x: Axis
    y: Axis
    label: str
    width: float = 460
    height: float = 250
    top: float = 30
    left: float = 48
    right: float = 12
    bottom: float = 40
    parts: list[str] = field(default_factory=list)

    def across(self, value: float) -> float:
        """The x coordinate of `value`."""
        span = self.x.highest - self.x.lowest or 1
        return self.left + (value - self.x.lowest) / span * (self.width - self.left - self.right)

    def up(self, value: float) -> float:
        """The y coordinate of `value`."""
        span = self.y.highest - self.y.lowest or 1
        return self.height - self.bottom - (value - self.y.lowest) / span * (self.height - self.top - self.bottom)

    def text(self, x: float, y: float, words: str, css: str = "", anchor: str = "start") -> None:
        """Words at a coordinate."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>')

    def frame(self) -> None:
        """Grid lines, ticks and titles of both axes."""
        low, right = self.height - self.bottom, self.width - self.right
        for tick in self.y.places():
            y = self.up(tick)
            self.parts.append(f'<path class="grid" d="M{self.left:.1f} {y:.1f}H{right:.1f}"/>')
            self.text(self.left - 6, y + 4, self.y.write(tick), "tick", "end")
        for tick in self.x.places():
            x = self.across(tick)
            self.parts.append(f'<path class="axis" d="M{x:.1f} {low:.1f}v4"/>')
            self.text(x, low + 16, self.x.write(tick), "tick", "middle")
        self.parts.append(f'<path class="axis" d="M{self.left:.1f} {low:.1f}H{right:.1f}"/>')
        self.text((self.left + right) / 2, self.height - 6, self.x.title, "tick", "middle")

    def legend(self, entries: Sequence[tuple[str, str, str]]) -> None:
        """Entries (mark, CSS class, words) in a row at the top; the mark is `box`, `line` or `dot`."""
        x = self.left
        for mark, css, words in entries:
            if mark == "box":
                self.parts.append(f'<rect class="{css}" x="{x:.1f}" y="8" width="11" height="11" rx="2"/>')
            elif mark == "dot":
                self.parts.append(f'<circle class="{css} dot" cx="{x + 6:.1f}" cy="13.5" r="4"/>')
            else:
                self.parts.append(f'<path class="{css} line" d="M{x - 1:.1f} 13.5h14"/>')
            self.text(x + 18, 18, words, "label")
            x += 34 + len(words) * _CHARACTER_WIDTH

    def bar(self, start: float, stop: float, bottom: float, top: float, css: str, title: str = "") -> None:
        """A bar from `start` to `stop` across and `bottom` to `top` up, in the units of the axes."""
        x, y = self.across(start), self.up(top)
        width, height = self.across(stop) - x, self.up(bottom) - y
        hint = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(
            f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">{hint}</rect>'
        )

    def line(self, points: Sequence[tuple[float, float]], css: str) -> None:
        """A line through `points`."""
        path = "L".join(f"{self.across(x):.1f} {self.up(y):.1f}" for x, y in points)
        self.parts.append(f'<path class="{css} line" d="M{path}"/>')

    def dots(self, points: Sequence[tuple[float, float]], css: str) -> None:
        """A dot at each of `points`."""
        for x, y in points:
            self.parts.append(f'<circle class="{css} dot" cx="{self.across(x):.1f}" cy="{self.up(y):.1f}" r="3.5"/>')

    def svg(self) -> str:
        """The picture."""
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(self.label)}">'
            f"{''.join(self.parts)}</svg>"
        )
