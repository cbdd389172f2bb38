"""Rotary position embedding (RoFormer, arXiv 2104.09864), with YaRN's frequencies (arXiv 2309.00071) where asked for.

    angle[p, i] = p * frequency[i];  (a, b) -> (a cos - b sin, b cos + a sin) for a = x[i], b = x[i + dim / 2]

Angles are float32 products, as in transformers and vLLM, so that equal weights give equal tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from coterie.errors import InputError, UnsupportedError
from coterie.modeling.tiles import Floats


class Yarn(msgspec.Struct, frozen=True):
    """YaRN's parameters, by the names of `config.json`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


class Rope(msgspec.Struct, frozen=True):
    """A rotary embedding.

    Attributes:
        theta: base of the frequencies.
        dim: rotated dimensions of a head.
        yarn: None for plain frequencies.
    """

    theta: float
    dim: int
    yarn: Yarn | None


def read_rope(file: Path, parameters: Mapping[str, Any], dim: int) -> Rope:
    """Read `rope_parameters` (or `rope_scaling` with `rope_theta`) of a `config.json`.

    Raises:
        InputError: a parameter is missing, unknown or wrong.
        UnsupportedError: a kind of embedding other than `default` and `yarn`.
    """
    rest = dict(parameters)
    kinds = {rest.pop(name) for name in ("rope_type", "type") if name in rest} or {"default"}
    theta = rest.pop("rope_theta", None)
    if kinds not in ({"default"}, {"yarn"}):
        raise UnsupportedError(f"{file}: rope type {sorted(map(str, kinds))}; only default and yarn are computed")
    if not isinstance(theta, int | float) or not 1 < theta < 1e12:
        raise InputError(f"{file}: rope_theta is {str(theta)[:40]!r}, not a number above 1")
    if kinds == {"default"}:
        _refuse_rest(file, rest)
        return Rope(float(theta), dim, None)
    try:
        yarn = msgspec.convert({name: value for name, value in rest.items() if value is not None}, Yarn)
    except msgspec.ValidationError as error:
        raise InputError(f"{file}: yarn: {error}") from None
    _refuse_rest(file, {name: value for name, value in rest.items() if name not in Yarn.__struct_fields__})
    if yarn.factor < 1 or yarn.original_max_position_embeddings < 1:
        raise InputError(f"{file}: yarn: factor {yarn.factor} of {yarn.original_max_position_embeddings} positions")
    return Rope(float(theta), dim, yarn)


def _refuse_rest(file: Path, rest: Mapping[str, Any]) -> None:
    if rest:
        raise UnsupportedError(f"{file}: rope parameters that are not computed: {', '.join(sorted(rest))[:200]}")


def tables(rope: Rope, positions: int) -> tuple[Floats, Floats]:
    """Cosines and sines of all angles: two of `[positions, dim / 2]`."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    plain = np.reciprocal(np.float32(rope.theta) ** exponents)
    frequencies = plain if rope.yarn is None else _stretched(rope, rope.yarn, plain)
    angles = (np.arange(positions, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    factor = 1.0 if rope.yarn is None else _attention_factor(rope.yarn)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def yarn_scale(rope: Rope) -> float:
    """DeepSeek's factor of queries and of keys, from `mscale_all_dim`; 1 without YaRN."""
    return _mscale(rope.yarn.factor, rope.yarn.mscale_all_dim) if rope.yarn and rope.yarn.mscale_all_dim else 1.0


def rotate(values: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotate heads by their tokens' angles.

    Args:
        values: `[T, H, dim]`.
        cos: `[T, 1, dim / 2]`.
        sin: `[T, 1, dim / 2]`.
    """
    half = values.shape[-1] // 2
    first, second = values[..., :half], values[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _stretched(rope: Rope, yarn: Yarn, plain: Floats) -> Floats:
    """YaRN section 3.2: slow frequencies divided by the factor, fast ones kept, a ramp between."""
    low, high = (_ramp_end(rope, yarn, turns) for turns in (yarn.beta_fast, yarn.beta_slow))
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (np.arange(rope.dim // 2, dtype=np.float32) - low) / np.float32(max(high - low, 1e-3))
    kept = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    stretched: Floats = plain / np.float32(yarn.factor) * (1 - kept) + plain * kept
    return stretched


def _ramp_end(rope: Rope, yarn: Yarn, turns: float) -> float:
    """The dimension whose frequency makes so many turns over the original context."""
    span = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
    return rope.dim * math.log(span) / (2 * math.log(rope.theta))


def _attention_factor(yarn: Yarn) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
