"""One run by either engine: the same first weights, outputs, losses and updates, packed or not; and nothing leaks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("tensorflow", exc_type=ImportError)

from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.choose import load_engine
from gaudi_bert.engines.protocol import Communicator, ComputeDtype, Model, ModelSpec
from gaudi_bert.model.config import initial_value, parameter_specs
from gaudi_bert.model.heads import PretrainingHead, TaskHead, VectorHead
from gaudi_bert.model.sequences import join_sequences
from gaudi_bert.training.objective import LossDenominators
from gaudi_bert.training.verify_model import compare_packed_with_unpacked, probe_leaks
from tests.builders import training_updates as work
from tests.builders.agree import agree, identical
from tests.builders.effort import LONG
from tests.builders.model_packs import VOCABULARY, random_packs, small_config

pytestmark = pytest.mark.slow

RUNS = [("global", "adamw", "token", 3), ("balanced", "lamb", "sequence", 1)]
if LONG:
    RUNS += [("local", "adamw", "token", 3), ("local", "lamb", "token", 1), ("global", "lamb", "sequence", 3)]
LENGTHS = [[11, 5, 13], [17, 9], [31]]


def both(spec: ModelSpec, compute_dtype: ComputeDtype = "float32") -> tuple[Model, Model]:
    """A model of each engine with the same variables, none of which is at its start of 0 or 1."""
    one, other = (load_engine(name).build(spec, seed=3, compute_dtype=compute_dtype) for name in ("tensorflow", "pytorch"))
    noise = np.random.default_rng(3)
    values = {name: value + noise.normal(0, 0.2, value.shape).astype(np.float32) for name, value in one.values().items()}
    for model in (one, other):
        model.load_values(values)
    return one, other


def batch(depth: int = 3) -> dict[str, np.ndarray]:
    return join_sequences(random_packs(1, LENGTHS), 31, 17, depth)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_outputs_losses_and_gradients(attention: str) -> None:
    one, other = both(ModelSpec(small_config(attention=attention), PretrainingHead()))
    theirs, ours = (model.trial(batch(), "sequence") for model in (one, other))
    for name, value in theirs.outputs.items():
        agree(ours.outputs[name], value, 1e-5, scale=1.0)
    for name, value in theirs.losses.items():
        agree(ours.losses[name], value, 1e-6)
    whole = np.sqrt(sum(np.square(gradient).sum() for gradient in theirs.gradients.values()))
    for name, gradient in theirs.gradients.items():
        assert np.linalg.norm(ours.gradients[name] - gradient) <= 1e-5 * max(np.linalg.norm(gradient), 0.01 * whole), name
    key = "bert/encoder/layer_1/attention/self/key/bias"
    assert not ours.gradients[key].any()


def test_first_weights_are_a_function_of_seed_and_name() -> None:
    spec = ModelSpec(small_config(), PretrainingHead())
    values = [load_engine(name).build(spec, seed=7).values() for name in ("tensorflow", "pytorch")]
    assert list(values[0]) == list(values[1]) == list(parameter_specs(small_config()))
    for name, value in values[0].items():
        identical(values[1][name], value)
    name = "bert/pooler/dense/kernel"
    expected = initial_value(name, parameter_specs(small_config())[name], 0.2, 7)
    identical(values[0][name], expected)
    assert not np.array_equal(load_engine("pytorch").build(spec, seed=8).values()[name], expected)


@pytest.mark.parametrize(("kind", "optimizer", "loss", "micro_batches"), RUNS)
def test_fifty_updates(kind: str, optimizer: str, loss: str, micro_batches: int) -> None:
    curves = []
    for engine in ("tensorflow", "pytorch"):
        model = work.make_model(loss=loss, engine=engine)
        settings = TrainingSettings(optimizer=optimizer, loss=loss, seed=3)
        denominators = LossDenominators(kind, work.EXPECTED)
        step = work.make_step(model, settings, Communicator(), micro_batches, denominators=denominators, engine=engine)
        losses = []
        for update in range(1, 51):
            packs = work.packs_of(update)
            shares = [work.packed(packs[part::micro_batches]) for part in range(micro_batches)]
            losses.append(step.run(shares, update, 1e-3).numpy()[[0, 2, 8]])
        curves.append(np.array(losses))
        assert step.updates.graphs_built == (1 if engine == "pytorch" or micro_batches == 1 else 2)
    agree(curves[1] / curves[0], np.ones_like(curves[0]), 1e-4)


TASKS = [
    TaskHead("classification", 3),
    TaskHead("multi-label", 3),
    TaskHead("regression", 1),
    TaskHead("token-classification", 4),
    TaskHead("question-answering", 2),
    TaskHead("masked-language-modelling"),
    TaskHead("causal-language-modelling"),
]


def task_batch(head: TaskHead) -> dict[str, np.ndarray]:
    """Features of a task whose targets are drawn at random; the last sequence of the second pack has weight 0."""
    packed, random = batch(), np.random.default_rng(5)
    features = {name: packed[name] for name in ("input_ids", "input_mask", "segment_ids", "positions")}
    starts, weights = packed["next_sentence_positions"], packed["next_sentence_weights"].copy()
    features["sequence_positions"] = starts
    if head.is_of_text:
        shape = (*starts.shape, head.width) if head.kind == "multi-label" else starts.shape
        targets = random.integers(0, 3 if head.kind == "classification" else 2, shape)
        kind = np.int32 if head.kind == "classification" else np.float32
        return {**features, "targets": targets.astype(kind), "target_weights": weights}
    if head.kind == "question-answering":
        spans = np.stack([starts + 1, starts + 3], axis=-1).astype(np.int32)
        return {**features, "targets": spans, "target_weights": weights}
    if head.kind == "masked-language-modelling":
        used = (packed["masked_lm_weights"] > 0).astype(np.float32)
        places = packed["masked_lm_positions"]
        return {**features, "masked_positions": places, "targets": packed["masked_lm_ids"], "target_weights": used}
    classes = head.width or VOCABULARY
    real = (packed["input_mask"] > 0).astype(np.float32)
    targets = random.integers(0, classes, real.shape).astype(np.int32)
    return {**features, "targets": targets, "target_weights": real * (random.random(real.shape) < 0.7)}


def as_batch(features: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.astype(np.float32 if value.dtype.kind == "f" else np.int32) for name, value in features.items()}


@pytest.mark.parametrize("head", TASKS, ids=lambda head: head.kind)
def test_heads_of_tasks(head: TaskHead) -> None:
    config = small_config(attention="causal" if head.is_causal else "bidirectional")
    one, other = both(ModelSpec(config, head))
    features = as_batch(task_batch(head))
    (theirs, their_sums), (ours, our_sums) = one.evaluate(features), other.evaluate(features)
    agree(our_sums, their_sums, 1e-5)
    assert (ours is None) == (theirs is None) == (not head.keeps_outputs)
    if ours is not None and theirs is not None:
        assert ours.shape == theirs.shape
        used = features["input_mask"] > 0 if head.per_token else features["target_weights"] > 0
        agree(ours[used], theirs[used], 1e-5, scale=1.0)
        identical(other.outputs(features), ours)


@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
def test_vectors(pooling: str) -> None:
    one, other = both(ModelSpec(small_config(), VectorHead(pooling, normalize=pooling == "mean")))
    features = as_batch(task_batch(TASKS[0]))
    used = features["target_weights"] > 0
    agree(other.outputs(features)[used], one.outputs(features)[used], 1e-5, scale=1.0)


def test_bfloat16_is_near_float32_and_float64_shows_that_the_rest_is_rounding() -> None:
    spec = ModelSpec(small_config(), PretrainingHead())
    _, narrow = both(spec, "bfloat16")
    _, plain = both(spec)
    _, wide = both(spec, "float64")
    near, right = narrow.evaluate(batch())[1], plain.evaluate(batch())[1]
    assert near.dtype == right.dtype == np.float32
    agree(near[[0, 2]], right[[0, 2]], 0.02)
    assert abs(near[0] - right[0]) > 1e-6
    found = compare_packed_with_unpacked(wide, batch())
    assert all(difference < 1e-13 for difference, _ in found.outputs.values())
    assert all(difference <= 1e-7 * max(size, 1e-5) for difference, size in found.gradients.values())


def test_packed_is_unpacked_and_not_a_bit_leaks() -> None:
    _, model = both(ModelSpec(small_config(), PretrainingHead()))
    found = compare_packed_with_unpacked(model, batch(), "sequence")
    assert all(difference <= 1e-5 for difference, _ in {**found.outputs, **found.losses}.values())
    for chosen in range(3):
        report = probe_leaks(model, VOCABULARY, batch(), chosen)
        assert (report.leaks, report.own_outputs_moved) == (0, True)


def test_dropout_is_a_function_of_the_seed_of_a_pass() -> None:
    model = work.make_model(dropout=0.2, engine="pytorch")
    step = work.make_step(model, TrainingSettings(seed=3, learning_rate=1e-9), Communicator(), 1, engine="pytorch")
    zeros = {name: np.zeros(shape, np.float32) for name, shape in model.shapes().items()}
    moments = []
    for update in (7, 7, 8):
        step.updates.load_moments(zeros, zeros)
        step.run([work.packed(work.packs_of(1))], update, 0.0)
        moments.append(step.updates.moments()[0]["bert/embeddings/word_embeddings"])
    identical(moments[1], moments[0])
    assert np.abs(moments[2] - moments[0]).max() > 1e-6
    still, _ = work.make_model(engine="pytorch").evaluate(work.packed(work.packs_of(1)))
    assert still is None


def test_dropout_drops_the_share_it_should() -> None:
    import torch

    from gaudi_bert.engines.pytorch.bert import dropout

    torch.manual_seed(5)
    dropped = dropout(torch.ones(997, 1009), 0.1).numpy()
    share = float((dropped == 0).mean())
    assert abs(share - 0.1) < 0.002
    agree(dropped[dropped > 0], np.full((dropped > 0).sum(), 1 / 0.9), 1e-4)


def test_weights_of_another_model_are_refused() -> None:
    from gaudi_bert.common.errors import InputError

    model = work.make_model(engine="pytorch")
    with pytest.raises(InputError, match=r"bert/pooler/dense/bias is \[3\] there"):
        model.load_values({"bert/pooler/dense/bias": np.zeros(3, np.float32)})
    assert dataclasses.is_dataclass(model.spec)
