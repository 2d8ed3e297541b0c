"""The learning rate: linear warm-up, then polynomial decay to zero.

Updates are counted from 1. With W warm-up updates, N updates, peak rate r and power p,

    rate(t) = r * t / W                                  for t <= W
    rate(t) = r * (1 - (t - W) / (N - W + 1)) ** p       for t > W, `decay_from: warmup`
    rate(t) = r * (1 - (t - 1) / N) ** p                 for t > W, `decay_from: start`

so no update has a rate of zero, and zero would be reached at update N + 1. `warmup` reaches the peak at update W and goes
down from there without a step. `start` decays as if there had been no warm-up, so the rate falls at the end of the
warm-up: with 2,000 of 7,038 updates and p = 0.5 from r to 0.846 r.

Who has which: google-research/bert (`optimization.py`, p = 1) decays from the start, for its only optimizer, Adam.
NVIDIA's and Habana's reference models raise Adam's curve until the pieces join (`warmup`), and leave that of LAMB
(p = 0.5) as it is (`start`); MLPerf's recipe has no warm-up and p = 1. All of them count updates from 0, so that their
warm-up is behind ours by one update, whose rate is zero; after the warm-up `start` is theirs, update by update.
"""

from __future__ import annotations

from gaudi_bert.config.sections import TrainingSettings


def learning_rate_at(update: int, settings: TrainingSettings) -> float:
    """The learning rate of update number `update`, counted from 1; updates after the last one get 0."""
    peak, warmup, updates = settings.learning_rate, settings.warmup_updates, settings.updates
    if update <= warmup:
        return peak * update / warmup
    if settings.decay_from == "start":
        remaining = 1.0 - (update - 1) / updates
    else:
        remaining = 1.0 - (update - warmup) / (updates - warmup + 1)
    return peak * max(remaining, 0.0) ** settings.decay_power
