"""Read or train a WordPiece vocabulary, and convert documents to token ids.

The same text always gives the same vocabulary. The trainer of the `tokenizers` library visits characters in the order of a
randomised hash table, so the order of their tokens would vary. Therefore all characters, alone and as `##` continuations,
are passed to it as reserved tokens in a fixed order.

A sentence is split at spaces, and each word is tokenized separately. This gives the tokens of the sentence, because BERT's
normalization handles one character at a time and WordPiece one word at a time. Most of a text consists of few different
words, so the tokens of each word are computed once and kept.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gaudi_bert.common.arrays import BoolArray, Int32Array, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LARGEST_ALPHABET = 1000
# A word with more characters than this becomes [UNK], as in Google's tokenizer.
_LONGEST_WORD_CHARACTERS = 200
# The maximum number of words in the cache of token ids. A full cache takes about 200 MB. If new words would exceed this
# number, the cache is cleared first.
MOST_KNOWN_WORDS = 1_000_000


# --- the vocabulary


@dataclass(frozen=True)
class Vocabulary:
    """A WordPiece vocabulary.

    Attributes:
        tokens: The tokens in the order of vocab.txt. The index of a token is its id.
    """

    tokens: tuple[str, ...]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def token_id(self, token: str) -> int:
        """Return the id of a token.

        Raises:
            ValueError: The vocabulary does not contain the token.
        """
        return self.tokens.index(token)

    @property
    def text(self) -> str:
        """The content of vocab.txt."""
        return "".join(f"{token}\n" for token in self.tokens)

    @property
    def sha256(self) -> str:
        """The SHA-256 of vocab.txt."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    def mark_continuations(self) -> BoolArray:
        """Return a mask of the tokens that continue a word (`##...`), bool [vocabulary]."""
        return np.array([token.startswith("##") for token in self.tokens], dtype=bool)


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a vocab.txt file, which contains one token per line.

    Raises:
        InputError: The file cannot be read, lacks a special token, or contains a token twice.
    """
    try:
        lines = read_file(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: the vocabulary is not UTF-8 at byte {error.start}; pass a vocab.txt with one token per line"
        ) from error
    if lines and not lines[-1]:
        lines.pop()
    tokens = tuple(line.rstrip("\r") for line in lines)
    missing = [token for token in SPECIAL_TOKENS if token not in tokens]
    if missing:
        raise InputError(
            f"{path}: the vocabulary lacks {' '.join(missing)}; add all of {' '.join(SPECIAL_TOKENS)}, which BERT requires"
        )
    first_line: dict[str, int] = {}
    for number, token in enumerate(tokens, start=1):
        if token in first_line:
            first = first_line[token]
            raise InputError(
                f"{path}: line {number}: token {token!r} is already on line {first}; rename the token on line {first}, for"
                f" example to [unused-{first}] (removing the line would change the ids of all later tokens)"
            )
        first_line[token] = number
    return Vocabulary(tokens)


def _make_wordpiece_tokenizer(tokens: Iterable[str], lower_case: bool) -> Tokenizer:
    """Create a BERT tokenizer with the given tokens.

    It applies Google's text normalization, splits at spaces, punctuation and CJK characters, and divides words by WordPiece.

    Args:
        tokens: The tokens in the order of their ids.
        lower_case: Whether to convert text to lower case and remove accents.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    numbers = {token: number for number, token in enumerate(tokens)}
    model = models.WordPiece(vocab=numbers, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD_CHARACTERS)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def train_vocabulary(documents: Callable[[], Iterable[list[str]]], size: int, lower_case: bool) -> Vocabulary:
    """Train a WordPiece vocabulary on documents.

    The memory grows with the number of different words, and not with the size of the text.

    Args:
        documents: Called twice. Each time it must return all documents, each a list of sentences.
        size: The maximum number of tokens.
        lower_case: Whether to convert text to lower case and remove accents.

    Raises:
        InputError: `size` is too small for the characters of the text.
    """
    from tokenizers import trainers

    tokenizer = _make_wordpiece_tokenizer(["[UNK]"], lower_case)
    alphabet = _collect_alphabet(documents(), tokenizer)
    reserved = [*SPECIAL_TOKENS, *alphabet, *(f"##{character}" for character in alphabet)]
    if size <= len(reserved):
        problem = f"the {len(alphabet)} different characters of the text alone require {len(reserved)} tokens"
        raise InputError(f"prepare.train_vocab = {size}: {problem}; set it to at least {2 * len(reserved)}")
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=reserved,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(), trainer)
    numbers = tokenizer.get_vocab()
    return Vocabulary(tuple(sorted(numbers, key=numbers.__getitem__)))


