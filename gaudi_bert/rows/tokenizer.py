"""The tokenizer of a model, with the same results as in `transformers` and `sentence-transformers`.

If `transformers` is installed, the fast tokenizer that `AutoTokenizer` builds from the folder is used. Otherwise
`tokenizer_files` reads the folder. `save_tokenizer` writes a tokenizer into a model folder, so that other libraries compute
the same tokens.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, check_model_exists, read_file, write_json, write_text
from gaudi_bert.rows.tokenizer_files import (
    ESM_CLASS,
    GENERAL_CLASS,
    NAMED_TOKENS,
    SETTINGS_NAME,
    TOKENIZER_NAME,
    VOCABULARY_NAME,
    build_esm_tokenizer,
    convert_library_errors,
    read_tokenizer_class,
    read_tokenizer_files,
    read_tokenizer_json,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


TruncationSide: TypeAlias = Literal["left", "right"]
# A folder with one of these files contains a tokenizer. Without `transformers`, only the first two can be read.
_SOURCES = (TOKENIZER_NAME, VOCABULARY_NAME, "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
_READ_BY_TRANSFORMERS = (*_SOURCES, SETTINGS_NAME, "special_tokens_map.json", "added_tokens.json", "merges.txt")
_CHECKPOINTS = "checkpoints"
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_TOKEN_TYPES = "token_type_ids"


class TextSpecialTokens(NamedTuple):
    """The ids of the special tokens before a text and after a text."""

    before: list[int]
    after: list[int]


class PairSpecialTokens(NamedTuple):
    """The ids of the special tokens before, between and after the two texts of a pair, and the segment ids of the texts."""

    before: list[int]
    between: list[int]
    after: list[int]
    first_segment_id: int
    second_segment_id: int


@dataclass(frozen=True)
class RowTokenizer:
    """A tokenizer from the `tokenizers` library that neither truncates nor pads, and the tokenizer settings of its model.

    Attributes:
        tokenizer: The `tokenizers.Tokenizer` object.
        file: The file or folder that it was read from, for messages.
        settings: Further settings that affect the model's inputs, with their names in tokenizer_config.json.
    """

    tokenizer: Tokenizer
    file: Path
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """A SHA-256 that identifies the tokenizer, computed from everything that affects the token ids or segment ids of a
        text.
        """
        named = {name: self.settings[name] for name in NAMED_TOKENS if name in self.settings}
        stated = json.dumps([self.truncation_side, self.has_segments, self.tokenizer.encode_special_tokens, named])
        content = self.tokenizer.to_str()
        if type(self.tokenizer.model).__name__ == "Unigram":
            # Saving and loading a tokenizer may change the last digit of a token's score. Round the scores, so that the
            # SHA-256 stays the same.
            values = json.loads(content)
            values["model"]["vocab"] = [[token, f"{score:.9g}"] for token, score in values["model"]["vocab"]]
            content = json.dumps(values)
        return hashlib.sha256(f"{stated}\n{content}".encode()).hexdigest()

    @property
    def truncation_side(self) -> TruncationSide:
        """The side of a text where truncation removes tokens."""
        return cast(TruncationSide, self.settings.get("truncation_side", "right"))

    @property
    def has_segments(self) -> bool:
        """Whether the model takes segment ids, which distinguish the two texts of a pair. If it does not, all segment ids
        are 0, as in `transformers`.
        """
        return _TOKEN_TYPES in self.settings.get("model_input_names", (_TOKEN_TYPES,))

    @property
    def can_truncate_pairs(self) -> bool:
        """Whether pairs are truncated in the same way as in `transformers`.

        This is false for ESM models. Their tokenizer in `transformers` is written in Python and truncates pairs in another
        way.
        """
        return self.settings.get("tokenizer_class") != ESM_CLASS

    @property
    def vocabulary_size(self) -> int:
        """The largest token id plus one, which is the number of token embeddings that a model needs."""
        numbers = self.tokenizer.get_vocab().values()
        if not numbers:
            raise InputError(f"{self.file}: the vocabulary is empty; pass a tokenizer with a vocabulary")
        return max(numbers) + 1

    def special_tokens_around_text(self) -> TextSpecialTokens:
        """Return the ids of the special tokens before a text and after a text, as two lists.

        Raises:
            InputError: The tokenizer returns no token for a letter or digit.
        """
        for letter in "aA1":  # try several letters, because the vocabulary may lack some of them
            encoding = self.tokenizer.encode(letter)
            text = [at for at, special in enumerate(encoding.special_tokens_mask) if not special]
            if text:
                return TextSpecialTokens(encoding.ids[: text[0]], encoding.ids[text[-1] + 1 :])
        raise InputError(f"{self.file}: the tokenizer returns no token for a letter; pass the tokenizer of a text model")

    def tokenizer_for_words(self) -> Tokenizer:
        """Return a tokenizer for text that is already split into words.

        If the tokenizer marks spaces, the returned tokenizer marks the beginning of each word as if a space preceded it.
        """
        content = json.loads(self.tokenizer.to_str())
        steps = content.get("pre_tokenizer") or {}
        marks = [step for step in (steps, *steps.get("pretokenizers", ())) if step.get("add_prefix_space") is False]
        if not marks:
            return self.tokenizer
        marks[0]["add_prefix_space"] = True
        return clone_tokenizer(self.tokenizer, json.dumps(content))

    def special_tokens_around_pair(self) -> PairSpecialTokens:
        """Return the special tokens before, between and after the two texts of a pair, and the segment ids of the texts.

        Returns:
            The special tokens before, between and after the tokens of the two texts, then the segment id of the first and of
            the second text.

        Raises:
            InputError: The tokenizer cannot encode a pair of texts.
        """
        for letter in "aA1":  # try several letters, because the vocabulary may lack some of them
            one, pair = self.tokenizer.encode(letter), self.tokenizer.encode(letter, letter)
            tokens = len(one.ids) - sum(one.special_tokens_mask)
            text = [at for at, special in enumerate(pair.special_tokens_mask) if not special]
            if tokens and len(text) == 2 * tokens:
                first, second, end = text[0], text[tokens], text[-1] + 1
                segments = (pair.type_ids[first], pair.type_ids[second]) if self.has_segments else (0, 0)
                return PairSpecialTokens(pair.ids[:first], pair.ids[first + tokens : second], pair.ids[end:], *segments)
        raise InputError(f"{self.file}: the tokenizer cannot encode a pair of texts; pass the tokenizer of a text model")

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of all special tokens, in ascending order."""
        added = self.tokenizer.get_added_tokens_decoder()
        named = map(self.tokenizer.token_to_id, (*_SPECIAL_TOKENS, *self._find_special_token_texts(*NAMED_TOKENS)))
        special = {number for number, token in added.items() if token.special}
        return tuple(sorted(special | {number for number in named if number is not None}))

    @property
    def pad_id(self) -> int | None:
        """The id of the padding token, or None if there is none."""
        return self._find_first_id_in_vocabulary([*self._find_special_token_texts("pad_token"), "[PAD]", "<pad>"])

    @property
    def mask_id(self) -> int:
        """The id of the mask token. Raises an InputError if there is none."""
        number = self._find_mask_id()
        if number is None:
            raise InputError(f"{self.file}: the tokenizer has no mask token; pass the tokenizer of a masked language model")
        return number

    def _find_mask_id(self) -> int | None:
        """Return the id of the mask token, or None if the vocabulary contains no mask token."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        others = (token.content for token in added if token.special and "mask" in token.content.lower())
        return self._find_first_id_in_vocabulary(
            [*self._find_special_token_texts("mask_token"), "[MASK]", "<mask>", *others]
        )

    def _find_special_token_texts(self, *names: str) -> list[str]:
        """Return the special tokens that the settings define under the given names, such as `mask_token`."""
        return [self.settings[name] for name in names if name in self.settings]

    def special_token_ids(self) -> dict[str, int | None]:
        """Return the ids of the special tokens that a model's config.json lists: pad, mask, cls, bos, sep and eos.

        The result is a dict by these names. The id of a missing token is None.
        """
        before, after = self.special_tokens_around_text()
        first, last = before[0] if before else None, after[-1] if after else None
        ends = {"cls": first, "bos": first, "sep": last, "eos": last}
        return {"pad": self.pad_id, "mask": self._find_mask_id(), **ends}

    def _find_first_id_in_vocabulary(self, tokens: Iterable[str]) -> int | None:
        """Return the id of the first given token that the vocabulary contains, or None if it contains none of them."""
        numbers = (self.tokenizer.token_to_id(token) for token in tokens)
        return next((int(number) for number in numbers if number is not None), None)

    def check_fits(self, vocab_size: int, type_vocab_size: int) -> None:
        """Raise an InputError if the tokenizer can return token ids or segment ids that are too large for the embeddings of
        a model.

        Args:
            vocab_size: The number of token embeddings in the model.
            type_vocab_size: The number of segment embeddings in the model.

        Raises:
            InputError: An id is too large, or the segment ids of a single text are not all 0.
        """
        if self.vocabulary_size > vocab_size:
            raise InputError(
                f"{self.file}: the tokenizer has {self.vocabulary_size:,} tokens, but the model has only {vocab_size:,}; "
                "pass the tokenizer with which the model was trained"
            )
        for encoding in (self.tokenizer.encode("a"), self.tokenizer.encode("a", "a")):
            largest_ids = max(encoding.ids, default=0), max(encoding.type_ids if self.has_segments else [], default=0)
            for what, largest, most in zip(("token", "segment"), largest_ids, (vocab_size, type_vocab_size), strict=True):
                if largest >= most:
                    raise InputError(
                        f"{self.file}: the template of the tokenizer uses the {what} id {largest}, but the ids of the model "
                        f"are 0 to {most - 1:,}; pass the tokenizer with which the model was trained"
                    )
        if self.has_segments and any(self.tokenizer.encode("a").type_ids):
            raise InputError(
                f"{self.file}: the template of the tokenizer assigns a segment id other than 0 to a single text, which is "
                "not supported"
            )


# --- opening a tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder contains a tokenizer."""
    return any((folder / name).is_file() for name in _SOURCES)


