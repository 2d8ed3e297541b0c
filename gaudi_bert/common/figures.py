"""The figures of a packing: five that are counted or proven, and the others, which follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PackingFigures:
    """How well some sequences are packed.

    Attributes:
        slots: of all packs.
        lower_bound: packs that no packing can do without, proven.
    """

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
        return {
            "sequences": self.sequences,
            "packs": self.packs,
            "tokens": self.tokens,
            "padding_tokens": self.padding_tokens,
            "efficiency": self.efficiency,
            "packing_factor": self.packing_factor,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
        }
