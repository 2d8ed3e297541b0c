"""Products with packed weights are those with the weights."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", exc_type=ImportError)

import torch

from gaudi_bert.encoders.matrix_products import onednn_supports
from gaudi_bert.engines.pytorch.packed_weights import PackedLinear, multiply, pack_linear_layers, pack_weights
from tests.builders.agree import agree


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1, 1), (7, 31, 13), (33, 64, 1)])
def test_products_from_packed_weights(rows: int, inputs: int, outputs: int, dtype: torch.dtype, bound: float) -> None:
    """Packed where oneDNN is there and can, and as they are otherwise; what they give is the same."""
    random = torch.Generator().manual_seed(rows)
    left, right, bias = (torch.randn(*shape, generator=random) for shape in ((rows, inputs), (inputs, outputs), (outputs,)))
    packed = pack_weights(right, dtype)
    assert packed.dtype == dtype
    assert packed.is_mkldnn == onednn_supports(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        result = multiply(left, packed, bias.to(dtype))
    assert result.dtype == dtype
    agree(result.float().numpy(), (left @ right + bias).numpy(), bound)
    assert not pack_weights(right.double(), torch.float64).is_mkldnn


class _Words(torch.nn.Module):
    """Layers of every kind that `pack_linear_layers` meets: used, unused, tied, read by its module, outside of autocast."""

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
def test_linear_layers_are_packed_in_place(dtype: torch.dtype, bound: float) -> None:
    if not onednn_supports(dtype):
        pytest.skip("oneDNN does not compute in this type here")
    torch.manual_seed(4)
    module, ids = _Words().eval(), torch.arange(11).reshape(1, 11)
    expected = module(ids).detach()

    def compute() -> torch.Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return module(ids)

    pack_linear_layers(module, compute, dtype)
    agree(compute().numpy(), expected.numpy(), bound)
    with torch.inference_mode():
        wide = module(ids)
    assert wide.dtype == torch.float32
    agree(wide.numpy(), expected.numpy(), bound)
    packed = {name for name, layer in module.named_modules() if isinstance(layer, PackedLinear)}
    assert packed == ({"inner", "head"} if dtype == torch.float32 else {"inner"})
    assert all(f"{name}.weight" not in dict(module.named_parameters()) for name in packed)
