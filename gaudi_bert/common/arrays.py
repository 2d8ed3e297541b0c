"""Names for the types of arrays that pass between functions; a docstring states the shape and the unit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BoolArray", "ByteArray", "FloatArray", "Int32Array", "IntArray"]

BoolArray = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]
FloatArray = NDArray[np.float64]
Int32Array = NDArray[np.int32]
IntArray = NDArray[np.int64]