def open_tokenizer(folder: Path, settings: Mapping[str, Any] | None = None, *, lower_case: bool = False) -> RowTokenizer:
    """Open and return the tokenizer in a model folder.

    Args:
        folder: The folder or the file. For a checkpoint of a run, the tokenizer of the run is used.
        settings: Arguments for the tokenizer class, which sentence-transformers stores in the folder.
        lower_case: Whether text is converted to lower case first, as sentence-transformers does with `do_lower_case`.

    Raises:
        InputError: There is no tokenizer, a file is damaged, or the tokenizer is written in Python.
    """
    check_model_exists(folder)
    folder = folder if folder.is_dir() else folder.parent
    folder = folder.parent if folder.name == _CHECKPOINTS else folder  # the tokenizer is in the folder of the run
    if not has_tokenizer(folder):
        raise InputError(
            f"{folder}: the folder contains no tokenizer; put {TOKENIZER_NAME} or {VOCABULARY_NAME} there, or pass "
            "--vocab to finetune"
        )
    for name in _READ_BY_TRANSFORMERS:  # transformers silently ignores a file that it cannot read
        if os.path.lexists(folder / name):
            read_file(folder / name)
    # `transformers` cannot open a folder if its files name neither a model type nor a tokenizer class.
    if read_tokenizer_class(folder)[0] is not None and importlib.util.find_spec("transformers") is not None:
        from transformers import AutoTokenizer

        with convert_library_errors(folder):  # no code in the folder is run, and nothing is downloaded
            opened = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, **(settings or {})
            )
        tokenizer = _convert_transformers_tokenizer(opened, folder)
    elif settings:
        raise InputError(
            f"{folder}: only transformers can apply the setting {', '.join(settings)} to a tokenizer; install transformers"
        )
    else:
        backend, own_settings = read_tokenizer_files(folder)
        tokenizer = _make_row_tokenizer(backend, folder, own_settings)
    if lower_case:
        _add_lower_case_step(tokenizer.tokenizer)
    return tokenizer


