"""The heart of the project: packing changes nothing. Against the naive model, and against ourselves unpacked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.model.sequences import join_sequences, split_packs
from gaudi_bert.training.verify_model import compare_packed_with_unpacked
from tests.builders.agree import agree
from tests.builders.effort import LONG
from tests.builders.model_packs import random_packs, small_model
from tests.builders.properties import examples
from tests.oracles import model as naive

OUTPUT_BOUND = 1e-5
GRADIENT_BOUND = 1e-5
KEY_BIAS_BOUND = 1e-9

# What softmax is blind to where a sequence has one key, and a difference of sums over sequences: their true gradient can
# be 0, so the bound of float32 rounding is a share of the whole gradient, which cannot.
CAN_VANISH = ("/self/query/kernel", "/self/query/bias", "/self/key/kernel", "/seq_relationship/output_bias")
ROUNDING_OF_THE_WHOLE = 1e-6


def check_gradients(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    whole = np.sqrt(sum(np.square(gradient).sum() for gradient in theirs.values()))
    for name, gradient in theirs.items():
        difference = np.linalg.norm(ours[name].astype(np.float64) - gradient)
        allowed = GRADIENT_BOUND * np.linalg.norm(gradient)
        if name.endswith("/key/bias"):
            allowed = KEY_BIAS_BOUND
        elif name.endswith(CAN_VANISH):
            allowed = max(allowed, ROUNDING_OF_THE_WHOLE * whole)
        assert difference <= allowed, name


def check_against_naive(model, packs, length, masked_slots, depth, loss) -> None:
    batch = join_sequences(packs, length, masked_slots, depth)
    outputs, losses, gradients = model.trial(batch, loss)
    values = model.values()
    sequences = [sequence for pack in packs for sequence in pack]
    expected_outputs, expected_losses, expected_gradients = naive.everything(model.config, values, sequences, loss)
    for placed, (hidden, words, sentence) in zip(split_packs(batch), expected_outputs, strict=True):
        ours = outputs["hidden_states"][placed.pack, placed.positions]
        agree(ours, hidden, OUTPUT_BOUND, scale=1.0)
        ours = outputs["masked_lm_logits"][placed.pack, placed.masked_slots]
        agree(ours, words, OUTPUT_BOUND, scale=1.0)
        ours = outputs["next_sentence_logits"][placed.pack, placed.number - 1]
        agree(ours, sentence, OUTPUT_BOUND, scale=1.0)
    agree(list(losses.values()), expected_losses, OUTPUT_BOUND, scale=1.0)
    check_gradients(gradients, expected_gradients)


@st.composite
def packs_of_lengths(draw):
    """Depth, pack length and the lengths in one to three packs; padding or none; odd and prime sizes included."""
    depth = draw(st.integers(1, 8))
    length = draw(st.integers(3, 37))
    packs = []
    for _ in range(draw(st.integers(1, 3))):
        left, lengths = length, []
        for _ in range(draw(st.integers(1, depth))):
            if left > 0:
                lengths.append(draw(st.integers(1, min(left, 13))))
                left -= lengths[-1]
        if draw(st.booleans()):
            lengths[-1] += left
        packs.append(lengths)
    return depth, length, packs


@examples(3)
@given(packs_of_lengths(), st.sampled_from(["token", "sequence"]), st.booleans(), st.integers(0, 1000))
def test_packed_is_the_naive_model_one_sequence_at_a_time(case, loss, causal, seed):
    depth, length, lengths = case
    packs = random_packs(seed, lengths)
    masked_slots = max(sum(len(sequence.masked_ids) for sequence in pack) for pack in packs) + seed % 3
    model = small_model(seed=seed % 5, attention="causal" if causal else "bidirectional")
    check_against_naive(model, packs, length, masked_slots, depth, loss)


@pytest.mark.parametrize(("lengths", "loss"), [([[1]], "token"), ([[1, 1, 1], [1, 1]], "sequence")])
def test_sequences_of_one_token_whose_queries_and_keys_have_no_gradient(lengths, loss):
    packs, model = random_packs(0, lengths), small_model()
    check_against_naive(model, packs, 3, 3, 3, loss)
    values = model.values()
    sequences = [sequence for pack in packs for sequence in pack]
    true_gradients = naive.everything(model.config, values, sequences, loss)[2]
    assert not any(gradient.any() for name, gradient in true_gradients.items() if name.endswith("/self/query/kernel"))


# Every depth; each padding goes together with each loss at two of them.
DEPTHS = [(depth, 3 * (depth % 2), ("token", "sequence")[depth // 2 % 2]) for depth in range(1, 9)]


@pytest.mark.parametrize(("depth", "padding", "loss"), DEPTHS)
def test_packed_is_unpacked_at_every_depth(depth, padding, loss):
    length = 41
    full = [[3 + place % 4 for place in range(depth - 1)] for _ in range(3)]
    for number, pack in enumerate(full):
        pack.append(length - sum(pack) - padding * (number > 0))
    full[1:2] = [full[1][: max(1, depth // 2)]]
    batch = join_sequences(random_packs(depth, full), length, 29, depth)
    found = compare_packed_with_unpacked(small_model(), batch, loss)
    assert found.packs == 3
    for name, (difference, largest) in {**found.outputs, **found.losses}.items():
        assert difference <= OUTPUT_BOUND, name
        assert largest > 0.1, name
    for name, (difference, size) in found.gradients.items():
        if name.endswith("/key/bias"):
            assert (difference, size) == (0, 0)
        else:
            assert difference <= GRADIENT_BOUND * size, name
            assert size > 0, name


@pytest.mark.repeated
@pytest.mark.parametrize("loss", ["token", "sequence"] if LONG else ["sequence"])
def test_compiled_kernels_are_held_to_the_same(loss):
    check_against_naive(small_model(compiled=True), random_packs(2, [[11, 5, 13], [19, 2]]), 31, 17, 3, loss)


def test_float64_shows_that_the_rest_is_rounding():
    batch = join_sequences(random_packs(7, [[11, 5, 13, 8], [17, 9], [37]]), 37, 23, 4)
    found = compare_packed_with_unpacked(small_model(compute_dtype="float64"), batch)
    assert all(difference < 1e-13 for difference, _ in found.outputs.values())
    assert all(difference <= 1e-7 * size for difference, size in found.gradients.values())


@pytest.mark.parametrize("damage", ["mask", "positions"])
def test_the_proof_sees_a_missing_mask_and_running_positions(damage):
    batch = join_sequences(random_packs(5, [[11, 9, 13]]), 33, 13, 3)
    model = small_model()
    _, _, right = model.trial(batch, "token")
    if damage == "mask":
        batch["input_mask"] = (batch["input_mask"] > 0).astype(np.int32)
    else:
        batch["positions"] = np.arange(33, dtype=np.int32)[np.newaxis]
    _, _, wrong = model.trial(batch, "token")
    with pytest.raises(AssertionError):
        check_gradients(wrong, right)
