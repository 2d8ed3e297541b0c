"""Pairs of segments for the next-sentence task, as BERT's `create_pretraining_data.py` chooses them (Devlin et al., 2019).

A document is walked from its first sentence. Sentences are gathered until they hold the target length: the longest pair,
L - 3 tokens, or for one document in ten a random shorter one. A random cut makes the first of them segment A. With
probability 1/2 (and always where one sentence was gathered) segment B is taken from a random place of another document,
label 1, and the sentences behind the cut are put back to be gathered again; otherwise they are segment B, label 0. A pair
that is too long loses tokens from its longer segment (B where they are equal), each from the front or the back at random.

A segment is a run of tokens of the block, so a pair is four numbers. Which tokens the one-by-one truncation keeps needs no
loop: with m = L - 3 tokens to keep, B keeps min(|B|, max(floor(m/2), m - |A|)) and A the rest, and how many of the lost ones
were in front is a sum of fair coins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.corpus.randomness import RandomStream
from gaudi_bert.corpus.tokens import TokenBlock

__all__ = ["SPECIAL_TOKENS_IN_PAIR", "SegmentPairs", "choose_pairs", "kept_tokens"]

Integers: TypeAlias = NDArray[np.int64]

SPECIAL_TOKENS_IN_PAIR = 3
_SHORTEST_PAIR = 2
_RANDOM_NEXT_PROBABILITY = 0.5


@dataclass(frozen=True)
class SegmentPairs:
    """n pairs; all arrays are int64 [n] and count in tokens of the block.

    Args:
        first_start, first_stop: segment A is `tokens[first_start:first_stop]`.
        second_start, second_stop: segment B.
        labels: 0 = B really follows A, 1 = B is from another document.
    """

    first_start: Integers
    first_stop: Integers
    second_start: Integers
    second_stop: Integers
    labels: Integers

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
            wanted = target - (starts[cut] - starts[first])
            second = _random_segment(starts, documents, document, wanted, random)
            label, following = 1, cut
        else:
            second = (starts[cut], starts[stop])
            label, following = 0, stop
        rows.append((*_truncate((starts[first], starts[cut]), second, most_tokens, random), label))
        first = following


def _random_segment(
    starts: list[int], documents: list[int], document: int, wanted: int, random: RandomStream
) -> tuple[int, int]:
    """At least one sentence, and at least `wanted` tokens if there are so many, from a random sentence of another document.

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
    while stop < end and starts[stop] - starts[first] < wanted:
        stop += 1
    return starts[first], starts[stop]


def kept_tokens(first_length: int, second_length: int, most_tokens: int) -> tuple[int, int]:
    """How many tokens of A and B remain when the longer one (B where equal) loses one at a time until they fit."""
    if first_length + second_length <= most_tokens:
        return first_length, second_length
    second_kept = min(second_length, max(most_tokens // 2, most_tokens - first_length))
    return most_tokens - second_kept, second_kept


def _truncate(
    first: tuple[int, int], second: tuple[int, int], most_tokens: int, random: RandomStream
) -> tuple[int, int, int, int]:
    first_kept, second_kept = kept_tokens(first[1] - first[0], second[1] - second[0], most_tokens)
    first_start = first[0] + random.heads(first[1] - first[0] - first_kept)
    second_start = second[0] + random.heads(second[1] - second[0] - second_kept)
    return first_start, first_start + first_kept, second_start, second_start + second_kept
