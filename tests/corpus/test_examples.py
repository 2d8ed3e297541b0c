"""Pretraining examples: pairs of segments, masks, and the records that are made of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.arrays import make_bit_generator
from gaudi_bert.common.features import UnpackedFeature
from gaudi_bert.config.sections import PrepareSettings
from gaudi_bert.corpus.examples import (
    DocumentBlockJob,
    PretrainingExamples,
    _choose_segment_pairs,
    _mask_sequences,
    _RandomStream,
    make_pretraining_examples,
)
from gaudi_bert.corpus.vocabulary import SPECIAL_TOKENS, TokenBlock, Vocabulary, tokenize_documents
from gaudi_bert.tfrecords.wire.example import decode_example
from tests.builders.properties import examples
from tests.oracles.packed_record import restored_ids

WORDS = [f"w{number}" for number in range(40)]
VOCABULARY = Vocabulary((*SPECIAL_TOKENS, "w", *(f"##{digit}" for digit in range(10)), *WORDS[:25]))
PAD, UNK, CLS, SEP, MASK = range(5)


def _job_of(documents: list[list[str]], split: str = "train", block: int = 0, **changes: Any) -> DocumentBlockJob:
    vocabulary = changes.pop("vocabulary", VOCABULARY)
    settings = {"max_sequence_length": 31, "max_predictions": 5, "duplicates": 3, "seed": 7, **changes}
    return DocumentBlockJob(documents, split, block, vocabulary, PrepareSettings(**settings))


def documents_of(seed: int) -> list[list[str]]:
    generator = random.Random(seed)
    return [
        [" ".join(generator.choices(WORDS, k=generator.randint(1, 12))) for _ in range(generator.randint(1, 9))]
        for _ in range(7)
    ]


def payloads(made: PretrainingExamples) -> list[bytes]:
    stops = np.cumsum(made.lengths)
    return [made.frames[stop - length + 12 : stop - 4] for stop, length in zip(stops, made.lengths, strict=True)]


@examples(25)
@given(
    st.integers(0, 2**31), st.sampled_from([8, 13, 31]), st.integers(1, 7), st.sampled_from([0.15, 0.5, 0.95]), st.booleans()
)
def test_every_example_is_well_formed(seed: int, length: int, predictions: int, share: float, whole_words: bool) -> None:
    documents = documents_of(seed)
    chosen = {"max_sequence_length": length, "max_predictions": predictions, "masked_lm_probability": share}
    chosen |= {"whole_word_masking": whole_words, "seed": seed}
    made = make_pretraining_examples(_job_of(documents, **chosen))
    text = tokenize_documents(documents, VOCABULARY, True).tokens.tolist()
    runs = {tuple(text[start : start + size]) for start in range(len(text)) for size in range(1, length)}
    for payload in payloads(made):
        example = decode_example(payload)
        sizes = {"tokens": length, "masked": predictions, "sequences": 1}
        assert {name: len(values) for name, values in example.items()} == {
            feature.key: sizes[feature.axis] for feature in UnpackedFeature
        }
        tokens = restored_ids(example)[: example["input_mask"].sum()]
        assert (tokens[0], tokens[-1], tokens.count(CLS), tokens.count(SEP)) == (CLS, SEP, 1, 2)
        middle = tokens.index(SEP)
        assert tuple(tokens[1:middle]) in runs
        assert tuple(tokens[middle + 1 : -1]) in runs
        padding = [0] * (length - len(tokens))
        assert example["input_mask"].tolist() == [1] * len(tokens) + padding
        assert example["segment_ids"].tolist() == [0] * (middle + 1) + [1] * (len(tokens) - middle - 1) + padding
        assert example["input_ids"][len(tokens) :].tolist() == padding
        used = int(example["masked_lm_weights"].sum())
        assert example["masked_lm_weights"].tolist() == [1.0] * used + [0.0] * (predictions - used)
        allowed = min(predictions, max(1, round(len(tokens) * share)), len(tokens) - 3)
        assert used <= allowed if whole_words else used == allowed
        positions = example["masked_lm_positions"].tolist()
        assert sorted({*positions[:used]} - {0, middle, len(tokens) - 1}) == positions[:used]
        assert positions[used:] == example["masked_lm_ids"][used:].tolist() == [0] * (predictions - used)
        assert example["next_sentence_labels"][0] in (0, 1)


def test_figures_add_up() -> None:
    made = make_pretraining_examples(_job_of(documents_of(2)))
    examples = [decode_example(payload) for payload in payloads(made)]
    assert made.counts == {
        "text_documents": 7,
        "text_sentences": sum(map(len, documents_of(2))),
        "text_tokens": made.counts["text_tokens"],
        "unknown_tokens": 0,
        "sequences": len(examples),
        "tokens": sum(int(example["input_mask"].sum()) for example in examples),
        "random_next": sum(int(example["next_sentence_labels"][0]) for example in examples),
        "masked": sum(int(example["masked_lm_weights"].sum()) for example in examples),
    }


def test_duplicates_differ_and_all_depends_on_seed_split_and_block() -> None:
    def made(*which: Any, **changes: Any) -> list[bytes]:
        return payloads(make_pretraining_examples(_job_of(documents_of(3), *which, **changes)))

    assert made() == made()
    assert len(set(made(duplicates=4))) > 0.95 * len(made(duplicates=4))
    assert made()[: len(made(duplicates=1))] == made(duplicates=1)
    variants = [made(), made("evaluation"), made(block=1), made(seed=8)]
    assert len({b"".join(variant) for variant in variants}) == len(variants)


def test_text_that_leaves_no_token_makes_nothing() -> None:
    nothing = make_pretraining_examples(_job_of([["\u200b", " "], ["\x07"]]))
    assert (nothing.frames, len(nothing.lengths), nothing.counts["sequences"]) == (b"", 0, 0)


# --- masks

MASK_ID, VOCABULARY_SIZE = 4, 1009


def test_eighty_ten_ten_and_every_place_alike() -> None:
    candidates = np.zeros((20000, 23), dtype=bool)
    candidates[:, 1:21] = True
    drawn = np.random.default_rng(3).integers(10, VOCABULARY_SIZE, candidates.shape).astype(np.int32)
    generator = make_bit_generator(1, "test")
    masked, positions, ids, _ = _mask_sequences(drawn, candidates, np.full(20000, 3), 3, MASK_ID, VOCABULARY_SIZE, generator)
    shown = np.take_along_axis(masked, positions, axis=1)
    assert abs((shown == MASK_ID).mean() - 0.8) < 0.01
    assert abs((shown == ids).mean() - 0.1) < 0.01
    random_tokens = shown[(shown != MASK_ID) & (shown != ids)]
    assert abs(random_tokens.mean() - (VOCABULARY_SIZE - 1) / 2) < 15
    share_of_place = np.bincount(positions.ravel(), minlength=23) / 60000
    assert np.abs(share_of_place[1:21] - 1 / 20).max() < 0.005


# --- pairs


Corpus = list[list[int]]

corpora = st.lists(st.lists(st.integers(1, 23), min_size=1, max_size=13), min_size=1, max_size=5)


def block_of(corpus: Corpus) -> TokenBlock:
    """Documents with sentences of the given lengths; every token is its own place."""
    lengths = [length for document in corpus for length in document]
    return TokenBlock(
        tokens=np.arange(sum(lengths), dtype=np.int32),
        sentence_starts=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        document_starts=np.concatenate(([0], np.cumsum([len(document) for document in corpus], dtype=np.int64))),
    )


@examples(150)
@given(corpora, st.integers(8, 47), st.floats(0, 1), st.integers(0, 2**31))
def test_pairs_are_well_formed(corpus: Corpus, length: int, short: float, seed: int) -> None:
    block = block_of(corpus)
    pairs = _choose_segment_pairs(block, length, short, _RandomStream(seed, "test"))
    first_start, first_stop, second_start, second_stop, labels = pairs
    first_lengths, second_lengths = first_stop - first_start, second_stop - second_start
    assert len(labels) >= (len(corpus) if sum(map(len, corpus)) > 1 else 0)  # of a single sentence there is no pair
    assert (first_lengths >= 1).all()
    assert (second_lengths >= 1).all()
    assert (first_lengths + second_lengths <= length - 3).all()
    document_borders = block.sentence_starts[block.document_starts]
    document_of = np.searchsorted(document_borders, np.arange(len(block.tokens)), side="right") - 1
    for start, stop in ((first_start, first_stop), (second_start, second_stop)):
        assert (document_of[start] == document_of[stop - 1]).all()
    same_document = document_of[first_start] == document_of[second_start]
    assert same_document[labels == 0].all()
    assert (second_start >= first_stop)[labels == 0].all()
    if len(corpus) > 1:
        assert not same_document[labels == 1].any()


def test_a_random_next_of_one_document_is_never_the_real_one() -> None:
    random_pairs = 0
    for seed in range(50):
        pairs = _choose_segment_pairs(block_of([[3] * 40]), 32, 0.1, _RandomStream(seed, "test"))
        first_start, first_stop, second_start, second_stop, labels = pairs
        is_random = labels == 1
        random_pairs += is_random.sum()
        assert (second_start != first_stop)[is_random].all()
        overlap = (second_start < first_stop) & (second_stop > first_start)
        assert not overlap[is_random].any()
    assert random_pairs > 50


def test_one_sentence_has_no_pair_and_two_only_the_real_one() -> None:
    assert not _choose_segment_pairs(block_of([[5]]), 16, 0.0, _RandomStream(1, "test"))[0].size
    pairs = _choose_segment_pairs(block_of([[5, 6]]), 16, 0.0, _RandomStream(1, "test"))
    assert [column.tolist() for column in pairs] == [[0], [5], [5], [11], [0]]
    empty = TokenBlock(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert not _choose_segment_pairs(empty, 16, 0.1, _RandomStream(1, "test"))[0].size
