"""Draw docs/how-it-works.svg, the picture of the README: padded rows, the same sequences packed, the attention of a pack.

python benchmarks/draw_how_it_works.py

Drawn from the lengths in `PACKS`; a test compares the committed picture with what is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Outline

from gaudi_bert.common.files import write_text

SLOTS = 16
# Lengths that share a row; the last row has a slot of padding, and its attention is shown.
PACKS = ((16,), (11, 5), (10, 6), (9, 4, 3), (7, 5, 3))
# In which order the sequences (numbered through PACKS) come in the unpacked data.
ARRIVAL = (8, 1, 6, 3, 10, 0, 4, 9, 2, 5, 7)

CELL, GAP, ROW = 15, 2, 25
PITCH = CELL + GAP
CORNER = 3
LEFT, MIDDLE, RIGHT, TOP = 28, 398, 768, 84
FOOT = 376
WIDTH, HEIGHT = 1068, 398

COLOURS = {
    "page": "#ffffff",
    "ink": "#17202e",
    "soft": "#5c6779",
    "padding": "#e6eaf1",
    "off": "#f1f3f8",
    "white": "#ffffff",
    "rule": "#c3cad7",
    "mark": "#aab3c3",
    "first": "#2b62d9",
    "second": "#e0822b",
    "third": "#8a4fc9",
}
_ROLES = ("first", "second", "third")
_TITLE: dict[str, Any] = {"fontsize": 17, "fontweight": "bold", "color": COLOURS["ink"]}
_NOTE: dict[str, Any] = {"fontsize": 13, "color": COLOURS["soft"]}
_BIG: dict[str, Any] = {"fontsize": 13, "fontweight": "bold"}


def draw_how_it_works() -> str:
    """The picture as SVG text."""

    sequences = [(length, place) for pack in PACKS for place, length in enumerate(pack)]
    tokens = sum(length for length, _ in sequences)
    before, after = len(sequences) * SLOTS, len(PACKS) * SLOTS
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, facecolor="none")
    FigureCanvasSVG(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(HEIGHT, 0)
    page = FancyBboxPatch((14, 14), WIDTH - 28, HEIGHT - 28, "round,pad=14", color=COLOURS["page"], linewidth=0)
    axes.add_patch(page)
    note = f"{len(sequences)} rows, {tokens / before:.0%} of the slots are real tokens"
    _heading(axes, LEFT, "Before: one sequence per row", note)
    _unpacked(axes, sequences)
    _arrow(axes, LEFT + SLOTS * PITCH + 22)
    note = f"{len(PACKS)} rows, {tokens / after:.0%} of the slots are real tokens"
    _heading(axes, MIDDLE, "Packed: several share a row", note)
    _packed(axes)
    _features(axes)
    _heading(axes, RIGHT, "Attention stays at home", "each token sees its own sequence only")
    _attention(axes)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gaudi-bert"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _heading(axes: Axes, x: float, title: str, note: str) -> None:
    axes.text(x, 38, title, **_TITLE)
    axes.text(x, 60, note, **_NOTE)


def _cells(axes: Axes, x: float, y: float, count: int, role: str) -> None:
    """`count` slots in a row, as one path; the round joints of a thick line make their corners."""

    if count:
        square = Outline.unit_rectangle()
        inner = np.asarray(square.vertices) * (CELL - 2 * CORNER) + np.array((x + CORNER, y + CORNER))
        cells = (Outline(inner + np.array((index * PITCH, 0)), square.codes) for index in range(count))
        axes.add_patch(
            PathPatch(Outline.make_compound_path(*cells), color=COLOURS[role], linewidth=2 * CORNER, joinstyle="round")
        )


def _sequence(axes: Axes, x: float, y: float, number: int, length: int, place: int) -> None:
    """A sequence: its slots, and its letter in the first one."""
    _cells(axes, x, y, length, _ROLES[place])
    letter = ascii_uppercase[number]
    axes.text(x + CELL / 2, y + 11, letter, ha="center", fontsize=10, fontweight="bold", color=COLOURS["white"])


def _unpacked(axes: Axes, sequences: Sequence[tuple[int, int]]) -> None:
    for row, number in enumerate(ARRIVAL):
        length, place = sequences[number]
        y = TOP + row * ROW
        _sequence(axes, LEFT, y, number, length, place)
        _cells(axes, LEFT + length * PITCH, y, SLOTS - length, "padding")
    axes.text(LEFT, FOOT, "grey: padding, which costs as much as text", **_NOTE)


def _arrow(axes: Axes, x: float) -> None:
    y = TOP + 2 * ROW + CELL
    line: dict[str, Any] = {"color": COLOURS["ink"], "linewidth": 2.5, "solid_capstyle": "round", "solid_joinstyle": "round"}
    axes.plot([x, x + 42], [y, y], **line)
    axes.plot([x + 31, x + 42, x + 31], [y - 9, y, y + 9], **line)
    axes.text(x + 21, y - 16, "pack", ha="center", color=COLOURS["ink"], **_BIG)


def _packed(axes: Axes) -> None:
    number = 0
    for row, pack in enumerate(PACKS):
        y, slot = TOP + row * ROW, 0
        for place, length in enumerate(pack):
            _sequence(axes, MIDDLE + slot * PITCH, y, number, length, place)
            number, slot = number + 1, slot + length
        _cells(axes, MIDDLE + slot * PITCH, y, SLOTS - slot, "padding")


def _features(axes: Axes) -> None:
    """What the last row tells the model: the number of the sequence, and positions that start again."""

    row_y = TOP + (len(PACKS) - 1) * ROW
    right = MIDDLE + SLOTS * PITCH - GAP
    rule: dict[str, Any] = {"color": COLOURS["rule"], "linewidth": 1}
    frame = FancyBboxPatch((MIDDLE, row_y), right - MIDDLE, CELL, "round,pad=4", fill=False, **rule)
    axes.add_patch(frame)
    axes.plot([right + 4, RIGHT - 34], [row_y + CELL / 2] * 2, linestyle=(0, (3, 4)), **rule)
    axes.plot([(MIDDLE + right) / 2] * 2, [row_y + CELL + 4, row_y + CELL + 26], linestyle=(0, (3, 4)), **rule)
    numbers, positions = _row_features(PACKS[-1])
    for line, (name, values) in enumerate(
        (("input_mask: the number of the sequence", numbers), ("positions: start again at 0", positions))
    ):
        y = row_y + 62 + line * 54
        axes.text(MIDDLE, y, name, fontsize=13, color=COLOURS["ink"])
        for slot, value in enumerate(values):
            is_real = numbers[slot] > 0
            _cells(axes, MIDDLE + slot * PITCH, y + 8, 1, _ROLES[numbers[slot] - 1] if is_real else "padding")
            ink = COLOURS["white" if is_real else "soft"]
            axes.text(MIDDLE + slot * PITCH + CELL / 2, y + 19, str(value), ha="center", fontsize=9.5, color=ink)
    axes.text(MIDDLE, FOOT, "each keeps its own [CLS], masks and label", **_NOTE)


def _row_features(pack: Sequence[int]) -> tuple[list[int], list[int]]:
    padding = SLOTS - sum(pack)
    numbers = [number for number, length in enumerate(pack, start=1) for _ in range(length)] + [0] * padding
    positions = [position for length in pack for position in range(length)] + [0] * padding
    return numbers, positions


def _attention(axes: Axes) -> None:
    """Which token (row) sees which (column), for the last packed row; its letters stand at the side."""
    numbers, _ = _row_features(PACKS[-1])
    for row in range(SLOTS):
        seen = [column for column in range(SLOTS) if numbers[column] == numbers[row]]
        y = TOP + row * PITCH
        _cells(axes, RIGHT, y, seen[0], "off")
        _cells(axes, RIGHT + seen[0] * PITCH, y, len(seen), _ROLES[numbers[row] - 1] if numbers[row] else "mark")
        _cells(axes, RIGHT + (seen[-1] + 1) * PITCH, y, SLOTS - 1 - seen[-1], "off")
    first = sum(map(len, PACKS[:-1]))
    start = 0
    for place, length in enumerate(PACKS[-1]):
        middle = TOP + (start + length / 2) * PITCH
        axes.text(RIGHT - 10, middle + 4, ascii_uppercase[first + place], ha="right", color=COLOURS[_ROLES[place]], **_BIG)
        start += length
    axes.text(RIGHT, FOOT, "same outputs, losses and gradients", **_NOTE)


if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / "docs" / "how-it-works.svg"
    write_text(path, draw_how_it_works())
    print(f"{path}: {path.stat().st_size:,} bytes")
