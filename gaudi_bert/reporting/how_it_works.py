"""The one picture that explains packing: padded rows, the same sequences packed, and the attention of one packed row.

Drawn with plain SVG from the lengths in `PACKS`; the colours follow the reader's light or dark setting. Its output is
`docs/how-it-works.svg` (`python benchmarks/draw_how_it_works.py`), and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import ascii_uppercase

__all__ = ["draw_how_it_works"]

SLOTS = 16
# Lengths that share a row; the last row has a slot of padding, and its attention is shown.
PACKS = ((16,), (11, 5), (10, 6), (9, 4, 3), (7, 5, 3))
# In which order the sequences (numbered through PACKS) come in the unpacked data.
ARRIVAL = (8, 1, 6, 3, 10, 0, 4, 9, 2, 5, 7)

CELL, GAP, ROW = 15, 2, 25
PITCH = CELL + GAP
LEFT, MIDDLE, RIGHT, TOP = 28, 398, 768, 84
FOOT = 376
WIDTH, HEIGHT = 1068, 398

STYLE = """
  .page{fill:#fff}.ink{fill:#17202e}.soft{fill:#5c6779}.pad{fill:#e6eaf1}.off{fill:#f1f3f8}.white{fill:#fff}
  .c0{fill:#2b62d9}.c1{fill:#e0822b}.c2{fill:#8a4fc9}.padmark{fill:#aab3c3}.rule{stroke:#c3cad7;fill:none}
  .arrow{stroke:#17202e;fill:none;stroke-width:2.5;stroke-linecap:round;stroke-linejoin:round}
  text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
  .title{font-size:17px;font-weight:650;letter-spacing:-.2px}.note{font-size:13px}.cell{font-size:10px;font-weight:600}
  .number{font-size:9.5px}.big{font-size:13px;font-weight:600}
  @media (prefers-color-scheme:dark){
    .page{fill:#0d1117}.ink{fill:#e7ebf3}.soft{fill:#9ba7ba}.pad{fill:#262d39}.off{fill:#181e28}
    .c0{fill:#4f83f1}.c1{fill:#e59143}.c2{fill:#a172dd}.padmark{fill:#566175}.rule{stroke:#475164}.arrow{stroke:#e7ebf3}
  }
"""


def draw_how_it_works() -> str:
    """The picture as SVG text."""
    sequences = [(length, place) for pack in PACKS for place, length in enumerate(pack)]
    tokens = sum(length for length, _ in sequences)
    before, after = len(sequences) * SLOTS, len(PACKS) * SLOTS
    parts = [
        *_heading(
            LEFT, "Before: one sequence a row", f"{len(sequences)} rows, {tokens / before:.0%} of the slots are real tokens"
        ),
        *_unpacked(sequences),
        *_arrow(LEFT + SLOTS * PITCH + 22),
        *_heading(
            MIDDLE, "Packed: several share a row", f"{len(PACKS)} rows, {tokens / after:.0%} of the slots are real tokens"
        ),
        *_packed(),
        *_features(),
        *_heading(RIGHT, "Attention stays at home", "each token sees its own sequence only"),
        *_attention(),
    ]
    label = f"{len(sequences)} padded rows become {len(PACKS)} packed rows; attention is block-diagonal."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">\n'
        f'<style>{STYLE}</style>\n<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="14"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, css: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{css}" text-anchor="{anchor}">{words}</text>'


def _heading(x: float, title: str, note: str) -> Iterator[str]:
    yield _text(x, 38, title, "title ink")
    yield _text(x, 60, note, "note soft")


def _cells(x: float, y: float, count: int, css: str) -> str:
    """`count` slots in a row."""
    path = "".join(
        f"M{x + index * PITCH + 3:g} {y:g}h9a3 3 0 0 1 3 3v9a3 3 0 0 1-3 3h-9a3 3 0 0 1-3-3v-9a3 3 0 0 1 3-3z"
        for index in range(count)
    )
    return f'<path class="{css}" d="{path}"/>' if count else ""


def _sequence(x: float, y: float, number: int, length: int, place: int) -> Iterator[str]:
    """A sequence: its slots, and its letter in the first one."""
    yield _cells(x, y, length, f"c{place}")
    yield _text(x + CELL / 2, y + 11, ascii_uppercase[number], "cell white", "middle")


def _unpacked(sequences: Sequence[tuple[int, int]]) -> Iterator[str]:
    for row, number in enumerate(ARRIVAL):
        length, place = sequences[number]
        y = TOP + row * ROW
        yield from _sequence(LEFT, y, number, length, place)
        yield _cells(LEFT + length * PITCH, y, SLOTS - length, "pad")
    yield _text(LEFT, FOOT, "grey: padding, which costs as much as text", "note soft")


def _arrow(x: float) -> Iterator[str]:
    y = TOP + 2 * ROW + CELL
    yield f'<path class="arrow" d="M{x} {y}h42m-11 -9l11 9l-11 9"/>'
    yield _text(x + 21, y - 16, "pack", "big ink", "middle")


def _packed() -> Iterator[str]:
    number = 0
    for row, pack in enumerate(PACKS):
        y, slot = TOP + row * ROW, 0
        for place, length in enumerate(pack):
            yield from _sequence(MIDDLE + slot * PITCH, y, number, length, place)
            number, slot = number + 1, slot + length
        yield _cells(MIDDLE + slot * PITCH, y, SLOTS - slot, "pad")


def _features() -> Iterator[str]:
    """What the last row tells the model: the number of the sequence, and positions that start again."""
    row_y = TOP + (len(PACKS) - 1) * ROW
    right = MIDDLE + SLOTS * PITCH - GAP
    yield f'<rect class="rule" x="{MIDDLE - 4}" y="{row_y - 4}" width="{right - MIDDLE + 8}" height="{CELL + 8}" rx="6"/>'
    yield f'<path class="rule" d="M{right + 4} {row_y + CELL / 2:g}H{RIGHT - 34}" stroke-dasharray="3 4"/>'
    yield f'<path class="rule" d="M{(MIDDLE + right) / 2:g} {row_y + CELL + 4}v22" stroke-dasharray="3 4"/>'
    numbers, positions = _row_features(PACKS[-1])
    for line, (name, values) in enumerate(
        (("input_mask: the number of the sequence", numbers), ("positions: start again at 0", positions))
    ):
        y = row_y + 62 + line * 54
        yield _text(MIDDLE, y, name, "note ink")
        for slot, value in enumerate(values):
            css = f"c{numbers[slot] - 1}" if numbers[slot] else "pad"
            yield _cells(MIDDLE + slot * PITCH, y + 8, 1, css)
            ink = "white" if numbers[slot] else "soft"
            yield _text(MIDDLE + slot * PITCH + CELL / 2, y + 19, str(value), f"number {ink}", "middle")
    yield _text(MIDDLE, FOOT, "each keeps its own [CLS], masks and label", "note soft")


def _row_features(pack: Sequence[int]) -> tuple[list[int], list[int]]:
    padding = SLOTS - sum(pack)
    numbers = [number for number, length in enumerate(pack, start=1) for _ in range(length)] + [0] * padding
    positions = [position for length in pack for position in range(length)] + [0] * padding
    return numbers, positions


def _attention() -> Iterator[str]:
    """Which token (row) sees which (column), for the last packed row; its letters stand at the side."""
    numbers, _ = _row_features(PACKS[-1])
    for row in range(SLOTS):
        seen = [column for column in range(SLOTS) if numbers[column] == numbers[row]]
        y = TOP + row * PITCH
        yield _cells(RIGHT, y, seen[0], "off")
        yield _cells(RIGHT + seen[0] * PITCH, y, len(seen), f"c{numbers[row] - 1}" if numbers[row] else "padmark")
        yield _cells(RIGHT + (seen[-1] + 1) * PITCH, y, SLOTS - 1 - seen[-1], "off")
    first = sum(map(len, PACKS[:-1]))
    start = 0
    for place, length in enumerate(PACKS[-1]):
        middle = TOP + (start + length / 2) * PITCH
        yield _text(RIGHT - 10, middle + 4, ascii_uppercase[first + place], f"big c{place}", "end")
        start += length
    yield _text(RIGHT, FOOT, "same outputs, losses and gradients", "note soft")
