"""Cut long texts before they are tokenized, if this cannot change the tokens that remain after truncation.

A text of several megabytes is truncated to a few hundred tokens, so it is enough to tokenize its beginning or its end. A
text is cut only between two words. The cut comes before a separator (a space or a line break) that has a letter or a digit
on each side. If the tokenizer makes a word of each Chinese character, a cut is also possible between two of them. Tokenizing
the two parts separately gives the same tokens as tokenizing the text, if all of the following holds for the tokenizer:

- The normalizer has only known steps. Each step changes single characters, or characters together with the combining marks
  that follow them. A letter, a digit or a separator is not a combining mark.
- The pre-tokenizer has only known steps, and they split the text at the cut. Therefore no piece contains characters from
  both sides, and models tokenize each piece separately.
- No added token contains a space, so no added token extends across the cut. No added token consumes the spaces after it.

So if the beginning of a text has more tokens than remain, all remaining tokens are in this beginning. Other tokenizers read
the complete text, up to a limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gaudi_bert.common.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# At most this many characters of a text are tokenized. A longer text is cut between two words first, or rejected if that is
# impossible.
MAX_CHARACTERS = 1 << 17
# Before a long text is tokenized, it is cut to 8 characters for each token of a sequence. If this part has too few tokens,
# or no place to cut is found, the next attempt keeps 4 times as many characters.
_FIRST_CHARACTERS_PER_TOKEN, _GROWTH = 8, 4
# A sequence of more than 2,048 tokens may need a text that is longer than MAX_CHARACTERS. The limit is then this many
# characters for each token of the sequence.
_MAX_CHARACTERS_PER_TOKEN = 64
# A text is cut only between words. Words are hardly ever longer than this, so only this many characters are searched for a
# place to cut.
_LONGEST_WORD = 4096
_NORMALIZERS = {"BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip", "Precompiled"}
_PRE_TOKENIZERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit", "ByteLevel", "Metaspace", "Punctuation", "Digits"}
_IDEOGRAPH = "[\u4e00-\u9fff]"


class LongTextTruncator:
    """Cuts very long texts before they are tokenized, without changing the tokens that remain after truncation.

    Args:
        tokenizer: The tokenizer. It must neither truncate nor pad while texts are cut.
        tokens: The largest number of tokens in a sequence.

    Attributes:
        max_characters: The length in characters above which a text is rejected unless it can be cut.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: int) -> None:
        self._tokenizer, self._tokens = tokenizer, tokens
        self._cut_pattern = _build_token_boundary_pattern(tokenizer)
        self.max_characters = max(MAX_CHARACTERS, _MAX_CHARACTERS_PER_TOKEN * tokens)

    def truncate_text(self, text: str, prompt: str = "", min_tokens: int | None = None, *, from_left: bool = False) -> str:
        """Cut a long text to a part that has more than `min_tokens` tokens, and return the part. If the tokens are truncated
        to `min_tokens` afterwards, the result is the same as for the complete text.

        A short text is returned unchanged.

        Args:
            text: The text.
            prompt: Text that is prepended to `text` before it is tokenized. Its tokens count too.
            min_tokens: The number of tokens that must be exceeded. None stands for the length of a sequence.
            from_left: Whether truncation removes the beginning of the text, so that its end remains.

        Raises:
            InputError: The text is too long to be tokenized completely, and no place to cut it was found.
        """
        tokens = self._tokens if min_tokens is None else min_tokens
        most = max(self.max_characters, _MAX_CHARACTERS_PER_TOKEN * tokens)
        size = _FIRST_CHARACTERS_PER_TOKEN * (tokens + 1)
        while size < min(len(text), _GROWTH * most):
            part = self._truncate_between_words(text, min(size, most), from_left)
            if part and self.count_tokens(prompt + part) > tokens:
                return part
            size *= _GROWTH
        if len(text) > most:
            raise InputError(
                f"a text of {len(text):,} characters cannot be cut, because its {'last' if from_left else 'first'} {most:,} "
                f"characters contain no word boundary, or not more than {tokens:,} tokens; shorten the text"
            )
        return text

    def truncate_pair(self, first: str, second: str, *, from_left: bool = False) -> tuple[str, str]:
        """Cut the longer of two texts to a part that still contains all tokens that truncation of the pair keeps. Return
        both texts.

        Truncation compares the token counts of both texts, so the shorter text is never cut. The longer text keeps more
        tokens than the shorter text has, and more tokens than a sequence may have.

        Args:
            first: The first text.
            second: The second text.
            from_left: Whether truncation removes the beginning of a text.

        Raises:
            InputError: Both texts are too long, or no place to cut the longer text was found.
        """
        if max(len(first), len(second)) <= _FIRST_CHARACTERS_PER_TOKEN * self._tokens:
            return first, second
        shorter, longer = sorted((first, second), key=len)
        if len(shorter) > self.max_characters:
            raise InputError(f"both texts of a pair have more than {self.max_characters:,} characters; shorten one of them")
        longer = self.truncate_text(longer, min_tokens=max(self._tokens, self.count_tokens(shorter)), from_left=from_left)
        return (first, longer) if len(second) >= len(first) else (longer, second)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens in a text, without special tokens."""
        return len(self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)

    def _truncate_between_words(self, text: str, max_characters: int, from_left: bool) -> str:
        """Return the longest part of a text that has at most `max_characters` characters and ends where the text can be cut.
        It is the beginning of the text or, if `from_left` is true, its end. Return "" if no place to cut was found.
        """
        if self._cut_pattern is None:
            return ""
        start = len(text) - max_characters if from_left else max(0, max_characters - _LONGEST_WORD)
        end = min(len(text), start + _LONGEST_WORD) if from_left else max_characters
        cuts = [match.end() for match in self._cut_pattern.finditer(text, start, end)]
        if not cuts:
            return ""
        return text[cuts[0] :] if from_left else text[: cuts[-1]]


def _build_token_boundary_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a regular expression for the positions where a text can be cut. A match ends at such a position. Return None if
    cutting a text could change its tokens.
    """
    content = json.loads(tokenizer.to_str())
    normalizers, pre_tokenizers = (
        _flatten_tokenizer_steps(content["normalizer"]),
        _flatten_tokenizer_steps(content["pre_tokenizer"]),
    )
    added = [
        token for each in content["added_tokens"] for token in (each["content"], _normalize_text(tokenizer, each["content"]))
    ]
    if not (
        pre_tokenizers
        and all(step["type"] in _NORMALIZERS or _can_cut_before_replacement(step) for step in normalizers)
        and all(step["type"] in _PRE_TOKENIZERS for step in pre_tokenizers)
        and not content["model"].get("dropout")
        and not any(each["rstrip"] for each in content["added_tokens"])
        and not any(re.search(r"\s", token) for token in added)
    ):
        return None
    separators = "".join(each for each in " \n" if _is_split_between(tokenizer, "a", f"{each}b"))
    patterns = [rf"\w(?=[{separators}]\w)"] if separators else []
    if (
        any(step.get("handle_chinese_chars") for step in normalizers)  # every ideograph becomes a word
        and _is_split_between(tokenizer, "\u4e2d", "\u56fd")
        and not re.search(_IDEOGRAPH, "".join(added))
    ):
        patterns.append(f"{_IDEOGRAPH}(?={_IDEOGRAPH})")
    return re.compile("|".join(patterns)) if patterns else None


