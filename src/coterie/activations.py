"""Activation traces: which experts a set of requests used, in prefill and in decode.

A trace is valid from the moment it exists: whoever makes one, by hand, from records or from a file,
gets a `TraceError` if any of its numbers contradict each other.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.core import Counts, ExpertCounts, ModelGeometry, check_conservation
from coterie.errors import InputError, TraceError
from coterie.tensorfile import TensorFormat
from coterie.wire import Ids, check_ids, count_ids, smallest_dtype

Lengths = npt.NDArray[np.int64]

_HASH = re.compile(r"[0-9a-f]{32}")
_COUNTS = ("prefill", "decode")
_LENGTHS = ("prefill_tokens", "prefill_covered", "decode_tokens", "decode_covered")
_OPTIONAL = ("decode_ids", "gate_prob", "gate_logit")
_PER_REQUEST = (*_COUNTS, *_LENGTHS, "gate_prob", "gate_logit")
_UNSIGNED = ("uint8", "uint16", "uint32")
_MOST_TOKENS = (1 << 32) - 1  # what a count of 32 bits can hold


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    geometry: ModelGeometry
    label_names: list[str]


_FORMAT = TensorFormat(
    name="trace",
    version=1,
    header=_Header,
    required=frozenset((*_COUNTS, *_LENGTHS, "prompt_hashes", "labels")),
    optional=frozenset(_OPTIONAL),
    most_bytes=64 << 30,
    error=TraceError,
    remedy="record it with `coterie collect`",
)


@dataclass(frozen=True, slots=True, eq=False)
class ActivationTrace:
    """Expert counts of N requests.

    Attributes:
        model: name of the model, as its server calls it.
        geometry: L, E and top-k.
        prefill: `[N, L, E]` counts of prompt tokens; each layer of row i sums to `prefill_covered[i] * top_k`.
        decode: `[N, L, E]` counts of output tokens; each layer sums to `decode_covered[i] * top_k`.
        prefill_tokens: `[N]` prompt lengths.
        prefill_covered: `[N]` prompt tokens counted; at least one.
        decode_tokens: `[N]` output lengths.
        decode_covered: `[N]` output tokens counted; at most `decode_tokens - 1`, since the last sampled token is
            never forwarded.
        prompt_hashes: `core.prompt_hash` of each prompt.
        labels: domain label of each request; empty where none was given.
        decode_ids: `[sum of decode_covered, L, top_k]` expert ids, request after request; optional.
        gate_prob: `[N, L, E]` sums of gate probabilities over prompt tokens; optional.
        gate_logit: `[N, L, E]` sums of gate logits over prompt tokens; optional.

    Raises:
        TraceError: naming the field, the request and what is wrong.
    """

    model: str
    geometry: ModelGeometry
    prefill: Counts
    decode: Counts
    prefill_tokens: Lengths
    prefill_covered: Lengths
    decode_tokens: Lengths
    decode_covered: Lengths
    prompt_hashes: tuple[str, ...]
    labels: tuple[str, ...]
    decode_ids: npt.NDArray[np.unsignedinteger[Any]] | None = None
    gate_prob: npt.NDArray[np.float32] | None = None
    gate_logit: npt.NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        _check_names(self)
        _check_shapes(self)
        _check_lengths(self)
        _check_counts(self)
        _check_ids(self)
        _check_gates(self)

    def __len__(self) -> int:
        return len(self.prompt_hashes)

    @property
    def complete(self) -> npt.NDArray[np.bool_]:
        """`[N]`: whether every token of the prompt was counted."""
        return np.equal(self.prefill_covered, self.prefill_tokens)

    def select(self, requests: Sequence[int] | npt.NDArray[np.integer[Any]]) -> ActivationTrace:
        """The trace of some requests, in the order given.

        Args:
            requests: positions from 0 to N - 1, at least one.

        Raises:
            TraceError: a position is out of range, or these are no positions (of a mask take `np.flatnonzero`).
        """
        given = np.asarray(requests)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise TraceError(
                f"trace: positions of requests are a list of whole numbers, not {given.dtype} of shape {given.shape}; "
                "of a mask take np.flatnonzero(mask)"
            )
        chosen = given.astype(np.int64)
        if wrong := [int(i) for i in chosen if not 0 <= i < len(self)]:
            raise TraceError(f"trace: no request {wrong[0]} among {len(self)}")
        arrays = {name: getattr(self, name) for name in _PER_REQUEST}
        return replace(
            self,
            **{name: array[chosen] for name, array in arrays.items() if array is not None},
            prompt_hashes=tuple(self.prompt_hashes[i] for i in chosen),
            labels=tuple(self.labels[i] for i in chosen),
            decode_ids=None if self.decode_ids is None else self.decode_ids[_rows_of(chosen, self.decode_covered)],
        )

    def digest(self) -> str:
        """Identity of the trace's contents: 32 hexadecimal digits, alike whatever dtype holds the counts."""
        names = msgspec.json.encode([self.model, self.geometry, self.prompt_hashes, self.labels])
        identity = hashlib.blake2b(names, digest_size=16)
        for name in (*_PER_REQUEST, "decode_ids"):
            if (array := getattr(self, name)) is not None:
                identity.update(f"{name}{array.shape}".encode())
                for row in array:
                    identity.update((row.astype("<u4") if row.dtype.kind == "u" else row).tobytes())
        return identity.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to one safetensors file; what was there is replaced at once or not at all.

        Raises:
            TraceError: the file cannot be written.
        """
        names = sorted(set(self.labels))
        position = {name: i for i, name in enumerate(names)}
        arrays = {name: getattr(self, name) for name in (*_COUNTS, *_LENGTHS, *_OPTIONAL)}
        arrays["labels"] = np.array([position[label] for label in self.labels], dtype=np.uint32)
        arrays["prompt_hashes"] = np.frombuffer(bytes.fromhex("".join(self.prompt_hashes)), np.uint8).reshape(-1, 16)
        present = {name: array for name, array in arrays.items() if array is not None}
        _FORMAT.write(path, _Header(self.model, self.geometry, names), present)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ActivationTrace:
        """Read a trace.

        Raises:
            TraceError: naming the file, what is wrong with it and the remedy: missing, truncated, alien, of another
                schema version, or inconsistent.
        """
        header, arrays = _FORMAT.read(path)
        try:
            labels = _read_labels(arrays.pop("labels"), header.label_names)
            hashes = _read_hashes(arrays.pop("prompt_hashes"))
            return cls(header.model, header.geometry, prompt_hashes=hashes, labels=labels, **arrays)
        except InputError as error:
            raise _FORMAT.failure(path, error) from None


@dataclass(frozen=True, slots=True, eq=False)
class TraceRecord:
    """One request of a trace.

    Attributes:
        prompt: counts of the prompt's tokens.
        output: counts of the output tokens that were forwarded: all but the last sampled one.
        output_tokens: length of the output.
        prompt_hash: `core.prompt_hash` of the prompt.
        label: domain label; empty if none.
        decode_ids: `[output.covered, L, top_k]` expert ids of the output tokens; optional.
        gate_prob: `[L, E]` sums of gate probabilities over the prompt's tokens, float32; optional.
        gate_logit: `[L, E]` sums of gate logits over the prompt's tokens, float32; optional.
    """

    prompt: ExpertCounts
    output: ExpertCounts
    output_tokens: int
    prompt_hash: str
    label: str = ""
    decode_ids: Ids | None = None
    gate_prob: npt.NDArray[np.float32] | None = None
    gate_logit: npt.NDArray[np.float32] | None = None


def build_trace(model: str, records: Sequence[TraceRecord]) -> ActivationTrace:
    """Put single requests together, in the smallest dtype that holds all of their counts.

    Raises:
        TraceError: no record, records of several geometries, a record that contradicts itself, or an optional
            array that some records have and others lack.
    """
    if not records:
        raise TraceError("trace: no requests")
    geometry = records[0].prompt.geometry
    for i, record in enumerate(records):
        for part in (record.prompt, record.output):
            if part.geometry != geometry:
                raise TraceError(f"trace: request {i} is of a model with {part.geometry}, request 0 with {geometry}")
    return ActivationTrace(
        model,
        geometry,
        prefill=_stack([record.prompt for record in records]),
        decode=_stack([record.output for record in records]),
        prefill_tokens=_lengths("prefill_tokens", [record.prompt.tokens for record in records]),
        prefill_covered=_lengths("prefill_covered", [record.prompt.covered for record in records]),
        decode_tokens=_lengths("decode_tokens", [record.output_tokens for record in records]),
        decode_covered=_lengths("decode_covered", [record.output.covered for record in records]),
        prompt_hashes=tuple(record.prompt_hash for record in records),
        labels=tuple(record.label for record in records),
        decode_ids=_join_ids(_of_all(records, "decode_ids"), geometry),
        gate_prob=_stack_gates(_of_all(records, "gate_prob")),
        gate_logit=_stack_gates(_of_all(records, "gate_logit")),
    )


def _lengths(name: str, lengths: Sequence[int]) -> Lengths:
    for i, length in enumerate(lengths):
        if not 0 <= length <= _MOST_TOKENS:  # before the array, which holds no number of more than 64 bits
            raise TraceError(f"trace: request {i}: {name} is {length}: a length is from 0 to {_MOST_TOKENS}")
    return np.array(lengths, dtype=np.int64)


def _of_all(records: Sequence[TraceRecord], name: str) -> list[npt.NDArray[Any]] | None:
    """An optional array of every record, or None where none has it."""
    arrays = [getattr(record, name) for record in records]
    lacking = [i for i, array in enumerate(arrays) if array is None]
    if len(lacking) == len(records):
        return None
    if lacking:
        raise TraceError(f"trace: request {lacking[0]} has no {name}, others have; record all requests alike")
    return arrays


def _join_ids(parts: list[npt.NDArray[Any]] | None, geometry: ModelGeometry) -> npt.NDArray[Any] | None:
    if parts is None:
        return None
    dtype = smallest_dtype(geometry.experts - 1)
    for i, ids in enumerate(parts):
        if ids.shape[1:] != (geometry.layers, geometry.top_k):
            raise TraceError(f"trace: request {i}: decode_ids has shape {ids.shape}, not (tokens, L, top_k)")
        if ids.dtype.kind not in "iu":
            raise TraceError(f"trace: request {i}: decode_ids has dtype {ids.dtype}, not whole numbers")
        try:
            check_ids(ids, geometry)  # before the cast, which would wrap what does not fit
        except InputError as error:
            raise TraceError(f"trace: request {i}: decode_ids: {error}") from None
    return np.concatenate([ids.astype(dtype) for ids in parts])


def _stack_gates(parts: list[npt.NDArray[Any]] | None) -> npt.NDArray[np.float32] | None:
    if parts is None:
        return None
    if len(shapes := {part.shape for part in parts}) > 1:
        raise TraceError(f"trace: gate sums of several shapes: {sorted(shapes)}")
    return np.stack(parts)


def _stack(parts: Sequence[ExpertCounts]) -> Counts:
    dtype = smallest_dtype(max(int(part.counts.max()) for part in parts))
    return np.stack([part.counts.astype(dtype) for part in parts])


def _rows_of(chosen: npt.NDArray[np.int64], lengths: Lengths) -> npt.NDArray[np.int64]:
    """Row numbers of the chosen requests in an array that holds `lengths[i]` rows of each request."""
    starts = np.cumsum(lengths) - lengths
    return np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in chosen] or [chosen])


# --- validation: one condition, one message -------------------------------------------------------------


def _check_names(trace: ActivationTrace) -> None:
    if not trace.model:
        raise TraceError("trace: the model's name is empty")
    if not trace.prompt_hashes:
        raise TraceError("trace: no requests")
    if len(trace.labels) != len(trace):
        raise TraceError(f"trace: {len(trace.labels)} labels for {len(trace)} prompt hashes")
    for i, prompt_hash in enumerate(trace.prompt_hashes):
        if not _HASH.fullmatch(prompt_hash):
            raise TraceError(f"trace: request {i}: prompt hash {prompt_hash[:60]!r} is not 32 hexadecimal digits")


def _check_shapes(trace: ActivationTrace) -> None:
    requests, geometry = len(trace), trace.geometry
    for name in _COUNTS:
        _check_array(name, getattr(trace, name), (requests, geometry.layers, geometry.experts), _UNSIGNED)
    for name in _LENGTHS:
        _check_array(name, getattr(trace, name), (requests,), ("int64",))


def _check_array(name: str, array: npt.NDArray[Any], shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
    if array.shape != shape:
        raise TraceError(f"trace: {name} has shape {array.shape}, not {shape}")
    if array.dtype.name not in dtypes:
        raise TraceError(f"trace: {name} has dtype {array.dtype}, not {' or '.join(dtypes)}")


def _check_lengths(trace: ActivationTrace) -> None:
    """`1 <= prefill_covered <= prefill_tokens`, and `0 <= decode_covered <= max(decode_tokens - 1, 0)`."""
    for name in _LENGTHS:
        lengths = getattr(trace, name)
        _refuse(name, lengths, (lengths < 0) | (lengths > _MOST_TOKENS), f"a length is from 0 to {_MOST_TOKENS}")
    _refuse("prefill_covered", trace.prefill_covered, trace.prefill_covered < 1, "nothing of the prompt was counted")
    _refuse(
        "prefill_covered",
        trace.prefill_covered,
        trace.prefill_covered > trace.prefill_tokens,
        "more tokens counted than the prompt has",
    )
    _refuse(
        "decode_covered",
        trace.decode_covered,
        trace.decode_covered > np.maximum(trace.decode_tokens - 1, 0),
        "the output has fewer forwarded tokens (the last one sampled is never forwarded)",
    )


def _refuse(name: str, values: Lengths, wrong: npt.NDArray[np.bool_], why: str) -> None:
    if wrong.any():
        first = int(np.argmax(wrong))
        raise TraceError(f"trace: request {first}: {name} is {int(values[first])}: {why}")


def _check_counts(trace: ActivationTrace) -> None:
    """Token conservation in each layer (ELDR section 1.3), which also refuses all-zero rows."""
    for name in _COUNTS:
        counts, covered = getattr(trace, name), getattr(trace, f"{name}_covered")
        sums = counts.sum(axis=-1, dtype=np.uint64)
        wrong = (sums != (covered * trace.geometry.top_k)[:, None]).any(axis=1) | (counts.max(axis=(1, 2)) > covered)
        for i in np.flatnonzero(wrong)[:1]:
            try:
                check_conservation(counts[i], int(covered[i]), trace.geometry.top_k)
            except InputError as error:
                raise TraceError(f"trace: request {i}: {name}: {error}") from None


def _check_ids(trace: ActivationTrace) -> None:
    """Ids are well formed and count to `decode`; request by request, so that memory stays bounded."""
    ids, geometry = trace.decode_ids, trace.geometry
    if ids is None:
        return
    _check_array("decode_ids", ids, (int(trace.decode_covered.sum()), geometry.layers, geometry.top_k), _UNSIGNED)
    ends = np.cumsum(trace.decode_covered)
    for i, (start, end) in enumerate(zip(ends - trace.decode_covered, ends, strict=True)):
        try:
            check_ids(ids[start:end], geometry)
        except InputError as error:
            raise TraceError(f"trace: request {i}: decode_ids: {error}") from None
        if not np.array_equal(count_ids(ids[start:end], geometry.experts), trace.decode[i]):
            raise TraceError(f"trace: request {i}: decode_ids do not count to decode")


def _check_gates(trace: ActivationTrace) -> None:
    for name in ("gate_prob", "gate_logit"):
        sums = getattr(trace, name)
        if sums is None:
            continue
        _check_array(name, sums, trace.prefill.shape, ("float32",))
        if not np.isfinite(sums).all():
            raise TraceError(f"trace: {name} holds a value that is not finite")
    if trace.gate_prob is not None and (trace.gate_prob < 0).any():
        raise TraceError("trace: gate_prob holds a negative sum of probabilities")


# --- what the file holds as bytes -----------------------------------------------------------------------


def _read_labels(positions: npt.NDArray[Any], names: Sequence[str]) -> tuple[str, ...]:
    if positions.ndim != 1 or positions.dtype.kind != "u" or (positions >= len(names)).any():
        raise TraceError(f"trace: labels are not positions among the {len(names)} label names")
    return tuple(names[i] for i in positions)


def _read_hashes(digests: npt.NDArray[Any]) -> tuple[str, ...]:
    if digests.ndim != 2 or digests.shape[1] != 16 or digests.dtype != np.uint8:
        raise TraceError(f"trace: prompt_hashes has shape {digests.shape} {digests.dtype}, not (N, 16) bytes")
    return tuple(row.tobytes().hex() for row in digests)
