"""Cut texts have the tokens of complete ones, whatever the tokenizer; where that is not certain, nothing is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.cutting import MAX_CHARACTERS, LongTextTruncator, _build_token_boundary_pattern

PIECES = [
    *("a", "b", "word", "words", "Straße", "ΣΑΣ", "naïve", "e\u0301", "\u0301", "\u0300x"),
    *("中", "国人", "ﾞ", "ｶﾞ", "が", "1", "23"),
    *(" ", "  ", "\n", "\t", "\u00a0", "\u3000", "\u200b", "\x00", "\u00ad", "_", "-"),
    *(".", "'s", "'", "``", "\U0001f600", "\ufeff"),
    *("[MASK]", "<mask>", "[SEP]", " <mask> ", "N0", "\u0d4e", "\u1100\u1161", "\u11a8"),
    *("\u00bd", "\ufdfa", "\u0130", "x" * 120),
]  # fmt: skip
TRAINING = [" ".join(PIECES[start::7]) for start in range(7)] * 3


def train(model: str, normalizer: Any, pre_tokenizer: Any, *added: Any) -> Tokenizer:
    classes = {"wordpiece": models.WordPiece, "bpe": models.BPE, "unigram": models.Unigram, "wordlevel": models.WordLevel}
    names = {"wordpiece": "WordPiece", "bpe": "Bpe", "unigram": "Unigram", "wordlevel": "WordLevel"}
    needs_unk = model in ("wordpiece", "wordlevel")
    tokenizer = Tokenizer(classes[model](unk_token="[UNK]") if needs_unk else classes[model]())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    more: dict[str, Any] = {"unk_token": "[UNK]"} if model == "unigram" else {}
    if model == "bpe":
        more["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    trainer = getattr(trainers, f"{names[model]}Trainer")(
        vocab_size=350, special_tokens=["[UNK]"], show_progress=False, **more
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def sequence(*steps: Any) -> Any:
    return normalizers.Sequence(list(steps))


MASK = AddedToken("<mask>", lstrip=True)
QUOTES = normalizers.Replace("``", '"')
SPACES = normalizers.Replace(Regex(" {2,}"), " ")
BERT = normalizers.BertNormalizer
TOKENIZERS = {
    "bert": train("wordpiece", BERT(), pre_tokenizers.BertPreTokenizer(), "[MASK]", "[SEP]"),
    "cased bert": train("wordpiece", BERT(lowercase=False), pre_tokenizers.BertPreTokenizer(), "[MASK]"),
    "roberta": train("bpe", None, pre_tokenizers.ByteLevel(add_prefix_space=False), MASK, "N0"),
    "prefixed": train("bpe", normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=True), MASK),
    "xlm-roberta": train("unigram", sequence(normalizers.NFKC(), SPACES), pre_tokenizers.Metaspace(), MASK),
    "albert": train(
        "unigram",
        sequence(QUOTES, normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), SPACES),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        AddedToken("[MASK]", lstrip=True, normalized=True),
    ),
    "words": train("wordlevel", normalizers.NFD(), pre_tokenizers.Whitespace(), AddedToken("word", single_word=True)),
    "stripped": train("bpe", normalizers.Strip(), pre_tokenizers.WhitespaceSplit()),
}  # fmt: skip
UNCERTAIN = {
    "no pre-tokenizer": train("bpe", None, None),
    "spaces stay in pieces": train("unigram", None, pre_tokenizers.Metaspace(split=False)),
    "a split by an expression": train("bpe", None, pre_tokenizers.Split(Regex(r"\w+|\s"), "isolated")),
    "a replaced space": train("bpe", normalizers.Replace(" ", "_"), pre_tokenizers.Whitespace()),
    "a replacement by an expression": train("bpe", normalizers.Replace(Regex(r"\s\w"), "_"), pre_tokenizers.Whitespace()),
    "a stripped beginning": train("bpe", normalizers.Strip(), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "an added token with a space": train("bpe", None, pre_tokenizers.Whitespace(), "a b"),
    "an added token that takes spaces": train("bpe", None, pre_tokenizers.ByteLevel(), AddedToken("word", rstrip=True)),
    "a prefix": train("bpe", normalizers.Prepend("x"), pre_tokenizers.Whitespace()),
}


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


TEXT = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)
SPACED = st.lists(st.sampled_from(PIECES), max_size=60).map(" ".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(text=st.one_of(TEXT, SPACED), tokens=st.integers(1, 6), from_left=st.booleans())
def test_the_tokens_that_stay_are_those_of_the_complete_text(name: str, text: str, tokens: int, from_left: bool) -> None:
    tokenizer = TOKENIZERS[name]
    cut = LongTextTruncator(tokenizer, tokens).truncate_text(text, from_left=from_left)
    complete, found = ids(tokenizer, text), ids(tokenizer, cut)
    kept = slice(-tokens, None) if from_left else slice(tokens)
    assert found[kept] == complete[kept]
    assert (len(found) > tokens) == (len(complete) > tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(text=SPACED, place=st.floats(0, 1))
def test_tokens_at_each_place_are_those_of_both_parts(name: str, text: str, place: float) -> None:
    tokenizer = TOKENIZERS[name]
    places = _build_token_boundary_pattern(tokenizer)
    found = [match.end() for match in places.finditer(text)]
    if found:
        at = found[int(place * (len(found) - 1))]
        assert ids(tokenizer, text[:at]) + ids(tokenizer, text[at:]) == ids(tokenizer, text)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(first=SPACED, second=SPACED, tokens=st.integers(2, 7), from_left=st.booleans())
def test_pairs_are_truncated_as_complete_ones(name: str, first: str, second: str, tokens: int, from_left: bool) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS[name].to_str())
    cut = LongTextTruncator(tokenizer, tokens).truncate_pair(first, second, from_left=from_left)
    tokenizer.enable_truncation(tokens, direction="left" if from_left else "right")
    complete, found = tokenizer.encode(first, second), tokenizer.encode(*cut)
    assert (found.ids, found.type_ids) == (complete.ids, complete.type_ids)
    assert bool(found.overflowing) == bool(complete.overflowing)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("from_left", [False, True])
def test_little_of_a_long_text_is_tokenized(name: str, from_left: bool) -> None:
    text = "words and more words " * 50_000
    cut = LongTextTruncator(TOKENIZERS[name], 30).truncate_text(text, from_left=from_left)
    assert len(cut) < 1_000
    assert text.endswith(cut) if from_left else text.startswith(cut)


def test_chinese_is_cut_between_characters_that_are_words() -> None:
    text = "中国人" * 50_000
    assert len(LongTextTruncator(TOKENIZERS["bert"], 30).truncate_text(text)) < 1_000
    with pytest.raises(InputError, match="contain no word boundary"):
        LongTextTruncator(TOKENIZERS["xlm-roberta"], 30).truncate_text(text)


@pytest.mark.parametrize("name", UNCERTAIN)
def test_nothing_is_cut_where_it_might_change_tokens(name: str) -> None:
    cutter = LongTextTruncator(UNCERTAIN[name], 10)
    text = "a b " * (MAX_CHARACTERS // 4)
    assert cutter.truncate_text(text) is text
    assert cutter.truncate_text(text, from_left=True) is text
    with pytest.raises(InputError, match=f"{MAX_CHARACTERS:,}"):
        cutter.truncate_text(f"{text} ")


def test_very_long_words_and_empty_ones_are_rejected() -> None:
    cutter = LongTextTruncator(TOKENIZERS["bert"], 10)
    for text in ("a" * 200_000, " " * 200_000, "\x00 " * 100_000):
        with pytest.raises(InputError, match="200,000 characters"):
            cutter.truncate_text(text)
        assert cutter.truncate_text(text[:100_000]) == text[:100_000]
