"""How much a solver may do, in elementary operations: known beforehand and the same on every machine, unlike seconds.

Every loop that could go on for long tells a `Work` what it does and stops where nothing is left; what has been found by then
is returned, with the bound that is proven by then. An operation is about a nanosecond of one core. The published histograms
stay far below every limit, so a limit changes none of their plans.
"""

from __future__ import annotations

__all__ = ["BOUND_WORK", "NNLS_WORK", "OPTIMAL_WORK", "Work", "estimate_limit"]

OPTIMAL_WORK = 30e9
"""What `optimal` may do."""

NNLS_WORK = 25e9
"""What all rounds of an NNLS method may do."""

BOUND_WORK = 6e9
"""What the proof of a bound may do where the algorithm proves none itself."""

ESTIMATE_WORK = ((1024, float("inf")), (4096, 180e9), (2**63, 40e9))
"""What all rows of an estimate may do together, by the longest packs for which it holds. Up to the first of these each row
may do what a plan may, so that it says what a plan would be."""


class Work:
    """Operations that are left.

    Args:
        operations: how many; infinite for no limit.
        whole: of which this is a share: what is spent here is spent there too.
    """

    def __init__(self, operations: float = float("inf"), whole: Work | None = None) -> None:
        self.left = operations
        self._whole = whole

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left."""
        return self.left <= 0

    def spend(self, operations: float) -> None:
        """Count what was done, or is done next."""
        self.left -= operations
        if self._whole is not None:
            self._whole.spend(operations)

    def share(self, part: float) -> Work:
        """A limit of this part (0..1) of what is left, for one phase."""
        return Work(max(self.left, 0.0) * part, self)


def estimate_limit(max_sequence_length: int) -> Work | None:
    """What all rows of an estimate may do together; None where each has the limit of its own algorithm."""
    operations = next(operations for longest, operations in ESTIMATE_WORK if max_sequence_length <= longest)
    return None if operations == float("inf") else Work(operations)
