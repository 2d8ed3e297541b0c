"""The tokenizer that belongs to a model: its folder's `tokenizer.json`, else its `vocab.txt` with its casing settings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.common.files import read_file, read_json, regular
from gaudi_bert.corpus.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_WHOLE, _WORDS, _CASING = "tokenizer.json", "vocab.txt", "tokenizer_config.json"
# As BertTokenizer in transformers has it: a longer word becomes [UNK].
_LONGEST_WORD_CHARACTERS = 100


@dataclass(frozen=True)
class RowTokenizer:
    """A BERT tokenizer that neither cuts nor pads.

    `sha256` is that of the `file` that it was read from.
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


def open_tokenizer(folder: Path) -> RowTokenizer:
    """The tokenizer in a model's folder, or beside a model's file."""
    if not folder.exists() and not any(folder.parent.glob(f"{escape(folder.name)}.*")):  # a TF1 checkpoint is a prefix
        raise InputError(f"{folder}: there is no such folder; check the path")
    folder = folder if folder.is_dir() else folder.parent
    for name, read in ((_WHOLE, _read_tokenizer), (_WORDS, _build_tokenizer)):
        file = folder / name
        if file.is_file():
            return RowTokenizer(read(file), file, hashlib.sha256(read_file(file)).hexdigest())
    raise InputError(f"{folder}: holds no tokenizer; put the model's {_WHOLE} or {_WORDS} there")


def _read_tokenizer(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(regular(file)))
    except Exception as error:  # the library raises nothing narrower
        if type(error) is not Exception:
            raise
        raise InputError(f"{file}: not a tokenizer ({shortened(str(error))}); save it again with save_pretrained") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _build_tokenizer(vocabulary: Path) -> Tokenizer:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = read_vocabulary(vocabulary).tokens
    casing_file = vocabulary.parent / _CASING
    casing: Any = read_json(casing_file) if casing_file.is_file() else {}
    casing = casing if isinstance(casing, dict) else {}
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.WordPiece(vocab=numbers, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD_CHARACTERS)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=bool(casing.get("do_lower_case", True)),
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
