"""Large products on a CPU are those that PyTorch computes by itself."""

from __future__ import annotations

import pytest
import torch

from gaudi_bert.encoders import matrix_products
from gaudi_bert.encoders.matrix_products import (
    OneDnnLinear,
    convert_linear_layers_for_inference,
    convert_to_onednn_layout,
    linear,
    multiply,
    onednn_supports,
)
from tests.builders.agree import agree


@pytest.mark.parametrize(("part", "capability"), [(4, "AVX512"), (768, "AVX512"), (768, "AVX2")])
@pytest.mark.parametrize(("left", "right"), [((1, 1), (1, 1)), ((7, 31), (31, 13)), ((5, 8), (8, 1)), ((1, 9), (9, 2))])
@pytest.mark.parametrize("multiply", [multiply, linear])
def test_large_products(
    multiply, left: tuple[int, int], right: tuple[int, int], part: int, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any shape, also of transposed views, at once and in parts; with the gradients that are needed, and no others."""
    monkeypatch.setattr(matrix_products, "_MIN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(matrix_products, "_TERMS_PER_PART", part)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    random = torch.Generator().manual_seed(1)
    one, other = (torch.randn(*shape[::-1], generator=random, requires_grad=True) for shape in (left, right))
    bias = torch.randn(right[-1], generator=random, requires_grad=True)
    weights = torch.randn(left[0], right[1], generator=random)
    factor = other if multiply is linear else other.t()
    result, exact = multiply(one.t(), factor, bias), one.t() @ other.t() + bias
    assert type(result.grad_fn).__name__ == "LargeProductBackward"
    agree(result.detach().numpy(), exact.detach().numpy(), 1e-5)
    gradients = (torch.autograd.grad((values * weights).sum(), [one, other, bias]) for values in (result, exact))
    for ours, right_one in zip(*gradients, strict=True):
        agree(ours.numpy(), right_one.numpy(), 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert multiply(one.t(), factor).dtype == torch.bfloat16
    fixed = multiply(one.detach().t(), factor, bias)
    assert torch.autograd.grad(fixed.sum(), other)[0].shape == other.shape


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5)])
def test_linear_layers_of_any_module(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """While it lasts, and not afterwards; in a module that calls its layers in any way."""
    monkeypatch.setattr(matrix_products, "_MIN_MULTIPLICATIONS", 0)
    layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3, bias=False))
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    exact = layers(inputs)
    with matrix_products.FastLinearLayers():
        result = layers(inputs)
        with torch.autocast("cpu", torch.bfloat16):
            assert layers(inputs).dtype == torch.bfloat16
    leaves = [inputs, *layers.parameters()]
    assert (result.grad_fn.name() != exact.grad_fn.name()) == (len(shape) > 1)
    agree(result.detach().numpy(), exact.detach().numpy(), 1e-5)
    gradients = (torch.autograd.grad(values.square().sum(), leaves) for values in (result, exact))
    for ours, right_one in zip(*gradients, strict=True):
        agree(ours.numpy(), right_one.numpy(), 1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1, 1), (7, 31, 13), (33, 64, 1)])
def test_products_with_converted_weights(rows: int, inputs: int, outputs: int, dtype: torch.dtype, bound: float) -> None:
    """Weights are converted if oneDNN supports their dtype. Their products are those of the original weights."""
    random = torch.Generator().manual_seed(rows)
    left, right, bias = (torch.randn(*shape, generator=random) for shape in ((rows, inputs), (inputs, outputs), (outputs,)))
    packed = convert_to_onednn_layout(right, dtype)
    assert packed.dtype == dtype
    assert packed.is_mkldnn == onednn_supports(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        result = multiply(left, packed, bias.to(dtype))
    assert result.dtype == dtype
    agree(result.float().numpy(), (left @ right + bias).numpy(), bound)
    assert not convert_to_onednn_layout(right.double(), torch.float64).is_mkldnn


class _Words(torch.nn.Module):
    """A module whose layers are used, unused, tied to an embedding, read by the module, or called outside of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 8)
        self.inner, self.unused, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3, bias=False)
        self.output = torch.nn.Linear(8, 11)
        self.output.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.words(ids))
        hidden = hidden @ self.inner.weight.to(hidden.dtype)
        scores = self.output(hidden)
        with torch.autocast("cpu", enabled=False):
            return torch.cat([scores.float(), self.head(hidden.float())], -1)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_linear_layers_are_converted_in_place(dtype: torch.dtype, bound: float) -> None:
    if not onednn_supports(dtype):
        pytest.skip("oneDNN does not compute in this type here")
    torch.manual_seed(4)
    module, ids = _Words().eval(), torch.arange(11).reshape(1, 11)
    expected = module(ids).detach()

    def compute() -> torch.Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return module(ids)

    convert_linear_layers_for_inference(module, compute, dtype)
    agree(compute().numpy(), expected.numpy(), bound)
    with torch.inference_mode():
        wide = module(ids)
    assert wide.dtype == torch.float32
    agree(wide.numpy(), expected.numpy(), bound)
    packed = {name for name, layer in module.named_modules() if isinstance(layer, OneDnnLinear)}
    assert packed == ({"inner", "head"} if dtype == torch.float32 else {"inner"})
    assert all(f"{name}.weight" not in dict(module.named_parameters()) for name in packed)
