"""One update: accumulation, packing and dropout change nothing that they should not."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.config import TrainingSettings
from gaudi_bert.model.bert import BertForPretraining
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.losses import pretraining_sums
from gaudi_bert.model.sequences import join_sequences
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.objective import loss_weights
from gaudi_bert.training.optimizers import Optimizer
from gaudi_bert.training.step import TrainingStep, dropout_seed
from tests.builders import training_data as data

PACKS = data.make_packs(12)


def make_model(dropout: float = 0.0) -> BertForPretraining:
    config = BertConfig(
        vocab_size=data.VOCABULARY,
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=data.LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
    )
    return BertForPretraining(config, seed=5)


def packed_batch(packs) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(values)
        for name, values in join_sequences(packs, data.LENGTH, data.MASKED_SLOTS, data.DEPTH).items()
    }


def unpacked_batch(packs) -> dict[str, np.ndarray]:
    singles = [[sequence] for pack in packs for sequence in pack]
    return {name: np.asarray(values) for name, values in join_sequences(singles, data.LENGTH, data.PREDICTIONS, 1).items()}


def one_update(micro_batches, loss="token", clip_norm=0.0, dropout=0.0, update=1):
    """Gradients of one update (from the first moments, which are (1 - beta_1) times them), and what `run` returned."""
    model = make_model(dropout)
    settings = TrainingSettings(beta_1=0.5, loss=loss, clip_norm=clip_norm, seed=3)
    optimizer = Optimizer(model.variables_by_name, settings)
    step = TrainingStep(model, optimizer, Communicator(), settings, accumulation_steps=len(micro_batches))
    sums = step.run(micro_batches, update, 1e-3).numpy()
    return {name: 2 * moment.numpy() for name, moment in optimizer.first_moments.items()}, sums


def assert_same_gradients(one, other) -> None:
    for name, gradient in other.items():
        allowed = 1e-8 if name.endswith("/key/bias") else 1e-5 * np.linalg.norm(gradient)
        assert np.linalg.norm(one[name] - gradient) <= allowed, name


@functools.cache
def big_batch(loss: str):
    return one_update([packed_batch(PACKS)], loss)


@pytest.mark.parametrize(("loss", "parts"), [("token", 3), ("sequence", 12)])
def test_micro_batches_are_one_big_batch(loss, parts) -> None:
    big, big_sums = big_batch(loss)
    small, small_sums = one_update([packed_batch(PACKS[part::parts]) for part in range(parts)], loss)
    assert_same_gradients(small, big)
    np.testing.assert_allclose(small_sums, big_sums, rtol=1e-5)


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_a_packed_update_is_the_unpacked_update(loss) -> None:
    packed, packed_sums = big_batch(loss)
    unpacked, unpacked_sums = one_update([unpacked_batch(PACKS)], loss)
    assert_same_gradients(packed, unpacked)
    np.testing.assert_allclose(packed_sums, unpacked_sums, rtol=1e-5)


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_the_weights_known_before_are_those_of_the_loss(loss) -> None:
    model, batch = make_model(), packed_batch(PACKS)
    inputs = {name: tf.constant(values) for name, values in batch.items()}
    sums = pretraining_sums(model(inputs, dropout_seed=None), inputs, loss)
    expected = [sums.masked_lm_weight.numpy(), sums.next_sentence_weight.numpy()]
    np.testing.assert_allclose(loss_weights(batch, loss), expected, rtol=1e-6)


def test_clipping_comes_after_accumulation() -> None:
    halves = [packed_batch(PACKS[:6]), packed_batch(PACKS[6:])]
    free, sums = one_update(halves)
    norm = sums[8]
    assert norm == pytest.approx(np.sqrt(sum((gradient**2).sum() for gradient in free.values())), rel=1e-4)
    clipped, _ = one_update(halves, clip_norm=float(norm) / 4)
    for name, gradient in free.items():
        np.testing.assert_allclose(clipped[name], gradient / 4, rtol=1e-4, atol=1e-8, err_msg=name)


def test_dropout_is_a_function_of_the_update() -> None:
    one, again, later = (one_update([packed_batch(PACKS)], dropout=0.2, update=update)[0] for update in (7, 7, 8))
    name = "bert/embeddings/word_embeddings"
    assert all((one[each] == again[each]).all() for each in one)
    assert not np.allclose(one[name], later[name])


def test_dropout_seeds_differ_by_seed_update_micro_batch_and_rank() -> None:
    keys = [(1, 1, 0, 0), (2, 1, 0, 0), (1, 2, 0, 0), (1, 1, 1, 0), (1, 1, 0, 1)]
    assert len({dropout_seed(*key).tobytes() for key in keys}) == len(keys)
    assert dropout_seed(1, 1, 0, 0).dtype == np.int32
    assert dropout_seed(1, 1, 0, 0).shape == (2,)


def test_the_wrong_number_of_micro_batches_is_a_defect() -> None:
    model = make_model()
    optimizer = Optimizer(model.variables_by_name, TrainingSettings())
    step = TrainingStep(model, optimizer, Communicator(), TrainingSettings(), accumulation_steps=2)
    with pytest.raises(ValueError, match="1 micro-batches given, 2 make an update"):
        step.run([packed_batch(PACKS)], 1, 1e-3)


def test_the_graph_has_no_sum_whose_order_may_vary() -> None:
    """`AddN` of three or more adds into whichever input's memory is free: its last bit differs from run to run."""
    model = make_model(0.1)
    optimizer = Optimizer(model.variables_by_name, TrainingSettings())
    step = TrainingStep(model, optimizer, Communicator(), TrainingSettings(), accumulation_steps=1)
    for update in (1, 2, 3):
        step.run([packed_batch(PACKS)], update, 1e-3)
    assert step.graphs_traced == 1
    sums = [operation for operation in step.graph.get_operations() if operation.type == "AddN"]
    assert all(len(operation.inputs) == 2 for operation in sums)
