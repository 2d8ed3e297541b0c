"""The tokenizer that belongs to a model: its folder's `tokenizer.json`, else its `vocab.txt` with its casing settings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.common.files import read_json
from gaudi_bert.corpus.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["RowTokenizer", "open_tokenizer"]

WHOLE, WORDS, CASING = "tokenizer.json", "vocab.txt", "tokenizer_config.json"
# That of BertTokenizer in transformers: a longer word becomes [UNK].
LONGEST_WORD_CHARACTERS = 100


@dataclass(frozen=True)
class RowTokenizer:
    """A BERT tokenizer that neither cuts nor pads.

    Attributes:
        tokenizer: of the library `tokenizers`.
        file: where it was read from.
        sha256: of that file.
    """

    tokenizer: Tokenizer
    file: Path
    sha256: str

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest token number."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @property
    def cls_id(self) -> int:
        """The number of [CLS], the first token of every sequence."""
        return self._special("[CLS]")

    @property
    def sep_id(self) -> int:
        """The number of [SEP], the last token of every text."""
        return self._special("[SEP]")

    @property
    def pad_id(self) -> int:
        """The number of [PAD]."""
        return self._special("[PAD]")

    @property
    def mask_id(self) -> int:
        """The number of [MASK]."""
        return self._special("[MASK]")

    def _special(self, token: str) -> int:
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise InputError(f"{self.file}: has no {token}; give the tokenizer of a BERT")
        return int(number)


def open_tokenizer(folder: Path, *, lower_case: bool | None = None) -> RowTokenizer:
    """The tokenizer in a model's folder, or beside a model's file.

    Args:
        folder: holds `tokenizer.json`, or `vocab.txt`.
        lower_case: for a `vocab.txt`; None for what `tokenizer_config.json` beside it says, or true.

    Raises:
        InputError: there is none, or it is damaged.
    """
    if not folder.exists() and not any(folder.parent.glob(f"{escape(folder.name)}.*")):  # a TF1 checkpoint is a prefix
        raise InputError(f"{folder}: there is no such folder; check the path")
    folder = folder if folder.is_dir() else folder.parent
    if (folder / WHOLE).is_file():
        return RowTokenizer(_whole(folder / WHOLE), folder / WHOLE, _sha256(folder / WHOLE))
    if (folder / WORDS).is_file():
        return RowTokenizer(_from_words(folder, lower_case), folder / WORDS, _sha256(folder / WORDS))
    raise InputError(f"{folder}: holds no tokenizer; put the model's {WHOLE} or {WORDS} there")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _whole(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        if type(error) is not Exception:
            raise
        raise InputError(f"{file}: not a tokenizer ({shortened(str(error))}); save it again with save_pretrained") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_words(folder: Path, lower_case: bool | None) -> Tokenizer:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = read_vocabulary(folder / WORDS).tokens
    casing: Any = read_json(folder / CASING) if (folder / CASING).is_file() else {}
    casing = casing if isinstance(casing, dict) else {}
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.WordPiece(vocab=numbers, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD_CHARACTERS)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=bool(casing.get("do_lower_case", True)) if lower_case is None else lower_case,
        strip_accents=casing.get("strip_accents"),
        handle_chinese_chars=bool(casing.get("tokenize_chinese_chars", True)),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])],
    )
    return tokenizer
