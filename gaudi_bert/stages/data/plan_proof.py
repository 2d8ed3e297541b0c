"""Proving the lower bounds of a plan from the prices that it carries, before anything is written by it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.artefacts.plan import Plan, PlannedGroup
from gaudi_bert.common.errors import FailedError, InputError

__all__ = ["prove_plan"]


def prove_plan(path: Path, plan: Plan, groups: Iterable[int]) -> None:
    """Recompute the bound of each of `groups`, in whole numbers, from its prices and the lengths that it packs.

    Args:
        path: of the plan, for errors.
        plan: the plan.
        groups: numbers of groups.

    Raises:
        InputError: the prices prove less than the plan claims.
    """
    from gaudi_bert.packing.certificate import Certificate, check_certificate, simple_certificate

    for number in groups:
        group = plan.groups[number]
        counts = _counts(group, plan.max_sequence_length)
        claimed = simple_certificate(counts, plan.depth)
        if group.bound_prices is not None and claimed.bound < group.lower_bound:
            claimed = Certificate(np.array(group.bound_prices, np.int64), plan.depth, group.lower_bound)
        try:
            proven = check_certificate(claimed, counts)
        except (FailedError, InputError) as error:
            raise InputError(f"{path}: group {number}: {error}; make the plan again") from error
        if not group.lower_bound <= min(proven, group.packs):
            raise InputError(
                f"{path}: group {number}: its prices prove {proven} packs, not {group.lower_bound}; make the plan again"
            )


def _counts(group: PlannedGroup, max_sequence_length: int) -> NDArray[np.int64]:
    """int64 [L]: how many sequences of each length the strategies of the group hold."""
    counts = np.zeros(max_sequence_length + 1, np.int64)
    for strategy, count in group.strategies:
        np.add.at(counts, list(strategy), count)
    return counts[1:]