def read_tokenizer(path: Path) -> RowTokenizer:
    """Open and return the tokenizer in a folder or in a tokenizer.json file.

    Raises:
        InputError: The path contains no tokenizer, or a file is damaged.
    """
    if not path.is_file():
        return open_tokenizer(path)
    backend = read_tokenizer_json(path)
    settings = {} if backend.truncation is None else {"truncation_side": backend.truncation["direction"]}
    return _make_row_tokenizer(backend, path, settings)


def wrap_tokenizer(original: Any) -> RowTokenizer:
    """Wrap a copy of a `transformers` or `tokenizers` tokenizer in a `RowTokenizer`, so that the original is not changed.

    Raises:
        InputError: The argument is not a tokenizer, or is a tokenizer that is written in Python.
    """
    from tokenizers import Tokenizer

    if isinstance(original, RowTokenizer):
        return original
    file = Path(getattr(original, "name_or_path", "") or "the tokenizer")
    if isinstance(original, Tokenizer):
        return _make_row_tokenizer(clone_tokenizer(original), file, {})
    if not hasattr(original, "special_tokens_map"):
        raise InputError(
            f"{type(original).__name__}: the type is not supported; pass a tokenizer that AutoTokenizer returns"
        )
    opened = _convert_transformers_tokenizer(original, file)
    return _make_row_tokenizer(clone_tokenizer(opened.tokenizer), file, opened.settings)


def _add_lower_case_step(tokenizer: Tokenizer) -> None:
    """Make a tokenizer convert texts to lower case first, unless it already does. The tokenizer is changed in place."""
    from tokenizers import normalizers

    content = json.loads(tokenizer.to_str())["normalizer"]
    if not any(step and step["type"] == "Lowercase" for step in [content, *((content or {}).get("normalizers") or ())]):
        present = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *present])


