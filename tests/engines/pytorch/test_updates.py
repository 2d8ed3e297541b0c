"""Updates on a device: layers computed twice give the same bits, and what has no deterministic kernel is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import FineTuneSettings, TrainingSettings
from gaudi_bert.engines import load_engine
from gaudi_bert.engines.protocol import Communicator, ModelSpec, UpdateScalars
from gaudi_bert.engines.pytorch import engine as engine_module
from gaudi_bert.model.config import BertConfig, EncoderConfig
from tests.builders.agree import agree, identical
from tests.builders.task_batches import LENGTH, TEXTS, batch_of, packs_of
from tests.builders.torch_models import CONFIGS

VOCABULARY = 61


# --- layers that are computed twice, and kernels that repeat their bits

ENCODERS = ("roberta", "modernbert")


def spec_of(name: str, dropout: float) -> ModelSpec:
    if name == "bert":
        sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config = BertConfig(**sizes, **rates, vocab_size=VOCABULARY, max_position_embeddings=LENGTH)
        return ModelSpec(config, TEXTS)
    values = CONFIGS[name]().to_dict()
    rates = {key: dropout for key in values if key.endswith(("dropout_prob", "_dropout"))}
    return ModelSpec(EncoderConfig({**values, **rates}), TEXTS)


def after_updates(name: str, dropout: float, **options: Any) -> tuple[dict[str, np.ndarray], int]:
    """All numbers of a model after two updates, and the bytes that one forward pass retained."""
    engine = load_engine("pytorch")
    settings, spec = TrainingSettings(device="cpu", **options), spec_of(name, dropout)
    model = engine.build_model(spec, engine.open_device(settings), seed=1, compiled=bool(settings.compile))
    batch, seeds = batch_of(packs_of(TEXTS, VOCABULARY), TEXTS), np.array([[1, 2], [3, 4]], np.int32)
    kept: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model.compute_training_outputs(model.copy_to_device(batch), seeds[0])
    updates = engine.create_updates(model, settings, Communicator(), 2)
    for update in (1, 2):
        sums = updates.run_update([batch] * 2, seeds + update, np.ones((2, 2)), UpdateScalars(0.1, 1.0, 1.0), update)
    return {**model.copy_variables(), "sums": sums()}, sum(kept)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["bert", *ENCODERS])
def test_layers_that_are_computed_twice_give_the_same_bits_and_retain_less(name: str, dropout: float) -> None:
    (once, all_bytes), (twice, few_bytes) = (
        after_updates(name, dropout, recompute=recompute) for recompute in (False, True)
    )
    assert few_bytes < 0.6 * all_bytes
    for variable, values in once.items():
        identical(twice[variable], values)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["bert", *ENCODERS])
def test_every_model_is_traced_as_one_graph(name: str, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a compiler, which here runs the graph as it is: with the numbers of a step that is not compiled."""
    monkeypatch.setattr(engine_module, "_COMPILERS", {"cpu": "eager"})
    eager, traced = (after_updates(name, 0.0, compile=compiles, recompute=recompute)[0] for compiles in (False, True))
    for variable, values in eager.items():
        agree(traced[variable], values, 1e-4)


def test_a_model_that_cannot_compute_its_layers_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.RobertaPreTrainedModel, "supports_gradient_checkpointing", False)
    with pytest.raises(InputError, match=r"recompute = true: Roberta\w+ cannot recompute its layers; set it to false"):
        after_updates("roberta", 0.0, recompute=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What opening a GPU asks of PyTorch; nothing is computed on it."""
    for name, value in {"is_available": True, "set_device": None, "get_device_name": "a card", "device_count": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def test_a_gpu_repeats_its_bits_unless_it_is_told_not_to(gpu: None) -> None:
    engine = load_engine("pytorch")
    assert engine.open_device(TrainingSettings(device="cuda")).notes == ()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    (note,) = engine.open_device(FineTuneSettings(device="cuda", deterministic=False)).notes
    assert note == "note: a resumed run may differ in rounding: finetune.deterministic = false"
    assert not torch.are_deterministic_algorithms_enabled()


def test_more_processes_than_gpus_are_refused(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(InputError, match="has 1 GPUs"):
        load_engine("pytorch").open_device(TrainingSettings(device="cuda"))


def test_an_operation_without_a_deterministic_kernel_is_refused(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, settings = load_engine("pytorch"), TrainingSettings()
    model = engine.build_model(spec_of("bert", 0.0), seed=1)
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(model, "compute_loss", lambda *_: torch.zeros(3).put_(torch.tensor([0]), torch.ones(1)))
    updates, batch = engine.create_updates(model, settings, Communicator(), 1), batch_of(packs_of(TEXTS, VOCABULARY), TEXTS)
    reason = r"training\.deterministic = true: put_ does not have a deterministic implementation; set it to false"
    with pytest.raises(InputError, match=reason):
        updates.run_update([batch], np.zeros((1, 2), np.int32), np.ones((1, 2)), UpdateScalars(0.1, 1.0, 1.0), 1)
