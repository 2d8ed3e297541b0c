"""Tensors on the device `hpu`, each around one of the CPU, by PyTorch's dispatch key for devices of others."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from habana_frameworks.record import record

_LIBRARIES: list[torch.library.Library] = []
_SEEN: set[tuple[str, ...]] = set()


class HpuTensor(torch.Tensor):
    """What PyTorch takes for a tensor on a card; `inner` holds its numbers."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type, inner: torch.Tensor) -> HpuTensor:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, device="hpu:0", **layout)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> HpuTensor:
        return HpuTensor(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Compute on the CPU; what comes out is on the device, unless the operation is a copy to the CPU."""
        options = options or {}
        leaves = tree_leaves((arguments, options))
        goal = next((leaf.type for leaf in leaves if isinstance(leaf, torch.device)), "hpu")
        _note(operation, leaves)
        if operation.namespace == "c10d":
            from habana_frameworks.torch.distributed.hccl import run_collective

            return run_collective(operation, arguments)
        wrappers = {id(leaf.inner): leaf for leaf in leaves if isinstance(leaf, HpuTensor)}
        with torch.inference_mode(False), torch.no_grad():
            result = operation(*tree_map(numbers, arguments), **tree_map(numbers, options))
            return result if goal == "cpu" else tree_map(lambda part: _wrap(part, wrappers), result)


def numbers(value: Any) -> Any:
    """The tensor of the CPU within one of the device, the CPU for the device; any other value as it is."""
    if isinstance(value, HpuTensor):
        return value.inner
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, FakeTensor) and value.device.type == "hpu":  # while torch.compile traces: a shape, no numbers
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return value


def _wrap(value: Any, wrappers: dict[int, HpuTensor]) -> Any:
    """What an operation changed stays the tensor that it was."""
    if isinstance(value, torch.Tensor):
        return wrappers[id(value)] if id(value) in wrappers else HpuTensor(value)
    return value


def _note(operation: Any, leaves: list[Any]) -> None:
    """Write down an operation with the types of its tensors, the first time; refuse to mix devices, as a card would."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(isinstance(numbers(tensor), FakeTensor) for tensor in tensors):
        return
    strangers = [tensor for tensor in tensors if tensor.device.type != "hpu" and tensor.dim() > 0]
    if strangers and operation not in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
        raise RuntimeError(f"{operation}: tensors on hpu and on {strangers[0].device}")
    key = (str(operation), *(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))
    if key not in _SEEN:
        _SEEN.add(key)
        record("operation", name=key[0], types=list(key[1:]))


def _empty(size: Any, *, dtype: Any = None, **options: Any) -> HpuTensor:
    return HpuTensor(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> HpuTensor:
    return HpuTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: torch.Tensor, goal: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    numbers(goal).copy_(numbers(source))
    return goal


def register() -> None:
    """The operations by which tensors come to the device; all others reach `__torch_dispatch__`."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    _LIBRARIES.append(library)
