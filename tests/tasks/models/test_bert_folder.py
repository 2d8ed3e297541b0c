"""What packs say is what transformers says of each sequence alone, in the order of the sequences."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.values import EngineName
from gaudi_bert.engines.choose import load_engine
from gaudi_bert.model.heads import VectorHead
from gaudi_bert.rows.types import Sequences
from gaudi_bert.rows.window_plan import plan_window
from gaudi_bert.tasks.models.bert_folder import BertFolder, PackRunner
from gaudi_bert.training.weights import Weights, read_weights
from tests.builders.agree import agree
from tests.builders.bert_folder import VOCABULARY, write_bert
from tests.builders.engine_models import model_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    return read_weights(folder)


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    random = np.random.default_rng(5)
    lengths = random.integers(3, 24, 61)
    lengths[7] = 64
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = random.integers(5, len(VOCABULARY), offsets[-1]).astype(np.int32)
    segments = random.integers(0, 2, offsets[-1]).astype(np.int8)
    return Sequences(np.arange(61), offsets, ids, segments)


@pytest.fixture(scope="module")
def alone(folder: Path, sequences: Sequences) -> dict[str, Any]:
    """By transformers, one sequence at a time."""
    import torch
    from transformers import BertModel

    model = BertModel.from_pretrained(folder).eval()
    found: dict[str, list[Any]] = {"cls": [], "mean": [], "max": []}
    for number in range(len(sequences)):
        span = slice(int(sequences.offsets[number]), int(sequences.offsets[number + 1]))
        ids = torch.tensor(sequences.input_ids[span][None].astype(np.int64))
        types = torch.tensor(sequences.segment_ids[span][None].astype(np.int64))
        with torch.inference_mode():
            hidden = model(input_ids=ids, token_type_ids=types).last_hidden_state[0].numpy()
        found["cls"].append(hidden[0])
        found["mean"].append(hidden.mean(axis=0))
        found["max"].append(hidden.max(axis=0))
    return {name: np.array(values) for name, values in found.items()}


@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
@pytest.mark.parametrize("one_shape", [False, True])
@pytest.mark.parametrize("engine", ["tensorflow"])
def test_vectors_of_packs(
    weights: Weights, sequences: Sequences, alone: dict[str, Any], pooling: str, one_shape: bool, engine: EngineName
) -> None:
    plan = plan_window(sequences.lengths, hidden_size=24, one_length=64 if one_shape else None)
    assert plan.gain > 1.5
    model = model_of(weights.config, VectorHead(pooling, normalize=False), None, engine)
    model.load_values({name: weights.variables[name] for name in model.shapes()})
    found = PackRunner(model, per="sequence", width=24, one_shape=one_shape, batch_tokens=5 * 64).run(sequences, plan)
    agree(found, alone[pooling], 1e-5, scale=1.0)


def test_answers_of_tokens_come_home(sequences: Sequences) -> None:
    """A model that says what it was fed: the token, its position and its segment."""

    class Echo:
        def outputs(self, batch: Any) -> Any:
            return np.stack([batch[name] for name in ("input_ids", "positions", "segment_ids")], axis=-1).astype(np.float32)

    plan = plan_window(sequences.lengths, hidden_size=24)
    found = PackRunner(Echo(), per="token", width=3, batch_tokens=200).run(sequences, plan)
    positions = np.concatenate([np.arange(length) for length in sequences.lengths])
    np.testing.assert_array_equal(found, np.stack([sequences.input_ids, positions, sequences.segment_ids], axis=1))


def test_weights_without_an_encoder(folder: Path) -> None:
    bert = BertFolder(folder, load_engine("tensorflow"))
    bert.weights = dataclasses.replace(bert.weights, variables={})
    with pytest.raises(InputError, match="is missing; give the weights of a complete encoder"):
        bert.embedder("mean", False, "float32", 64)
