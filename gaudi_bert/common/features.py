"""Definitions that several folders share: the features of an example, the metrics of a packing, and the built-in texts.

The value of a feature in its enumeration is its position in alphabetical order, in which features are serialised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from gaudi_bert.common.errors import join_with_and
from gaudi_bert.common.progress import format_count

Axis = Literal["tokens", "masked", "sequences"]
"""What a feature has one value for: each slot of the row, each masked-LM slot, or each sequence of the row."""


class Feature(IntEnum):
    """Base class of the two feature enumerations."""

    @property
    def key(self) -> str:
        """The name of the feature in a record."""
        return self.name.lower()

    @property
    def kind(self) -> Literal["int64", "float32"]:
        """The dtype of the feature in a record: float32 for weights, otherwise int64."""
        return "float32" if self.name.endswith("_WEIGHTS") else "int64"

    @property
    def axis(self) -> Axis:
        """What the feature has one value for."""
        if self.name.startswith("MASKED_LM_"):
            return "masked"
        return "sequences" if self.name.startswith("NEXT_SENTENCE_") else "tokens"


class UnpackedFeature(Feature):
    """The features of an unpacked example, which is one sequence padded to a row."""

    INPUT_IDS = 0
    INPUT_MASK = 1
    MASKED_LM_IDS = 2
    MASKED_LM_POSITIONS = 3
    MASKED_LM_WEIGHTS = 4
    NEXT_SENTENCE_LABELS = 5
    SEGMENT_IDS = 6


class PackedFeature(Feature):
    """The features of a packed example."""

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


# --- metrics of a packing


@dataclass(frozen=True)
class PackingMetrics:
    """Metrics of a packing. Five are counted or proven, and the others are derived from them.

    Attributes:
        sequences: Number of sequences.
        packs: Number of packs.
        tokens: Number of non-padding tokens.
        slots: Number of token slots of all packs.
        lower_bound: No packing has fewer packs than this.
    """

    sequences: int
    packs: int
    tokens: int
    slots: int
    lower_bound: int

    @property
    def padding_tokens(self) -> int:
        """The number of slots that contain padding."""
        return self.slots - self.tokens

    @property
    def efficiency(self) -> float:
        """The number of non-padding tokens divided by the number of slots, from 0 to 1. It is 1 if nothing is packed."""
        return self.tokens / self.slots if self.slots else 1.0

    @property
    def packing_factor(self) -> float:
        """The mean number of sequences in a pack. It is 1 if nothing is packed."""
        return self.sequences / self.packs if self.packs else 1.0

    @property
    def gap(self) -> int:
        """The number of packs more than the lower bound. A packing with gap 0 is optimal."""
        return self.packs - self.lower_bound

    def to_json_fields(self) -> dict[str, Any]:
        """Return the metrics by name, in the form in which artefacts store them."""
        counted, derived = ("sequences", "packs", "tokens"), ("padding_tokens", "efficiency", "packing_factor")
        return {name: getattr(self, name) for name in (*counted, *derived, "lower_bound", "gap")}


def describe_packing(packed: Any, rows: int | None = None) -> list[str]:
    """Return lines of text about packs: how many sequences or table rows they contain, and how full they are.

    Args:
        packed: The totals of a plan, or the metadata of a folder.
        rows: The number of table rows, if the sequences come from a table.
    """
    proven = f"{packed.gap:,} more than the proven minimum" if packed.gap else "which is proven to be the minimum"
    sequences = format_count(packed.sequences, "sequence")
    if rows is not None and rows != packed.sequences:
        sequences = f"{format_count(rows, 'row')} ({sequences})"
    return [
        f"{sequences} became {format_count(packed.packs, 'pack')} ({packed.packing_factor:.2f} times fewer), {proven}",
        f"{100 * packed.efficiency:.2f} % of the slots hold tokens",
    ]


def describe_algorithm(algorithm: str, used: Sequence[str], depth: int | None) -> str:
    """Return a line of text about the algorithm of a packing.

    Args:
        algorithm: The algorithm that the user chose.
        used: The algorithms that it used for the groups, which may be others.
        depth: The depth, or None.
    """
    others = [name for name in used if name != algorithm]
    heuristics = f" (by {join_with_and(others)})" if others else ""
    return f"algorithm {algorithm}{heuristics}, depth {depth}"


# --- built-in texts: names that stand for the documentation that comes with every CPython

# The approximate number of bytes of each text, which depends slightly on the Python version.
BUILT_IN_TEXTS = {"python-docs": 470_000, "python-docstrings": 1_400_000}

# Texts that are also available as labelled rows: a docstring, and the package of the standard library that it is from.
BUILT_IN_ROWS = ("python-docstrings",)
