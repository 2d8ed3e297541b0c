"""Naive twins of the pair rules: one token, one sentence at a time, as BERT's published script describes them.

The fast code draws its random numbers in another order, so these are compared by distribution, or fed the same choices.
"""

from __future__ import annotations

import random


def truncated_lengths(first: int, second: int, most: int) -> tuple[int, int]:
    """Take one token at a time from the longer segment, from the second where they are equal."""
    while first + second > most:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


def pair_lengths_of_corpus(
    corpus: list[list[int]], max_sequence_length: int, short_probability: float, generator: random.Random
) -> list[tuple[int, int, int]]:
    """(tokens of A, tokens of B, label) of every pair of one pass over `corpus`: sentence lengths, a list a document."""
    most = max_sequence_length - 3
    pairs = []
    for number, document in enumerate(corpus):
        target = generator.randint(2, most) if generator.random() < short_probability else most
        chunk: list[int] = []
        place = 0
        while place < len(document):
            chunk.append(document[place])
            if place == len(document) - 1 or sum(chunk) >= target:
                cut = generator.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
                first, label = sum(chunk[:cut]), 0
                if len(chunk) == 1 or generator.random() < 0.5:
                    label = 1
                    other = generator.choice([index for index in range(len(corpus)) if index != number])
                    second = 0
                    for length in corpus[other][generator.randrange(len(corpus[other])) :]:
                        second += length
                        if second >= target - first:
                            break
                    place -= len(chunk) - cut
                else:
                    second = sum(chunk[cut:])
                pairs.append((*truncated_lengths(first, second, most), label))
                chunk = []
            place += 1
    return pairs
