"""The arrays of a packed weights file, and how each is made from a checkpoint's tensors.

Matrices are transposed (`x @ W`), cut into blocks of columns, and joined where they multiply the same rows: queries,
keys and values; an expert's gate and up projections.  Interleaved rotary pairs are put into halves.  The latent
projection of keys and values is split into what maps queries to latents and what maps latents to values, so that
attention runs on the latents themselves (DeepSeek-V2, arXiv 2405.04434, section 2.1.2, "absorbed").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from coterie.modeling.checkpoint import Checkpoint
from coterie.modeling.config import ForwardConfig, GroupedAttention, LatentAttention
from coterie.modeling.expert_tensors import blocks_of, expert_names, moe_block, projections
from coterie.modeling.experts import BLOCK, block_expert
from coterie.modeling.gates import SigmoidRule
from coterie.modeling.rope import tables
from coterie.modeling.tiles import Floats, block_columns, width_of

Parts = Callable[[Checkpoint], Iterator[Floats]]


@dataclass(frozen=True, slots=True)
class PackedArray:
    """One array of the file.

    Attributes:
        name: its name there.
        shape: its shape.
        parts: makes it, in pieces that follow one another in C order.
    """

    name: str
    shape: tuple[int, ...]
    parts: Parts


def packed_arrays(config: ForwardConfig, expert_blocks: int | None) -> tuple[PackedArray, ...]:
    """All arrays of a model, in the order of the file.

    Args:
        config: the model.
        expert_blocks: blocks of each routed expert's intermediate dimension; None to leave routed experts out.
    """
    arrays = [*_ends(config)]
    for layer in range(config.layers):
        attention = config.attention
        arrays += _norms(config, layer)
        arrays += (
            _grouped(config, attention, layer)
            if isinstance(attention, GroupedAttention)
            else _latent(config, attention, layer)
        )
        arrays += _routed(config, layer, expert_blocks) if layer in config.moe_layers else _dense(config, layer)
    # vectors of odd lengths last, so that matrices start at cache lines
    return tuple(sorted(arrays, key=lambda array: math.prod(array.shape) % 16 != 0))


def _one(name: str, shape: tuple[int, ...], make: Callable[[Checkpoint], Floats]) -> PackedArray:
    return PackedArray(name, shape, lambda checkpoint: iter((make(checkpoint),)))


def _vector(name: str, source: str, size: int) -> PackedArray:
    return _one(name, (size,), lambda checkpoint: checkpoint.tensor(source, size))


def _matrix(name: str, inner: int, columns: int, make: Callable[[Checkpoint], Floats]) -> PackedArray:
    """A matrix that `make` gives as checkpoints store it, `[columns, inner]`."""
    width = width_of(columns)
    return _one(name, (-(-columns // width), inner, width), lambda checkpoint: block_columns(make(checkpoint).T, width))


def _plain(name: str, source: str, inner: int, columns: int) -> PackedArray:
    return _matrix(name, inner, columns, lambda checkpoint: checkpoint.tensor(source, columns, inner))


def _ends(config: ForwardConfig) -> Iterator[PackedArray]:
    vocab, hidden = config.vocab, config.hidden
    embedding = "model.embed_tokens.weight"
    yield _one("embedding", (vocab, hidden), lambda checkpoint: checkpoint.tensor(embedding, vocab, hidden))
    yield _plain("head", embedding if config.tied else "lm_head.weight", hidden, vocab)
    yield _vector("norm", "model.norm.weight", hidden)
    angles = (config.max_positions, config.rope.dim // 2)
    yield _one("rope.cos", angles, lambda _: tables(config.rope, config.max_positions)[0])
    yield _one("rope.sin", angles, lambda _: tables(config.rope, config.max_positions)[1])


def _norms(config: ForwardConfig, layer: int) -> Iterator[PackedArray]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield _vector(f"{layer}.{name}", f"model.layers.{layer}.{name}.weight", config.hidden)


def _grouped(config: ForwardConfig, attention: GroupedAttention, layer: int) -> Iterator[PackedArray]:
    source, hidden = f"model.layers.{layer}.self_attn", config.hidden
    queries, keys = config.heads * attention.head_dim, attention.kv_heads * attention.head_dim

    def join(checkpoint: Checkpoint) -> Floats:
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        return np.concatenate([checkpoint.tensor(f"{source}.{n}.weight", s, hidden) for n, s in sizes.items()])

    yield _matrix(f"{layer}.qkv", hidden, queries + 2 * keys, join)
    yield _plain(f"{layer}.output", f"{source}.o_proj.weight", queries, hidden)
    if attention.norm != "none":
        per_head = attention.norm == "head"
        yield _vector(f"{layer}.q_norm", f"{source}.q_norm.weight", attention.head_dim if per_head else queries)
        yield _vector(f"{layer}.k_norm", f"{source}.k_norm.weight", attention.head_dim if per_head else keys)


def _latent(config: ForwardConfig, attention: LatentAttention, layer: int) -> Iterator[PackedArray]:
    source, hidden, heads = f"model.layers.{layer}.self_attn", config.hidden, config.heads
    rank, nope, value = attention.kv_rank, attention.nope_dim, attention.value_dim
    of_head = nope + attention.rope_dim
    inner, query = hidden, "q_proj"
    if attention.query_rank is not None:
        inner, query = attention.query_rank, "q_b_proj"
        yield _plain(f"{layer}.q_a", f"{source}.q_a_proj.weight", hidden, inner)
        yield _vector(f"{layer}.q_a_norm", f"{source}.q_a_layernorm.weight", inner)

    def queries(checkpoint: Checkpoint) -> Floats:
        rows = checkpoint.tensor(f"{source}.{query}.weight", heads * of_head, inner)
        return _rotary_halves(rows.reshape(heads, of_head, inner), attention).reshape(rows.shape)

    def latents(checkpoint: Checkpoint) -> Floats:
        rows = checkpoint.tensor(f"{source}.kv_a_proj_with_mqa.weight", rank + attention.rope_dim, hidden)
        return _rotary_halves(rows, attention)

    def expand(checkpoint: Checkpoint) -> Floats:
        rows = checkpoint.tensor(f"{source}.kv_b_proj.weight", heads * (nope + value), rank)
        return rows.reshape(heads, nope + value, rank)

    yield _matrix(f"{layer}.q", inner, heads * of_head, queries)
    yield _matrix(f"{layer}.kv_a", hidden, rank + attention.rope_dim, latents)
    yield _vector(f"{layer}.kv_a_norm", f"{source}.kv_a_layernorm.weight", rank)
    yield _one(f"{layer}.to_latent", (heads, nope, rank), lambda checkpoint: expand(checkpoint)[:, :nope])
    yield _one(f"{layer}.to_value", (heads, rank, value), lambda c: expand(c)[:, nope:].swapaxes(1, 2))
    yield _plain(f"{layer}.output", f"{source}.o_proj.weight", heads * value, hidden)


def _rotary_halves(rows: Floats, attention: LatentAttention) -> Floats:
    """Reorder the last `rope_dim` of the last axis but one from pairs side by side to two halves."""
    if not attention.interleaved:
        return rows
    split = rows.shape[-2] - attention.rope_dim
    rotary = rows[..., split:, :]
    return np.concatenate((rows[..., :split, :], rotary[..., 0::2, :], rotary[..., 1::2, :]), axis=-2)


def _feed_forward(
    name: str, hidden: int, size: int, blocks: int, sources: tuple[tuple[str, str, str], ...]
) -> Iterator[PackedArray]:
    """Feed-forwards of equal size, from the names of each one's gate, up and down projections."""

    def each(which: int) -> Parts:
        def parts(checkpoint: Checkpoint) -> Iterator[Floats]:
            for gate, up, down in sources:
                inward = checkpoint.tensor(gate, size, hidden), checkpoint.tensor(up, size, hidden)
                yield block_expert(*inward, checkpoint.tensor(down, hidden, size), blocks)[which]

        return parts

    yield PackedArray(f"{name}.gate_up", (len(sources), blocks, hidden, 2 * BLOCK), each(0))
    yield PackedArray(f"{name}.down", (len(sources), blocks, BLOCK, hidden), each(1))


