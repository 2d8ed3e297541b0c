"""Names for the types of arrays that pass between functions; a docstring states the shape and the unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AnyArray",
    "BatchArrays",
    "BoolArray",
    "ByteArray",
    "Float32Array",
    "FloatArray",
    "Int32Array",
    "IntArray",
    "RowArray",
    "WeightArrays",
]

BoolArray = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]
Float32Array = NDArray[np.float32]
FloatArray = NDArray[np.float64]
Int32Array = NDArray[np.int32]
IntArray = NDArray[np.int64]
RowArray = NDArray[np.void]
"""Of rows with named fields (a structured type)."""
AnyArray = NDArray[Any]
"""Of any element type."""
BatchArrays = Mapping[str, Int32Array | Float32Array]
"""A batch on the host: each feature by its name."""
WeightArrays = Mapping[str, Float32Array]
"""The values of a model's variables by their names."""
