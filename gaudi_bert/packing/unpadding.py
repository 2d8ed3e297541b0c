"""Why packing scales and un-padding does not (paper 4.4 and appendix E).

Un-padding processes only real tokens, so a batch takes as long as it has tokens, and all accelerators wait for the slowest.
The paper takes the speed-ups measured on 8 GPUs with 32 sequences each, finds them Gumbel distributed (location 1.6038,
scale 0.1288), and derives one device's distribution from 1 - P_8(s) = (1 - P_1(s))^8 at the median and at the mode. Its
listing solves these two equations by Nelder-Mead; both are linear in location and scale, so here they are solved outright:
location 1.94 as printed, scale 0.318 (printed: 0.108, which meets neither equation; the paper's 50 % at 32 accelerators and
30 % at 2048 follow from 0.318). The expected speed-up of n accelerators is that of the slowest of n draws, by integration.

`linear_speed_up` asks the same of one's own data, for an ideal un-padding whose time is exactly its number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from gaudi_bert.common.arrays import FloatArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.histogram import Histogram

__all__ = ["ACCELERATORS", "MEASURED_ON_8", "Gumbel", "fit_one_device", "linear_speed_up", "speed_up"]

ACCELERATORS = tuple(2**exponent for exponent in range(12))
DEVICE_SEQUENCES = 32
QUANTILES = 200_000


@dataclass(frozen=True)
class Gumbel:
    """The Gumbel distribution P(s) = exp(-exp(-(s - location) / scale))."""

    location: float
    scale: float

    def quantile(self, share: FloatArray | float) -> FloatArray:
        """The value that `share` (0 < share < 1) of all draws stay below."""
        value: FloatArray = self.location - self.scale * np.log(-np.log(share))
        return value

    def cumulative(self, value: FloatArray | float) -> FloatArray:
        """The share of draws below `value`."""
        share: FloatArray = np.exp(-np.exp(-(np.asarray(value) - self.location) / self.scale))
        return share


MEASURED_ON_8 = Gumbel(1.6038, 0.1288)
"""Speed-up of un-padding over padding on 8 GPUs, BERT pretraining on Wikipedia, 32 sequences each (paper E)."""


def fit_one_device(measured: Gumbel = MEASURED_ON_8, devices: int = 8) -> Gumbel:
    """The distribution of one device of which the slowest of `devices` has `measured`'s median and mode (equations 13, 14).

    Raises:
        InputError: fewer than 2 devices.
    """
    if devices < 2:
        raise InputError(f"devices is {devices}; the distribution of one device can be derived from 2 or more")
    shares = np.array([0.5, np.exp(-1.0)])
    values = measured.quantile(shares)  # median and mode
    scores = Gumbel(0.0, 1.0).quantile(1 - (1 - shares) ** (1 / devices))
    scale = float((values[0] - values[1]) / (scores[0] - scores[1]))
    return Gumbel(float(values[1] - scale * scores[1]), scale)


def speed_up(one_device: Gumbel, accelerators: int) -> float:
    """Expected speed-up of un-padding on so many accelerators: that of the slowest."""
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    # The slowest of n lies below s with probability 1 - (1 - P(s))^n; expm1 and log1p keep the small tail exact.
    slowest = -np.expm1(np.log1p(-shares) / accelerators)
    return float(one_device.quantile(slowest).mean())


def linear_speed_up(histogram: Histogram, accelerators: int, device_sequences: int = DEVICE_SEQUENCES) -> float:
    """Expected speed-up of an ideal un-padding on these data: time in proportion to the tokens of the largest batch.

    Args:
        histogram: the sequences, at least one.
        accelerators: devices that wait for each other.
        device_sequences: sequences a device; their sum of tokens is taken as normal.
    """
    lengths = np.arange(1, histogram.max_sequence_length + 1)
    shares = histogram.counts / histogram.sequences
    mean = float(shares @ lengths)
    variance = float(shares @ (lengths - mean) ** 2)
    quantiles = (np.arange(QUANTILES // 100) + 0.5) / (QUANTILES // 100)
    largest = np.array([NormalDist().inv_cdf(share) for share in quantiles ** (1 / accelerators)])
    tokens = mean * device_sequences + float(largest.mean()) * np.sqrt(variance * device_sequences)
    padded_tokens = histogram.max_sequence_length * device_sequences
    return float(padded_tokens / min(tokens, padded_tokens))
