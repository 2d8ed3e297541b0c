from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.corpus import vocabulary as vocabulary_module
from gaudi_bert.corpus.vocabulary import (
    SPECIAL_TOKENS,
    Vocabulary,
    _make_wordpiece_tokenizer,
    read_vocabulary,
    tokenize_documents,
    train_vocabulary,
)
from tests.builders.command_line import run_python
from tests.builders.properties import examples

DOCUMENTS = [["The café's waiter waits.", "Waiting waiters wait; the waiter waited!"], ["Ünïcode 你好 the the the"]]


def write(path: Path, *tokens: str) -> Path:
    path.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return path


def test_a_vocabulary_is_read_and_written_alike(tmp_path: Path) -> None:
    path = write(tmp_path / "vocab.txt", *SPECIAL_TOKENS, "the", "##s", "\u2028", "é")
    vocabulary = read_vocabulary(path)
    assert (len(vocabulary), vocabulary.token_id("the"), vocabulary.text.encode()) == (9, 5, path.read_bytes())
    assert vocabulary.mark_continuations().tolist() == [False] * 6 + [True, False, False]


def test_bad_vocabularies(tmp_path: Path) -> None:
    for missing in SPECIAL_TOKENS:
        path = write(tmp_path / "vocab.txt", *(token for token in SPECIAL_TOKENS if token != missing), "the")
        with pytest.raises(InputError, match=rf"the vocabulary lacks {re.escape(missing)}"):
            read_vocabulary(path)
    with pytest.raises(InputError, match=r"line 7: token 'a' is already on line 6"):
        read_vocabulary(write(tmp_path / "twice", *SPECIAL_TOKENS, "a", "a"))
    (tmp_path / "binary").write_bytes(b"[PAD]\n\xff")
    with pytest.raises(InputError, match="not UTF-8 at byte 6"):
        read_vocabulary(tmp_path / "binary")
    with pytest.raises(InputError, match="cannot read"):
        read_vocabulary(tmp_path / "missing")


def test_training_makes_whole_words_of_frequent_ones() -> None:
    vocabulary = train_vocabulary(lambda: DOCUMENTS, 120, lower_case=True)
    assert vocabulary.tokens[:5] == SPECIAL_TOKENS
    assert {"the", "wait", "waiter"} <= set(vocabulary.tokens)
    assert not any("é" in token or token.lower() != token for token in vocabulary.tokens[5:])
    assert "The" in train_vocabulary(lambda: [["The The"]], 120, lower_case=False).tokens


def test_training_does_not_depend_on_the_process() -> None:
    code = (
        "from gaudi_bert.corpus.vocabulary import train_vocabulary\n"
        "from gaudi_bert.corpus.documents import convert_texts_to_documents\n"
        "from gaudi_bert.corpus.python_texts import load_python_texts\n"
        "documents = list(convert_texts_to_documents(load_python_texts('python-docs')).values())[:20]\n"
        "print(train_vocabulary(lambda: documents, 2000, True).sha256)"
    )
    first, second = (run_python(code, PYTHONHASHSEED=number, RAYON_NUM_THREADS=number) for number in ("1", "2"))
    assert first.stdout == second.stdout != ""


def test_tokenizer_follows_berts_rules() -> None:
    words = ["cafe", "##s", "!", "你", "好"]
    tokenizer = _make_wordpiece_tokenizer([*SPECIAL_TOKENS, *words], lower_case=True)
    texts = ("Cafés! 你好 [MASK]", "cafe" + "s" * 196, "cafe" + "s" * 197)
    short, long, longer = (tokenizer.encode(text, add_special_tokens=False).tokens for text in texts)
    assert short == [*words, *["[UNK]"] * 3]
    assert long[:2] == ["cafe", "##s"]
    assert longer == ["[UNK]"]


# --- blocks of tokens

LETTERS = "aAeéÉßIİiσςΣ가你.,-[]#"
VOCABULARY = Vocabulary((*SPECIAL_TOKENS, *"aeisσς你.,-[]#가", *(f"##{letter}" for letter in "aeisσς가"), "ae", "##\u0307"))
# Letters, accents apart, and every kind of white space and control character that Python or BERT knows.
CHARACTERS = st.sampled_from([*LETTERS, *" \u0301\u0307\u0345\t\r\x00\x1c\x85\xa0\xad\u1160\u200b\u2028\u3000\ufeff\ufffd"])
SENTENCES = st.lists(st.text(CHARACTERS | st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), min_size=1)


@examples(200)
@given(st.lists(SENTENCES, max_size=4), st.booleans())
def test_tokens_are_those_of_whole_sentences(documents: list[list[str]], lower_case: bool) -> None:
    block = tokenize_documents(documents, VOCABULARY, lower_case)
    tokenizer = _make_wordpiece_tokenizer(VOCABULARY.tokens, lower_case)
    encoded = [[tokenizer.encode(sentence, add_special_tokens=False).ids for sentence in document] for document in documents]
    kept = [[ids for ids in document if ids] for document in encoded if any(document)]
    found = np.split(block.tokens, block.sentence_starts[1:-1]) if block.sentence_count else []
    assert [ids.tolist() for ids in found] == [ids for document in kept for ids in document]
    assert np.diff(block.document_starts).tolist() == [len(document) for document in kept]
    assert (block.tokens.dtype, block.document_count) == (np.int32, len(kept))


def test_more_words_than_are_remembered_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary((*SPECIAL_TOKENS, "w", *(f"##{digit}" for digit in range(10))))
    documents = [[" ".join(f"w{number % 17}" for number in range(first, first + 5))] for first in range(11)]
    whole = tokenize_documents(documents, vocabulary, True)
    monkeypatch.setattr(vocabulary_module, "MOST_KNOWN_WORDS", 7)
    parts = [tokenize_documents([document], vocabulary, True).tokens for document in documents]
    assert np.concatenate(parts).tolist() == whole.tokens.tolist()
