"""The WordPiece vocabulary (a given vocab.txt, or one trained from the text), and documents as its token numbers.

The same text gives the same vocabulary: the trainer of the `tokenizers` library meets characters in the order of a
randomised hash table, so it is given the alphabet, alone and as `##` continuations, as reserved tokens in a fixed order.

The tokens of a sentence are those of its words between spaces: BERT's clean-up looks at one character at a time, and
WordPiece at one word. As few words make up most of a text, each is given to the tokenizer once.
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
# Google's limit; a longer word becomes [UNK].
_LONGEST_WORD_CHARACTERS = 200
# Some 200 MB at most; then all words are forgotten, and learnt again as they come.
MOST_KNOWN_WORDS = 1_000_000


# --- the vocabulary


@dataclass(frozen=True)
class Vocabulary:
    """The tokens by number, as vocab.txt lists them."""

    tokens: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def number(self, token: str) -> int:
        """The number of `token`."""
        return self.tokens.index(token)

    @property
    def text(self) -> str:
        """The content of vocab.txt."""
        return "".join(f"{token}\n" for token in self.tokens)

    @property
    def sha256(self) -> str:
        """The SHA-256 of vocab.txt."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    def continuations(self) -> BoolArray:
        """bool [vocabulary]: which tokens continue a word (`##...`)."""
        return np.array([token.startswith("##") for token in self.tokens], dtype=bool)


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a vocab.txt, one token a line."""
    try:
        lines = read_file(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; is this a vocab.txt, one token a line?") from error
    if lines and not lines[-1]:
        lines.pop()
    tokens = tuple(line.rstrip("\r") for line in lines)
    missing = [token for token in SPECIAL_TOKENS if token not in tokens]
    if missing:
        raise InputError(f"{path}: the vocabulary has no {' '.join(missing)}; BERT needs {' '.join(SPECIAL_TOKENS)}")
    first_line: dict[str, int] = {}
    for number, token in enumerate(tokens, start=1):
        if token in first_line:
            first = first_line[token]
            raise InputError(
                f"{path}: line {number}: token {token!r} is on line {first} too; rename the token of line {first}, for "
                f"example to [unused-{first}], because without that line all later tokens would have other ids"
            )
        first_line[token] = number
    return Vocabulary(tokens)


def _wordpiece_tokenizer(tokens: Iterable[str], lower_case: bool) -> Tokenizer:
    """A BERT tokenizer: clean-up, accents and case as Google's, punctuation and CJK characters apart, then WordPiece."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    numbers = {token: number for number, token in enumerate(tokens)}
    model = models.WordPiece(vocab=numbers, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD_CHARACTERS)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def train_vocabulary(documents: Callable[[], Iterable[list[str]]], size: int, lower_case: bool) -> Vocabulary:
    """Train a vocabulary of at most `size` tokens; memory grows with the number of different words, not with the text.

    `documents` gives the documents (lists of sentences) from the start each time it is called; it is called twice.
    """
    from tokenizers import trainers

    tokenizer = _wordpiece_tokenizer(["[UNK]"], lower_case)
    alphabet = _alphabet(documents(), tokenizer)
    reserved = [*SPECIAL_TOKENS, *alphabet, *(f"##{character}" for character in alphabet)]
    if size <= len(reserved):
        problem = f"the text has {len(alphabet)} different characters, which need {len(reserved)} tokens"
        raise InputError(f"prepare.train_vocab = {size}: {problem}; ask for at least {2 * len(reserved)}")
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


def _alphabet(documents: Iterable[list[str]], tokenizer: Tokenizer) -> list[str]:
    """The most frequent characters after normalisation, ties by code point, in the order of their code points."""
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
    """Token numbers of some documents, one after the other."""

    tokens: Int32Array  # int32 [tokens]
    sentence_starts: IntArray  # int64 [sentences + 1], where each sentence starts in `tokens`
    document_starts: IntArray  # int64 [documents + 1], where each document starts in `sentence_starts`

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_starts) - 1

    @property
    def sentences(self) -> int:
        """Number of sentences."""
        return len(self.sentence_starts) - 1


class _KnownWords:
    """The tokens of every word met so far, each tokenised once."""

    def __init__(self, vocabulary: Vocabulary, lower_case: bool) -> None:
        self._tokenizer = _wordpiece_tokenizer(vocabulary.tokens, lower_case)
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[str, int] = {}
        self._tokens: Int32Array = np.zeros(0, dtype=np.int32)
        self._starts: IntArray = np.zeros(1, dtype=np.int64)

    def _learn(self, words: Sequence[str]) -> None:
        if len(self._numbers) + len(words) > MOST_KNOWN_WORDS:
            self._forget()
        new = [word for word in dict.fromkeys(words) if word not in self._numbers]
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(new, add_special_tokens=False)]
        self._numbers.update(zip(new, range(len(self._numbers), len(self._numbers) + len(new)), strict=True))
        ends = self._starts[-1] + np.cumsum([len(ids) for ids in encoded], dtype=np.int64)
        self._tokens = np.concatenate((self._tokens, np.fromiter(chain.from_iterable(encoded), dtype=np.int32)))
        self._starts = np.concatenate((self._starts, ends))

    def tokens_of(self, words: Sequence[str]) -> tuple[Int32Array, IntArray]:
        """The tokens of `words`, one word after the other, and how many each word has."""
        self._learn(words)
        numbers = np.fromiter(map(self._numbers.__getitem__, words), dtype=np.int64, count=len(words))
        starts, lengths = self._starts[numbers], np.diff(self._starts)[numbers]
        before = np.cumsum(lengths) - lengths
        return self._tokens[np.repeat(starts - before, lengths) + np.arange(lengths.sum())], lengths


_known_words = lru_cache(maxsize=2)(_KnownWords)


def tokenize_documents(documents: Sequence[Sequence[str]], vocabulary: Vocabulary, lower_case: bool) -> TokenBlock:
    """Tokenise the sentences of `documents`; sentences without a token and documents without a sentence are omitted."""
    sentences = [sentence for document in documents for sentence in document]
    if not sentences:
        return TokenBlock(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    tokens, word_lengths = _known_words(vocabulary, lower_case).tokens_of(" ".join(sentences).split(" "))
    words = np.array([sentence.count(" ") + 1 for sentence in sentences], dtype=np.int64)
    lengths = np.add.reduceat(word_lengths, np.cumsum(words) - words)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    sentences_before = np.concatenate(([0], np.cumsum(lengths > 0)))
    return TokenBlock(
        tokens=tokens,
        sentence_starts=np.concatenate(([0], np.cumsum(lengths[lengths > 0]))),
        document_starts=np.unique(np.concatenate(([0], sentences_before[ends]))),
    )
