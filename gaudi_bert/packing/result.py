"""A finished packing: the mixture with its proven bound and all that is said of its quality. Checked on creation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gaudi_bert.common.errors import FailedError
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import Mixture, Strategy, check_mixture, packs_of

if TYPE_CHECKING:
    from gaudi_bert.packing.certificate import Certificate

__all__ = ["Packing", "Solved"]


@dataclass(frozen=True)
class Solved:
    """What an algorithm returns: the mixture, the name of what made it, and the proof of its bound if it made one."""

    mixture: Mixture
    algorithm_used: str
    certificate: Certificate | None = None


@dataclass(frozen=True)
class Packing:
    """How a histogram is packed, and how far from the best possible that is.

    Attributes:
        histogram: what is packed.
        depth: most sequences per pack that was allowed.
        algorithm: what was asked for.
        algorithm_used: what made the mixture, where `algorithm` chooses between several.
        mixture: strategies and how often each is used.
        lower_bound: packs that no packing of this depth can do without, proven.
        certificate: integer prices that prove the bound.
        masked_slots: most masked positions per pack (Q), or None where the data did not say.
        masked_slots_needed: what the fullest strategy needs of them.

    Raises:
        FailedError: the mixture is no packing of the histogram, or has fewer packs than the bound; a defect in either case.
    """

    histogram: Histogram
    depth: int
    algorithm: str
    algorithm_used: str
    mixture: Mapping[Strategy, int]
    lower_bound: int
    certificate: Certificate | None = None
    masked_slots: int | None = None
    masked_slots_needed: int | None = None

    def __post_init__(self) -> None:
        check_mixture(self.mixture, self.histogram, self.depth, self.masked_slots)
        if self.packs < self.lower_bound:
            raise FailedError(f"{self.packs} packs are fewer than the bound {self.lower_bound}; the bound is wrong")

    @property
    def packs(self) -> int:
        """Number of packs."""
        return packs_of(self.mixture)

    @property
    def gap(self) -> int:
        """Packs above the proven bound; 0 is proven optimal."""
        return self.packs - self.lower_bound

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.histogram.sequences

    @property
    def tokens(self) -> int:
        """Number of real tokens."""
        return self.histogram.tokens

    @property
    def padding_tokens(self) -> int:
        """Slots without a token."""
        return self.packs * self.histogram.max_sequence_length - self.tokens

    @property
    def efficiency(self) -> float:
        """Real tokens / slots, 0..1; 1 where there is nothing to pack."""
        slots = self.packs * self.histogram.max_sequence_length
        return self.tokens / slots if slots else 1.0

    @property
    def packing_factor(self) -> float:
        """Sequences per pack: the speed-up over one sequence per pack; 1 where there is nothing to pack."""
        return self.sequences / self.packs if self.packs else 1.0

    @property
    def depth_used(self) -> int:
        """Sequences of the deepest strategy."""
        return max(map(len, self.mixture), default=0)

    @property
    def strategies_used(self) -> int:
        """Number of different strategies."""
        return len(self.mixture)

    @property
    def token_bound(self) -> int:
        """The theoretical limit with no limit of depth: packs that the tokens alone need."""
        return self.histogram.token_bound

    def summary(self) -> dict[str, Any]:
        """What is printed of a packing."""
        return {
            "packs": self.packs,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "padding_tokens": self.padding_tokens,
            "efficiency": self.efficiency,
            "packing_factor": self.packing_factor,
            "depth_used": self.depth_used,
            "strategies_used": self.strategies_used,
            "algorithm": self.algorithm,
        }
