"""What several rooms know: the features of an example, their types and what each counts; the figures of a packing; and the
names of the texts built in.

A feature's number is its position in the order of the names, which is the order of a deterministic serialisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from gaudi_bert.common.errors import enumerated
from gaudi_bert.common.progress import count_of

Axis = Literal["tokens", "masked", "sequences"]
"""What the values of a feature are counted by: slots of the row, masked slots, or sequences of the row."""


class Feature(IntEnum):
    """Base of the two enumerations."""

    @property
    def key(self) -> str:
        """The name in a record."""
        return self.name.lower()

    @property
    def kind(self) -> Literal["int64", "float32"]:
        """The type in a record: weights are floats, all else is integers."""
        return "float32" if self.name.endswith("_WEIGHTS") else "int64"

    @property
    def axis(self) -> Axis:
        """Return what its values are counted by."""
        if self.name.startswith("MASKED_LM_"):
            return "masked"
        return "sequences" if self.name.startswith("NEXT_SENTENCE_") else "tokens"


class UnpackedFeature(Feature):
    """The features of one sequence that is padded to a row."""

    INPUT_IDS = 0
    INPUT_MASK = 1
    MASKED_LM_IDS = 2
    MASKED_LM_POSITIONS = 3
    MASKED_LM_WEIGHTS = 4
    NEXT_SENTENCE_LABELS = 5
    SEGMENT_IDS = 6


class PackedFeature(Feature):
    """The features of a pack."""

    INPUT_IDS = 0
    INPUT_MASK = 1
    MASKED_LM_IDS = 2
    MASKED_LM_POSITIONS = 3
    MASKED_LM_WEIGHTS = 4
    NEXT_SENTENCE_LABELS = 5
    NEXT_SENTENCE_POSITIONS = 6
    NEXT_SENTENCE_WEIGHTS = 7
    POSITIONS = 8
    SEGMENT_IDS = 9


# --- the figures of a packing


@dataclass(frozen=True)
class PackingFigures:
    """Figures of a packing: five that are counted or proven; the others follow from them."""

    sequences: int
    packs: int
    tokens: int
    slots: int
    lower_bound: int

    @property
    def padding_tokens(self) -> int:
        """Slots without a token."""
        return self.slots - self.tokens

    @property
    def efficiency(self) -> float:
        """Real tokens / slots, 0..1; 1 where there is nothing to pack."""
        return self.tokens / self.slots if self.slots else 1.0

    @property
    def packing_factor(self) -> float:
        """Sequences per pack; 1 where there is nothing to pack."""
        return self.sequences / self.packs if self.packs else 1.0

    @property
    def gap(self) -> int:
        """Packs above the proven bound; 0 is proven optimal."""
        return self.packs - self.lower_bound

    def stored(self) -> dict[str, Any]:
        """The figures as artefacts store and print them."""
        counted, derived = ("sequences", "packs", "tokens"), ("padding_tokens", "efficiency", "packing_factor")
        return {name: getattr(self, name) for name in (*counted, *derived, "lower_bound", "gap")}


def packing_lines(packed: Any, rows: int | None = None) -> list[str]:
    """Return the lines of packs: of how many sequences (or `rows` of a table), and how full they are.

    `packed` are the totals of a plan, or the metadata of a folder.
    """
    proven = f"{packed.gap:,} more than the proven minimum" if packed.gap else "proven: none fewer is possible"
    sequences = count_of(packed.sequences, "sequence")
    if rows is not None and rows != packed.sequences:
        sequences = f"{count_of(rows, 'row')} ({sequences})"
    return [
        f"{sequences} became {count_of(packed.packs, 'pack')} ({packed.packing_factor:.2f} times fewer), {proven}",
        f"{100 * packed.efficiency:.2f} % of the slots hold tokens",
    ]


def algorithm_line(algorithm: str, used: Sequence[str], depth: int | None) -> str:
    """Return which algorithms packed; `used` are those that `algorithm` chose."""
    others = [name for name in used if name != algorithm]
    heuristics = f" (by {enumerated(others)})" if others else ""
    return f"algorithm {algorithm}{heuristics}, depth {depth}"


# --- names that stand for data instead of a file: the documentation that every CPython carries

# By name, about how many bytes the text has (it differs a little from one Python to the next).
BUILT_IN_TEXTS = {"python-docs": 470_000, "python-docstrings": 1_400_000}

# Labelled rows: docstrings, and the package of the standard library that each is from.
BUILT_IN_ROWS = ("python-docstrings",)
