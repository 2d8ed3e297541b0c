from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.corpus import tokens
from gaudi_bert.corpus.tokens import tokenize_documents
from gaudi_bert.corpus.vocabulary import SPECIAL_TOKENS, Vocabulary, wordpiece_tokenizer
from tests.builders.properties import examples

LETTERS = "aAeéÉßIİiσςΣ가你.,-[]#"
VOCABULARY = Vocabulary((*SPECIAL_TOKENS, *"aeisσς你.,-[]#가", *(f"##{letter}" for letter in "aeisσς가"), "ae", "##\u0307"))
# Letters, accents apart, and every kind of white space and control character that Python or BERT knows.
CHARACTERS = st.sampled_from([*LETTERS, *" \u0301\u0307\u0345\t\r\x00\x1c\x85\xa0\xad\u1160\u200b\u2028\u3000\ufeff\ufffd"])
SENTENCES = st.lists(st.text(CHARACTERS | st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), min_size=1)


@examples(200)
@given(st.lists(SENTENCES, max_size=4), st.booleans())
def test_tokens_are_those_of_whole_sentences(documents: list[list[str]], lower_case: bool) -> None:
    block = tokenize_documents(documents, VOCABULARY, lower_case)
    tokenizer = wordpiece_tokenizer(VOCABULARY.tokens, lower_case)
    encoded = [[tokenizer.encode(sentence, add_special_tokens=False).ids for sentence in document] for document in documents]
    kept = [[ids for ids in document if ids] for document in encoded if any(document)]
    found = np.split(block.tokens, block.sentence_starts[1:-1]) if block.sentences else []
    assert [ids.tolist() for ids in found] == [ids for document in kept for ids in document]
    assert np.diff(block.document_starts).tolist() == [len(document) for document in kept]
    assert (block.tokens.dtype, block.documents) == (np.int32, len(kept))


def test_more_words_than_are_remembered_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary((*SPECIAL_TOKENS, "w", *(f"##{digit}" for digit in range(10))))
    documents = [[" ".join(f"w{number % 17}" for number in range(first, first + 5))] for first in range(11)]
    whole = tokenize_documents(documents, vocabulary, True)
    monkeypatch.setattr(tokens, "MOST_KNOWN_WORDS", 7)
    parts = [tokenize_documents([document], vocabulary, True).tokens for document in documents]
    assert np.concatenate(parts).tolist() == whole.tokens.tolist()
