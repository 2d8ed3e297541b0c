"""Draw docs/how-it-works.svg, the picture of the README: padded rows, the same sequences packed, the attention of a pack.

python docs/draw_how_it_works.py

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

CELL, GAP, ROW = 17, 2, 27
PITCH = CELL + GAP
CORNER = 3
LEFT, RIGHT = 30, 388
WIDTH, HEIGHT = 720, 912
# Where the parts begin, from the top: the rows, the attention of a pack (on the right), what the model is given of it.
ROWS, ATTENTION, FEATURES = 90, 332, 722

COLOURS = {
    "page": "#ffffff",
    "ink": "#17202e",
    "soft": "#5c6779",
    "padding": "#e6eaf1",
    "off": "#f1f3f8",
    "white": "#ffffff",
    "mark": "#aab3c3",
    "first": "#2b62d9",
    "second": "#bb5a0f",
    "third": "#8a4fc9",
}
_ROLES = ("first", "second", "third")
# Half of these sizes arrive on a telephone 360 pixels wide.
_NAME: dict[str, Any] = {"fontsize": 27, "fontweight": "bold", "color": COLOURS["ink"]}
_TITLE: dict[str, Any] = {"fontsize": 22, "fontweight": "bold", "color": COLOURS["ink"]}
_NOTE: dict[str, Any] = {"fontsize": 20, "color": COLOURS["soft"]}


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
    axes.text(LEFT, 46, f"Packing: {len(sequences)} sequences in {len(PACKS)} rows", **_NAME)
    _lines(axes, LEFT, ROWS, f"Before: {len(sequences)} rows", [f"{tokens / before:.0%} of slots are tokens"])
    _unpacked(axes, sequences)
    _lines(axes, RIGHT, ROWS, f"Packed: {len(PACKS)} rows", [f"{tokens / after:.0%} of slots are tokens"])
    _packed(axes)
    _lines(axes, LEFT, ROWS + 62 + len(ARRIVAL) * ROW, "", ["Grey: padding, which", "costs as much as text"])
    _lines(axes, RIGHT, ATTENTION, "Each token sees its own", [])
    axes.text(RIGHT, ATTENTION + 28, "sequence only (last row)", **_TITLE)
    _attention(axes)
    _lines(axes, LEFT, FEATURES, "What the model is given of the last row", [])
    _features(axes)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gaudi-bert"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": "How packing works"})
    return buffer.getvalue()


def _lines(axes: Axes, x: float, y: float, title: str, notes: Sequence[str]) -> None:
    """A title, and lines of notes below it."""
    axes.text(x, y, title, **_TITLE)
    for line, note in enumerate(notes, start=1):
        axes.text(x, y + 28 * line, note, **_NOTE)


def _cells(axes: Axes, x: float, y: float, count: int, role: str, cell: int = CELL) -> None:
    """`count` slots in a row, as one path; the round joints of a thick line make their corners."""
    if count:
        square = Outline.unit_rectangle()
        inner = np.asarray(square.vertices) * (cell - 2 * CORNER) + np.array((x + CORNER, y + CORNER))
        cells = (Outline(inner + np.array((index * (cell + GAP), 0)), square.codes) for index in range(count))
        axes.add_patch(
            PathPatch(Outline.make_compound_path(*cells), color=COLOURS[role], linewidth=2 * CORNER, joinstyle="round")
        )


def _sequence(axes: Axes, x: float, y: float, number: int, length: int, place: int) -> None:
    """A sequence: its slots, and its letter in the first one."""
    _cells(axes, x, y, length, _ROLES[place])
    letter = ascii_uppercase[number]
    axes.text(x + CELL / 2, y + 16, letter, ha="center", fontsize=18, fontweight="bold", color=COLOURS["white"])


def _unpacked(axes: Axes, sequences: Sequence[tuple[int, int]]) -> None:
    for row, number in enumerate(ARRIVAL):
        length, place = sequences[number]
        y = ROWS + 50 + row * ROW
        _sequence(axes, LEFT, y, number, length, place)
        _cells(axes, LEFT + length * PITCH, y, SLOTS - length, "padding")


def _packed(axes: Axes) -> None:
    number = 0
    for row, pack in enumerate(PACKS):
        y, slot = ROWS + 50 + row * ROW, 0
        for place, length in enumerate(pack):
            _sequence(axes, RIGHT + slot * PITCH, y, number, length, place)
            number, slot = number + 1, slot + length
        _cells(axes, RIGHT + slot * PITCH, y, SLOTS - slot, "padding")


def _features(axes: Axes) -> None:
    """What the last row tells the model: the number of the sequence, and positions that start again."""
    cell = 39
    numbers, positions = _row_features(PACKS[-1])
    for line, (name, values) in enumerate(
        (("input_mask: the number of each sequence", numbers), ("positions: each sequence starts again at 0", positions))
    ):
        y = FEATURES + 34 + line * 86
        axes.text(LEFT, y, name, **_NOTE)
        for slot, value in enumerate(values):
            is_real = numbers[slot] > 0
            x = LEFT + slot * (cell + GAP)
            _cells(axes, x, y + 12, 1, _ROLES[numbers[slot] - 1] if is_real else "padding", cell)
            ink = COLOURS["white" if is_real else "soft"]
            axes.text(x + cell / 2, y + 39, str(value), ha="center", fontsize=21, color=ink)


def _row_features(pack: Sequence[int]) -> tuple[list[int], list[int]]:
    padding = SLOTS - sum(pack)
    numbers = [number for number, length in enumerate(pack, start=1) for _ in range(length)] + [0] * padding
    positions = [position for length in pack for position in range(length)] + [0] * padding
    return numbers, positions


def _attention(axes: Axes) -> None:
    """Which token (row) sees which (column), for the last packed row."""
    numbers, _ = _row_features(PACKS[-1])
    for row in range(SLOTS):
        seen = [column for column in range(SLOTS) if numbers[column] == numbers[row]]
        y = ATTENTION + 44 + row * PITCH
        _cells(axes, RIGHT, y, seen[0], "off")
        _cells(axes, RIGHT + seen[0] * PITCH, y, len(seen), _ROLES[numbers[row] - 1] if numbers[row] else "mark")
        _cells(axes, RIGHT + (seen[-1] + 1) * PITCH, y, SLOTS - 1 - seen[-1], "off")


if __name__ == "__main__":
    path = Path(__file__).resolve().parent / "how-it-works.svg"
    write_text(path, draw_how_it_works())
    print(f"{path}: {path.stat().st_size:,} bytes")
