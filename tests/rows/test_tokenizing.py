"""Token numbers as transformers' own tokenizer gives them; spans that name the very characters; every word in one window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.fields import collect_label_names
from gaudi_bert.rows.tokenizer import RowTokenizer, open_tokenizer
from gaudi_bert.rows.tokenizing import _choose_window_of_each_token, _split_into_windows, tokenize_rows
from gaudi_bert.rows.types import IdsRow, QuestionRow, Row, RowPosition, Sequences, TaggedRow, TextRow
from tests.builders.bert_folder import VOCABULARY, write_tokenizer
from tests.builders.command_line import run_python
from tests.builders.properties import examples
from tests.oracles.windows import best_windows

CONTEXT = "The river flows north over the hill, and the cat sat on the mat. Unable dogs runs south!"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> RowTokenizer:
    return open_tokenizer(folder)


def tokenized(rows: list[Row], tokenizer: RowTokenizer, task: Any, most: int = 64, **settings: Any) -> Sequences:
    labels = collect_label_names(rows, task) if task else ()
    given = TaskSettings(**settings)
    return tokenize_rows(rows, tokenizer, task=task, settings=given, max_sequence_length=most, labels=labels, file="x.jsonl")


WORDS = ["the", "cat", "unableness", "x" * 40, "a.b", "...", "\u4e2d\u56fd", "\u4e2d" * 30 + "\u3002", " ", "\n\n", "\u00dc"]


def any_tokenizer(kind: str) -> RowTokenizer:
    library = Tokenizer(models.BPE() if kind == "bpe" else models.Unigram())
    special = {"special_tokens": ["<s>", "</s>", "<unk>"], "show_progress": False}
    if kind == "bpe":
        library.pre_tokenizer = pre_tokenizers.ByteLevel()
        trainer: Any = trainers.BpeTrainer(vocab_size=300, **special)
    else:
        library.normalizer, library.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=80, unk_token="<unk>", **special)
    library.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    library.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return RowTokenizer(library, Path(kind))


@pytest.fixture(scope="module")
def tokenizers(tokenizer: RowTokenizer) -> list[RowTokenizer]:
    return [tokenizer, any_tokenizer("bpe"), any_tokenizer("unigram")]


@examples(15)
@given(
    st.lists(st.tuples(st.sampled_from(WORDS), st.integers(1, 120)), max_size=9),
    st.sampled_from(["", " "]),
    st.booleans(),
    st.sampled_from(["left", "right"]),
)
def test_a_text_far_too_long_is_cut_as_if_it_were_read_to_its_end(
    tokenizers, runs, between: str, of_pair: bool, side: str
) -> None:
    text = between.join(word for word, count in runs for _ in range(count))
    for tokenizer in tokenizers:
        tokenizer = replace(tokenizer, settings={"truncation_side": side})
        rows: list[Row] = [
            TextRow(RowPosition(1), "cat"),
            TextRow(RowPosition(2), text, "the cat" if of_pair else None),
            TextRow(RowPosition(3), "cat " * 499),
        ]
        found = tokenized(rows, tokenizer, None, 7, too_long="truncate")
        tokenizer.tokenizer.enable_truncation(7, direction=side)
        theirs = [tokenizer.tokenizer.encode(*row[1:3]) for row in rows]  # type: ignore[misc]
        tokenizer.tokenizer.no_truncation()
        assert np.split(found.input_ids, found.offsets[1:-1])[1].tolist() == theirs[1].ids
        assert found.input_ids.tolist() == [token for encoding in theirs for token in encoding.ids]
        assert found.cut_rows == sum(bool(encoding.overflowing) for encoding in theirs)


def test_memory_does_not_grow_with_the_longest_text(folder: Path) -> None:
    """Encoded to its end, a text of two million characters takes 800 MB."""
    code = """
import resource, sys
from tests.rows.test_tokenizing import Path, RowPosition, TextRow, open_tokenizer, tokenized
tokenizer, text = open_tokenizer(Path(sys.argv[1])), "the cat, ... " * 160_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for rows in ([TextRow(RowPosition(1), text)], [TextRow(RowPosition(number), text[:20_000]) for number in range(200)]):
    tokenized(rows, tokenizer, None, too_long="truncate")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    done = run_python(code, folder)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 80


def test_a_text_far_too_long_is_refused_by_its_row(tokenizer: RowTokenizer) -> None:
    rows: list[Row] = [TextRow(RowPosition(number), "cat " * words) for number, words in ((3, 1), (7, 9999), (8, 10))]
    with pytest.raises(
        InputError, match=r"x\.jsonl: row 7: the row has more than \d{2,3} tokens, but a sequence may have at most 9"
    ):
        tokenized(rows, tokenizer, None, 9, too_long="error")


