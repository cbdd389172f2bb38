"""Requests to expert servers with values of chance, for tests of what carries them."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.experts.protocol import Dtype, Request, SlotShape


def request_for(shape: SlotShape, tokens: int = 3, dtype: Dtype = Dtype.FLOAT32, **changes: Any) -> Request:
    """A request that a slot of this shape can carry, but for the changes."""
    rng = np.random.default_rng(tokens)
    values = {
        "layer": 1,
        "epoch": 7,
        "owner": 1 << 40,
        "hidden": rng.normal(size=(tokens, shape.hidden)).astype(dtype.numpy),
        "ids": rng.integers(-1, shape.experts, (tokens, shape.top_k)).astype(np.int32),
        "weights": rng.random((tokens, shape.top_k), np.float32),
        "dtype": dtype,
    }
    return Request(**values | changes)
