"""One run by either engine: the same first weights and updates.

That both compute the same is in `tests/engines/test_protocol.py` and `tests/tasks/test_equivalence.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("tensorflow", exc_type=ImportError)

import torch

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.encoders.cpu import dropout
from gaudi_bert.engines.choose import load_engine
from gaudi_bert.engines.protocol import Communicator, ModelSpec
from gaudi_bert.model.config import initial_value, parameter_specs
from gaudi_bert.model.heads import PretrainingHead
from gaudi_bert.training.objective import LossDenominators
from tests.builders import training_updates as work
from tests.builders.agree import agree, identical
from tests.builders.effort import LONG, sampled
from tests.builders.model_packs import small_config

RUNS = [("global", "adamw", "token", 3), ("balanced", "lamb", "sequence", 1)]
if LONG:
    RUNS += [("local", "adamw", "token", 3), ("local", "lamb", "token", 1), ("global", "lamb", "sequence", 3)]


def test_first_weights_are_a_function_of_seed_and_name() -> None:
    spec, config = ModelSpec(small_config(), PretrainingHead()), small_config()
    expected = {name: initial_value(name, each, 0.2, 7) for name, each in parameter_specs(config).items()}
    for engine in ("tensorflow", "pytorch"):
        values = load_engine(engine).build(spec, seed=7).values()
        assert list(values) == list(expected)
        identical(values, expected)


@pytest.mark.parametrize(("kind", "optimizer", "loss", "micro_batches"), sampled(RUNS, 2))
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
            losses.append(step.run(shares, update, 1e-3)()[[0, 2, 8]])
        curves.append(np.array(losses))
        assert step.updates.graphs_built == (1 if engine == "pytorch" or micro_batches == 1 else 2)
    agree(curves[1] / curves[0], np.ones_like(curves[0]), 1e-4)


def test_dropout_drops_the_share_it_should() -> None:
    torch.manual_seed(5)
    dropped = dropout(torch.ones(997, 1009), 0.1).numpy()
    share = float((dropped == 0).mean())
    assert abs(share - 0.1) < 0.002
    agree(dropped[dropped > 0], np.full((dropped > 0).sum(), 1 / 0.9), 1e-4)


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(InputError, match=r"bert/pooler/dense/bias is \[3\] there"):
        work.make_model(engine="pytorch").load_values({"bert/pooler/dense/bias": np.zeros(3, np.float32)})
