"""Updates by either engine: the same first weights and losses; a loss of all micro-batches together, which are computed
twice.

That both compute the same outputs is in `test_protocol.py` and `tests/tasks/test_equivalence.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines import load_engine
from gaudi_bert.engines.protocol import Communicator, ModelSpec, UpdateLoss, UpdateScalars
from gaudi_bert.model.config import draw_initial_value, parameter_specs
from gaudi_bert.model.heads import PretrainingHead, VectorHead
from gaudi_bert.tasks.contrast import find_forbidden_candidates, in_batch_negatives_loss
from gaudi_bert.training.objective import LossDenominators
from gaudi_bert.training.verify_model import collate_packs
from tests.builders import training_data as data
from tests.builders import training_updates as work
from tests.builders.agree import agree, identical
from tests.builders.model_packs import VOCABULARY, small_config
from tests.builders.task_batches import TEXTS, batch_of, packs_of


def test_first_weights_are_a_function_of_seed_and_name() -> None:
    spec, config = ModelSpec(small_config(), PretrainingHead()), small_config()
    expected = {name: draw_initial_value(name, each, 0.2, 7) for name, each in parameter_specs(config).items()}
    for engine in ("tensorflow", "pytorch"):
        values = load_engine(engine).build_model(spec, seed=7).copy_variables()
        assert list(values) == list(expected)
        identical(values, expected)


@pytest.mark.parametrize(
    ("kind", "optimizer", "loss", "micro_batches"),
    [("global", "adamw", "token", 3), ("balanced", "lamb", "sequence", 1)],
)
def test_twenty_updates(kind: str, optimizer: str, loss: str, micro_batches: int) -> None:
    curves = []
    for engine in ("tensorflow", "pytorch"):
        model = work.make_model(loss=loss, engine=engine)
        settings = TrainingSettings(optimizer=optimizer, loss=loss, seed=3)
        denominators = LossDenominators(kind, work.EXPECTED)
        step = work.make_step(model, settings, Communicator(), micro_batches, denominators=denominators, engine=engine)
        losses = []
        for update in range(1, 21):
            packs = work.packs_of(update)
            shares = [work.packed(packs[part::micro_batches]) for part in range(micro_batches)]
            losses.append(step.run_update(shares, update, 1e-3)()[[0, 2, 8]])
        curves.append(np.array(losses))
        assert engine == "pytorch" or len(step.updates.graphs) == min(micro_batches, 2)
    agree(curves[1] / curves[0], np.ones_like(curves[0]), 1e-4)


@pytest.mark.parametrize("engine", ["tensorflow", "pytorch"])
def test_micro_batches_may_be_slow_in_the_first_update_and_where_rows_have_another_length(engine: str) -> None:
    """Afterwards a process that waits in vain is found within `stall_seconds`."""
    told = []

    class Listening(Communicator):
        def record_activity(self, activity: str, *, slow: bool = False) -> None:
            told.append((activity, slow))

    model, settings = work.make_model(engine=engine), TrainingSettings(seed=3)
    step = work.make_step(model, settings, Listening(), 2, engine=engine)
    packs = [[sequence] for pack in work.packs_of(1) for sequence in pack if sequence.length <= 17]
    whole, short = (collate_packs(packs, length, data.MASKED_SLOTS, data.DEPTH) for length in (data.LENGTH, 17))
    for update, batches in enumerate(([whole, whole], [whole, whole], [short, whole]), 1):
        step.run_update(batches, update, 0.0)
    name = "micro-batch {} of update {}".format
    assert told == [(name(2, 1), True), (name(2, 2), False), (name(1, 3), True), (name(2, 3), False)]


# --- one loss of all micro-batches together

PACKS = batch_of(packs_of(TEXTS, VOCABULARY), TEXTS)
USED = np.flatnonzero(PACKS["target_weights"].ravel() > 0)
SETTINGS = TrainingSettings(optimizer="adamw", clip_norm=0)
# Six texts: two anchors with their positives, and two negatives.
ANCHORS, CANDIDATES = USED[:2], USED[2:6]
SEEDS = np.array([[1, 2], [3, 4], [5, 6]], np.int32)


def contrast_of_all(outputs: Sequence[Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    together = np.concatenate(outputs).astype(np.float64)
    texts, forbidden = together.reshape(-1, together.shape[-1]), find_forbidden_candidates(ANCHORS, CANDIDATES)
    found = in_batch_negatives_loss(texts, ANCHORS, CANDIDATES, forbidden, 20.0, False)
    gradient = found.gradient_NH.reshape(together.shape)
    ends = np.cumsum([len(each) for each in outputs])[:-1]
    return np.array([found.loss, 2.0, found.right]), np.split(gradient, ends)


def half_square(outputs: Sequence[Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """A loss whose gradient is the outputs of the first pass."""
    return np.zeros(3), list(outputs)


def updated(engine: str, batches: list[dict[str, Any]], seeds: np.ndarray, update_loss: UpdateLoss, dropout: float) -> Any:
    """Sums and norms of three updates, and the weights after them."""
    config = small_config(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    model = load_engine(engine).build_model(ModelSpec(config, VectorHead("mean", normalize=False)), seed=3)
    noise = np.random.default_rng(3)
    model.load_variables(
        {k: v + noise.normal(0, 0.2, v.shape).astype(np.float32) for k, v in model.copy_variables().items()}
    )
    updates = load_engine(engine).create_updates(model, SETTINGS, Communicator(), len(batches))
    figures = [
        updates.run_update(batches, seeds, np.ones((len(batches), 2)), scalars_of(update), update, update_loss)()
        for update in (1, 2, 3)
    ]
    assert engine == "pytorch" or len(updates.graphs) == 1
    return np.array(figures), model.copy_variables()


def scalars_of(update: int) -> UpdateScalars:
    return UpdateScalars(1e-3, *(1.0 / (1.0 - beta**update) for beta in (SETTINGS.beta_1, SETTINGS.beta_2)))


def parts_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: values[pack : pack + 1] for name, values in batch.items()} for pack in range(len(batch["input_ids"]))]


def test_micro_batches_are_one_big_batch() -> None:
    results = {
        (engine, parts): updated(engine, batches, SEEDS[: len(batches)], contrast_of_all, 0.0)
        for engine in ("pytorch", "tensorflow")
        for parts, batches in ((1, [PACKS]), (3, parts_of(PACKS)))
    }
    expected, weights = results["pytorch", 1]
    assert expected[0, 0] > expected[-1, 0] > 0
    for (engine, _), (figures, values) in results.items():
        agree(figures, expected, 1e-6 if engine == "pytorch" else 1e-5)
        agree(values, weights, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pytorch", "tensorflow"])
def test_both_passes_draw_the_same_dropout(engine: str) -> None:
    first = parts_of(PACKS)[0]
    (once, *_), _ = updated(engine, [first], SEEDS[:1], half_square, 0.3)
    (twice, *_), _ = updated(engine, [first, first], np.stack([SEEDS[0], SEEDS[0]]), half_square, 0.3)
    (other, *_), _ = updated(engine, [first], SEEDS[1:2], half_square, 0.3)
    agree(twice[-1], 2 * once[-1], 1e-6)
    assert abs(other[-1] - once[-1]) > 1e-3 * once[-1]
