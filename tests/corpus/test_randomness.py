from __future__ import annotations

import statistics

from gaudi_bert.common.permutation import random_words
from gaudi_bert.corpus.randomness import RandomStream


def test_words_are_those_of_the_documented_generator() -> None:
    stream = RandomStream(7, "purpose", 3, 1)
    assert [stream.word() for _ in range(2500)] == random_words(2500, 7, "purpose", 3, 1).tolist()


def test_numbers_stay_in_their_ranges_and_are_spread_evenly() -> None:
    stream = RandomStream(1, "ranges")
    drawn = [stream.between(2, 6) for _ in range(5000)]
    assert set(drawn) == {2, 3, 4, 5, 6}
    assert abs(statistics.mean(drawn) - 4) < 0.1
    assert abs(statistics.mean(stream.chance(0.1) for _ in range(20000)) - 0.1) < 0.01
    assert not any(stream.chance(0.0) for _ in range(100))
    assert all(stream.chance(1.0) for _ in range(100))


def test_heads_of_many_tosses() -> None:
    stream = RandomStream(1, "heads")
    assert stream.heads(0) == 0
    for tosses in (1, 63, 64, 65, 1000):
        drawn = [stream.heads(tosses) for _ in range(500)]
        assert all(0 <= heads <= tosses for heads in drawn)
        assert abs(statistics.mean(drawn) / tosses - 0.5) < 0.08