def _collect_alphabet(documents: Iterable[list[str]], tokenizer: Tokenizer) -> list[str]:
    """Return the 1,000 most frequent characters of the documents after normalization, sorted by code point."""
    raw: Counter[str] = Counter()
    for sentences in documents:
        for sentence in sentences:
            raw.update(sentence)
    normalised: Counter[str] = Counter()
    for character, count in raw.items():
        for part in tokenizer.normalizer.normalize_str(character):
            if not part.isspace():
                normalised[part] += count
    ranked = sorted(normalised, key=lambda character: (-normalised[character], character))
    return sorted(ranked[:_LARGEST_ALPHABET])


# --- documents as tokens


@dataclass(frozen=True)
class TokenBlock:
    """The token ids of several documents, with the positions where sentences and documents start.

    Attributes:
        tokens: int32 [tokens], the token ids.
        sentence_starts: int64 [sentences + 1], the index in `tokens` at which each sentence starts, and at last the number
            of tokens.
        document_starts: int64 [documents + 1], the index in `sentence_starts` at which each document starts, and at last the
            number of sentences.
    """

    tokens: Int32Array
    sentence_starts: IntArray
    document_starts: IntArray

    @property
    def document_count(self) -> int:
        """The number of documents."""
        return len(self.document_starts) - 1

    @property
    def sentence_count(self) -> int:
        """The number of sentences."""
        return len(self.sentence_starts) - 1


class _WordCache:
    """A word tokenizer with a cache of token ids, so that frequent words are tokenized only once."""

    def __init__(self, vocabulary: Vocabulary, lower_case: bool) -> None:
        self._tokenizer = _make_wordpiece_tokenizer(vocabulary.tokens, lower_case)
        self._clear()

    def _clear(self) -> None:
        """Remove all words from the cache."""
        self._numbers: dict[str, int] = {}
        self._tokens: Int32Array = np.zeros(0, dtype=np.int32)
        self._starts: IntArray = np.zeros(1, dtype=np.int64)

    def _add_words(self, words: Sequence[str]) -> None:
        """Tokenize words that are not yet in the cache, and add their token ids to the cache. If the cache would become too
        large, clear it first.
        """
        if len(self._numbers) + len(words) > MOST_KNOWN_WORDS:
            self._clear()
        new = [word for word in dict.fromkeys(words) if word not in self._numbers]
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(new, add_special_tokens=False)]
        self._numbers.update(zip(new, range(len(self._numbers), len(self._numbers) + len(new)), strict=True))
        ends = self._starts[-1] + np.cumsum([len(ids) for ids in encoded], dtype=np.int64)
        self._tokens = np.concatenate((self._tokens, np.fromiter(chain.from_iterable(encoded), dtype=np.int32)))
        self._starts = np.concatenate((self._starts, ends))

    def tokenize_words(self, words: Sequence[str]) -> tuple[Int32Array, IntArray]:
        """Return the token ids of all words, and the number of tokens of each word.

        Returns:
            int32 [tokens], the ids of all words one after another, and int64 [words].
        """
        self._add_words(words)
        numbers = np.fromiter(map(self._numbers.__getitem__, words), dtype=np.int64, count=len(words))
        starts, lengths = self._starts[numbers], np.diff(self._starts)[numbers]
        before = np.cumsum(lengths) - lengths
        return self._tokens[np.repeat(starts - before, lengths) + np.arange(lengths.sum())], lengths


_get_word_cache = lru_cache(maxsize=2)(_WordCache)


def tokenize_documents(documents: Sequence[Sequence[str]], vocabulary: Vocabulary, lower_case: bool) -> TokenBlock:
    """Convert documents to token ids.

    Sentences without tokens and documents without sentences are left out.

    Args:
        documents: The documents, each a list of sentences.
        vocabulary: The vocabulary.
        lower_case: Whether to convert text to lower case and remove accents.
    """
    sentences = [sentence for document in documents for sentence in document]
    if not sentences:
        return TokenBlock(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    tokens, word_lengths = _get_word_cache(vocabulary, lower_case).tokenize_words(" ".join(sentences).split(" "))
    words = np.array([sentence.count(" ") + 1 for sentence in sentences], dtype=np.int64)
    lengths = np.add.reduceat(word_lengths, np.cumsum(words) - words)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    sentences_before = np.concatenate(([0], np.cumsum(lengths > 0)))
    return TokenBlock(
        tokens=tokens,
        sentence_starts=np.concatenate(([0], np.cumsum(lengths[lengths > 0]))),
        document_starts=np.unique(np.concatenate(([0], sentences_before[ends]))),
    )
