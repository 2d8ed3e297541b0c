"""The heart of the project: packing changes nothing, by either engine. Against the naive model, against ourselves unpacked,
and by changing what stands beside a sequence, which may change no bit of its outputs.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gaudi_bert.config.values import EngineName
from gaudi_bert.engines.protocol import Model
from gaudi_bert.model.heads import Loss
from gaudi_bert.training.verify_model import _measure_attention_leaks, _measure_differences, collate_packs, split_packs
from tests.builders.agree import agree
from tests.builders.effort import LONG
from tests.builders.model_packs import BY_EACH_ENGINE, VOCABULARY, WITHOUT_PYTORCH, random_packs, small_model
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


def check_against_naive(model: Model, packs, length: int, masked_slots: int, depth: int, loss: Loss) -> None:
    batch = collate_packs(packs, length, masked_slots, depth)
    outputs, losses, gradients = model.compute_losses_and_gradients(batch, loss)
    sequences = [sequence for pack in packs for sequence in pack]
    expected = naive.everything(model.spec.config, model.copy_variables(), sequences, loss)
    for placed, (hidden, words, sentence) in zip(split_packs(batch), expected[0], strict=True):
        agree(outputs["hidden_states"][placed.pack, placed.positions], hidden, OUTPUT_BOUND, scale=1.0)
        agree(outputs["masked_lm_logits"][placed.pack, placed.masked_slots], words, OUTPUT_BOUND, scale=1.0)
        agree(outputs["next_sentence_logits"][placed.pack, placed.number - 1], sentence, OUTPUT_BOUND, scale=1.0)
    agree(list(losses.values()), expected[1], OUTPUT_BOUND, scale=1.0)
    check_gradients(gradients, expected[2])


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


@BY_EACH_ENGINE
@examples(3)
@example((2, 13, [[5, 6]]), "sequence", True, 2)
@example((8, 29, [[3, 4, 2, 3, 1, 4, 3, 5], [7]]), "token", False, 1)
@example((3, 3, [[1, 1, 1], [1, 1]]), "sequence", False, 0)  # queries and keys have no gradient
@given(packs_of_lengths(), st.sampled_from(["token", "sequence"]), st.booleans(), st.integers(0, 1000))
def test_packed_is_the_naive_model_one_sequence_at_a_time(engine: EngineName, case, loss, causal, seed):
    depth, length, lengths = case
    packs = random_packs(seed, lengths)
    masked_slots = max(sum(len(sequence.masked_ids) for sequence in pack) for pack in packs) + seed % 3
    model = small_model(seed=seed % 5, engine=engine, attention="causal" if causal else "bidirectional")
    check_against_naive(model, packs, length, masked_slots, depth, loss)


@pytest.mark.repeated
@pytest.mark.parametrize("loss", ["token", "sequence"] if LONG else ["sequence"])
def test_compiled_kernels_are_held_to_the_same(loss):
    check_against_naive(small_model(compiled=True), random_packs(2, [[11, 5, 13], [19, 2]]), 31, 17, 3, loss)


@BY_EACH_ENGINE
def test_float64_shows_that_the_rest_is_rounding(engine: EngineName):
    batch = collate_packs(random_packs(7, [[11, 5, 13, 8], [17, 9], [37]]), 37, 23, 4)
    outputs, gradients = _measure_differences(small_model(compute_dtype="float64", engine=engine), batch)
    assert all(difference < 1e-13 for difference, _ in outputs.values())
    assert all(difference <= 1e-7 * size for difference, size in gradients.values())


@BY_EACH_ENGINE
def test_bfloat16_is_near_float32(engine: EngineName):
    batch = collate_packs(random_packs(1, [[11, 5, 13], [17, 9]]), 31, 17, 3)
    wide, losses, gradients = small_model(engine=engine).compute_losses_and_gradients(batch, "token")
    narrow, narrow_losses, narrow_gradients = small_model(
        compute_dtype="bfloat16", engine=engine
    ).compute_losses_and_gradients(batch, "token")
    assert all(part.dtype == np.float32 for part in (*narrow.values(), *narrow_gradients.values()))
    for placed in split_packs(batch):
        for name, where in (("hidden_states", placed.positions), ("masked_lm_logits", placed.masked_slots)):
            one, other = (outputs[name][placed.pack, where] for outputs in (wide, narrow))
            agree(one, other, 0.1, scale=1.0)
            assert np.abs(one - other).max() > 1e-6, "not computed in bfloat16"
    for name, loss in losses.items():
        agree(narrow_losses[name], loss, 0.02)
    for name, gradient in gradients.items():
        assert np.linalg.norm(narrow_gradients[name] - gradient) <= 0.1 * np.linalg.norm(gradient), name


# --- the leak probe: no bit of a sequence's outputs depends on its neighbours in the pack, or on the padding


@pytest.mark.parametrize(
    "changes",
    [
        {"initializer_range": 2.0},
        {"compiled": True, "attention": "causal"},
        {"compute_dtype": "bfloat16", "attention": "causal"},
        pytest.param({"engine": "pytorch"}, marks=WITHOUT_PYTORCH),
    ],
)
def test_large_scores_and_half_precision_leak_nothing(changes):
    model = small_model(**changes)
    batch = collate_packs(random_packs(4, [[7, 3, 11, 5], [13, 17]]), 31, 19, 4)
    for chosen in range(4):
        report = _measure_attention_leaks(model, VOCABULARY, batch, chosen)
        assert report == (4, 0, True)
