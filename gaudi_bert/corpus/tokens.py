"""A block of documents as token numbers in flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from gaudi_bert.corpus.vocabulary import Vocabulary, wordpiece_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TokenBlock", "tokenize_documents"]

_SENTENCES_AT_ONCE = 4096


@dataclass(frozen=True)
class TokenBlock:
    """Token numbers of some documents, one after the other.

    Args:
        tokens: int32 [tokens].
        sentence_starts: int64 [sentences + 1], where each sentence starts in `tokens`.
        document_starts: int64 [documents + 1], where each document starts in `sentence_starts`.
    """

    tokens: np.ndarray
    sentence_starts: np.ndarray
    document_starts: np.ndarray

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.document_starts) - 1

    @property
    def sentences(self) -> int:
        """How many sentences there are."""
        return len(self.sentence_starts) - 1


@lru_cache(maxsize=2)
def _cached_tokenizer(vocabulary: Vocabulary, lower_case: bool) -> Tokenizer:
    return wordpiece_tokenizer(vocabulary.tokens, lower_case)


def tokenize_documents(documents: Sequence[Sequence[str]], vocabulary: Vocabulary, lower_case: bool) -> TokenBlock:
    """Tokenise the sentences of `documents`; sentences without a token and documents without a sentence are left out."""
    tokenizer = _cached_tokenizer(vocabulary, lower_case)
    sentences = [sentence for document in documents for sentence in document]
    pieces: list[np.ndarray] = []
    lengths = np.zeros(len(sentences), dtype=np.int64)
    for start in range(0, len(sentences), _SENTENCES_AT_ONCE):
        batch = sentences[start : start + _SENTENCES_AT_ONCE]
        encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False)]
        lengths[start : start + len(batch)] = [len(ids) for ids in encoded]
        pieces.append(np.array([token for ids in encoded for token in ids], dtype=np.int32))
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    kept_before = np.concatenate(([0], np.cumsum(lengths > 0)))
    document_starts = np.unique(np.concatenate(([0], kept_before[ends])))
    return TokenBlock(
        tokens=np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32),
        sentence_starts=np.concatenate(([0], np.cumsum(lengths[lengths > 0]))),
        document_starts=document_starts,
    )
