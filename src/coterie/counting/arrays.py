"""What `counting` computes with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.unsignedinteger[Any]]
Floats = npt.NDArray[np.float32]
Row = npt.NDArray[np.int32]
"""Logarithms of a request's idle probabilities, `[n]`, in multiples of 2^-20."""
Sums = npt.NDArray[np.int64]
"""Sums of rows, `[..., n]`."""
