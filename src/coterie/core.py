"""The nouns that every part of coterie shares: frozen values, no behaviour beyond their own checks.

Those that are made several times for each request are structs, which take a tenth of the time of a frozen dataclass.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.counting import KERNEL
from coterie.errors import InputError

MAX_LAYERS = 4096
MAX_EXPERTS = 65536

Counts = npt.NDArray[np.unsignedinteger[Any]]
"""How many tokens chose each expert of each layer: unsigned integers, `[L, E]`."""


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The routed part of a model.

    Attributes:
        layers: number L of MoE layers, in model order; dense layers are not counted.
        experts: number E of routed (not shared) experts of each layer.
        top_k: experts that each token chooses in each layer.
    """

    layers: int
    experts: int
    top_k: int

    def __post_init__(self) -> None:
        _check_range("layers", self.layers, MAX_LAYERS)
        _check_range("experts", self.experts, MAX_EXPERTS)
        _check_range("top_k", self.top_k, self.experts)

    def __str__(self) -> str:
        return f"{self.layers} layers x {self.experts} experts, top-{self.top_k}"


def _check_range(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"model geometry: {name} must be a whole number from 1 to {most}, got {value!r}")


class ExpertCounts(msgspec.Struct, frozen=True, eq=False):
    """Which experts the tokens of one text chose.

    Attributes:
        geometry: the model's routed part.
        counts: `[L, E]`; each layer sums to `covered * top_k` (ELDR section 1.3, token conservation).
        tokens: tokens of the text.
        covered: tokens that were counted; fewer than `tokens` where KV blocks were filled from outside the engine.
    """

    geometry: ModelGeometry
    counts: Counts
    tokens: int
    covered: int

    def __post_init__(self) -> None:
        shape = (self.geometry.layers, self.geometry.experts)
        if self.counts.shape != shape:
            raise InputError(f"expert counts: shape {self.counts.shape} does not match the geometry {shape}")
        if self.counts.dtype.kind != "u":
            raise InputError(f"expert counts: dtype {self.counts.dtype} is not an unsigned integer")
        if not 0 <= self.covered <= self.tokens:
            raise InputError(f"expert counts: {self.covered} covered tokens of {self.tokens}")
        check_conservation(self.counts, self.covered, self.geometry.top_k)

    @property
    def complete(self) -> bool:
        """Whether every token was counted."""
        return self.covered == self.tokens


def check_conservation(counts: Counts, covered: int, top_k: int) -> None:
    """Check that each layer counted each token `top_k` times, and no expert twice for one token.

    Raises:
        InputError: naming the first layer that does not.
    """
    if KERNEL.conserves(counts, covered * top_k, covered):
        return
    sums = counts.sum(axis=-1, dtype=np.uint64)
    wrong = np.flatnonzero(sums != covered * top_k)
    if wrong.size:
        layer = int(wrong[0])
        raise InputError(
            f"expert counts: layer {layer} sums to {int(sums[layer])}, "
            f"not to {covered} tokens x top-{top_k} = {covered * top_k}"
        )
    raise InputError(f"expert counts: an expert was chosen {int(counts.max())} times by {covered} tokens")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a worker said of itself a moment ago.

    Attributes:
        kv_usage: part of its KV cache that is held, from 0 to 1.
        waiting: requests that wait there for room or for a place in the batch, not those whose KV is on its way.

    Raises:
        InputError: a value is out of range.
    """

    kv_usage: float
    waiting: int

    def __post_init__(self) -> None:
        if not 0 <= self.kv_usage <= 1 or self.waiting < 0:
            raise InputError(f"reading: kv_usage {self.kv_usage}, waiting {self.waiting}; need 0 to 1, and 0 or more")


class WorkerState(msgspec.Struct, frozen=True):
    """What a policy may know of one decode (or prefill) target when it decides.

    A target is a data-parallel rank of an expert-parallel group.  Experts are shared by the group, so
    locality chooses the group and load chooses the rank; with one rank per group the two coincide.

    Attributes:
        name: unique name of the target.
        group: name of its expert-parallel group.
        rank: its data-parallel rank in the group.
        available: whether it can take a request now.
        requests: requests in flight there, by the ledger's own count.
        tokens: prompt plus expected output tokens of those requests.
        assigned: sequence number of the last assignment; 0 if none.  Breaks ties by least recent use.
        reading: what it last said of itself; None where it said nothing, or too long ago.
    """

    name: str
    group: str
    rank: int = 0
    available: bool = True
    requests: int = 0
    tokens: int = 0
    assigned: int = 0
    reading: Reading | None = None


class RouteRequest(msgspec.Struct, frozen=True, eq=False):
    """One request as routing sees it.

    Attributes:
        id: request id.
        prompt_tokens: tokens of the prompt; 0 before prefill.
        output_tokens: expected output tokens (the client's limit, where it gave one).
        counts: experts that the prompt used; None where the engine did not say.
        counts_problem: why `counts` is None, for the decision's reason.
        domain: label given by the client, if any.
        prompt_hash: `prompt_hash` of the prompt, where the policy asks for it.
        prefix: first bytes of the prompt, as the key of prefix-aware prefill routing.
        session: name of the conversation that it continues, given by the client.
        holder: worker that decoded the conversation's last turn, by the ledger; its cache may hold that turn's KV.
    """

    id: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    counts: ExpertCounts | None = None
    counts_problem: str | None = None
    domain: str | None = None
    prompt_hash: str | None = None
    prefix: bytes = b""
    session: str | None = None
    holder: str | None = None


class Decision(msgspec.Struct, frozen=True):
    """A policy's choice.

    Attributes:
        worker: name of the chosen target.
        reason: one short phrase: which rule chose it, and which fallback if any.  One of few: metrics count by it.
        scores: similarity (or other figure of merit, higher is better) of each worker considered, by name.
        candidates: names among which load decided.
        detail: what is particular to this request, such as the label it gave; for logs.
        passed_over: workers that filters kept from the policy, by name, and why; each reason is one of few.
    """

    worker: str
    reason: str
    scores: tuple[tuple[str, float], ...] = ()
    candidates: tuple[str, ...] = ()
    detail: str = ""
    passed_over: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """What a decode worker gave for one request, as the gateway saw it.

    Attributes:
        tokens: output tokens, at least one.
        seconds: from the first of them to the last.

    Raises:
        InputError: no token, or a time that is negative or not finite.
    """

    tokens: int
    seconds: float

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 <= self.seconds < float("inf"):
            raise InputError(f"served: {self.tokens} tokens in {self.seconds} s")

    @property
    def step_s(self) -> float | None:
        """Mean time between two tokens; None where there was but one."""
        return self.seconds / (self.tokens - 1) if self.tokens > 1 else None


Role = Literal["prefill", "decode"]


def prompt_hash(prompt: str | Sequence[object]) -> str:
    """Stable identity of a prompt: a string, token ids, or chat messages.

    The same prompt hashes alike whatever the spacing or key order of the JSON it came in.

    Returns:
        32 hexadecimal digits (BLAKE2b, 128 bits).
    """
    canonical = json.dumps(prompt, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
