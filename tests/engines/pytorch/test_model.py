"""Any encoder of `transformers` in the engine: packed as unpacked, its heads as `transformers` has them, no leak."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.encoders.matrix_products import OneDnnLinear, onednn_supports
from gaudi_bert.engines import load_engine
from gaudi_bert.engines.protocol import Communicator, ModelSpec, UpdateScalars
from gaudi_bert.model.config import BertConfig, EncoderConfig
from gaudi_bert.model.heads import TaskHead, VectorHead
from tests.builders import torch_models
from tests.builders.agree import agree, identical
from tests.builders.encoders import CONFIGS as SMALL_CONFIGS
from tests.builders.task_batches import HEADS, TEXTS, batch_of, packs_of
from tests.builders.torch_models import VOCABULARY
from tools.type_scan import difference_alone

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
ESM = {"vocab_size": VOCABULARY, **SMALL, "pad_token_id": 1, "mask_token_id": 4, "position_embedding_type": "rotary"}
CONFIGS: dict[str, Any] = {
    **torch_models.CONFIGS,
    "electra": lambda: transformers.ElectraConfig(vocab_size=VOCABULARY, embedding_size=16, **SMALL),
    "modernbert-mean": lambda: transformers.ModernBertConfig(
        **{**torch_models.CONFIGS["modernbert"]().to_dict(), "classifier_pooling": "mean"}
    ),
    "albert": lambda: transformers.AlbertConfig(vocab_size=VOCABULARY, embedding_size=16, **SMALL),
    "roformer": lambda: transformers.RoFormerConfig(vocab_size=VOCABULARY, max_position_embeddings=80, **SMALL),
    "esm": lambda **more: transformers.EsmConfig(**{**ESM, **more}),
    "esm-token-dropout": lambda: transformers.EsmConfig(**ESM, token_dropout=True),
    "luke": lambda: transformers.LukeConfig(vocab_size=VOCABULARY, entity_vocab_size=50, entity_emb_size=16, **SMALL),
    "t5": lambda: transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=16, num_heads=2, num_layers=2, d_ff=48),
    "mixtral": lambda: transformers.MixtralConfig(
        vocab_size=VOCABULARY, **SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None
    ),
}
BERT = BertConfig(vocab_size=VOCABULARY, **SMALL, initializer_range=0.15)
TAGS = next(head for head in HEADS if head.kind == "token-classification")
WORDS, NEXT_WORD = HEADS[-2:]
CASES = [(name, TEXTS) for name in CONFIGS if name != "t5"] + [("roberta", head) for head in HEADS[1:]]
CASES += [("modernbert", WORDS), ("distilbert", WORDS), ("gpt2", NEXT_WORD), ("modernbert", TAGS)]
CASES += [("mixtral", NEXT_WORD), ("luke", WORDS), ("esm", WORDS), ("t5", TAGS)]
NAMES = [f"{name}-{head.kind}" for name, head in CASES]


def spec_of(name: str, head: Any) -> ModelSpec:
    values = CONFIGS[name]().to_dict()
    return ModelSpec(EncoderConfig({**values, "initializer_range": 0.15}), head)


def build(name: str, head: Any, seed: int | None = 3, **more: Any) -> Any:
    return load_engine("pytorch").build_model(spec_of(name, head), seed=seed, **more)


def gradients_of(model: Any, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The sums of a batch and the gradient of its loss, without dropout."""
    sums = model.compute_loss_and_metric_sums(model.forward(model.copy_to_device(batch), False), model.copy_to_device(batch))
    names = [name for name, parameter in model.parameters_by_name.items() if parameter.requires_grad]
    leaves = [model.parameters_by_name[name] for name in names]
    found = torch.autograd.grad(sums[0], leaves, allow_unused=True)
    return sums.detach().numpy(), {
        name: np.zeros(leaf.shape) if gradient is None else gradient.numpy()
        for name, leaf, gradient in zip(names, leaves, found, strict=True)
    }


@pytest.mark.parametrize(("name", "head"), CASES, ids=NAMES)
def test_packed_equals_unpacked_and_its_class(name: str, head: TaskHead) -> None:
    model, packs = build(name, head), packs_of(head, VOCABULARY)
    packed, singles = batch_of(packs, head), batch_of([[each] for pack in packs for each in pack], head)
    (sums, gradients), (sums_alone, gradients_alone) = gradients_of(model, packed), gradients_of(model, singles)
    agree(sums, sums_alone, 1e-5)
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in gradients_alone.values()))
    for variable, gradient in gradients_alone.items():
        assert np.linalg.norm(gradients[variable] - gradient) <= 1e-5 * max(np.linalg.norm(gradient), 0.1 * norm), variable
    assert difference_alone(model, head) <= 1e-5


def test_values_are_a_function_of_the_seed_and_variables_are_those_of_transformers() -> None:
    one, again, other = (build("roberta", WORDS, seed).copy_variables() for seed in (3, 3, 4))
    identical(again, one)
    assert not np.array_equal(other["lm_head.dense.weight"], one["lm_head.dense.weight"])
    words = "roberta.embeddings.word_embeddings.weight"
    assert words in one
    assert "lm_head.decoder.weight" not in one  # tied: once
    model = build("roberta", WORDS, None)
    model.load_variables(one)
    identical(model.copy_variables(), one)
    assert model.has_weight_decay(words)
    assert not model.has_weight_decay("lm_head.layer_norm.weight")
    assert not model.has_weight_decay("roberta.encoder.layer.0.output.LayerNorm.weight")
    assert not model.has_weight_decay("lm_head.bias")


