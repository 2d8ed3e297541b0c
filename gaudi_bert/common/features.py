"""Definitions that several packages share: the features of an example, the metrics of a packing, and the built-in texts.

Features are serialised in alphabetical order, and the value of a feature in its enumeration is its position in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from gaudi_bert.common.errors import join_with_and
from gaudi_bert.common.progress import format_count

# How many values a feature has in each row. There is one value for each token, for each masked-LM slot, or for each
# sequence.
Axis = Literal["tokens", "masked", "sequences"]


class Feature(IntEnum):
    """Base class for the features of a training example, such as `INPUT_IDS`."""

    @property
    def key(self) -> str:
        """The name of the feature in a TFRecord."""
        return self.name.lower()

    @property
    def kind(self) -> Literal["int64", "float32"]:
        """The dtype of the feature in a TFRecord, which is float32 for weights and otherwise int64."""
        return "float32" if self.name.endswith("_WEIGHTS") else "int64"

    @property
    def axis(self) -> Axis:
        """Whether the feature has one value per token slot, per masked-LM slot or per sequence."""
        if self.name.startswith("MASKED_LM_"):
            return "masked"
        return "sequences" if self.name.startswith("NEXT_SENTENCE_") else "tokens"


class UnpackedFeature(Feature):
    """The features of an unpacked example, which contains a single sequence padded to the length of a row."""

    INPUT_IDS = 0
    INPUT_MASK = 1
    MASKED_LM_IDS = 2
    MASKED_LM_POSITIONS = 3
    MASKED_LM_WEIGHTS = 4
    NEXT_SENTENCE_LABELS = 5
    SEGMENT_IDS = 6


class PackedFeature(Feature):
    """The features of a packed example, which contains one or several sequences."""

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
    """Metrics that describe how well sequences are packed. The properties are computed from the attributes.

    Attributes:
        sequences: The number of sequences.
        packs: The number of packs.
        tokens: The number of non-padding tokens.
        slots: The number of token slots in all packs.
        lower_bound: A proven lower bound of the number of packs.
    """

    sequences: int
    packs: int
    tokens: int
    slots: int
    lower_bound: int

    @property
    def padding_tokens(self) -> int:
        """The number of token slots that contain padding."""
        return self.slots - self.tokens

    @property
    def efficiency(self) -> float:
        """The proportion of token slots that contain no padding, from 0 to 1. It is 1 if there are no packs."""
        return self.tokens / self.slots if self.slots else 1.0

    @property
    def packing_factor(self) -> float:
        """The mean number of sequences in a pack. It is 1 if there are no packs."""
        return self.sequences / self.packs if self.packs else 1.0

    @property
    def gap(self) -> int:
        """The number of packs above the proven lower bound. If it is 0, the packing is optimal."""
        return self.packs - self.lower_bound

    def to_json_fields(self) -> dict[str, Any]:
        """Return the metrics by name, as they are stored in JSON files."""
        counted, derived = ("sequences", "packs", "tokens"), ("padding_tokens", "efficiency", "packing_factor")
        return {name: getattr(self, name) for name in (*counted, *derived, "lower_bound", "gap")}


def describe_packing(packed: Any, rows: int | None = None) -> list[str]:
    """Return lines of text that state how many sequences or table rows were packed, and how full the packs are.

    Args:
        packed: The totals of a plan, or the metadata of a folder of packs.
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
    """Return a line of text that states the packing algorithm and its depth.

    Args:
        algorithm: The algorithm that the user chose.
        used: The algorithms that were actually used for the groups of sequences.
        depth: The depth, or None.
    """
    others = [name for name in used if name != algorithm]
    heuristics = f" (by {join_with_and(others)})" if others else ""
    return f"algorithm {algorithm}{heuristics}, depth {depth}"


# --- built-in texts: the documentation that is part of every CPython installation

# The names of the built-in texts, and their approximate sizes in bytes. The sizes depend slightly on the Python version.
BUILT_IN_TEXTS = {"python-docs": 470_000, "python-docstrings": 1_400_000}

# These built-in texts are also available as labelled rows. A row is a docstring of the standard library, and its label is
# the package that contains it.
BUILT_IN_ROWS = ("python-docstrings",)