def test_windows_of_a_context_as_transformers_has_them(folder: Path, tokenizer: RowTokenizer) -> None:
    """Texts and pairs are compared with transformers in `test_tokenizer.py`."""
    from transformers import AutoTokenizer

    windows = AutoTokenizer.from_pretrained(folder)(
        "what flows", CONTEXT, truncation="only_second", max_length=15, stride=4, return_overflowing_tokens=True
    )
    cut = tokenized([QuestionRow(RowPosition(1), "a", "what flows", CONTEXT)], tokenizer, "question-answering", 15, stride=4)
    spans = [slice(cut.offsets[number], cut.offsets[number + 1]) for number in range(len(cut))]
    assert [cut.input_ids[span].tolist() for span in spans] == windows["input_ids"]


def test_rows_of_every_kind_lose_their_beginning(folder: Path, tokenizer: RowTokenizer) -> None:
    """If they are cut, and the tokenizer cuts on the left, as that of `transformers` does."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    cut: dict[str, Any] = {"too_long": "truncate"}
    left = replace(tokenizer, settings={**tokenizer.settings, "truncation_side": "left"})
    words = ("The", "river", "unable", "flows", "north", "and", "south", "over", "unable", "hill")
    tags = tokenized([TaggedRow(RowPosition(1), words)], left, "token-classification", 8, **cut)
    assert (
        tags.input_ids.tolist() == theirs(list(words), is_split_into_words=True, truncation=True, max_length=8)["input_ids"]
    )
    # [CLS] and [SEP] are of no word, and the second piece of a word does not represent it.
    assert tags.words.tolist() == [-1, 5, 6, 7, 8, -1, 9, -1]
    answers = tokenized([QuestionRow(RowPosition(1), "a", "what flows", CONTEXT)], left, "question-answering", 15, **cut)
    assert answers.input_ids.tolist() == theirs("what flows", CONTEXT, truncation="only_second", max_length=15)["input_ids"]
    language = tokenized([TextRow(RowPosition(1), CONTEXT)], left, "masked-language-modelling", 11, **cut)
    assert language.input_ids.tolist() == theirs(CONTEXT, truncation=True, max_length=11)["input_ids"]


def test_characters_of_words(tokenizer: RowTokenizer) -> None:
    text = "The CATS, unable!"
    rows: list[Row] = [TaggedRow(RowPosition(1), ("CATS", ",", "unable"), None, (4, 8, 10))]
    found = tokenized(rows, tokenizer, "token-classification")
    assert [text[start:end] for start, end in found.characters[1:-1]] == ["CAT", "S", ",", "un", "able"]
    assert found.words.tolist() == [-1, 0, -1, 1, 2, -1, -1]
    assert found.target is None


@examples(60)
@given(
    words=st.lists(st.sampled_from(["cat", "unables", "dogs", "x7", "\u200d", "!"]), min_size=1, max_size=40), data=st.data()
)
def test_every_word_is_in_one_window(words: list[str], data: st.DataObject, tokenizer: RowTokenizer) -> None:
    most = data.draw(st.integers(4, 20))
    stride = data.draw(st.integers(0, most - 3))
    tags = tuple(data.draw(st.sampled_from(["O", "B-x", "I-x"])) for _ in words)
    rows: list[Row] = [TaggedRow(RowPosition(1), tuple(words), tags), TaggedRow(RowPosition(2), ("cat",), ("O",))]
    found = tokenized(rows, tokenizer, "token-classification", most, too_long="window", stride=stride)
    assert found.lengths.max() <= most
    own = found.row[np.repeat(np.arange(len(found)), found.lengths)]
    assert sorted(found.words[(own == 0) & (found.words >= 0)].tolist()) == [
        place
        for place, word in enumerate(words)
        if word != "\u200d"  # which has no token
    ]
    names = collect_label_names(rows, "token-classification")
    for word, target, row in zip(found.words, found.target, own, strict=True):
        if word < 0:
            assert target == -100
        elif row == 0:
            assert names[target] == tags[word]


@examples(60)
@given(start=st.integers(0, len(CONTEXT) - 1), length=st.integers(1, 30), most=st.integers(18, 64))
def test_answers_are_in_the_windows_that_hold_them(start: int, length: int, most: int, tokenizer: RowTokenizer) -> None:
    text = CONTEXT[start : start + length].strip()
    if not text:
        return
    begin = CONTEXT.index(text, start)
    row = QuestionRow(RowPosition(1), "a", "what flows?", CONTEXT, ((text, begin),))
    found = tokenized([row], tokenizer, "question-answering", most, stride=8)
    for number, (first, last) in enumerate(found.target):
        spans = found.characters[found.offsets[number] : found.offsets[number + 1]]
        of_context = spans[spans[:, 0] >= 0]
        holds = of_context[0, 0] <= begin and of_context[-1, 1] >= begin + len(text)
        assert (last > 0) == holds
        if holds:
            assert spans[first, 0] <= begin
            assert spans[last, 1] >= begin + len(text)
            assert spans[first, 1] > begin
            assert spans[last, 0] < begin + len(text)


@pytest.mark.parametrize(
    ("task", "labels", "targets"),
    [
        ("multi-label", [("b", "a"), (), ("c",)], [[1, 1, 0], [0, 0, 0], [0, 0, 1]]),
        ("classification", ["b", "a"], [1, 0]),
        ("regression", [0.5, -2.0], [0.5, -2.0]),
    ],
)
def test_targets_of_texts(tokenizer: RowTokenizer, task: str, labels: list[Any], targets: list[Any]) -> None:
    rows: list[Row] = [TextRow(RowPosition(number), "cat", None, label) for number, label in enumerate(labels, 1)]
    assert tokenized(rows, tokenizer, task).target.tolist() == targets


def test_language_modelling_takes_texts_and_tokens(tokenizer: RowTokenizer) -> None:
    rows: list[Row] = [TextRow(RowPosition(1), "the cat sat on the mat"), IdsRow(RowPosition(2), tuple(range(9)))]
    found = tokenized(rows, tokenizer, "causal-language-modelling", 5, too_long="window")
    words = [VOCABULARY[token] for token in found.input_ids[:10]]
    assert words == ["[CLS]", "the", "cat", "sat", "[SEP]", "[CLS]", "on", "the", "mat", "[SEP]"]
    assert found.lengths.tolist() == [5, 5, 5, 4]
    assert found.row.tolist() == [0, 0, 1, 1]


AT = RowPosition(4)


@pytest.mark.parametrize(
    ("row", "task", "settings", "message"),
    [
        (
            TextRow(AT, "the cat sat on the mat"),
            None,
            {"too_long": "error"},
            "the row has 8 tokens, but a sequence may have at most 7",
        ),
        (
            TaggedRow(AT, ("cat",) * 6),
            "token-classification",
            {"too_long": "error"},
            "the row has 8 tokens, .* truncate, or window",
        ),
        (QuestionRow(AT, "a", "the cat sat on", "mat"), "question-answering", {}, "the question has 4 tokens"),
        (IdsRow(AT, (5, 999)), "masked-language-modelling", {}, "the token id 999 is not in the vocabulary"),
    ],
)
def test_what_does_not_fit_is_named(
    row: Row, task: Any, settings: dict[str, Any], message: str, tokenizer: RowTokenizer
) -> None:
    with pytest.raises(InputError, match=f"row 4: {message}"):
        tokenized([row], tokenizer, task, 7, **settings)
    with pytest.raises(InputError, match="cannot be split into windows"):
        tokenized([TextRow(AT, "cat")], tokenizer, None, 7, too_long="window")


def test_a_label_that_the_model_does_not_know(tokenizer: RowTokenizer) -> None:
    given: dict[str, Any] = {"task": "classification", "settings": TaskSettings(), "max_sequence_length": 8}
    with pytest.raises(InputError, match=r"x.tsv: row 9: the label 'c' is unknown; use one of a, b"):
        tokenize_rows([TextRow(RowPosition(9), "cat", None, "c")], tokenizer, labels=("a", "b"), file="x.tsv", **given)


# --- windows cover a text, overlap as asked for, and every word is carried by one of them


@pytest.mark.parametrize(("room", "shared"), [(1, 0), (13, 6), (116, 58), (255, 127), (256, 128), (381, 128)])
def test_how_much_windows_share_when_nobody_says_it(room: int, shared: int) -> None:
    assert _split_into_windows(1000, room, None, "x").tolist() == _split_into_windows(1000, room, shared, "x").tolist()


def test_windows_that_would_not_go_on() -> None:
    with pytest.raises(
        InputError, match=r"x: row 3: windows of 4 tokens cannot overlap by 4 tokens; lower task\.stride, or raise --max"
    ):
        _split_into_windows(9, 4, 4, "x: row 3")


@examples(100)
@given(st.integers(0, 200), st.integers(1, 40), st.data())
def test_windows_cover_the_text(tokens: int, room: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(0, room - 1))
    bounds = _split_into_windows(tokens, room, stride, "x")
    assert bounds[0, 0] == 0
    assert bounds[-1, 1] == tokens
    assert (bounds[:, 1] - bounds[:, 0] <= room).all()
    assert (bounds[:-1, 1] - bounds[1:, 0] == stride).all()
    chosen = _choose_window_of_each_token(np.arange(tokens), bounds)
    assert chosen.tolist() == best_windows(range(tokens), bounds.tolist())
    assert (np.diff(chosen) >= 0).all()
    assert all(bounds[window, 0] <= token < bounds[window, 1] for token, window in enumerate(chosen))


def test_memory_of_a_tagger_is_linear_in_the_text(folder: Path) -> None:
    """A line of 420 kB. All windows beside all words took 6 GB."""
    code = """
import resource, sys
from gaudi_bert.rows.fields import split_into_words
from tests.rows.test_tokenizing import Path, RowPosition, open_tokenizer, tokenized
tokenizer, text = open_tokenizer(Path(sys.argv[1])), "the cat, unable dogs " * 20_000
row = split_into_words(RowPosition(1), text)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = tokenized([row], tokenizer, "token-classification", 64, too_long="window")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10, len(text), len(found), (found.words >= 0).sum())
"""
    done = run_python(code, folder)
    assert done.returncode == 0, done.stderr
    peak, characters, windows, words = map(int, done.stdout.split())
    assert windows > 4_000
    assert words == 100_000
    assert peak < 96 * characters
