"""The traced step: its products are those of the formula, whatever computes attention, and its memory falls by recompute."""

from __future__ import annotations

import dataclasses
import functools

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from gaudi_bert.config.sections import TrainingSettings  # noqa: E402
from gaudi_bert.engines.pytorch.bert import fused_attention, plain_attention  # noqa: E402
from gaudi_bert.engines.pytorch.graph import check_graph, matrix_flops, model_of, report_on_step, trace_pass  # noqa: E402
from gaudi_bert.model.config import BertConfig  # noqa: E402
from gaudi_bert.model.features import BatchSizes  # noqa: E402
from tests.builders.model_packs import pretraining_step  # noqa: E402

SIZES = BatchSizes(packs=5, positions=11, masked_slots=4, depth=2)
CONFIG = BertConfig(
    vocab_size=31,
    hidden_size=6,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=10,
    max_position_embeddings=13,
)


@functools.cache
def report(precision: str = "float32", recompute: bool = False, layers: int = 3):
    config = dataclasses.replace(CONFIG, num_hidden_layers=layers)
    settings = TrainingSettings(precision=precision, recompute=recompute)
    return report_on_step(pretraining_step(config, SIZES, 2), settings, 0)


def flops_of_layers() -> int:
    """Of the forward passes of all layers; the last one computes only what the heads read."""
    hidden, inner, length = CONFIG.hidden_size, CONFIG.intermediate_size, SIZES.positions

    def layer(queries: int) -> int:
        projections = hidden * hidden * (2 * length + 2 * queries)  # keys and values; queries and the output
        return 2 * SIZES.packs * (projections + 2 * queries * length * hidden + 2 * queries * hidden * inner)

    return (CONFIG.num_hidden_layers - 1) * layer(length) + layer(SIZES.masked_slots + SIZES.depth)


def flops_of_heads() -> int:
    hidden, packs = CONFIG.hidden_size, SIZES.packs
    words = packs * SIZES.masked_slots * hidden * (hidden + CONFIG.vocab_size)
    return 2 * (words + packs * SIZES.depth * hidden * (hidden + 2))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_products_are_those_of_the_formula_and_layers_are_counted_as_often_as_they_are_computed(precision: str) -> None:
    """With dropout, as by default: each product has two more in the backward pass."""
    once, twice = (report(precision, recompute) for recompute in (False, True))
    assert once.is_fit
    assert twice.is_fit
    assert once.flops_per_micro_batch == 3 * (flops_of_layers() + flops_of_heads())
    assert twice.flops_per_micro_batch - once.flops_per_micro_batch == flops_of_layers()
    assert once.flops_per_update == 2 * once.flops_per_micro_batch


def test_what_recompute_retains_grows_by_the_input_of_each_layer() -> None:
    once, twice, larger = report("float32", False), report("float32", True), report("float32", True, 4)
    assert twice.activation_bytes < once.activation_bytes / 3
    assert twice.peak_bytes < once.peak_bytes
    assert [(fit.card, fit.most_packs > other.most_packs) for fit, other in zip(twice.cards, once.cards, strict=True)] == [
        ("Gaudi", True),
        ("Gaudi2", True),
    ]
    input_of_a_layer = 4 * SIZES.packs * SIZES.positions * CONFIG.hidden_size
    assert 1 <= (larger.activation_bytes - twice.activation_bytes) / input_of_a_layer < 1.5


@pytest.mark.parametrize("form", [plain_attention, fused_attention])
def test_attention_by_one_operation_is_counted(form) -> None:
    packs, heads, queries, length, size = 2, 3, 5, 7, 8

    def attend(query, key, value, bias):
        context = form(query.requires_grad_(), key, value, bias, 0.0)
        return context, torch.autograd.grad(context.sum(), query)

    with FakeTensorMode():
        inputs = (
            torch.empty(packs, heads, queries, size),
            *(torch.empty(packs, heads, length, size) for _ in range(2)),
            torch.empty(packs, 1, queries, length),
        )
        graph = make_fx(attend)(*inputs)
    products = matrix_flops(graph) / (2 * packs * heads * queries * length * size)
    assert products == (4 if form is plain_attention else 7)  # one operation computes all five of its backward pass


def test_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that depends on values, and double precision, in the pass itself."""
    from gaudi_bert.engines.pytorch import model

    right = model.pretraining_sums
    monkeypatch.setattr(model, "pretraining_sums", lambda words, *others: right(words.double(), *others).float())
    step = pretraining_step(CONFIG, SIZES)
    traced = trace_pass(model_of(step, TrainingSettings()), step, SIZES.packs)
    found = {(problem.kind, problem.graph) for problem in check_graph(traced)}
    assert found == {("double precision", "update")}
    with FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()):
        traced = make_fx(lambda numbers: numbers.nonzero() * 2)(torch.empty(4))
    assert {problem.kind for problem in check_graph(traced)} == {"data-dependent shape", "dynamic shape"}
