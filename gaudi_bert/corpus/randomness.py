"""A stream of random numbers with a fixed definition, for loops that draw one number at a time.

The words are the raw 64-bit outputs of Philox (see `gaudi_bert.common.permutation`). From a word w, an integer below n is
floor(w n / 2^64) (biased by less than n / 2^64) and a real number in [0, 1) is its upper 53 bits. Nothing here depends on
the version of Python or numpy.
"""

from __future__ import annotations

from gaudi_bert.common.permutation import philox

__all__ = ["RandomStream"]

_WORDS_AT_ONCE = 1024


class RandomStream:
    """Random numbers fixed for ever by `seed`, `purpose` and `indices`."""

    def __init__(self, seed: int, purpose: str, *indices: int) -> None:
        self._generator = philox(seed, purpose, *indices)
        self._words: list[int] = []

    def word(self) -> int:
        """The next 64 random bits."""
        if not self._words:
            self._words = self._generator.random_raw(_WORDS_AT_ONCE).tolist()
            self._words.reverse()
        return self._words.pop()

    def below(self, bound: int) -> int:
        """An integer in [0, bound)."""
        return (self.word() * bound) >> 64

    def between(self, lowest: int, highest: int) -> int:
        """An integer in [lowest, highest], both included."""
        return lowest + self.below(highest - lowest + 1)

    def chance(self, probability: float) -> bool:
        """True with `probability`."""
        return (self.word() >> 11) * 2.0**-53 < probability

    def heads(self, tosses: int) -> int:
        """How many of `tosses` fair coins show heads."""
        count = 0
        while tosses > 0:
            used = min(tosses, 64)
            count += (self.word() >> (64 - used)).bit_count()
            tosses -= used
        return count