def _dense(config: ForwardConfig, layer: int) -> Iterator[PackedArray]:
    sources = (projections(f"model.layers.{layer}.mlp"),)
    return _feed_forward(f"{layer}.dense", config.hidden, config.dense_size, blocks_of(config.dense_size), sources)


def expert_tensors(config: ForwardConfig) -> Iterator[str]:
    """Names of all that a checkpoint has of routed experts."""
    for layer in config.moe_layers:
        for expert in range(config.experts):
            yield from expert_names(config.architecture, layer, expert)


def _routed(config: ForwardConfig, layer: int, blocks: int | None) -> Iterator[PackedArray]:
    source = moe_block(config.architecture, layer)
    yield _plain(f"{layer}.gate", f"{source}.gate.weight", config.hidden, config.experts)
    if isinstance(config.gate, SigmoidRule):
        yield _vector(f"{layer}.gate_bias", f"{source}.gate.e_score_correction_bias", config.experts)
    if blocks is not None:
        experts = tuple(expert_names(config.architecture, layer, expert) for expert in range(config.experts))
        yield from _feed_forward(f"{layer}.experts", config.hidden, config.expert_size, blocks, experts)
    if config.shared_size:
        shared, size = (projections(f"{source}.shared_experts"),), config.shared_size
        yield from _feed_forward(f"{layer}.shared", config.hidden, size, blocks_of(size), shared)
