from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.arrays import random_words
from gaudi_bert.corpus.pairs import RandomStream, choose_pairs, lengths_that_fit
from gaudi_bert.corpus.vocabulary import TokenBlock
from tests.builders.properties import examples
from tests.oracles.corpus_pairs import pair_lengths_of_corpus, truncated_lengths

Corpus = list[list[int]]

corpora = st.lists(st.lists(st.integers(1, 23), min_size=1, max_size=13), min_size=1, max_size=5)


def block_of(corpus: Corpus) -> TokenBlock:
    """Documents with sentences of the given lengths; every token is its own place."""
    lengths = [length for document in corpus for length in document]
    return TokenBlock(
        tokens=np.arange(sum(lengths), dtype=np.int32),
        sentence_starts=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        document_starts=np.concatenate(([0], np.cumsum([len(document) for document in corpus], dtype=np.int64))),
    )


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 31))
def test_truncation_keeps_what_the_loop_keeps(first: int, second: int, most: int) -> None:
    assert lengths_that_fit(first, second, most) == truncated_lengths(first, second, most)


@examples(150)
@given(corpora, st.integers(8, 47), st.floats(0, 1), st.integers(0, 2**31))
def test_pairs_are_well_formed(corpus: Corpus, length: int, short: float, seed: int) -> None:
    block = block_of(corpus)
    pairs = choose_pairs(block, length, short, RandomStream(seed, "test"))
    first_lengths, second_lengths = pairs.first_stop - pairs.first_start, pairs.second_stop - pairs.second_start
    assert len(pairs) >= len(corpus)
    assert (first_lengths >= 1).all()
    assert (second_lengths >= 1).all()
    assert (first_lengths + second_lengths <= length - 3).all()
    document_borders = block.sentence_starts[block.document_starts]
    document_of = np.searchsorted(document_borders, np.arange(len(block.tokens)), side="right") - 1
    for start, stop in ((pairs.first_start, pairs.first_stop), (pairs.second_start, pairs.second_stop)):
        assert (document_of[start] == document_of[stop - 1]).all()
    same_document = document_of[pairs.first_start] == document_of[pairs.second_start]
    assert same_document[pairs.labels == 0].all()
    assert (pairs.second_start >= pairs.first_stop)[pairs.labels == 0].all()
    if len(corpus) > 1:
        assert not same_document[pairs.labels == 1].any()


def test_without_truncation_every_token_is_used_once_as_first_or_real_second() -> None:
    corpus = [[3, 4, 5, 6, 7, 8, 9] * 5, [2, 3, 5, 7, 11] * 7, [13]]
    block = block_of(corpus)
    pairs = choose_pairs(block, 128, 0.0, RandomStream(5, "test"))
    uses = np.zeros(len(block.tokens), dtype=int)
    for row in range(len(pairs)):
        uses[pairs.first_start[row] : pairs.first_stop[row]] += 1
        if pairs.labels[row] == 0:
            uses[pairs.second_start[row] : pairs.second_stop[row]] += 1
    fits = pairs.first_stop - pairs.first_start + pairs.second_stop - pairs.second_start < 125
    assert fits.mean() < 1, "some pairs are cut, or the case shows nothing"
    assert uses.max() == 1
    assert uses.mean() > 0.9


def test_one_document_takes_its_random_segment_from_itself() -> None:
    pairs = choose_pairs(block_of([[5]]), 16, 0.0, RandomStream(1, "test"))
    columns = (pairs.first_start, pairs.first_stop, pairs.second_start, pairs.second_stop, pairs.labels)
    assert [column.tolist() for column in columns] == [[0], [5], [0], [5], [1]]


def test_no_documents_no_pairs() -> None:
    empty = TokenBlock(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert len(choose_pairs(empty, 16, 0.1, RandomStream(1, "test"))) == 0


@pytest.mark.parametrize("length", [29, 64])
def test_same_distribution_as_the_naive_twin(length: int) -> None:
    generator = random.Random(3)
    corpus = [[generator.randint(1, 30) for _ in range(generator.randint(1, 40))] for _ in range(60)]
    block = block_of(corpus)
    rounds = 40
    fast, naive = [], []
    for seed in range(rounds):
        pairs = choose_pairs(block, length, 0.1, RandomStream(seed, "test"))
        first_lengths, second_lengths = pairs.first_stop - pairs.first_start, pairs.second_stop - pairs.second_start
        fast.append((len(pairs), first_lengths.mean(), second_lengths.mean(), pairs.labels.mean()))
        rows = np.array(pair_lengths_of_corpus(corpus, length, 0.1, random.Random(seed)))
        naive.append((len(rows), *rows.mean(axis=0)))
    for mine, theirs in zip(zip(*fast, strict=True), zip(*naive, strict=True), strict=True):
        spread = statistics.stdev(theirs) / rounds**0.5
        assert abs(statistics.mean(mine) - statistics.mean(theirs)) < 5 * spread


#


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
