"""Autocast as the vendor documents it: two lists of operations, its own or those of the files that the environment names.

The first list wins. Of the norms, only the first argument is cast to bfloat16. What is in neither list stays as PyTorch
does it; the vendor computes some of that in the widest type of the inputs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

_LIBRARIES: list[torch.library.Library] = []
_KEY = "AutocastPrivateUse1"
# The vendor's lists as of 2025, but for operations that no encoder has.
_BFLOAT16 = "addbmm addmm baddbmm bmm dot dropout layer_norm linear log_softmax matmul mean mm mul mv softmax"
_FLOAT32 = (
    "addcdiv cosine_similarity cross_entropy_loss div embedding exp log logsumexp mse_loss nll_loss pow reciprocal rsqrt"
)
_FIRST_ONLY = ("batch_norm", "group_norm", "instance_norm", "layer_norm")


def _names(variable: str, default: str) -> list[str]:
    path = os.environ.get(variable)
    return Path(path).read_text(encoding="utf-8").split() if path else default.split()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_eligible = isinstance(value, torch.Tensor) and value.device.type == "hpu" and value.is_floating_point()
    return value.to(dtype) if is_eligible and value.dtype != torch.float64 else value


def _kernel(operation: Any, dtype: torch.dtype, only_first: bool) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def compute(*arguments: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if only_first:
                return operation(_cast(arguments[0], dtype), *arguments[1:], **options)
            return operation(*tree_map(lambda value: _cast(value, dtype), arguments), **options)

    return compute


def register() -> None:
    """Once, when the device is registered: the lists are not read again."""
    everything, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    lower = _names("PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", _BFLOAT16)
    wide = [name for name in _names("PT_HPU_AUTOCAST_FP32_OPS_LIST", _FLOAT32) if name not in lower]
    for names, dtype in ((lower, torch.bfloat16), (wide, torch.float32)):
        for name in names:
            packet = getattr(torch.ops.aten, name, None)
            for overload in packet.overloads() if packet is not None else ():
                operation = getattr(packet, overload)
                if "out" in overload or "Dimname" in str(operation._schema):
                    continue
                only_first = dtype == torch.bfloat16 and name in _FIRST_ONLY
                library.impl(operation.name().removeprefix("aten::"), _kernel(operation, dtype, only_first), _KEY)
    _LIBRARIES.extend((everything, library))
