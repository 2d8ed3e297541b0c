from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.corpus.vocabulary import SPECIAL_TOKENS, read_vocabulary, train_vocabulary, wordpiece_tokenizer

DOCUMENTS = [["The café's waiter waits.", "Waiting waiters wait; the waiter waited!"], ["Ünïcode 你好 the the the"]]


def write(path: Path, *tokens: str) -> Path:
    path.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return path


def test_a_vocabulary_is_read_and_written_alike(tmp_path: Path) -> None:
    path = write(tmp_path / "vocab.txt", *SPECIAL_TOKENS, "the", "##s", "\u2028", "é")
    vocabulary = read_vocabulary(path)
    assert len(vocabulary) == 9
    assert vocabulary.number("the") == 5
    assert vocabulary.text.encode() == path.read_bytes()
    assert vocabulary.continuations().tolist() == [False] * 6 + [True, False, False]


@pytest.mark.parametrize("missing", SPECIAL_TOKENS)
def test_special_tokens_are_needed(tmp_path: Path, missing: str) -> None:
    path = write(tmp_path / "vocab.txt", *(token for token in SPECIAL_TOKENS if token != missing), "the")
    with pytest.raises(InputError, match="has no") as caught:
        read_vocabulary(path)
    assert missing in str(caught.value).split(";")[0]


def test_bad_vocabularies(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 7: token 'a' stands on line 6"):
        read_vocabulary(write(tmp_path / "twice", *SPECIAL_TOKENS, "a", "a"))
    (tmp_path / "binary").write_bytes(b"[PAD]\n\xff")
    with pytest.raises(InputError, match="not UTF-8 at byte 6"):
        read_vocabulary(tmp_path / "binary")
    with pytest.raises(InputError, match="cannot read the vocabulary"):
        read_vocabulary(tmp_path / "missing")


def test_training_makes_whole_words_of_frequent_ones() -> None:
    vocabulary = train_vocabulary(lambda: DOCUMENTS, 120, lower_case=True)
    assert vocabulary.tokens[:5] == SPECIAL_TOKENS
    assert {"the", "wait", "waiter"} <= set(vocabulary.tokens)
    assert not any("é" in token or token.lower() != token for token in vocabulary.tokens[5:])
    assert "The" in train_vocabulary(lambda: [["The The"]], 120, lower_case=False).tokens


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="different characters"):
        train_vocabulary(lambda: DOCUMENTS, 30, lower_case=True)


def test_training_does_not_depend_on_the_process() -> None:
    code = (
        "from gaudi_bert.corpus.vocabulary import train_vocabulary\n"
        "from gaudi_bert.corpus.documentation import documentation_documents\n"
        "from gaudi_bert.corpus.python_texts import python_texts\n"
        "documents = documentation_documents(python_texts('python-docs'))[:20]\n"
        "print(train_vocabulary(lambda: documents, 2000, True).sha256)"
    )
    seeds = [
        {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads} for seed, threads in (("1", "1"), ("2", "2"), ("3", "2"))
    ]
    runs = [
        subprocess.run([sys.executable, "-c", code], env=os.environ | seed, capture_output=True, check=True)
        for seed in seeds
    ]
    assert len({run.stdout for run in runs}) == 1


def test_tokenizer_follows_berts_rules() -> None:
    numbers = wordpiece_tokenizer([*SPECIAL_TOKENS, "cafe", "##s", "!", "你", "好"], lower_case=True)
    assert numbers.encode("Cafés! 你好 [MASK]", add_special_tokens=False).tokens == [
        "cafe",
        "##s",
        "!",
        "你",
        "好",
        *["[UNK]"] * 3,
    ]
    assert numbers.encode("cafe" + "s" * 196, add_special_tokens=False).tokens[:2] == ["cafe", "##s"]
    assert numbers.encode("cafe" + "s" * 197, add_special_tokens=False).tokens == ["[UNK]"]
