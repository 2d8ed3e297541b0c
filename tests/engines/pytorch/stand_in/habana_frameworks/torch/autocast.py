"""Autocast as the vendor documents it: two lists of operations, those of the files that the environment names.

What is in neither list stays as PyTorch does it; the vendor computes some of that in the widest type of the inputs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

_LIBRARIES: list[torch.library.Library] = []
_KEY = "AutocastPrivateUse1"


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_eligible = isinstance(value, torch.Tensor) and value.device.type == "hpu" and value.is_floating_point()
    return value.to(dtype) if is_eligible and value.dtype != torch.float64 else value


def _kernel(operation: Any, dtype: torch.dtype) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def compute(*arguments: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*tree_map(lambda value: _cast(value, dtype), arguments), **options)

    return compute


def register() -> None:
    """Once, when the device is registered: the lists are not read again."""
    everything, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    for kind, dtype in (("FP32", torch.float32), ("LOWER_PRECISION", torch.bfloat16)):
        for name in Path(os.environ[f"PT_HPU_AUTOCAST_{kind}_OPS_LIST"]).read_text(encoding="utf-8").split():
            packet = getattr(torch.ops.aten, name, None)
            for overload in packet.overloads() if packet is not None else ():
                operation = getattr(packet, overload)
                if "out" in overload or "Dimname" in str(operation._schema):
                    continue
                library.impl(operation.name().removeprefix("aten::"), _kernel(operation, dtype), _KEY)
    _LIBRARIES.extend((everything, library))