def _convert_transformers_tokenizer(original: Any, file: Path) -> RowTokenizer:
    """Wrap a `transformers` tokenizer in a `RowTokenizer` without copying it.

    Raises:
        InputError: The tokenizer or one of its steps is written in Python, except for the tokenizer of ESM, which is
            rebuilt.
    """
    from tokenizers import Tokenizer

    backend, kind = getattr(original, "backend_tokenizer", None), type(original).__name__
    if kind == ESM_CLASS:
        named = {**original.special_tokens_map, "extra_special_tokens": list(original.added_tokens_encoder)}
        backend = build_esm_tokenizer(original.get_vocab(), named, file)
        if original.split_special_tokens:
            raise InputError(f"{file}: split_special_tokens is not supported for ESM models; remove that setting")
    if not isinstance(backend, Tokenizer):
        raise InputError(
            f"{file}: {kind} is not a fast tokenizer of transformers; open the tokenizer with AutoTokenizer, or save a "
            "tokenizer.json"
        )
    with convert_library_errors(file):
        for step in (backend.normalizer, backend.pre_tokenizer):
            if step is not None:
                step.__getstate__()  # raises for a step that is written in Python, which cannot be copied
    settings = {
        "tokenizer_class": kind,
        "model_input_names": list(original.model_input_names),
        "truncation_side": original.truncation_side,
        "padding_side": original.padding_side,
        "model_max_length": original.model_max_length,
        **{name: str(token) for name, token in original.special_tokens_map.items() if name in NAMED_TOKENS},
    }
    backend.encode_special_tokens = original.split_special_tokens
    return _make_row_tokenizer(backend, file, settings)


def _make_row_tokenizer(backend: Tokenizer, file: Path, settings: Mapping[str, Any]) -> RowTokenizer:
    """Wrap a tokenizer in a `RowTokenizer`, after turning off its truncation and padding and checking that it works."""
    backend.no_truncation()
    backend.no_padding()
    with convert_library_errors(file):
        backend.encode("a", "a")  # raises if the template contains a token that the vocabulary lacks
    return RowTokenizer(backend, file, settings)


def clone_tokenizer(backend: Tokenizer, content: str | None = None) -> Tokenizer:
    """Return a copy of a `tokenizers` tokenizer.

    Args:
        backend: The tokenizer.
        content: JSON from which the copy is built instead. The setting `encode_special_tokens`, which JSON does not contain,
            is still taken from `backend`.
    """
    copy = type(backend).from_str(backend.to_str() if content is None else content)
    copy.encode_special_tokens = backend.encode_special_tokens
    return copy


# --- writing a tokenizer


def save_tokenizer(tokenizer: RowTokenizer, folder: Path, max_sequence_length: int | None = None) -> None:
    """Write a tokenizer into a folder. Every library that opens the folder, such as `transformers`, then computes the same
    tokens as `tokenizer`.

    The tokenizer, which may come from several files and settings, is written into one tokenizer.json. The general tokenizer
    class of `transformers` uses this file unchanged for every model. A vocab.txt is copied for programs that read nothing
    else.

    Args:
        tokenizer: The tokenizer.
        folder: The folder of a model or of a tokenized table.
        max_sequence_length: The largest number of tokens in a text. None keeps the tokenizer's own setting.
    """
    backend = clone_tokenizer(tokenizer.tokenizer)
    backend.no_truncation()  # another thread may have turned it on in the shared tokenizer
    write_text(folder / TOKENIZER_NAME, backend.to_str())
    state = json.loads(backend.to_str())["pre_tokenizer"] or {}
    usual = {"model_input_names": ["input_ids", _TOKEN_TYPES, "attention_mask"]} if tokenizer.has_segments else {}
    own: dict[str, Any] = {
        **usual,
        **tokenizer.settings,
        "tokenizer_class": GENERAL_CLASS,
        "truncation_side": tokenizer.truncation_side,
        "split_special_tokens": backend.encode_special_tokens,
        "clean_up_tokenization_spaces": False,
    }
    if "add_prefix_space" in state:  # `transformers` 4 would set it to false
        own["add_prefix_space"] = state["add_prefix_space"]
    if max_sequence_length is not None:
        own["model_max_length"] = max_sequence_length
    write_json(folder / SETTINGS_NAME, own)
    vocabulary = tokenizer.file / VOCABULARY_NAME
    if vocabulary.is_file():
        with atomic_file(folder / VOCABULARY_NAME) as handle:
            handle.write(read_file(vocabulary))
