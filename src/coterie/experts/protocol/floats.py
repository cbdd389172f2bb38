"""Values on the wire and in computation: float32 to and from the dtypes of requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.experts.protocol.layout import Dtype

Floats = npt.NDArray[np.float32]


def to_float32(values: npt.NDArray[Any], dtype: Dtype) -> Floats:
    """Values that were sent, exactly; the upper half of a float32 is a bfloat16."""
    if dtype is Dtype.BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def from_float32(values: Floats, dtype: Dtype) -> npt.NDArray[Any]:
    """Values to be sent, rounded to the nearest, ties to the even one; beyond the largest they are infinite."""
    if dtype is Dtype.FLOAT32:
        return values
    if dtype is Dtype.BFLOAT16:
        bits = values.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(dtype.numpy, copy=False)
