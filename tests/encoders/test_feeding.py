"""Masks of layers with a window: as long as `transformers` has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers", minversion="5")

from gaudi_bert.encoders.feeding import Feeding  # noqa: E402
from gaudi_bert.encoders.feeding_trial import packed_batch  # noqa: E402
from gaudi_bert.encoders.trial import alone_outputs, largest_difference, outputs_of, random_packs, sequences_of  # noqa: E402
from gaudi_bert.pytorch import PackCollator  # noqa: E402
from tests.encoders.test_feeding_trial import SIZES  # noqa: E402


@pytest.mark.parametrize(
    ("kind", "settings", "reaches"),
    [
        ("Mistral", {"sliding_window": 100}, {99}),
        ("Qwen2", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1}, {None, 99}),
        ("Gemma3Text", {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}, {None, 99}),
        ("ModernBert", {"local_attention": 200, "pad_token_id": 0, "num_hidden_layers": 3}, {None, 100}),
        ("Llama", {}, {None}),
    ],
)
def test_a_window_is_as_long_as_transformers_has_it(kind: str, settings: dict, reaches: set) -> None:
    """The model as it is, with its window of 100, on packs of 256: nothing is shortened here."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    feeding = PackCollator("transformers-5", model).feeding
    assert set((feeding.layers or {"all": feeding.window}).values()) == reaches
    assert packs_differ(model, feeding) < 1e-5
    unlimited = packs_differ(model, replace(feeding, window=None, layers={}))
    assert (unlimited < 1e-5) == (reaches == {None})


def packs_differ(model: Any, feeding: Feeding) -> float:
    """How far packs of 256 tokens are from their sequences alone."""
    rows, _ = random_packs(model.config, 256)
    with torch.no_grad():
        packed = sequences_of(outputs_of(model, packed_batch(rows, feeding)), rows)
        return largest_difference(packed, alone_outputs(model, feeding, rows))


def test_a_window_longer_than_the_packs_is_seen() -> None:
    """A window of 4,096 is shortened in the copy that is tried, and is as it was afterwards."""
    config = transformers.MistralConfig(**SIZES, sliding_window=4096)
    assert PackCollator("transformers-5", config).feeding.window == 4095
    assert config.sliding_window == 4096
