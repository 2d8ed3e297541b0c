"""A block of documents as token numbers in flat arrays.

A space separates words whatever stands beside it: BERT's clean-up, case, accents and punctuation look at one character at a
time, and WordPiece at one word. So the tokens of a sentence are those of its words between spaces, and as few words make up
most of a text, each is given to the tokenizer once (held to the tokenizer's own result on whole sentences by a test).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.corpus.vocabulary import Vocabulary, wordpiece_tokenizer

__all__ = ["MOST_KNOWN_WORDS", "TokenBlock", "tokenize_documents"]

Tokens: TypeAlias = NDArray[np.int32]
Offsets: TypeAlias = NDArray[np.int64]

# Some 200 MB at most; then they are forgotten, and learnt again as they come.
MOST_KNOWN_WORDS = 1_000_000


@dataclass(frozen=True)
class TokenBlock:
    """Token numbers of some documents, one after the other.

    Args:
        tokens: int32 [tokens].
        sentence_starts: int64 [sentences + 1], where each sentence starts in `tokens`.
        document_starts: int64 [documents + 1], where each document starts in `sentence_starts`.
    """

    tokens: Tokens
    sentence_starts: Offsets
    document_starts: Offsets

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.document_starts) - 1

    @property
    def sentences(self) -> int:
        """How many sentences there are."""
        return len(self.sentence_starts) - 1


class _KnownWords:
    """The tokens of every word met so far, each tokenised once."""

    def __init__(self, vocabulary: Vocabulary, lower_case: bool) -> None:
        self._tokenizer = wordpiece_tokenizer(vocabulary.tokens, lower_case)
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[str, int] = {}
        self._tokens: Tokens = np.zeros(0, dtype=np.int32)
        self._starts: Offsets = np.zeros(1, dtype=np.int64)

    def _learn(self, words: Sequence[str]) -> None:
        if len(self._numbers) + len(words) > MOST_KNOWN_WORDS:
            self._forget()
        new = [word for word in dict.fromkeys(words) if word not in self._numbers]
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(new, add_special_tokens=False)]
        self._numbers.update(zip(new, range(len(self._numbers), len(self._numbers) + len(new)), strict=True))
        ends = self._starts[-1] + np.cumsum([len(ids) for ids in encoded], dtype=np.int64)
        self._tokens = np.concatenate((self._tokens, np.fromiter(chain.from_iterable(encoded), dtype=np.int32)))
        self._starts = np.concatenate((self._starts, ends))

    def tokens_of(self, words: Sequence[str]) -> tuple[Tokens, Offsets]:
        """The tokens of `words`, one word after the other, and how many each word has."""
        self._learn(words)
        numbers = np.fromiter(map(self._numbers.__getitem__, words), dtype=np.int64, count=len(words))
        starts, lengths = self._starts[numbers], np.diff(self._starts)[numbers]
        before = np.cumsum(lengths) - lengths
        places = np.repeat(starts - before, lengths) + np.arange(lengths.sum())
        return self._tokens[places], lengths


@lru_cache(maxsize=2)
def _known_words(vocabulary: Vocabulary, lower_case: bool) -> _KnownWords:
    return _KnownWords(vocabulary, lower_case)


def tokenize_documents(documents: Sequence[Sequence[str]], vocabulary: Vocabulary, lower_case: bool) -> TokenBlock:
    """Tokenise the sentences of `documents`; sentences without a token and documents without a sentence are left out."""
    sentences = [sentence for document in documents for sentence in document]
    if not sentences:
        return TokenBlock(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    tokens, word_lengths = _known_words(vocabulary, lower_case).tokens_of(" ".join(sentences).split(" "))
    words = np.array([sentence.count(" ") + 1 for sentence in sentences], dtype=np.int64)
    lengths = np.add.reduceat(word_lengths, np.cumsum(words) - words)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    kept_before = np.concatenate(([0], np.cumsum(lengths > 0)))
    document_starts = np.unique(np.concatenate(([0], kept_before[ends])))
    return TokenBlock(
        tokens=tokens,
        sentence_starts=np.concatenate(([0], np.cumsum(lengths[lengths > 0]))),
        document_starts=document_starts,
    )
