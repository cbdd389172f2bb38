"""The parts of a decoder layer, with their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coterie.modeling.attention import CacheHeads
from coterie.modeling.config import ForwardConfig, GroupedAttention, LatentAttention
from coterie.modeling.experts import EXPERT_ROWS, ExpertWeights
from coterie.modeling.gates import Choice, GateRule, SoftmaxRule, sigmoid_gate, softmax_gate
from coterie.modeling.kernels import Kernel, StepAttention
from coterie.modeling.step import Slots
from coterie.modeling.tiles import ROWS, Floats, Shape

Read = Callable[[str], Floats]
"""Gives one of a layer's arrays."""


class Begun(Protocol):
    """Experts of a layer that somebody computes.  It is either finished or cancelled."""

    def finish(self) -> Floats:
        """Their sums `[T, D]`; waits for them.

        Raises:
            EngineError: they cannot be computed now.
        """

    def cancel(self) -> None:
        """Want no sums any more."""


Routed = Callable[[Floats, Choice], Begun]
"""Begins with a layer's routed experts, from rows `[T, D]` and what each chose."""

LATENT_EPS = 1e-6  # of the norms of latents, which take no epsilon from the configuration


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """Cosines and sines of a step's positions: two of `[T, 1, dim / 2]`."""

    cos: Floats
    sin: Floats


class Attention(Protocol):
    """The attention of one layer."""

    heads: CacheHeads

    def project(self, rows: Floats, angles: Angles) -> tuple[Floats, Floats]:
        """From `rows [T, D]`: scaled queries `[T, heads, share, key_dim]`, and what the cache gets `[T, width]`."""

    def output(self, mixed: Floats) -> Floats:
        """From `mixed [T, heads, share, value_dim]` back to `[T, D]`."""

    def shapes(self) -> list[Shape]:
        """Products of its matrices."""


def run_attention(
    attention: Attention, rows: Floats, angles: Angles, slots: Slots, kv: Floats, attend: StepAttention, layer: int
) -> Floats:
    """Write the step's keys and values to the cache, and let its tokens attend to all of theirs: `[T, D]`."""
    queries, cached = attention.project(rows, angles)
    kv[slots.blocks, layer, slots.offsets] = cached
    return attention.output(attend(queries, layer))


class Grouped:
    """Attention in which groups of heads share keys and values."""

    def __init__(self, kernel: Kernel, config: ForwardConfig, attention: GroupedAttention, read: Read) -> None:
        self.kernel, self.config, self.kind = kernel, config, attention
        self.heads = cache_heads(config)
        self.qkv, self.out = read("qkv"), read("output")
        self.norms = None if attention.norm == "none" else (read("q_norm"), read("k_norm"))

    def project(self, rows: Floats, angles: Angles) -> tuple[Floats, Floats]:
        """As `Attention.project`."""
        head_dim, eps = self.kind.head_dim, self.config.norm_eps
        middle, size = self.config.heads * head_dim, self.kind.kv_heads * head_dim
        joined = self.kernel.product(rows, self.qkv, middle + 2 * size)
        queries, keys, values = joined[:, :middle], joined[:, middle : middle + size], joined[:, middle + size :]
        if self.kind.norm == "full" and self.norms:
            queries, keys = (self.kernel.rms_norm(x, w, eps) for x, w in zip((queries, keys), self.norms, strict=True))
        queries, keys = (x.reshape(len(rows), -1, head_dim) for x in (queries, keys))
        if self.kind.norm == "head" and self.norms:
            queries, keys = (self.kernel.rms_norm(x, w, eps) for x, w in zip((queries, keys), self.norms, strict=True))
        queries = self.kernel.rotate(queries, angles.cos, angles.sin) * np.float32(self.config.scale)
        keys = self.kernel.rotate(keys, angles.cos, angles.sin).reshape(len(rows), size)
        shape = (len(rows), self.heads.heads, self.heads.share, head_dim)
        return queries.reshape(shape), np.concatenate((keys, values), axis=1)

    def output(self, mixed: Floats) -> Floats:
        """As `Attention.output`."""
        return self.kernel.product(mixed.reshape(len(mixed), -1), self.out, self.config.hidden)

    def shapes(self) -> list[Shape]:
        """As `Attention.shapes`."""
        return [_shape(matrix) for matrix in (self.qkv, self.out)]


