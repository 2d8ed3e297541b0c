"""The tokenizer that belongs to a model: its folder's `tokenizer.json`, else its `vocab.txt` with its casing settings."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.common.files import (
    atomic_file,
    check_model,
    explained_os_errors,
    read_file,
    read_json,
    regular,
    write_json,
    write_text,
)
from gaudi_bert.corpus.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer


TOKENIZER_NAME = "tokenizer.json"
_WORDS, _CASING = "vocab.txt", "tokenizer_config.json"
_FILES = (TOKENIZER_NAME, _CASING, "special_tokens_map.json", "added_tokens.json", _WORDS, "vocab.json", "merges.txt")
_CHECKPOINTS = "checkpoints"
# As BertTokenizer in transformers has it: a longer word becomes [UNK].
_LONGEST_WORD_CHARACTERS = 100


# Of tokenizers that do not say which of their tokens are special: those of a vocab.txt.
_ESM_SPECIAL = ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>")
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class RowTokenizer:
    """A tokenizer that neither cuts nor pads.

    `sha256` is that of the `file` that it was read from.
    """

    tokenizer: Tokenizer
    file: Path
    sha256: str

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest token number."""
        numbers = self.tokenizer.get_vocab().values()
        if not numbers:
            raise InputError(f"{self.file}: its vocabulary is empty; give the tokenizer of a BERT")
        return max(numbers) + 1

    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after the tokens of a text."""
        for letter in "aA1":  # whichever the vocabulary has
            encoding = self.tokenizer.encode(letter)
            text = [at for at, special in enumerate(encoding.special_tokens_mask) if not special]
            if text:
                return encoding.ids[: text[0]], encoding.ids[text[-1] + 1 :]
        raise InputError(f"{self.file}: makes no token of a letter; give the tokenizer of a model for text")

    def for_words(self) -> Tokenizer:
        """The tokenizer for words that were split already: one that marks spaces marks the beginning of each word."""
        content = json.loads(self.tokenizer.to_str())
        steps = content.get("pre_tokenizer") or {}
        marks = [step for step in (steps, *steps.get("pretokenizers", ())) if step.get("add_prefix_space") is False]
        if not marks:
            return self.tokenizer
        marks[0]["add_prefix_space"] = True
        return type(self.tokenizer).from_str(json.dumps(content))

    def pair_frame(self) -> tuple[list[int], list[int], list[int], int, int]:
        """The special tokens before, between and after the tokens of two texts, and the segment of each text."""
        for letter in "aA1":  # whichever the vocabulary has
            one, pair = self.tokenizer.encode(letter), self.tokenizer.encode(letter, letter)
            tokens = len(one.ids) - sum(one.special_tokens_mask)
            text = [at for at, special in enumerate(pair.special_tokens_mask) if not special]
            if tokens and len(text) == 2 * tokens:
                first, second, end = text[0], text[tokens], text[-1] + 1
                segments = pair.type_ids[first], pair.type_ids[second]
                return pair.ids[:first], pair.ids[first + tokens : second], pair.ids[end:], *segments
        raise InputError(f"{self.file}: makes no pair of two texts; give the tokenizer of a model for text")

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The numbers of all special tokens, ascending."""
        added = self.tokenizer.get_added_tokens_decoder()
        named = map(self.tokenizer.token_to_id, _SPECIAL_TOKENS)
        special = {number for number, token in added.items() if token.special}
        return tuple(sorted(special | {number for number in named if number is not None}))

    @property
    def pad_id(self) -> int | None:
        """The number of the token for padding; None where there is none."""
        return self._first_of("[PAD]", "<pad>")

    @property
    def mask_id(self) -> int:
        """The number of the token that hides another one."""
        number = self._mask_id()
        if number is None:
            raise InputError(f"{self.file}: has no token like [MASK]; give the tokenizer of a model of masked words")
        return number

    def _mask_id(self) -> int | None:
        added = self.tokenizer.get_added_tokens_decoder().values()
        others = (token.content for token in added if token.special and "mask" in token.content.lower())
        return self._first_of("[MASK]", "<mask>", *others)

    def token_ids(self) -> dict[str, int | None]:
        """The numbers of special tokens by what config.json calls them; None for those that it does not have."""
        before, after = self.frame()
        first, last = before[0] if before else None, after[-1] if after else None
        ends = {"cls": first, "bos": first, "sep": last, "eos": last}
        return {"pad": self.pad_id, "mask": self._mask_id(), **ends}

    def _first_of(self, *tokens: str) -> int | None:
        numbers = (self.tokenizer.token_to_id(token) for token in tokens)
        return next((int(number) for number in numbers if number is not None), None)

    def check_fits(self, vocab_size: int, type_vocab_size: int) -> None:
        """Refuse numbers that a model does not have: of tokens, and of the segments that the tokenizer's template gives."""
        if self.vocabulary_size > vocab_size:
            sizes = f"{self.vocabulary_size:,} tokens, the model has {vocab_size:,}"
            raise InputError(f"{self.file}: has {sizes}; give the tokenizer that it was trained with")
        for encoding in (self.tokenizer.encode("a"), self.tokenizer.encode("a", "a")):
            largest_ids = max(encoding.ids, default=0), max(encoding.type_ids, default=0)
            for what, largest, most in zip(("token", "segment"), largest_ids, (vocab_size, type_vocab_size), strict=True):
                if largest >= most:
                    number = f"{what} {largest}, the model's are 0 to {most - 1:,}"
                    raise InputError(f"{self.file}: its template gives the {number}; give the model's own tokenizer")


