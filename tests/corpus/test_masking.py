from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.permutation import philox
from gaudi_bert.corpus.masking import MaskedSequences, mask_sequences, prediction_counts
from tests.builders.properties import examples

MASK, VOCABULARY = 4, 1009


def sequences(count: int, slots: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random rows [CLS] tokens [SEP] [PAD]..., where they may be masked, and their lengths."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(5, slots + 1, count)
    places = np.arange(slots)
    candidates = (places > 0) & (places < (lengths - 1)[:, None])
    input_ids = np.where(candidates, generator.integers(10, VOCABULARY, (count, slots)), 0).astype(np.int32)
    return input_ids, candidates, lengths


def mask(input_ids: np.ndarray, candidates: np.ndarray, counts: np.ndarray, most: int, seed: int = 1) -> MaskedSequences:
    return mask_sequences(input_ids, candidates, counts, most, MASK, VOCABULARY, philox(seed, "test"))


def test_counts_round_as_python_does() -> None:
    lengths = np.arange(5, 300)
    for probability in (0.15, 0.5, 0.02):
        expected = [min(20, max(1, round(length * probability)), length - 3) for length in lengths.tolist()]
        assert prediction_counts(lengths, probability, 20).tolist() == expected
    assert prediction_counts(np.array([5, 9]), 0.9, 20).tolist() == [2, 6]


@examples(60)
@given(st.integers(1, 17), st.integers(5, 41), st.integers(1, 50), st.integers(0, 2**31), st.booleans())
def test_masks_are_well_formed_and_can_be_undone(count: int, slots: int, most: int, seed: int, whole_words: bool) -> None:
    input_ids, candidates, lengths = sequences(count, slots, seed)
    counts = prediction_counts(lengths, 0.3, most)
    starts = (input_ids % 3 != 0) if whole_words else None
    if starts is not None:
        starts[:, 1] = True
    original = input_ids.copy()
    masked = mask_sequences(input_ids, candidates, counts, most, MASK, VOCABULARY, philox(seed, "test"), starts)
    assert (input_ids == original).all()
    restored = masked.input_ids.copy()
    for row in range(count):
        used = masked.counts[row]
        assert used <= counts[row]
        assert whole_words or used == counts[row]
        positions = masked.positions[row, :used]
        assert (np.diff(positions) > 0).all()
        assert candidates[row, positions].all()
        assert not masked.positions[row, used:].any()
        assert not masked.ids[row, used:].any()
        restored[row, positions] = masked.ids[row, :used]
    assert (restored == input_ids).all()


def test_eighty_ten_ten_and_every_place_alike() -> None:
    input_ids, candidates, _ = sequences(20000, 23, 3)
    candidates[:] = False
    candidates[:, 1:21] = True
    masked = mask(input_ids, candidates, np.full(20000, 3), 3)
    rows = np.arange(20000)[:, None]
    shown = masked.input_ids[rows, masked.positions]
    assert abs((shown == MASK).mean() - 0.8) < 0.01
    assert abs((shown == masked.ids).mean() - 0.1) < 0.01
    random_tokens = shown[(shown != MASK) & (shown != masked.ids)]
    assert abs(random_tokens.mean() - (VOCABULARY - 1) / 2) < 15
    share_of_place = np.bincount(masked.positions.ravel(), minlength=23) / 60000
    assert np.abs(share_of_place[1:21] - 1 / 20).max() < 0.005


def test_whole_words_are_masked_whole_and_large_ones_passed_over() -> None:
    #                     [CLS] a  b ##b ##b  c ##c [SEP]
    input_ids = np.array([[2, 10, 20, 21, 22, 30, 31, 3]], dtype=np.int32)
    candidates = np.array([[0, 1, 1, 1, 1, 1, 1, 0]], dtype=bool)
    starts = np.array([[1, 1, 1, 0, 0, 1, 0, 1]], dtype=bool)
    seen = set()
    for seed in range(60):
        masked = mask_sequences(input_ids, candidates, np.array([2]), 4, MASK, VOCABULARY, philox(seed, "test"), starts)
        seen.add(tuple(masked.positions[0, : masked.counts[0]].tolist()))
    assert seen == {(1,), (5, 6)}


def test_fewer_slots_than_predictions() -> None:
    input_ids, candidates, lengths = sequences(5, 7, 1)
    masked = mask(input_ids, candidates, prediction_counts(lengths, 0.9, 11), 11)
    assert masked.positions.shape == (5, 11)
    assert (masked.counts == prediction_counts(lengths, 0.9, 11)).all()
