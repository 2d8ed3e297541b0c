"""The learning rate: linear warm-up, then polynomial decay to zero.

Updates are counted from 1. With W warm-up updates, N updates and peak rate r,

    rate(t) = r * t / W                               for t <= W
    rate(t) = r * (1 - (t - W) / (N - W + 1)) ** p    for t > W

so the peak is reached exactly at update W, the two pieces join without a step, no update has a rate of zero, and zero would
be reached at update N + 1. Google's BERT counts from 0 and wastes its first update on a rate of zero; otherwise the curves
are the same (`optimization.py` of google-research/bert; p = 1 there, 0.5 for LAMB in the Habana reference models).
"""

from __future__ import annotations

__all__ = ["learning_rate_at"]


def learning_rate_at(update: int, *, peak: float, warmup_updates: int, updates: int, decay_power: float) -> float:
    """The learning rate of update number `update`, counted from 1.

    Args:
        update: 1 .. `updates`; later updates get 0.
        peak: the largest rate, reached at the end of the warm-up.
        warmup_updates: how many updates the rate rises for; 0 for none.
        updates: how many updates the run has.
        decay_power: 1 is linear decay.
    """
    if update <= warmup_updates:
        return peak * update / warmup_updates
    left = 1.0 - (update - warmup_updates) / (updates - warmup_updates + 1)
    return peak * max(left, 0.0) ** decay_power
