"""One update: accumulation, packing and dropout change nothing they should not; optimizers; what losses are divided by."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.artefacts.training import LossMetrics
from gaudi_bert.common.errors import FailedError
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.config.values import EngineName
from gaudi_bert.engines.protocol import Communicator, UpdateScalars
from gaudi_bert.engines.tensorflow import updates as optimizers
from gaudi_bert.engines.tensorflow.updates import _Optimizer
from gaudi_bert.training.objective import (
    IntervalReport,
    LossDenominators,
    PretrainingObjective,
    ReportInterval,
    draw_dropout_seed,
    make_loss_denominators,
)
from gaudi_bert.training.sources import open_local_records
from tests.builders import training_data as data
from tests.builders import training_updates as work
from tests.builders.agree import agree, identical
from tests.builders.effort import LONG
from tests.builders.model_packs import BY_EACH_ENGINE
from tests.oracles import training as naive

PACKS = data.make_packs(12)


def one_update(micro_batches, loss="token", clip_norm=0.0):
    """Gradients of one update (from the first moments, which are (1 - beta_1) times them), and what `run` returned."""
    settings = TrainingSettings(beta_1=0.5, loss=loss, clip_norm=clip_norm, seed=3)
    step = work.make_step(work.make_model(loss=loss), settings, Communicator(), len(micro_batches))
    sums = step.run_update(micro_batches, 1, 1e-3)()
    return {name: 2 * moment for name, moment in step.updates.copy_moments()[0].items()}, sums


def assert_same_gradients(one, other) -> None:
    for name, gradient in other.items():
        allowed = 1e-8 if name.endswith("/key/bias") else 1e-5 * np.linalg.norm(gradient)
        assert np.linalg.norm(one[name] - gradient) <= allowed, name


@functools.cache
def big_batch(loss: str):
    return one_update([work.packed(PACKS)], loss)


@pytest.mark.repeated
@pytest.mark.parametrize(("loss", "parts"), [("sequence", 12), *([("token", 3)] if LONG else [])])
def test_micro_batches_are_one_big_batch(loss, parts) -> None:
    big, big_sums = big_batch(loss)
    small, small_sums = one_update([work.packed(PACKS[part::parts]) for part in range(parts)], loss)
    assert_same_gradients(small, big)
    agree(small_sums, big_sums, 1e-5)


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_the_weights_known_before_are_those_of_the_loss(loss) -> None:
    batch = work.packed(PACKS)
    _, sums = work.make_model(loss=loss).evaluate_batch(batch)
    agree(PretrainingObjective(loss).compute_loss_denominators(batch), [sums[1], sums[3]], 1e-6)


def test_clipping_comes_after_accumulation() -> None:
    free, sums = big_batch("token")
    norm = sums[8]
    agree(norm, np.sqrt(sum((gradient**2).sum() for gradient in free.values())), 1e-4)
    clipped, _ = one_update([work.packed(PACKS[:6]), work.packed(PACKS[6:])], clip_norm=float(norm) / 4)
    for name, gradient in free.items():
        agree(clipped[name], gradient / 4, 1e-4)


@BY_EACH_ENGINE
def test_dropout_is_a_function_of_the_update_and_no_sum_has_an_order_that_may_vary(engine: EngineName) -> None:
    """TensorFlow's `AddN` of three or more adds into whichever input's memory is free: its last bit differs by run."""
    model, settings = work.make_model(dropout=0.2, engine=engine), TrainingSettings(seed=3)
    step = work.make_step(model, settings, Communicator(), 1, engine=engine)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in model.variable_shapes().items()}
    moments = []
    for update in (7, 7, 8):
        step.updates.load_moments(zeros, zeros)
        step.run_update([work.packed(PACKS)], update, 0.0)
        moments.append(step.updates.copy_moments()[0]["bert/embeddings/word_embeddings"])
    one, again, later = moments
    identical(again, one)
    assert np.abs(later - one).max() > 1e-6
    if engine == "tensorflow":
        (graph,) = step.updates.graphs
        sums = [operation for operation in graph.get_operations() if operation.type == "AddN"]
        assert all(len(operation.inputs) == 2 for operation in sums)


def test_dropout_seeds_differ_by_seed_update_micro_batch_and_rank() -> None:
    keys = [(1, 1, 0, 0), (2, 1, 0, 0), (1, 2, 0, 0), (1, 1, 1, 0), (1, 1, 0, 1)]
    assert len({draw_dropout_seed(*key).tobytes() for key in keys}) == len(keys)
    seed = draw_dropout_seed(*keys[0])
    assert (seed.dtype, seed.shape) == (np.int32, (2,))


# --- what losses are divided by: on paper, and that `balanced` expects what the data holds

WEIGHTS_M2 = np.array([[6.0, 2.0], [4.0, 3.0], [2.0, 1.0]])


class OneOfThree(Communicator):
    """Beside two processes that hold the same."""

    def sum_array(self, values):
        return 3 * np.asarray(values)


@pytest.mark.parametrize(
    ("denominators", "factors"),
    [
        (LossDenominators("global"), [[1 / 36, 1 / 18]] * 3),
        (LossDenominators("local"), 1 / (9 * WEIGHTS_M2)),  # the mean of the means
        # b m e and b p (equations 25 and 26), as a mean over nine micro-batches: a constant.
        (LossDenominators("balanced", (76 * 0.5, 2.0)), [[1 / (5 * 38 * 9), 1 / (5 * 2 * 9)]] * 3),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_what_losses_are_divided_by(denominators: LossDenominators, factors) -> None:
    agree(denominators.compute_loss_factors(WEIGHTS_M2, 5, OneOfThree(rank=1, size=3)), factors, 1e-7)


@pytest.mark.parametrize("kind", ["global", "local"])
def test_nothing_masked_divides_by_no_zero_and_nothing_of_the_data_is_needed(kind) -> None:
    assert np.isfinite(LossDenominators(kind).compute_loss_factors(np.zeros((2, 2)), 5, Communicator())).all()
    assert make_loss_denominators(TrainingSettings(loss_normalization=kind), None).kind == kind


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_what_balanced_expects_of_packs_and_of_single_sequences(tmp_path, loss: str) -> None:
    settings = TrainingSettings(loss_normalization="balanced", loss=loss)
    packed = make_loss_denominators(settings, open_local_records(data.write_packed(tmp_path / "packed", PACKS)))
    unpacked = make_loss_denominators(settings, open_local_records(data.write_unpacked(tmp_path / "unpacked", PACKS)))
    of_sequences = [len(sequence.masked_ids) for pack in PACKS for sequence in pack]
    factor = len(of_sequences) / len(PACKS)
    masked = sum(of_sequences if loss == "token" else map(bool, of_sequences)) / len(PACKS)
    agree(packed.expected_weights, (masked, factor))
    # The same sequences weigh the same whether packed or not: a pack is `factor` of them.
    agree(unpacked.expected_weights, (masked / factor, 1.0))


# --- adamW and LAMB against the naive twins; clipping

SHAPES = {
    "bert/embeddings/word_embeddings": (13, 7),
    "bert/embeddings/LayerNorm/gamma": (7,),
    "bert/encoder/layer_0/attention/self/query/kernel": (7, 7),
    "bert/encoder/layer_0/attention/self/query/bias": (7,),
    "cls/predictions/output_bias": (13,),
}
FACTOR = np.float32(0.25)  # of clipping


def random_values(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: (scale * random.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


def run_ours(settings, values, gradients_of_updates, rates, compiled: bool = False) -> dict[str, np.ndarray]:
    variables = {name: tf.Variable(value) for name, value in values.items()}
    optimizer = _Optimizer(variables, settings, compiled=compiled)
    apply = tf.function(optimizer.apply_gradients, autograph=False)
    for number, (gradients, rate) in enumerate(zip(gradients_of_updates, rates, strict=True), start=1):
        given = [tf.constant(gradients[name] / FACTOR) for name in variables]
        corrections = (1.0 / (1.0 - beta**number) for beta in (settings.beta_1, settings.beta_2))
        scalars = UpdateScalars(*(tf.constant(value, tf.float32) for value in (rate, *corrections)))
        apply(given, scalars, tf.constant(FACTOR))
    return {name: variable.numpy() for name, variable in variables.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize(
    ("changes", "compiled"),
    [({}, False), ({}, True), ({"layer_adaptation": "decayed"}, True), ({"weight_decay": 0.0, "beta_2": 0.9}, False)],
)
def test_equals_the_naive_optimizer_after_seven_updates(optimizer: str, changes: dict, compiled: bool, monkeypatch) -> None:
    monkeypatch.setattr(optimizers, "_MIN_COMPILED_ELEMENTS", 10)  # so that some of these are compiled
    settings = TrainingSettings(optimizer=optimizer, **changes)
    values = random_values(1)
    values["cls/predictions/output_bias"][:] = 0  # LAMB's ratio is then 1
    gradients = [random_values(10 + number, 0.1) for number in range(7)]
    gradients[0]["cls/predictions/output_bias"][:] = 0  # neither has a norm
    rates = [0.001 * (number + 1) for number in range(7)]
    ours = run_ours(settings, values, gradients, rates, compiled)
    expected = naive.run(optimizer, values, gradients, rates, settings)
    for name, value in expected.items():
        agree(ours[name], value, 1e-6, scale=1.0)


# --- the figures of an interval

OBJECTIVE = PretrainingObjective("token")
BATCH = {"next_sentence_weights": np.array([[1, 1], [1, 0]]), "input_mask": np.array([[1, 1, 2], [1, 0, 0]])}


def test_an_interval_counts_real_work_and_leaves_the_first_update_out_of_the_speed() -> None:
    times = iter([0.0, 100.0, 102.0])
    interval = ReportInterval(OBJECTIVE, 1, has_cold_start=True, clock=lambda: next(times))
    sums = tf.constant([30.0, 10, 4, 8, 5, 20, 3, 4, 2.0])
    for batches in ([BATCH], [BATCH, BATCH]):
        interval.start_clock_if_due()
        interval.record_update(sums.numpy, batches)
    report = interval.make_report(Communicator())
    assert report == IntervalReport(
        metrics=LossMetrics(
            loss=3.5,
            masked_lm_loss=3.0,
            masked_lm_accuracy=0.25,
            next_sentence_loss=0.5,
            next_sentence_accuracy=0.75,
        ),
        gradient_norm=2.0,
        sequences=9,
        tokens=12,
        packing_factor=1.5,
        seconds_per_update=2.0,
        sequences_per_second=3.0,
        tokens_per_second=4.0,
        slots_per_second=6.0,
    )


@pytest.mark.parametrize(
    ("slot", "value", "what"), [(0, np.nan, "the loss"), (2, np.inf, "the loss"), (8, np.nan, "the gradient")]
)
def test_the_first_update_that_is_not_finite_is_named(slot, value, what) -> None:
    interval = ReportInterval(OBJECTIVE, 41, has_cold_start=False)
    good, bad = np.ones(9, np.float32), np.ones(9, np.float32)
    bad[slot] = value
    for sums in (good, good, bad, bad):
        interval.record_update(tf.constant(sums).numpy, [BATCH])
    with pytest.raises(FailedError, match=f"update 43: {what} is not finite"):
        interval.make_report(Communicator())