def test_statistics_of_layers_are_those_of_the_first_process() -> None:
    """What a layer counts depends on what its process read; a checkpoint holds the first one's."""

    class Second(Communicator):
        def broadcast(self, arrays: Any) -> Any:
            return {name: np.full_like(array, 0.25) for name, array in arrays.items()}

    head, batch = TaskHead("classification", 3), batch_of(packs_of(TEXTS, VOCABULARY), TEXTS)
    spec = ModelSpec(EncoderConfig(SMALL_CONFIGS["ibert"]().to_dict()), head)
    model = load_engine("pytorch").build_model(spec, seed=1)
    updates = load_engine("pytorch").create_updates(model, TrainingSettings(seed=3), Second(1, 2), 1)
    updates.run_update([batch], np.zeros((1, 2), np.int32), np.ones((1, 2)), UpdateScalars(1e-3, 1.0, 1.0), 1)
    assert model.persistent_buffers()
    assert all(bool((buffer == 0.25).all()) for buffer in model.persistent_buffers().values())


def test_bfloat16_is_near_float32() -> None:
    device = load_engine("pytorch").open_device(TrainingSettings(device="cpu", precision="bfloat16"))
    batch = batch_of(packs_of(TEXTS, VOCABULARY), TEXTS)
    narrow = load_engine("pytorch").build_model(spec_of("roberta", TEXTS), device, seed=3).compute_outputs(batch)
    real = batch["target_weights"] > 0
    agree(narrow[real], build("roberta", TEXTS).compute_outputs(batch)[real], 0.05)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "head"), CASES, ids=NAMES)
def test_a_frozen_model_gives_the_same(name: str, head: TaskHead, precision: Any) -> None:
    model, batch = build(name, head, compute_dtype=precision), batch_of(packs_of(head, VOCABULARY), head)
    (outputs, sums), variables = model.evaluate_batch(batch), model.copy_variables()
    model.freeze()
    found, found_sums = model.evaluate_batch(batch)
    bound = 1e-5 if precision == "float32" else 0.05
    agree(found_sums[:2], sums[:2], bound)  # which class is the likeliest, the third sum, may change in bfloat16
    if outputs is not None:
        real = batch["input_mask" if outputs.shape[1] == batch["input_mask"].shape[1] else "target_weights"] > 0
        agree(found[real], outputs[real], bound)
    kept = sum(parameter.numel() for parameter in model.parameters_by_name.values())
    packed = sum(layer.onednn_weights.numel() for layer in model.module.modules() if isinstance(layer, OneDnnLinear))
    buffers = sum(buffer.numel() for buffer in model.persistent_buffers().values())
    assert kept + packed + buffers == sum(values.size for values in variables.values())
    if onednn_supports(getattr(torch, precision)) and name != "gpt2":  # whose layers are not linear layers of PyTorch
        assert packed > 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", [*HEADS[:5], VectorHead("mean", normalize=True), VectorHead("cls", normalize=False)])
def test_a_frozen_bert_gives_the_same_and_holds_each_weight_once(head: Any, precision: Any) -> None:
    of_batch = head if isinstance(head, TaskHead) else TEXTS
    model = load_engine("pytorch").build_model(ModelSpec(BERT, head), seed=3, compute_dtype=precision)
    batch = batch_of(packs_of(of_batch, VOCABULARY), of_batch)
    short = {name: values[2:] for name, values in batch.items()}  # one sequence: as many positions are read as there are
    short |= {name: short[name][:, :1] for name in ("input_ids", "input_mask", "segment_ids", "positions")}
    short |= {name: values[:, :1] for name, values in short.items() if name in ("sequence_positions", "target_weights")}
    expected, numbers = (
        [model.compute_outputs(each) for each in (batch, short)],
        sum(map(np.size, model.copy_variables().values())),
    )
    model.freeze()
    for each, values in zip((batch, short), expected, strict=True):
        agree(model.compute_outputs(each), values, 1e-5 if precision == "float32" else 0.05)
    assert sum(tensor.numel() for tensor in model.frozen.values()) == numbers


@pytest.mark.parametrize(
    ("values", "head", "named"),
    [
        ({"model_type": "nothing"}, TEXTS, "'nothing'"),
        ("gpt2", WORDS, "masked-language-modelling"),
        ({"model_type": "roberta", "hidden_size": 30, "num_attention_heads": 4}, TEXTS, "'roberta'"),
        ("esm-token-dropout", WORDS, "EsmForMaskedLM"),
        ({"model_type": "xlnet", "d_model": 32, "n_head": 2}, TEXTS, "position_ids"),
        (
            {"model_type": "funnel", "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 48},
            TEXTS,
            "one output vector per token",
        ),
    ],
)
def test_what_cannot_be_fed_or_built_is_refused_in_a_line(values: Any, head: TaskHead, named: str) -> None:
    values = values if isinstance(values, dict) else CONFIGS[values]().to_dict()
    with pytest.raises(InputError, match=named) as refused:
        load_engine("pytorch").build_model(ModelSpec(EncoderConfig(values), head), seed=1)
    assert not re.search(r"\n|\w(Error|Exception)\b", str(refused.value)), "words of ours, not those of Python"


def test_a_row_with_a_token_that_changes_its_neighbours_is_refused() -> None:
    model, batch = build("esm-token-dropout", TEXTS), batch_of(packs_of(TEXTS, VOCABULARY), TEXTS)
    batch["input_ids"][0, 3] = ESM["mask_token_id"]
    with pytest.raises(InputError, match="token_dropout: false"):
        model.compute_outputs(batch)
