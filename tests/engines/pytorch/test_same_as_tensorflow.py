"""One run by either engine: the same first weights, outputs, losses and updates."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("tensorflow", exc_type=ImportError)

import torch

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.protocol import Communicator, Model, ModelSpec, load_engine
from gaudi_bert.model.config import initial_value, parameter_specs
from gaudi_bert.model.features import join_sequences
from gaudi_bert.model.heads import PretrainingHead, TaskHead, VectorHead
from gaudi_bert.pytorch.cpu import dropout
from gaudi_bert.training.objective import LossDenominators
from tests.builders import training_updates as work
from tests.builders.agree import agree, identical
from tests.builders.effort import LONG, sampled
from tests.builders.model_packs import VOCABULARY, random_packs, small_config
from tests.builders.task_batches import HEADS, LENGTHS, TEXTS, batch_of, packs_of

RUNS = [("global", "adamw", "token", 3), ("balanced", "lamb", "sequence", 1)]
if LONG:
    RUNS += [("local", "adamw", "token", 3), ("local", "lamb", "token", 1), ("global", "lamb", "sequence", 3)]


def both(spec: ModelSpec) -> tuple[Model, Model]:
    """A model of each engine with the same variables, none of which is at its start of 0 or 1."""
    one, other = (load_engine(name).build(spec, seed=3) for name in ("tensorflow", "pytorch"))
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
    spec, config = ModelSpec(small_config(), PretrainingHead()), small_config()
    expected = {name: initial_value(name, each, 0.2, 7) for name, each in parameter_specs(config).items()}
    for engine in ("tensorflow", "pytorch"):
        values = load_engine(engine).build(spec, seed=7).values()
        assert list(values) == list(expected)
        identical(values, expected)


@pytest.mark.parametrize(("kind", "optimizer", "loss", "micro_batches"), sampled(RUNS, 2))
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


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
def test_heads_of_tasks(head: TaskHead) -> None:
    config = small_config(attention="causal" if head.is_causal else "bidirectional")
    one, other = both(ModelSpec(config, head))
    features = batch_of(packs_of(head, VOCABULARY), head)
    (theirs, their_sums), (ours, our_sums) = one.evaluate(features), other.evaluate(features)
    agree(our_sums, their_sums, 1e-5)
    assert (ours is None) == (theirs is None) == (not head.keeps_outputs)
    if ours is not None and theirs is not None:
        assert ours.shape == theirs.shape
        used = features["input_mask"] > 0 if head.per_token else features["target_weights"] > 0
        agree(ours[used], theirs[used], 1e-5, scale=1.0)
        identical(other.outputs(features), ours)


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "last"])
def test_vectors(pooling: str) -> None:
    one, other = both(ModelSpec(small_config(), VectorHead(pooling, normalize=pooling == "mean")))
    features = batch_of(packs_of(TEXTS, VOCABULARY), TEXTS)
    used = features["target_weights"] > 0
    agree(other.outputs(features)[used], one.outputs(features)[used], 1e-5, scale=1.0)


def test_dropout_drops_the_share_it_should() -> None:
    torch.manual_seed(5)
    dropped = dropout(torch.ones(997, 1009), 0.1).numpy()
    share = float((dropped == 0).mean())
    assert abs(share - 0.1) < 0.002
    agree(dropped[dropped > 0], np.full((dropped > 0).sum(), 1 / 0.9), 1e-4)


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(InputError, match=r"bert/pooler/dense/bias is \[3\] there"):
        work.make_model(engine="pytorch").load_values({"bert/pooler/dense/bias": np.zeros(3, np.float32)})
