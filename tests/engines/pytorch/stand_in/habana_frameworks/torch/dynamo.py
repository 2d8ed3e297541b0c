"""The compiler of the cards: a graph is written down, and computed as it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from habana_frameworks.record import record


def hpu_backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Called by torch.compile, for each graph."""
    if os.environ.get("PT_HPU_LAZY_MODE") != "0":
        raise RuntimeError("hpu_backend needs PT_HPU_LAZY_MODE=0")
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    sizes = [str(size) for tensor in tensors for size in tensor.shape if not isinstance(size, int)]
    devices = sorted({tensor.device.type for tensor in tensors})
    record("compile", devices=devices, symbols=sizes)
    return graph.forward
