"""The iterative NNLS loop with padding feedback, as Habana Labs published it ("Data Packing Process for MLPERF BERT").

Solve the weighted NNLS for the sequences that are left; round the usages down (those below 2 to the nearest integer); where that makes more
slots than there are sequences, the surplus is padding; go on with what is not covered, until fewer than 100 sequences are left or 20
rounds are over. Lengths 1 to 8 get the residual weight sqrt(8 / (2 L)), because their surplus is cheap padding.

What is left is packed by `leftovers`: "complement" is the published way, a pack (length, L - length) for each sequence; "best-fit" puts it
into the room that the trimmed surplus slots leave, then into new packs. The published listing fails on a leftover of full length (it asks
for a sequence of length 0) and may go on for ever without progress; neither happens here.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.best_fit import best_fit_into
from gaudi_bert.packing.complements import complete_by_complements
from gaudi_bert.packing.mixture import Mixture, add_packs, coverage, trim_to_exact
from gaudi_bert.packing.nnls import solve_nnls

__all__ = ["Leftovers", "iterative_nnls", "residual_weights"]

Leftovers = Literal["best-fit", "complement"]

MAX_ROUNDS = 20
FEW_SEQUENCES = 100
PADDING_LENGTHS = 8


def residual_weights(max_sequence_length: int) -> np.ndarray:
    """float64 [L]: sqrt(8 / (2 L)) for lengths 1 to 8, and 1 for the rest."""
    weights = np.ones(max_sequence_length)
    weights[:PADDING_LENGTHS] = np.sqrt(min(1.0, PADDING_LENGTHS / (2 * max_sequence_length)))
    return weights


def iterative_nnls(counts: np.ndarray, depth: int, leftovers: Leftovers = "best-fit") -> Mixture:
    """Pack by the published loop; the mixture covers `counts` exactly.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        depth: most sequences in a pack, from 1; L or more means no limit.
        leftovers: how the last sequences are packed.

    Raises:
        InputError: an unknown value of `leftovers`.
    """
    if leftovers not in ("best-fit", "complement"):
        raise InputError(f"leftovers is {leftovers!r}; it must be 'best-fit' or 'complement'")
    mixture, left = _run_rounds(np.asarray(counts, dtype=np.int64), depth)
    if leftovers == "complement":
        return complete_by_complements(mixture, counts, depth)
    return best_fit_into(trim_to_exact(mixture, counts - left), left, depth)


def _run_rounds(counts: np.ndarray, depth: int) -> tuple[Mixture, np.ndarray]:
    """Rounds of NNLS and rounding: the packs, with surplus slots, and the sequences that they do not cover."""
    weights = residual_weights(len(counts))
    mixture: Mixture = {}
    left = counts.copy()
    for _ in range(MAX_ROUNDS):
        before = int(left.sum())
        if before == 0:
            break
        packs = _rounded_packs(left, weights, depth)
        for strategy, count in packs.items():
            add_packs(mixture, strategy, count)
        left = np.maximum(left - coverage(packs, len(counts)), 0)
        if int(left.sum()) < FEW_SEQUENCES or int(left.sum()) == before:
            break
    return mixture, left


def _rounded_packs(left: np.ndarray, weights: np.ndarray, depth: int) -> Mixture:
    solution = solve_nnls(left, weights, depth)
    usage = np.where(solution.usage < 2, np.rint(solution.usage), np.floor(solution.usage)).astype(np.int64)
    packs: Mixture = {}
    for strategy, count in zip(solution.strategies, usage.tolist(), strict=True):
        add_packs(packs, strategy, count)
    return packs
