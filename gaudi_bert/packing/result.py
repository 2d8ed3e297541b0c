"""A finished packing, checked; and what solvers exchange: a result (`Solved`) and a limit of effort (`Work`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.features import PackingFigures
from gaudi_bert.packing.certificate import Certificate
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import Mixture, Strategy, check_mixture, packs_of


@dataclass(frozen=True)
class Packing(PackingFigures):
    """How a histogram is packed, and how far from the best possible that is. Checked on creation.

    Attributes:
        depth: most sequences per pack that was allowed.
        algorithm: as requested.
        algorithm_used: what returned the mixture, where `algorithm` chooses between several.
        mixture: strategies and how often each is used.
        certificate: integer prices that prove the bound.
        masked_slots: most masked positions per pack (Q), or None if unknown.
        masked_slots_needed: what the fullest strategy needs of them.
    """

    histogram: Histogram
    depth: int
    algorithm: str
    algorithm_used: str
    mixture: Mapping[Strategy, int]
    certificate: Certificate
    masked_slots: int | None = None
    masked_slots_needed: int | None = None

    def __post_init__(self) -> None:
        check_mixture(self.mixture, self.histogram, self.depth, self.masked_slots)
        if self.packs != packs_of(self.mixture):
            raise FailedError(f"{self.packs} packs, but the mixture has {packs_of(self.mixture)}; this is a defect")
        if self.packs < self.lower_bound:
            raise FailedError(f"{self.packs} packs are fewer than the bound {self.lower_bound}; the bound is wrong")

    @property
    def depth_used(self) -> int:
        """Sequences of the deepest strategy."""
        return max(map(len, self.mixture), default=0)

    @property
    def token_bound(self) -> int:
        """Packs that the tokens alone need: the theoretical limit without a limit of depth."""
        return self.histogram.token_bound


Leftovers = Literal["best-fit", "complement"]
"""How `nnls` packs the sequences that its loop leaves over."""


@dataclass(frozen=True)
class Solved:
    """What an algorithm returns: the mixture, the algorithm that was used, and the proof of its bound if it has one."""

    mixture: Mixture
    algorithm_used: str
    certificate: Certificate | None = None


# --- how much a solver may do, in elementary operations: known beforehand and the same on every machine, unlike seconds
#
# Every loop that could take long reports to a `Work` what it does and stops where nothing remains; then it returns what it
# has, with the bound that is proven by then. An operation is about a nanosecond of one core. The published histograms stay
# far below every limit, so a limit changes none of their plans.

OPTIMAL_WORK = 30e9
"""What `optimal` may do."""

NNLS_WORK = 25e9
"""What all rounds of an NNLS method may do."""

BOUND_WORK = 6e9
"""What the proof of a bound may do where the algorithm proves none itself."""

ESTIMATE_WORK = ((1024, float("inf")), (4096, 180e9), (2**63, 40e9))
"""What all rows of an estimate may do together, by the longest packs for which it holds. Up to the first of these each row
may do what a plan may, so that it equals the plan."""


class Work:
    """The remaining operations.

    Args:
        operations: how many; infinite for no limit.
        whole: of which this is a share: what is spent here is spent there too.
    """

    def __init__(self, operations: float = float("inf"), whole: Work | None = None) -> None:
        self.remaining = operations
        self._whole = whole

    @property
    def exhausted(self) -> bool:
        """Whether nothing remains."""
        return self.remaining <= 0

    def spend(self, operations: float) -> None:
        """Count what was done, or is done next."""
        self.remaining -= operations
        if self._whole is not None:
            self._whole.spend(operations)

    def share(self, part: float) -> Work:
        """A limit of this part (0..1) of what remains, for one phase."""
        return Work(max(self.remaining, 0.0) * part, self)


def estimate_limit(max_sequence_length: int) -> Work | None:
    """What all rows of an estimate may do together; None where each has its algorithm's limit."""
    operations = next(operations for longest, operations in ESTIMATE_WORK if max_sequence_length <= longest)
    return None if operations == float("inf") else Work(operations)
