"""Pairs of segments for the next-sentence task, as BERT's `create_pretraining_data.py` chooses them (Devlin et al., 2019).

A document is walked from its first sentence. Sentences are gathered until they hold the target length: the longest pair,
L - 3 tokens, or for one document in ten a random shorter one. A random cut makes the first of them segment A. With
probability 1/2 (and always where one sentence was gathered) segment B comes from a random position in another document,
label 1, and the sentences behind the cut are put back to be gathered again; otherwise they are segment B, label 0. A pair
that is too long loses tokens from its longer segment (B where they are equal), each from the front or the back at random.

A segment is a run of tokens of the block, so a pair is four numbers. Which tokens the one-by-one truncation keeps needs no
loop: with m = L - 3 tokens to keep, B keeps min(|B|, max(floor(m/2), m - |A|)) and A the rest, and how many of the lost ones
were in front is a sum of fair coins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import IntArray, philox
from gaudi_bert.corpus.vocabulary import TokenBlock

SPECIAL_TOKENS_IN_PAIR = 3
_SHORTEST_PAIR = 2
_RANDOM_NEXT_PROBABILITY = 0.5
_WORDS_AT_ONCE = 1024


class RandomStream:
    """Random numbers for loops that draw one at a time, fixed for ever by `seed`, `purpose` and `indices`.

    The words are the raw 64-bit outputs of Philox (see `gaudi_bert.common.arrays`). From a word w, an integer below n
    is floor(w n / 2^64) (biased by less than n / 2^64) and a real number in [0, 1) is its upper 53 bits. Nothing here
    depends on the version of Python or numpy.
    """

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


@dataclass(frozen=True)
class SegmentPairs:
    """n pairs; all arrays are int64 [n] and count in tokens of the block.

    Args:
        first_start, first_stop: segment A is `tokens[first_start:first_stop]`.
        second_start, second_stop: segment B.
        labels: 0 = B really follows A, 1 = B is from another document.
    """

    first_start: IntArray
    first_stop: IntArray
    second_start: IntArray
    second_stop: IntArray
    labels: IntArray

    def __len__(self) -> int:
        return len(self.labels)


def choose_pairs(
    block: TokenBlock, max_sequence_length: int, short_sequence_probability: float, random: RandomStream
) -> SegmentPairs:
    """The pairs of one pass over all documents of `block`."""
    most_tokens = max_sequence_length - SPECIAL_TOKENS_IN_PAIR
    starts = block.sentence_starts.tolist()
    documents = block.document_starts.tolist()
    rows: list[tuple[int, int, int, int, int]] = []
    for document in range(block.documents):
        target = most_tokens
        if random.chance(short_sequence_probability):
            target = random.between(_SHORTEST_PAIR, most_tokens)
        _pairs_of_document(rows, starts, documents, document, target, most_tokens, random)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return SegmentPairs(*(np.ascontiguousarray(column) for column in columns.T))


def _pairs_of_document(
    rows: list[tuple[int, int, int, int, int]],
    starts: list[int],
    documents: list[int],
    document: int,
    target: int,
    most_tokens: int,
    random: RandomStream,
) -> None:
    first, end = documents[document], documents[document + 1]
    while first < end:
        stop = first + 1
        while stop < end and starts[stop] - starts[first] < target:
            stop += 1
        cut = first + random.between(1, stop - first - 1) if stop - first >= 2 else stop
        if stop - first == 1 or random.chance(_RANDOM_NEXT_PROBABILITY):
            least_tokens = target - (starts[cut] - starts[first])
            second = _random_segment(starts, documents, document, least_tokens, random)
            label, following = 1, cut
        else:
            second = (starts[cut], starts[stop])
            label, following = 0, stop
        rows.append((*_truncate((starts[first], starts[cut]), second, most_tokens, random), label))
        first = following


def _random_segment(
    starts: list[int], documents: list[int], document: int, least_tokens: int, random: RandomStream
) -> tuple[int, int]:
    """From a random sentence of another document: at least one sentence, and at least `least_tokens` tokens if it has them.

    In a block of one document it is taken from that document, as Google's script does when it finds no other.
    """
    others = len(documents) - 2
    other = document
    if others > 0:
        other = random.below(others)
        other += other >= document
    end = documents[other + 1]
    first = documents[other] + random.below(end - documents[other])
    stop = first + 1
    while stop < end and starts[stop] - starts[first] < least_tokens:
        stop += 1
    return starts[first], starts[stop]


def lengths_that_fit(first_length: int, second_length: int, most_tokens: int) -> tuple[int, int]:
    """How many tokens of A and B remain when the longer one (B where equal) loses one at a time until they fit."""
    if first_length + second_length <= most_tokens:
        return first_length, second_length
    second_length = min(second_length, max(most_tokens // 2, most_tokens - first_length))
    return most_tokens - second_length, second_length


def _truncate(
    first: tuple[int, int], second: tuple[int, int], most_tokens: int, random: RandomStream
) -> tuple[int, int, int, int]:
    first_length, second_length = lengths_that_fit(first[1] - first[0], second[1] - second[0], most_tokens)
    first_start = first[0] + random.heads(first[1] - first[0] - first_length)
    second_start = second[0] + random.heads(second[1] - second[0] - second_length)
    return first_start, first_start + first_length, second_start, second_start + second_length
