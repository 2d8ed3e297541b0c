"""Masks of layers with a window: as long as `transformers` has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers", minversion="5")

from gaudi_bert.encoders.pack_inputs import PackInputs  # noqa: E402
from gaudi_bert.encoders.pack_inputs_trial import build_packed_batch  # noqa: E402
from gaudi_bert.encoders.trial import (  # noqa: E402
    build_trial_packs,
    compute_outputs_without_packing,
    compute_token_outputs,
    largest_difference,
    split_by_sequence,
)
from gaudi_bert.pytorch import PackCollator  # noqa: E402
from tests.encoders.test_pack_inputs_trial import SIZES  # noqa: E402


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
    pack_inputs = PackCollator("transformers-5", model).pack_inputs
    assert set((pack_inputs.window_by_layer_kind or {"all": pack_inputs.window}).values()) == reaches
    assert packs_differ(model, pack_inputs) < 1e-5
    unlimited = packs_differ(model, replace(pack_inputs, window=None, window_by_layer_kind={}))
    assert (unlimited < 1e-5) == (reaches == {None})


def packs_differ(model: Any, pack_inputs: PackInputs) -> float:
    """How far packs of 256 tokens are from their sequences alone."""
    rows, _ = build_trial_packs(model.config, 256)
    with torch.no_grad():
        packed = split_by_sequence(compute_token_outputs(model, build_packed_batch(rows, pack_inputs)), rows)
        return largest_difference(packed, compute_outputs_without_packing(model, pack_inputs, rows))


def test_a_window_longer_than_the_packs_is_seen() -> None:
    """A window of 4,096 is shortened in the copy that is tried, and is as it was afterwards."""
    config = transformers.MistralConfig(**SIZES, sliding_window=4096)
    assert PackCollator("transformers-5", config).pack_inputs.window == 4095
    assert config.sliding_window == 4096
