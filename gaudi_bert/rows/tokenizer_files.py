"""Read the tokenizer in a folder without `transformers`, from its tokenizer.json or vocab.txt and its settings files.

Images without `transformers` use this module. A setting that `transformers` would apply is either applied here, or rejected
with an error that names it. A tokenizer.json that contradicts the settings files is also rejected, because `transformers`
would compute other tokens.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_bert.common.errors import InputError, short_repr, shorten
from gaudi_bert.common.files import check_regular_file, explain_os_errors, read_file, read_json
from gaudi_bert.corpus.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

TOKENIZER_NAME, SETTINGS_NAME, VOCABULARY_NAME = "tokenizer.json", "tokenizer_config.json", "vocab.txt"
# With this class, `transformers` loads any tokenizer.json unchanged, whatever the type of the model.
GENERAL_CLASS = "PreTrainedTokenizerFast"
# The names of special tokens in `transformers`. If special tokens are missing in a vocabulary, they are added in this order.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_BERT, ESM_CLASS = "BertTokenizer", "EsmTokenizer"
_AS_IT_IS = (GENERAL_CLASS.removesuffix("Fast"), "TokenizersBackend")
_ROBERTA = "RobertaTokenizer"
# Tokenizer classes that return token types in `transformers` 5. Other classes, and folders that name no class, return none.
_WITH_TOKEN_TYPES = (_BERT, "DebertaTokenizer", "DebertaV2Tokenizer", "FNetTokenizer")
_BERT_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_ESM_TOKENS = {
    "cls_token": "<cls>",
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
_NORMALIZATION = {
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
}
# BertTokenizer in `transformers` replaces words of more than 100 characters with [UNK].
_LONGEST_WORD_CHARACTERS = 100
_APPLIED = {
    *("tokenizer_class", "model_input_names", "truncation_side", "split_special_tokens", "added_tokens_decoder"),
    *("extra_special_tokens", "additional_special_tokens", "add_prefix_space", *NAMED_TOKENS),
}
# Settings that do not change the tokens of a text, such as settings for padding, decoding and chat templates.
# `model_max_length` limits the number of tokens, but other modules apply this limit.
_WITHOUT_EFFECT = {
    *("model_max_length", "max_length", "stride", "truncation_strategy", "padding_side", "pad_token_type_id"),
    *("pad_to_multiple_of", "clean_up_tokenization_spaces", "chat_template", "name_or_path", "tokenizer_file", "vocab_file"),
    *("special_tokens_map_file", "processor_class", "transformers_version", "backend", "is_local", "local_files_only"),
    *("verbose", "errors"),
}


def read_tokenizer_json(file: Path) -> Tokenizer:
    """Read and return the tokenizer in a tokenizer.json file, which is the format of the `tokenizers` library.

    Raises:
        InputError: The file cannot be read or is damaged.
    """
    from tokenizers import Tokenizer

    with explain_os_errors(file, "read"), convert_library_errors(file):
        return Tokenizer.from_file(str(check_regular_file(file)))


@contextmanager
def convert_library_errors(path: Path) -> Iterator[None]:
    """Convert exceptions and Rust panics of a tokenizer library, which are usually caused by damaged files, into an
    InputError.
    """
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"{path}: the file is not a valid tokenizer ({shorten(str(error), 300)}); save it again with save_pretrained"
        ) from error


def read_tokenizer_class(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the name of the tokenizer class in the files of a folder, and the content of its tokenizer_config.json.

    If the files name no class, the first result is the type of the model in config.json, or None.

    Raises:
        InputError: A file is not JSON, or does not contain an object.
    """
    contents = [
        read_json(folder / name) if os.path.lexists(folder / name) else {} for name in (SETTINGS_NAME, "config.json")
    ]
    for name, content in zip((SETTINGS_NAME, "config.json"), contents, strict=True):
        if not isinstance(content, dict):
            raise InputError(f"{folder / name}: expected an object, found {short_repr(content)}; copy the folder again")
    settings, config = contents
    return settings.get("tokenizer_class") or config.get("tokenizer_class") or config.get("model_type"), settings


