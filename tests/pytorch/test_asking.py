"""What a model does is found by trying it: causal or not, windows, positions; and what cannot be fed packs is refused."""

from __future__ import annotations

import pickle

import pytest

from gaudi_bert.common.errors import InputError
from tests.builders.effort import LONG

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers", minversion="5")

from gaudi_bert.pytorch import PackCollator, probe_model  # noqa: E402
from tests.builders.torch_models import HEADS, NotBuiltError, small_random_model, types_of, verdict_on  # noqa: E402

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "initializer_range": 0.3,
}
SAMPLE = {
    "next token": ("gemma", "mixtral", "falcon", "mistral", "mpt", "bert"),
    "masked tokens": ("albert", "modernbert"),
    "none": ("t5",),
}
REFUSED = {
    "next token": ("mamba", "jamba", "bloom", "bart"),
    "masked tokens": ("deberta-v2", "longformer", "big_bird", "fnet"),
}


def cases(chosen: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(kind, head) for head, kinds in chosen.items() for kind in kinds]


@pytest.mark.parametrize(("kind", "head"), cases(SAMPLE))
def test_packs_are_what_the_sequences_are_alone(kind: str, head: str) -> None:
    assert verdict_on(small_random_model(kind, head)) == "right"


@pytest.mark.parametrize("seed", [8, 10])
def test_fresh_weights_in_which_tokens_hardly_move_one_another_are_no_obstacle(seed: int) -> None:
    torch.manual_seed(seed)
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": 258}
    config = transformers.RobertaConfig(
        **{**SIZES, "vocab_size": 4096, "hidden_size": 64, "initializer_range": 0.02}, **special
    )
    assert not PackCollator("transformers-5", transformers.RobertaForMaskedLM(config)).feeding.causal


@pytest.mark.parametrize(("kind", "head"), cases(REFUSED))
def test_what_no_mask_is_right_for_is_refused(kind: str, head: str) -> None:
    with pytest.raises(InputError, match="give it rows of one sequence") as caught:
        PackCollator("transformers-5", small_random_model(kind, head))
    assert "\n" not in str(caught.value)


@pytest.mark.repeated
@pytest.mark.skipif(not LONG, reason="every type: only in `make test-long`")
def test_every_type_is_right_or_refused() -> None:
    """The table of docs/pytorch-models.md: no type may be wrong."""
    transformers.logging.set_verbosity_error()
    wrong, right = [], 0
    for head in HEADS:
        for kind in types_of(head):
            try:
                verdict = verdict_on(small_random_model(kind, head))
            except NotBuiltError:
                continue
            right += verdict.startswith("right")
            if not verdict.startswith(("right", "refused")):
                wrong.append(f"{kind}, {head}: {verdict}")
    assert not wrong
    assert right >= 150


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
    finding = probe_model(model, ["transformers-5"])[0]
    assert finding.is_right, finding
    unlimited = probe_model(model, ["4-D bool mask"])[0]  # without a window
    assert unlimited.is_right == (reaches == {None}), unlimited


def test_a_window_longer_than_the_packs_is_seen_by_the_probe() -> None:
    """A window of 4,096 is shortened while the model is tried, and is as it was afterwards."""
    config = transformers.MistralConfig(**SIZES, sliding_window=4096)
    torch.manual_seed(5)
    model = transformers.MistralForCausalLM(config).eval()
    right, unlimited = probe_model(model, ["transformers-5", "4-D bool mask"])
    assert right.is_right
    assert "WRONG" in unlimited.verdict
    assert model.config.sliding_window == 4096
    assert PackCollator("transformers-5", model.config).feeding.window == 4095


def test_a_model_that_is_not_what_its_config_makes_is_refused() -> None:
    """An encoder made of a causal model: its config says nothing of it."""
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES, attn_implementation="eager")).eval()
    given = torch.zeros(1, 1, 1, 1)
    model.register_forward_pre_hook(
        lambda module, inputs, named: (inputs, {**named, "attention_mask": given}), with_kwargs=True
    )  # every token sees every other
    with pytest.raises(InputError, match="its config describes a causal model, and it is not"):
        PackCollator("transformers-5", model)


def test_a_model_that_its_copy_does_not_speak_for_is_refused() -> None:
    """Other positions than those that it gets: a copy of its config has no such hook."""
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()

    def later(module: torch.nn.Module, inputs: tuple, named: dict) -> tuple:
        return inputs, {name: value + 1 if name == "position_ids" else value for name, value in named.items()}

    model.register_forward_pre_hook(later, with_kwargs=True)
    with pytest.raises(InputError, match="BertModel: computes wrong outputs for packs of 144 tokens"):
        PackCollator("transformers-5", model)


def test_a_model_in_sixteen_bits_is_tried_in_them() -> None:
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16)
    collator = PackCollator("transformers-5", model, dtype=torch.bfloat16)
    assert pickle.loads(pickle.dumps(collator)).feeding.causal  # for workers that are spawned


def test_a_model_is_tried_without_touching_it() -> None:
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).train()
    state = torch.random.get_rng_state()
    assert not PackCollator("transformers-5", model).feeding.causal
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    model.config.is_decoder = True
    assert PackCollator("transformers-5", model.config).feeding.causal


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match="Linear: is not a transformers model"):
        PackCollator("transformers-5", torch.nn.Linear(2, 2))