def open_tokenizer(folder: Path) -> RowTokenizer:
    """The tokenizer in a model's folder, or next to a model's file."""
    check_model(folder)
    folder = folder if folder.is_dir() else folder.parent
    folder = folder.parent if folder.name == _CHECKPOINTS else folder  # of a run, whose folder has the tokenizer
    for name, read in ((TOKENIZER_NAME, _read_tokenizer), (_WORDS, _build_tokenizer)):
        file = folder / name
        if os.path.lexists(file):
            return RowTokenizer(read(file), file, hashlib.sha256(read_file(file)).hexdigest())
    raise InputError(f"{folder}: holds no tokenizer; put {TOKENIZER_NAME} or {_WORDS} there, or finetune with --vocab")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any((folder / name).is_file() for name in (TOKENIZER_NAME, _WORDS))


def read_tokenizer(path: Path) -> RowTokenizer:
    """The tokenizer of a file, whatever its name, or of a folder."""
    if not path.is_file():
        return open_tokenizer(path)
    return RowTokenizer(_read_tokenizer(path), path, hashlib.sha256(read_file(path)).hexdigest())


def copy_tokenizer(tokenizer: RowTokenizer, folder: Path, usual_settings: Mapping[str, Any]) -> None:
    """Copy the files of a tokenizer as they are; one of a bare vocab.txt also becomes a tokenizer.json.

    `usual_settings`, if any, are written as tokenizer_config.json where the tokenizer has none.
    """
    own = tokenizer.file
    copies = (
        {name: own.with_name(name) for name in _FILES} if own.name in (TOKENIZER_NAME, _WORDS) else {TOKENIZER_NAME: own}
    )
    for name, file in copies.items():
        if file.is_file():
            with atomic_file(folder / name) as handle:
                handle.write(read_file(file))
    if not (folder / TOKENIZER_NAME).is_file():
        library = type(tokenizer.tokenizer).from_str(tokenizer.tokenizer.to_str())
        library.no_truncation()
        write_text(folder / TOKENIZER_NAME, library.to_str())
    if usual_settings and not (folder / _CASING).is_file():
        write_json(folder / _CASING, dict(usual_settings))


def tokenizer_of(given: Any) -> RowTokenizer:
    """A tokenizer of `transformers` or of `tokenizers`, as a copy that neither cuts nor pads."""
    from tokenizers import Tokenizer

    if isinstance(given, RowTokenizer):
        return given
    library = getattr(given, "backend_tokenizer", given)
    if not isinstance(library, Tokenizer):
        raise InputError(f"{type(given).__name__}: is not a tokenizer of the library tokenizers; use AutoTokenizer")
    content = library.to_str()
    copy = Tokenizer.from_str(content)
    copy.no_truncation()
    copy.no_padding()
    name = getattr(given, "name_or_path", "") or "the tokenizer"
    return RowTokenizer(copy, Path(name), hashlib.sha256(content.encode("utf-8")).hexdigest())


def _read_tokenizer(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    with explained_os_errors(file, "read"), _library_errors(file):
        tokenizer = Tokenizer.from_file(str(regular(file)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with _library_errors(file):
        tokenizer.encode("a", "a")  # a template may name what is not there
    return tokenizer


@contextmanager
def _library_errors(file: Path) -> Iterator[None]:
    """The library's error about a damaged file, in one line: a plain `Exception`, or a panic, which is not even that."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{file}: not a tokenizer ({shortened(str(error))}); save it again with save_pretrained") from error


def _build_tokenizer(vocabulary: Path) -> Tokenizer:
    """Build what the settings next to a vocab.txt mean: BERT's words, or the letters of proteins."""
    file = vocabulary.parent / _CASING
    settings: Any = read_json(file) if os.path.lexists(file) else None
    settings = settings if isinstance(settings, dict) else {}
    is_of_proteins = settings.get("tokenizer_class") == "EsmTokenizer"
    return _build_esm_tokenizer(vocabulary) if is_of_proteins else _build_bert_tokenizer(vocabulary, settings)


def _build_esm_tokenizer(vocabulary: Path) -> Tokenizer:
    """Build transformers' EsmTokenizer: wherever a token of the vocabulary stands in a text, it is one."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    tokens = [line.strip() for line in read_file(vocabulary).decode("utf-8", "replace").splitlines()]
    numbers = {token: number for number, token in enumerate(tokens)}
    missing = [token for token in _ESM_SPECIAL if token not in numbers]
    if missing:
        raise InputError(f"{vocabulary}: has no token {missing[0]}; give the vocab.txt of an ESM model")
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    known = "|".join(re.escape(token) for token in sorted(filter(None, tokens), key=len, reverse=True))
    pieces = pre_tokenizers.Split(Regex(known), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pieces])
    tokenizer.add_special_tokens(list(_ESM_SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<cls> $A <eos>",
        pair="<cls> $A <eos> $B <eos>",
        special_tokens=[(token, numbers[token]) for token in ("<cls>", "<eos>")],
    )
    return tokenizer


def _build_bert_tokenizer(vocabulary: Path, casing: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = read_vocabulary(vocabulary).tokens
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
