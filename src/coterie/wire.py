"""Expert counts and routed-expert ids as they travel between processes.

**The counts envelope** is coterie's own format: a JSON object, returned by the engine plugin inside
`kv_transfer_params`, under `coterie` for the prompt and `coterie_output` for the output:

    {"v": 1, "dtype": "<u2", "layers": 48, "experts": 128, "top_k": 8,
     "tokens": 391, "covered": 391, "counts": "<base64 of the C-order [L, E] array>"}

The dtype is the smallest unsigned one that holds the largest count, so 48 x 128 counts of a prompt of
up to 65,535 tokens take 12 KiB, and prompts of millions of tokens do not overflow.

A plain request asks for them by `kv_transfer_params: {"coterie": "counts"}`; `"counts+ids"` asks for the
expert ids of each output token as well, which come back under `coterie_output_ids`.

**Routed-expert ids**: one row of `top_k` ids per token and layer.  The plugin writes them as a
`{"data", "shape", "dtype"}` object; stock engines return them as vLLM's base64 `.npy`, nested lists, or
SGLang's raw int32.  Every reader is given the number of bytes it may expand to, and checks all that it reads:
these bytes come from another process.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.core import Counts, ExpertCounts, ModelGeometry
from coterie.counting import KERNEL
from coterie.errors import InputError, WireError

VERSION = 1
PROMPT_KEY = "coterie"
OUTPUT_KEY = "coterie_output"
OUTPUT_IDS_KEY = "coterie_output_ids"
ASK_COUNTS = "counts"
ASK_IDS = "counts+ids"
MAX_ENVELOPE_BYTES = 16 << 20
MAX_ROUTED_BYTES = 1 << 30
MAX_COUNT = (1 << 32) - 1
"""The largest count; nothing in an envelope is larger."""

_FIELDS = {"v", "dtype", "layers", "experts", "top_k", "tokens", "covered", "counts"}
_DTYPES: dict[str, np.dtype[Any]] = {"|u1": np.dtype("|u1"), "<u2": np.dtype("<u2"), "<u4": np.dtype("<u4")}
_ID_DTYPES = {"uint8", "uint16", "uint32", "int16", "int32", "int64"}

Ids = npt.NDArray[np.integer[Any]]
"""Expert ids chosen by each token in each layer, `[tokens, L, top_k]`."""


def smallest_dtype(maximum: int) -> np.dtype[Any]:
    """The smallest unsigned little-endian dtype of at most 32 bits that holds `maximum`.

    Raises:
        WireError: `maximum` is negative or needs more than 32 bits.
    """
    for dtype in _DTYPES.values():
        if 0 <= maximum <= np.iinfo(dtype).max:
            return dtype
    raise WireError(f"a count of {maximum} does not fit 32 unsigned bits")


# --- the counts envelope -----------------------------------------------------------------------------


def encode_counts(counts: ExpertCounts) -> dict[str, Any]:
    """Write counts as a JSON-ready envelope."""
    dtype = smallest_dtype(int(counts.counts.max(initial=0)))
    geometry = counts.geometry
    return {
        "v": VERSION,
        "dtype": dtype.str,
        "layers": geometry.layers,
        "experts": geometry.experts,
        "top_k": geometry.top_k,
        "tokens": counts.tokens,
        "covered": counts.covered,
        "counts": base64.b64encode(counts.counts.astype(dtype).tobytes()).decode("ascii"),
    }


def decode_counts(envelope: object) -> ExpertCounts:
    """Read an envelope.

    Args:
        envelope: a JSON object; its counts may be given as bytes, the same characters.

    Raises:
        WireError: a field is missing, unknown, of the wrong type or out of range; the payload has another
            size than the header says; or the counts break token conservation.
    """
    fields = _check_fields(envelope)
    dtype = _DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise WireError(f"counts envelope: dtype {_brief(fields['dtype'])} is not one of {', '.join(_DTYPES)}")
    for name in ("layers", "experts", "top_k", "tokens", "covered"):
        if type(fields[name]) is not int or not 0 <= fields[name] <= MAX_COUNT:
            raise WireError(
                f"counts envelope: {name} must be a whole number of at most {MAX_COUNT}, got {_brief(fields[name])}"
            )
    try:
        geometry = _geometry(fields["layers"], fields["experts"], fields["top_k"])
    except InputError as error:
        raise WireError(f"counts envelope: {error}") from None
    size = geometry.layers * geometry.experts * dtype.itemsize
    payload = _decode_base64(fields["counts"], size, MAX_ENVELOPE_BYTES, "counts envelope")
    counts = payload.view(dtype).reshape(geometry.layers, geometry.experts)
    try:
        return ExpertCounts(geometry, counts, fields["tokens"], fields["covered"])
    except InputError as error:
        raise WireError(f"counts envelope: {error}") from None


def _check_fields(envelope: object) -> Mapping[str, Any]:
    if not isinstance(envelope, Mapping):
        raise WireError(f"counts envelope: expected an object, got {_brief(envelope)}")
    if envelope.get("v") != VERSION:
        raise WireError(
            f"counts envelope: version {_brief(envelope.get('v'))} is not {VERSION}; "
            "install the same coterie release in the gateway and in the engines"
        )
    if envelope.keys() == _FIELDS:
        return envelope
    if missing := _FIELDS - envelope.keys():
        raise WireError(f"counts envelope: missing {', '.join(sorted(missing))}")
    unknown = envelope.keys() - _FIELDS
    raise WireError(f"counts envelope: unknown fields {_brief(sorted(map(str, unknown)))}")


_geometry = lru_cache(maxsize=64)(ModelGeometry)  # a second's envelopes are of one or two models


def _decode_base64(text: object, size: int, most: int, what: str) -> npt.NDArray[np.uint8]:
    if not isinstance(text, (str, bytes)):
        raise WireError(f"{what}: the payload must be a base64 string, got {_brief(text)}")
    if size > most:
        raise WireError(f"{what}: {size} bytes announced, more than the {most} allowed")
    if len(text) != 4 * math.ceil(size / 3):
        raise WireError(f"{what}: {len(text)} base64 characters do not hold the {size} bytes announced")
    if not size:
        return np.empty(0, np.uint8)
    data = KERNEL.from_base64(text if isinstance(text, bytes) else text.encode("ascii", "replace"), size)
    if data is None:
        found = len(_strict_base64(text, what))
        raise WireError(f"{what}: {found} bytes instead of the {size} bytes announced")
    return data


def _strict_base64(text: str | bytes, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"{what}: invalid base64: {error}") from None


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- routed-expert ids -------------------------------------------------------------------------------


def read_routed_experts(
    payload: object,
    geometry: ModelGeometry,
    *,
    model_layers: int | None = None,
    moe_layers: Sequence[int] | None = None,
    max_bytes: int = MAX_ROUTED_BYTES,
) -> Ids:
    """Read the routed-expert ids of a stock engine, whatever its format.

    Args:
        payload: vLLM's base64 `.npy` string, SGLang's base64 of raw int32, nested lists
            `[tokens, layers, top_k]`, or an object `{"data": base64, "shape": [...], "dtype": name}`.
        geometry: the model's routed part.
        model_layers: layers per row in the payload, dense ones included; `geometry.layers` if not given.
        moe_layers: indices of the MoE layers among them; all if not given.
        max_bytes: size that the decoded payload may have.

    Returns:
        `[tokens, L, top_k]` ids of the MoE layers.

    Raises:
        WireError: wrong shape or dtype, an id out of range, an id twice in a row, or an all-zero row of a
            MoE layer (what engines leave where they did not record).
    """
    ids = read_some_routed_experts(
        payload, geometry, model_layers=model_layers, moe_layers=moe_layers, max_bytes=max_bytes
    )
    check_ids(ids, geometry)
    return ids


def read_some_routed_experts(
    payload: object,
    geometry: ModelGeometry,
    *,
    model_layers: int | None = None,
    moe_layers: Sequence[int] | None = None,
    max_bytes: int = MAX_ROUTED_BYTES,
) -> Ids:
    """As `read_routed_experts`, but rows that the engine did not record are left in: see `recorded_tokens`."""
    rows = model_layers or geometry.layers
    ids = _parse_ids(payload, rows, geometry.top_k, max_bytes)
    if ids.ndim != 3 or ids.shape[1:] != (rows, geometry.top_k):
        raise WireError(f"routed experts: shape {ids.shape} is not (tokens, {rows}, {geometry.top_k})")
    if moe_layers is not None:
        ids = ids[:, _check_layers(moe_layers, rows, geometry.layers), :]
    elif rows != geometry.layers:
        raise WireError(f"routed experts: {rows} layers for {geometry.layers} MoE layers; say which are MoE layers")
    _check_range(ids, geometry)
    return ids


def recorded_tokens(ids: Ids) -> npt.NDArray[np.bool_]:
    """`[tokens]`: whether every layer of `[tokens, L, top_k]` names different experts, as a router does.

    A row that the engine did not record is all zeros, or holds what was left in its buffer.  With top-1 a zero
    row is expert 0, so every token counts as recorded.
    """
    ordered = np.sort(ids, axis=-1)
    twice: npt.NDArray[np.bool_] = (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2))
    return ~twice


def check_ids(ids: Ids, geometry: ModelGeometry) -> None:
    """Check that every row of `[tokens, L, top_k]` names `top_k` different experts of the model.

    Raises:
        WireError: naming the first token and layer that does not.
    """
    _check_range(ids, geometry)
    if geometry.top_k > 1:
        _refuse((ids == 0).all(-1), "only zeros: the engine did not record it", ids)
        ordered = np.sort(ids, axis=-1)
        _refuse((ordered[..., 1:] == ordered[..., :-1]).any(-1), "the same expert twice", ids)


def _check_range(ids: Ids, geometry: ModelGeometry) -> None:
    _refuse(((ids < 0) | (ids >= geometry.experts)).any(-1), f"an id outside 0..{geometry.experts - 1}", ids)


def _refuse(wrong: Any, what: str, ids: Ids) -> None:
    if wrong.any():
        token, layer = (int(i) for i in np.argwhere(wrong)[0])
        raise WireError(
            f"routed experts: token {token}, layer {layer} holds {what} ({_brief(ids[token, layer].tolist())})"
        )


def _check_layers(moe_layers: Sequence[int], rows: int, layers: int) -> list[int]:
    chosen = list(moe_layers)
    if chosen != sorted(set(chosen)) or len(chosen) != layers or not all(0 <= i < rows for i in chosen):
        raise WireError(f"routed experts: {_brief(chosen)} are not {layers} ascending layer numbers below {rows}")
    return chosen


def _parse_ids(payload: object, rows: int, top_k: int, max_bytes: int) -> Ids:
    if isinstance(payload, str):
        if len(payload) > 4 * math.ceil(max_bytes / 3):
            raise WireError(f"routed experts: {len(payload)} base64 characters, more than {max_bytes} bytes allow")
        data = _strict_base64(payload, "routed experts")
        return _parse_npy(data) if data.startswith(b"\x93NUMPY") else _parse_int32(data, rows, top_k)
    if isinstance(payload, Mapping):
        return _parse_object(payload, max_bytes)
    if isinstance(payload, list):
        return _parse_lists(payload, rows, top_k)
    raise WireError(f"routed experts: neither a string, a list nor an object: {_brief(payload)}")


def _parse_npy(data: bytes) -> Ids:
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read_header(stream)
    except Exception as error:  # numpy parses the header as Python's source, which fails in many ways
        raise WireError(f"routed experts: not a valid .npy: {_brief(str(error))}") from None
    if fortran or dtype.name not in _ID_DTYPES:
        raise WireError(f"routed experts: .npy of dtype {dtype} (order {'F' if fortran else 'C'}) is not accepted")
    # checked before numpy allocates: the header may lie about the size
    body = memoryview(data)[stream.tell() :]
    if math.prod(shape) * dtype.itemsize != len(body):
        raise WireError(f"routed experts: .npy of shape {shape} {dtype} does not match its {len(body)} bytes")
    return shaped(body, dtype, shape, "routed experts")


def _parse_int32(data: bytes, rows: int, top_k: int) -> Ids:
    row_bytes = 4 * rows * top_k
    if len(data) % row_bytes:
        raise WireError(f"routed experts: {len(data)} bytes are not whole rows of {rows} layers x {top_k} int32")
    return np.frombuffer(data, dtype="<i4").reshape(-1, rows, top_k)


def _parse_object(payload: Mapping[Any, Any], max_bytes: int) -> Ids:
    if payload.keys() != {"data", "shape", "dtype"}:
        raise WireError(f"routed experts: expected data, shape and dtype, got {_brief(sorted(map(str, payload)))}")
    shape, name = payload["shape"], payload["dtype"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"routed experts: shape {_brief(shape)} is not a list of whole numbers")
    if not isinstance(name, str) or name not in _ID_DTYPES:
        raise WireError(f"routed experts: dtype {_brief(name)} is not one of {', '.join(sorted(_ID_DTYPES))}")
    dtype = np.dtype(name).newbyteorder("<")
    data = _decode_base64(payload["data"], math.prod(shape) * dtype.itemsize, max_bytes, "routed experts")
    return shaped(data, dtype, shape, "routed experts")


def shaped(
    data: bytes | memoryview | npt.NDArray[np.uint8], dtype: np.dtype[Any], shape: Sequence[int], what: str
) -> npt.NDArray[Any]:
    """The array of a shape from another process, whose product was found to fit the data.

    Raises:
        WireError: numpy has no array of this shape: a negative or huge number beside a zero, or too many of them.
    """
    try:
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise WireError(f"{what}: shape {_brief(list(shape))} is of no array: {error}") from None


def _parse_lists(payload: list[Any], rows: int, top_k: int) -> Ids:
    for token in payload:
        if not isinstance(token, list) or len(token) != rows:
            raise WireError(f"routed experts: a token's row is not a list of {rows} layers: {_brief(token)}")
        for ids in token:
            if not isinstance(ids, list) or len(ids) != top_k or not all(type(i) is int for i in ids):
                raise WireError(f"routed experts: a layer's row is not a list of {top_k} ids: {_brief(ids)}")
            if not all(-(1 << 31) <= i < 1 << 31 for i in ids):
                raise WireError(f"routed experts: an id does not fit 32 bits: {_brief(ids)}")
    return np.asarray(payload, dtype=np.int32).reshape(-1, rows, top_k)


def encode_ids(ids: Ids, experts: int) -> dict[str, Any]:
    """Write checked ids `[tokens, L, top_k]` as the object that `read_routed_experts` reads."""
    dtype = smallest_dtype(experts - 1)
    data = base64.b64encode(ids.astype(dtype).tobytes()).decode("ascii")
    return {"data": data, "shape": list(ids.shape), "dtype": dtype.name}


def count_ids(ids: Ids, experts: int) -> Counts:
    """Count `[tokens, L, top_k]` checked ids into `[L, E]`."""
    tokens, layers, _ = ids.shape
    flat = ids.astype(np.int64) + (np.arange(layers) * experts)[None, :, None]
    counts = np.bincount(flat.ravel(), minlength=layers * experts).reshape(layers, experts)
    return counts.astype(smallest_dtype(tokens))