def read_tokenizer_files(folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Build a tokenizer from the files in a folder, and return it with its settings.

    Returns:
        The tokenizer with its added tokens, and its settings with their names in tokenizer_config.json.

    Raises:
        InputError: A file is damaged, or only `transformers` can read the files or apply a setting.
    """
    (named_class, settings), file = read_tokenizer_class(folder), folder / TOKENIZER_NAME
    is_bare = not os.path.lexists(file)
    # The folders that BERT's authors published name no tokenizer class, so recognize them by their files.
    is_bert = named_class == "bert" or (named_class is None and (is_bare or (folder / "bert_config.json").is_file()))
    kind = _BERT if is_bert else str(named_class or GENERAL_CLASS).removesuffix("Fast")
    if is_bare and (kind not in (_BERT, ESM_CLASS) or not os.path.lexists(folder / VOCABULARY_NAME)):
        raise _needs_transformers_error(folder, f"the folder contains a {kind} without {TOKENIZER_NAME}")
    settings = {**{_BERT: _BERT_TOKENS, ESM_CLASS: _ESM_TOKENS}.get(kind, {}), **settings}
    added_tokens = _read_added_tokens(folder, settings)
    _check_settings_supported(folder, kind, settings)
    vocabulary = folder / VOCABULARY_NAME
    if not is_bare:
        backend = read_tokenizer_json(file)
    elif kind == _BERT:
        words = read_vocabulary(vocabulary).tokens
        backend = _build_bert_tokenizer({word: number for number, word in enumerate(words)}, settings)
    else:
        lines = read_file(vocabulary).decode("utf-8", "replace").splitlines()
        backend = build_esm_tokenizer({line.strip(): number for number, line in enumerate(lines)}, settings, vocabulary)
    if backend.truncation is not None:
        settings.setdefault("truncation_side", backend.truncation["direction"])
        backend.no_truncation()
    _add_missing_tokens(backend, added_tokens, settings, folder)
    if not is_bare:
        _check_json_matches_settings(backend, kind, settings, folder)
    backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    usual_inputs = ["input_ids", *(["token_type_ids"] if kind in _WITH_TOKEN_TYPES else []), "attention_mask"]
    return backend, {
        "tokenizer_class": kind,
        "model_input_names": settings.get("model_input_names", usual_inputs),
        **{name: settings[name] for name in ("truncation_side", "padding_side", "model_max_length") if name in settings},
        **{name: _token_text(settings[name]) for name in NAMED_TOKENS if settings.get(name) is not None},
    }


def _needs_transformers_error(path: Path, what: str) -> InputError:
    """Return the error for a setting or a file that is supported only if `transformers` is installed."""
    return InputError(f"{path}: {what}, which only transformers can apply; install transformers")


def _contradiction_error(path: Path, name: str, value: object, stored: object) -> InputError:
    """Return the error for a setting that contradicts tokenizer.json."""
    problem = f"{name} is {json.dumps(value)}, but it is {json.dumps(stored)} in {TOKENIZER_NAME}"
    return InputError(f"{path}: {problem}; change one of the values, or install transformers, which applies {name}")


def _check_settings_supported(folder: Path, kind: str, settings: Mapping[str, Any]) -> None:
    """Raise an InputError if a tokenizer setting is not supported or has an invalid value. Supported settings are either
    applied in this module or do not affect tokens.

    Raises:
        InputError: A setting is unknown, or its value is not allowed.
    """
    file, known = folder / SETTINGS_NAME, _APPLIED | _WITHOUT_EFFECT
    # BERT's tokenizer applies settings for text normalization. As in `transformers`, a general class such as
    # `PreTrainedTokenizerFast` accepts these settings but ignores them.
    known = known | (set(_NORMALIZATION.values()) if kind in (_BERT, *_AS_IT_IS) else set())
    harmless: dict[str, Any] = {"do_basic_tokenize": True, "never_split": None}
    for name, value in settings.items():
        if name not in known and not (name in harmless and value == harmless[name]):
            raise _needs_transformers_error(file, f"the file contains the setting {shorten(name)} of {kind}")
    for name, allowed in (("truncation_side", ("left", "right")), ("split_special_tokens", (True, False))):
        if settings.get(name, allowed[0]) not in allowed:
            raise InputError(
                f"{file}: {name} must be {allowed[0]} or {allowed[1]}, but is {short_repr(settings[name])}; correct it"
            )
    if kind == ESM_CLASS and settings.get("split_special_tokens"):
        raise _needs_transformers_error(file, f"the file sets split_special_tokens for {kind}")


def _token_text(token: Any) -> str:
    """Return the text of a token. In settings, a token is either a string or an object with the key `content`."""
    return str(token["content"] if isinstance(token, dict) else token)


def _read_added_tokens(folder: Path, settings: dict[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens that the files in a folder add to the vocabulary, as a dict by token id.

    In folders of old versions, special_tokens_map.json overrides the special tokens in `settings`, which is updated in
    place.
    """
    from tokenizers import AddedToken

    with convert_library_errors(folder / SETTINGS_NAME):
        if "added_tokens_decoder" in settings:
            return {int(number): AddedToken(**token) for number, token in settings["added_tokens_decoder"].items()}
    with convert_library_errors(folder):
        if os.path.lexists(folder / "special_tokens_map.json"):
            settings.update(read_json(folder / "special_tokens_map.json"))
        if not os.path.lexists(folder / "added_tokens.json"):
            return {}
        special = set(_special_tokens_in_settings(settings))
        return {
            number: AddedToken(token, special=token in special, normalized=token not in special)
            for token, number in read_json(folder / "added_tokens.json").items()
        }


def _special_tokens_in_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens that the settings define, as a dict from token texts to descriptions."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    values = [settings.get(name) for name in NAMED_TOKENS] + list(extra.values() if isinstance(extra, dict) else extra)
    return {_token_text(value): value for value in values if value is not None}


def _add_missing_tokens(
    backend: Tokenizer, added_tokens: Mapping[int, AddedToken], settings: Mapping[str, Any], folder: Path
) -> None:
    """Add the tokens that a folder defines but that are missing in its tokenizer. Raise an InputError if a token gets a
    different id than the folder specifies.

    Args:
        backend: The tokenizer, which is changed in place.
        added_tokens: The added tokens by token id.
        settings: The settings, whose special tokens are added if they are missing.
        folder: The folder, for messages.
    """
    from tokenizers import AddedToken

    with convert_library_errors(folder):
        present = backend.get_added_tokens_decoder()
        for number, token in sorted(added_tokens.items()):
            if repr(present.get(number)) != repr(token):
                backend.add_tokens([token])
            if (found := backend.token_to_id(token.content)) != number:
                raise InputError(
                    f"{folder}: expected the token id {number} for the added token {token.content!r}, found {found} in the "
                    "vocabulary"
                )
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        for content, value in _special_tokens_in_settings(settings).items():
            flags = (
                {key: value[key] for key in ("lstrip", "rstrip", "single_word") if key in value}
                if isinstance(value, dict)
                else {}
            )
            if content not in known:
                backend.add_special_tokens([AddedToken(content, special=True, normalized=False, **flags)])


def _check_json_matches_settings(backend: Tokenizer, kind: str, settings: Mapping[str, Any], folder: Path) -> None:
    """Check that tokenizer.json computes the same tokens as the class and the settings in tokenizer_config.json.

    Raises:
        InputError: They differ, or the class is unknown here.
    """
    file, content = folder / SETTINGS_NAME, json.loads(backend.to_str())
    prefix = (content["pre_tokenizer"] or {}).get("add_prefix_space")
    if prefix is not None and prefix != bool(settings.get("add_prefix_space", False)):
        raise _contradiction_error(file, "add_prefix_space", bool(settings.get("add_prefix_space", False)), prefix)
    is_byte_level = content["normalizer"] is None and prefix is not None and content["model"]["type"] == "BPE"
    if kind not in (_BERT, *_AS_IT_IS) and not (kind == _ROBERTA and is_byte_level):
        raise InputError(
            f"{file}: the tokenizer class {kind} is supported only with transformers; install transformers, or "
            f"pass the file {TOKENIZER_NAME} if the option accepts a file"
        )
    if kind != _BERT:
        return
    if content["model"]["type"] != "WordPiece":
        raise _needs_transformers_error(
            file, f"the file names the class {kind}, but {TOKENIZER_NAME} contains another kind of tokenizer"
        )
    with convert_library_errors(folder / TOKENIZER_NAME):
        expected = _build_bert_tokenizer(backend.get_vocab(with_added_tokens=False), settings)
    meant = json.loads(expected.to_str())
    found, wanted = content["normalizer"] or {}, meant["normalizer"]
    for key, name in _NORMALIZATION.items():
        if found.get(key) != wanted[key]:
            raise _contradiction_error(file, name, wanted[key], found.get(key))
    model = {key: value for key, value in content["model"].items() if key != "vocab"}
    same = found == wanted and content["pre_tokenizer"] == meant["pre_tokenizer"]
    if not same or model != {key: value for key, value in meant["model"].items() if key != "vocab"}:
        raise _needs_transformers_error(
            file, f"the file names the class {kind}, but {TOKENIZER_NAME} contains another kind of tokenizer"
        )
    _add_missing_tokens(expected, {}, settings, folder)
    with convert_library_errors(folder / TOKENIZER_NAME):
        pairs = [each.encode("a", "a") for each in (backend, expected)]
        if pairs[0].type_ids != pairs[1].type_ids or pairs[0].special_tokens_mask != pairs[1].special_tokens_mask:
            raise _needs_transformers_error(
                file, f"the file names the class {kind}, but {TOKENIZER_NAME} adds other special tokens"
            )


def _build_bert_tokenizer(token_ids: Mapping[str, int], settings: Mapping[str, Any]) -> Tokenizer:
    """Build the same tokenizer as `BertTokenizer` of `transformers` from a vocabulary and settings."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    unknown, cls, sep = (_token_text(settings[name]) for name in ("unk_token", "cls_token", "sep_token"))
    model = models.WordPiece(vocab=dict(token_ids), unk_token=unknown, max_input_chars_per_word=_LONGEST_WORD_CHARACTERS)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=bool(settings.get("do_lower_case", True)),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, token_ids[cls]), (sep, token_ids[sep])],
    )
    return tokenizer


def build_esm_tokenizer(token_ids: Mapping[str, int], settings: Mapping[str, Any], file: Path) -> Tokenizer:
    """Build a fast tokenizer for an ESM model from its vocabulary. The ESM tokenizer of `transformers` is implemented only
    in Python.

    Every occurrence of a vocabulary token in a text becomes that token, even within a word. The longest token is matched
    first.

    Args:
        token_ids: The vocabulary, which maps tokens to token ids.
        settings: The settings of the tokenizer, which name its special tokens.
        file: The file or folder, for messages.

    Raises:
        InputError: The vocabulary is not that of an ESM model, or the settings name other special tokens.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    special = list(_ESM_TOKENS.values())
    missing = [token for token in special if token not in token_ids]
    if missing:
        raise InputError(
            f"{file}: the vocabulary does not contain the token {missing[0]}; pass the vocab.txt of an ESM model"
        )
    named = {name: _token_text(settings.get(name, token)) for name, token in _ESM_TOKENS.items()}
    if named != _ESM_TOKENS or set(_special_tokens_in_settings(settings)) - set(special):
        known = ", ".join(special)
        raise InputError(
            f"{file}: {SETTINGS_NAME} names special tokens other than {known}, which is not supported for ESM models"
        )
    tokenizer = Tokenizer(models.WordLevel(dict(token_ids), unk_token="<unk>"))
    known = "|".join(re.escape(token) for token in sorted(filter(None, token_ids), key=len, reverse=True))
    pieces = pre_tokenizers.Split(Regex(known), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pieces])
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<cls> $A <eos>",
        pair="<cls> $A <eos> $B <eos>",
        special_tokens=[(token, token_ids[token]) for token in ("<cls>", "<eos>")],
    )
    return tokenizer
