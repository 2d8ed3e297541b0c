"""The WordPiece vocabulary: a given vocab.txt, or one trained from the text; the same text gives the same vocabulary.

Training is byte-pair merging on word counts as in the `tokenizers` library (its WordPiece trainer). That trainer meets
characters in the order of a randomised hash table, so its result changes from run to run; here it is handed the alphabet,
alone and as `##` continuations, as reserved tokens in a fixed order, which takes all freedom from it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["SPECIAL_TOKENS", "Vocabulary", "read_vocabulary", "train_vocabulary", "wordpiece_tokenizer"]

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LARGEST_ALPHABET = 1000
# Google's limit; a longer word becomes [UNK].
_LONGEST_WORD_CHARACTERS = 200


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

    def continuations(self) -> NDArray[np.bool_]:
        """bool [vocabulary]: which tokens continue a word (`##...`)."""
        return np.array([token.startswith("##") for token in self.tokens], dtype=bool)


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a vocab.txt, one token a line.

    Raises:
        InputError: the file is missing, not UTF-8, has a token twice, or lacks one of `SPECIAL_TOKENS`.
    """
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except OSError as error:
        raise InputError(f"{path}: cannot read the vocabulary: {error.strerror}; check the path (prepare.vocab)") from error
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
            raise InputError(f"{path}: line {number}: token {token!r} stands on line {first_line[token]} too; remove one")
        first_line[token] = number
    return Vocabulary(tokens)


def wordpiece_tokenizer(tokens: Iterable[str], lower_case: bool) -> Tokenizer:
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

    Args:
        documents: gives the documents (lists of sentences) from the start, each time it is called; it is called twice.
        size: how many tokens are wanted.
        lower_case: as in `wordpiece_tokenizer`.

    Raises:
        InputError: `size` leaves no room for the characters of the text.
    """
    from tokenizers import trainers

    tokenizer = wordpiece_tokenizer(["[UNK]"], lower_case)
    alphabet = _alphabet(documents(), tokenizer)
    reserved = [*SPECIAL_TOKENS, *alphabet, *(f"##{character}" for character in alphabet)]
    if size <= len(reserved):
        raise InputError(
            f"prepare.train_vocab = {size}: the text has {len(alphabet)} different characters, which need {len(reserved)} "
            f"tokens before the first word; ask for at least {2 * len(reserved)}"
        )
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
