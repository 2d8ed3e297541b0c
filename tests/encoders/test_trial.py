"""A model is tried as it is; why it cannot be tried is one line."""

from __future__ import annotations

import pickle

import pytest

from gaudi_bert.common.errors import InputError

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers", minversion="5")

from gaudi_bert.pytorch import PackCollator  # noqa: E402
from tests.encoders.test_pack_inputs_trial import LLAMA, ROWS, SIZES, check_outputs, random_model  # noqa: E402


def test_a_model_in_sixteen_bits_is_tried_in_them() -> None:
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16)
    collator = PackCollator("transformers-5", model, dtype=torch.bfloat16)
    assert pickle.loads(pickle.dumps(collator)).pack_inputs.is_causal  # for workers that are spawned


def test_router_logits_are_refused_with_their_reason() -> None:
    model = random_model("MixtralForCausalLM", "Mixtral", **LLAMA, num_local_experts=2, output_router_logits=True)
    with pytest.raises(InputError, match=r"does not support packs: set model\.config\.output_router_logits = False"):
        PackCollator("transformers-5", model)
    model.config.output_router_logits = False
    check_outputs(model, PackCollator("transformers-5", model), ROWS)