def _flatten_tokenizer_steps(component: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer as a flat list that includes the steps of nested sequences."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    children = component.get("normalizers") or component.get("pretokenizers") or ()
    return [step for child in children for step in _flatten_tokenizer_steps(child)]


def _can_cut_before_replacement(normalizer_step: Mapping[str, Any]) -> bool:
    """Return whether a normalizer step has the same effect on a text after the text has been cut in two. Such a step
    replaces a string without spaces, or replaces runs of spaces.
    """
    pattern = normalizer_step.get("pattern") if normalizer_step["type"] == "Replace" else None
    if not isinstance(pattern, dict):
        return False
    literal = pattern.get("String")
    return pattern.get("Regex") == " {2,}" or (literal is not None and not re.search(r"\s", literal))


def _normalize_text(tokenizer: Tokenizer, text: str) -> str:
    """Apply the normalizer of a tokenizer to a text, and return the result."""
    return text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)


def _is_split_between(tokenizer: Tokenizer, first: str, rest: str) -> bool:
    """Return whether the pre-tokenizer splits `first + rest` into the same pieces as `first` and `rest` separately."""

    def pieces(text: str) -> list[str]:
        """Split a text with the pre-tokenizer, and return the pieces."""
        return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(_normalize_text(tokenizer, text))]

    return pieces(first + rest) == pieces(first) + pieces(rest)
