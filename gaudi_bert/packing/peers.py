"""How other tools pack: what `gaudi-bert compare` puts beside our algorithms.

Each peer is called where its package is installed and takes lengths (TRL), and otherwise stood in for by the same
heuristic, written anew: what its documentation and its source say that it does with its default settings.

- TRL, `pack_dataset(strategy="bfd")`: best-fit decreasing within each batch of 1,000 rows, as `Dataset.map` hands them over.
- seqpacker, `obfd`, its default and best: best-fit decreasing over all sequences. Any best fit of decreasing lengths has the
  packs of LPFHP without a limit of depth: a pack just filled is the tightest for the next sequence of the same length.
- NeMo, `first_fit_decreasing` and `first_fit_shuffle`: first fit over all sequences, longest first or shuffled.
- axolotl, `sample_packing`: first fit in groups of 100,000 sequences as they come, at most 200 in a pack.
- grain, `FirstFitPackIterDataset`, `BestFitPackIterDataset`: a number of open packs (here 1,024, as MaxText's own comparison
  has it), all of which are closed when a sequence fits none of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from gaudi_bert.common.arrays import Int32Array
from gaudi_bert.packing.heuristics.first_fit import pack_first_fit
from gaudi_bert.packing.heuristics.in_order import count_best_fit, count_first_fit, sorted_in_batches
from gaudi_bert.packing.heuristics.longest_pack_first import pack_longest_first
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import packs_of

__all__ = ["PEERS", "ListedLengths", "Peer", "count_trl_packs"]

TRL_BATCH = 1000
AXOLOTL_GROUP, AXOLOTL_DEPTH = 100_000, 200
GRAIN_PACKS = 1024
MOST_TRL_TOKENS = 2**28
"""TRL wants tokens, not lengths: a byte for each is made up for it, but not without end."""


@dataclass(frozen=True, eq=False)
class ListedLengths:
    """The sequences one by one, and counted.

    Attributes:
        in_order: int32 [sequences], as they come.
        shuffled: the same in a random order.
        histogram: how many there are of each length.
        depth: most sequences per pack.
    """

    in_order: Int32Array
    shuffled: Int32Array
    histogram: Histogram
    depth: int

    @property
    def slots(self) -> int:
        """Slots of a pack."""
        return self.histogram.max_sequence_length


@dataclass(frozen=True)
class Peer:
    """A packer of another tool.

    Attributes:
        tool: its package.
        algorithm: what it calls the algorithm.
        count: the packs of the same heuristic, written anew.
        installed: the packs that the package itself makes, where it can be called with lengths.
    """

    tool: str
    algorithm: str
    count: Callable[[ListedLengths], int]
    installed: Callable[[ListedLengths], int] | None = None

    def callable_for(self, lengths: ListedLengths) -> bool:
        """Whether the package itself is there and can pack these lengths: it has no limit of depth."""
        if self.installed is None or lengths.depth < lengths.slots or lengths.histogram.tokens > MOST_TRL_TOKENS:
            return False
        return importlib.util.find_spec(self.tool) is not None


def count_trl_packs(lengths: ListedLengths) -> int:
    """Packs that TRL's own `pack_dataset` makes."""
    from gaudi_bert.packing.trl import pack_with_trl

    return pack_with_trl(lengths.in_order, lengths.slots)


def _bfd_in_batches(lengths: ListedLengths) -> int:
    ordered = sorted_in_batches(lengths.in_order, TRL_BATCH)
    return count_best_fit(ordered, lengths.slots, lengths.depth, batch=TRL_BATCH)


def _bfd(lengths: ListedLengths) -> int:
    return packs_of(pack_longest_first(lengths.histogram.counts, lengths.depth))


def _ffd(lengths: ListedLengths) -> int:
    return packs_of(pack_first_fit(lengths.histogram.counts, lengths.depth))


def _first_fit_shuffled(lengths: ListedLengths) -> int:
    return count_first_fit(lengths.shuffled, lengths.slots, lengths.depth)


def _multipack(lengths: ListedLengths) -> int:
    return count_first_fit(lengths.in_order, lengths.slots, min(lengths.depth, AXOLOTL_DEPTH), batch=AXOLOTL_GROUP)


def _first_fit_open(lengths: ListedLengths) -> int:
    return count_first_fit(lengths.in_order, lengths.slots, lengths.depth, open_packs=GRAIN_PACKS)


def _best_fit_open(lengths: ListedLengths) -> int:
    return count_best_fit(lengths.in_order, lengths.slots, lengths.depth, open_packs=GRAIN_PACKS)


PEERS = (
    Peer("seqpacker", "obfd", _bfd),
    Peer("nemo", "first_fit_decreasing", _ffd),
    Peer("trl", "bfd", _bfd_in_batches, count_trl_packs),
    Peer("nemo", "first_fit_shuffle", _first_fit_shuffled),
    Peer("axolotl", "multipack", _multipack),
    Peer("grain", "best_fit", _best_fit_open),
    Peer("grain", "first_fit", _first_fit_open),
)
