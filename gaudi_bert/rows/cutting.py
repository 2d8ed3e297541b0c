"""Cuts long texts before they are tokenized, where this cannot change the tokens that stay.

A text of megabytes is truncated to some hundred tokens, so it is enough to tokenize its beginning, or its end. Text is cut
between two words only: before a separator (a space or a line break) that stands between two letters or digits, or
between two Chinese characters if the tokenizer makes each of them a word. The tokens of a text are those of its part
before such a place and of the rest, one after the other, if all of the following holds for its tokenizer:

- The normalizer has only known steps. Each of them changes characters by themselves or with combining marks that follow
  them, and a letter, a digit or a separator is no such mark.
- The pre-tokenizer has only known steps, and they split there: the pieces of two words with a separator between them are
  those of the first word and of the rest. No piece contains both words, and models tokenize each piece by itself.
- No added token contains a space, so none lies across the place. None takes the spaces that follow it.

So if the beginning has more tokens than stay, these tokens are among its own. Tokenizers for which this is not certain
read the text completely, up to a limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gaudi_bert.common.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_CHARACTERS = 1 << 17
"""Most characters of a text that are tokenized."""
_FIRST_CHARACTERS, _MORE = 8, 4
"""Characters per token that are tried first, and how many times as many are tried next."""
_CHARACTERS_PER_TOKEN = 64
"""For long sequences, more characters are tokenized than MOST_CHARACTERS."""
_LONGEST_WORD = 4096
"""So many characters are searched for a place to cut."""
_NORMALIZERS = {"BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip", "Precompiled"}
_PRE_TOKENIZERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit", "ByteLevel", "Metaspace", "Punctuation", "Digits"}
_IDEOGRAPH = "[\u4e00-\u9fff]"


class TextCutter:
    """Cuts texts for one tokenizer.

    Args:
        tokenizer: neither truncates nor pads when texts are cut.
        tokens: the most tokens of a sequence.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: int) -> None:
        self._tokenizer, self._tokens = tokenizer, tokens
        self._places = _find_places(tokenizer)
        self.most_characters = max(MOST_CHARACTERS, _CHARACTERS_PER_TOKEN * tokens)

    def cut(self, text: str, before: str = "", tokens: int | None = None, *, from_left: bool = False) -> str:
        """Return the beginning or the end of a text that decides which of its tokens stay; short texts as they are.

        Args:
            text: the text.
            before: precedes the text when it is tokenized.
            tokens: the part has more tokens than this; None for those of a sequence.
            from_left: whether the beginning of the text is truncated, so that its end stays.

        Raises:
            InputError: the text is very long, and it is not certain which of its tokens stay.
        """
        tokens = self._tokens if tokens is None else tokens
        most = max(self.most_characters, _CHARACTERS_PER_TOKEN * tokens)
        size = _FIRST_CHARACTERS * (tokens + 1)
        while size < min(len(text), _MORE * most):
            part = self._end(text, min(size, most)) if from_left else self._beginning(text, min(size, most))
            if part and self.count(before + part) > tokens:
                return part
            size *= _MORE
        if len(text) > most:
            problem = f"has {len(text):,} characters; its {'last' if from_left else 'first'} {most:,} have no place to cut"
            raise InputError(f"a text {problem} or not more than {tokens:,} tokens; shorten it")
        return text

    def cut_pair(self, first: str, second: str, *, from_left: bool = False) -> tuple[str, str]:
        """Return two texts that are truncated together, the longer one cut.

        Which text loses how many tokens depends on how many tokens both have. So the shorter one is not cut, and of the
        longer one a part stays that has more tokens than the other, and than a sequence.
        """
        if max(len(first), len(second)) <= _FIRST_CHARACTERS * self._tokens:
            return first, second
        shorter, longer = sorted((first, second), key=len)
        if len(shorter) > self.most_characters:
            raise InputError(f"both texts of a pair have more than {self.most_characters:,} characters; shorten one of them")
        longer = self.cut(longer, tokens=max(self._tokens, self.count(shorter)), from_left=from_left)
        return (first, longer) if len(second) >= len(first) else (longer, second)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        return len(self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)

    def _beginning(self, text: str, size: int) -> str:
        """Return the longest beginning of at most `size` characters that ends where text may be cut, or nothing."""
        found = list(self._found(text, max(0, size - _LONGEST_WORD), size))
        return text[: found[-1]] if found else ""

    def _end(self, text: str, size: int) -> str:
        first = len(text) - size
        found = next(self._found(text, first, min(len(text), first + _LONGEST_WORD)), None)
        return "" if found is None else text[found:]

    def _found(self, text: str, start: int, end: int) -> Iterator[int]:
        places = () if self._places is None else self._places.finditer(text, start, end)
        return (place.end() for place in places)


def _find_places(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return what precedes and follows the places at which the tokenizer's texts may be cut; None if there are none."""
    content = json.loads(tokenizer.to_str())
    normalizers, pre_tokenizers = _steps(content["normalizer"]), _steps(content["pre_tokenizer"])
    added = [
        token for each in content["added_tokens"] for token in (each["content"], _normalized(tokenizer, each["content"]))
    ]
    is_known = (
        all(step["type"] in _NORMALIZERS or _is_local_replacement(step) for step in normalizers)
        and all(step["type"] in _PRE_TOKENIZERS for step in pre_tokenizers)
        and not content["model"].get("dropout")
        and not any(each["rstrip"] for each in content["added_tokens"])
        and not any(re.search(r"\s", token) for token in added)
    )
    if not is_known or not pre_tokenizers:
        return None
    separators = "".join(each for each in " \n" if _splits(tokenizer, "a", f"{each}b"))
    patterns = [rf"\w(?=[{separators}]\w)"] if separators else []
    has_words_of_ideographs = any(step.get("handle_chinese_chars") for step in normalizers)
    if has_words_of_ideographs and _splits(tokenizer, "\u4e2d", "\u56fd") and not re.search(_IDEOGRAPH, "".join(added)):
        patterns.append(f"{_IDEOGRAPH}(?={_IDEOGRAPH})")
    return re.compile("|".join(patterns)) if patterns else None


def _steps(component: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer, of which a sequence has several."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    children = component.get("normalizers") or component.get("pretokenizers") or ()
    return [step for child in children for step in _steps(child)]


def _is_local_replacement(step: Mapping[str, Any]) -> bool:
    """Whether a step replaces text without spaces, or several spaces by one."""
    pattern = step.get("pattern") if step["type"] == "Replace" else None
    if not isinstance(pattern, dict):
        return False
    literal = pattern.get("String")
    return pattern.get("Regex") == " {2,}" or (literal is not None and not re.search(r"\s", literal))


def _normalized(tokenizer: Tokenizer, text: str) -> str:
    return text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)


def _splits(tokenizer: Tokenizer, first: str, rest: str) -> bool:
    """Whether the pieces of a text are those of its two parts."""

    def pieces(text: str) -> list[str]:
        return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(_normalized(tokenizer, text))]

    return pieces(first + rest) == pieces(first) + pieces(rest)