class Latent:
    """Multi-head latent attention: the cache holds one latent, and one rotated key, for all heads."""

    def __init__(self, kernel: Kernel, config: ForwardConfig, attention: LatentAttention, read: Read) -> None:
        self.kernel, self.config, self.kind = kernel, config, attention
        self.heads = cache_heads(config)
        self.query_latent = None if attention.query_rank is None else (read("q_a"), read("q_a_norm"))
        self.query, self.kv_a, self.kv_a_norm = read("q"), read("kv_a"), read("kv_a_norm")
        self.to_latent, self.to_value, self.out = read("to_latent"), read("to_value"), read("output")

    def project(self, rows: Floats, angles: Angles) -> tuple[Floats, Floats]:
        """As `Attention.project`."""
        rank, nope = self.kind.kv_rank, self.kind.nope_dim
        queries = self._queries(rows)
        rotated = self.kernel.rotate(queries[..., nope:], angles.cos, angles.sin)
        latent_queries = self.kernel.product_by_head(queries[..., :nope], self.to_latent)
        joined = self.kernel.product(rows, self.kv_a, rank + self.kind.rope_dim)
        latents = self.kernel.rms_norm(joined[:, :rank], self.kv_a_norm, LATENT_EPS)
        keys = self.kernel.rotate(joined[:, None, rank:], angles.cos, angles.sin)[:, 0]
        scaled = np.concatenate((latent_queries, rotated), axis=-1) * np.float32(self.config.scale)
        return scaled[:, None], np.concatenate((latents, keys), axis=1)

    def _queries(self, rows: Floats) -> Floats:
        """`[T, heads, nope + rope]`."""
        of_head = self.kind.nope_dim + self.kind.rope_dim
        if self.query_latent is not None and self.kind.query_rank is not None:
            matrix, norm = self.query_latent
            rows = self.kernel.rms_norm(self.kernel.product(rows, matrix, self.kind.query_rank), norm, LATENT_EPS)
        return self.kernel.product(rows, self.query, self.config.heads * of_head).reshape(len(rows), -1, of_head)

    def output(self, mixed: Floats) -> Floats:
        """As `Attention.output`."""
        values = self.kernel.product_by_head(mixed[:, 0], self.to_value)
        return self.kernel.product(values.reshape(len(values), -1), self.out, self.config.hidden)

    def shapes(self) -> list[Shape]:
        """As `Attention.shapes`."""
        matrices = [self.query, self.kv_a, self.to_latent, self.to_value, self.out]
        return [_shape(matrix) for matrix in matrices + ([self.query_latent[0]] if self.query_latent else [])]


def cache_heads(config: ForwardConfig) -> CacheHeads:
    """What a model's cache holds of a token in a layer."""
    kind = config.attention
    if isinstance(kind, GroupedAttention):
        return CacheHeads(kind.kv_heads, config.heads // kind.kv_heads, kind.head_dim, kind.head_dim, latent=False)
    return CacheHeads(1, config.heads, kind.kv_rank + kind.rope_dim, kind.kv_rank, latent=True)


class Dense:
    """The feed-forward of a layer without experts."""

    def __init__(self, kernel: Kernel, read: Read) -> None:
        self.kernel = kernel
        self.weights = ExpertWeights(read("dense.gate_up"), read("dense.down"))

    def __call__(self, rows: Floats) -> Floats:
        """`[T, D]` to `[T, D]`."""
        return self.kernel.dense(rows, self.weights)

    def shapes(self) -> list[Shape]:
        """Products of its matrices."""
        return [*self.weights.shapes(ROWS)]


class RemoteExperts(Protocol):
    """Routed experts that are computed outside of this process."""

    def start(self, layer: int, rows: Floats, choice: Choice) -> Begun:
        """See `Routed`; `layer` is the MoE layer, from 0.

        Raises:
            EngineError: the experts cannot be computed now.
        """


@dataclass(frozen=True, slots=True, eq=False)
class _Here:
    """Routed experts that this process computes, once they are wanted."""

    kernel: Kernel
    rows: Floats
    choice: Choice
    weights: ExpertWeights

    def finish(self) -> Floats:
        return self.kernel.routed(self.rows, self.choice, self.weights)

    def cancel(self) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class _WithShared:
    """Routed experts, and the sums of shared ones."""

    routed: Begun
    shared: Floats

    def finish(self) -> Floats:
        return self.routed.finish() + self.shared

    def cancel(self) -> None:
        self.routed.cancel()


class Moe:
    """Routed experts, and shared ones where the model has them.

    Args:
        kernel: what computes.
        config: the model.
        read: gives the layer's arrays.
        routed: what computes routed experts instead of `kernel`; None to read their weights.
    """

    def __init__(self, kernel: Kernel, config: ForwardConfig, read: Read, routed: Routed | None = None) -> None:
        self.kernel, self.rule, self.count = kernel, config.gate, config.experts
        self.gate = read("gate")
        self.bias = None if isinstance(config.gate, SoftmaxRule) else read("gate_bias")
        self.experts = None if routed else ExpertWeights(read("experts.gate_up"), read("experts.down"))
        self.routed = routed or self._here
        self.shared = ExpertWeights(read("shared.gate_up"), read("shared.down")) if config.shared_size else None

    def begin(self, rows: Floats) -> tuple[Begun, Choice]:
        """From `[T, D]`: the layer's experts, and which are the routed ones."""
        choice = choose(self.kernel.product(rows, self.gate, self.count), self.bias, self.rule)
        routed = self.routed(rows, choice)
        if self.shared is None:
            return routed, choice
        return _WithShared(routed, self.kernel.dense(rows, self.shared)), choice  # while others compute the routed ones

    def _here(self, rows: Floats, choice: Choice) -> Begun:
        assert self.experts is not None, "read where nobody else computes them"
        return _Here(self.kernel, rows, choice, self.experts)

    def shapes(self) -> list[Shape]:
        """Products of its matrices."""
        experts = self.experts.shapes(EXPERT_ROWS) if self.experts else ()
        shared = self.shared.shapes(ROWS) if self.shared else ()
        return [_shape(self.gate), *experts, *shared]


def choose(logits: Floats, bias: Floats | None, rule: GateRule) -> Choice:
    """Experts of each token by the model's rule, from `logits [T, E]` and a sigmoid gate's bias `[E]`."""
    if isinstance(rule, SoftmaxRule):
        return softmax_gate(logits, rule)
    assert bias is not None, "packed with every sigmoid gate"
    return sigmoid_gate(logits, bias, rule)


def _shape(blocks: Floats) -> Shape:
    return ROWS, blocks.shape[1], blocks.shape[2]
