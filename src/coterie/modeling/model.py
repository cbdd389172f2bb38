"""A model: packed weights and the forward pass over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coterie.core import ModelGeometry
from coterie.errors import InputError
from coterie.modeling.attention import KV_TILE
from coterie.modeling.config import ForwardConfig, GroupedAttention
from coterie.modeling.kernels import Kernel, kernels
from coterie.modeling.layers import (
    Angles,
    Attention,
    Dense,
    Grouped,
    Latent,
    Moe,
    Read,
    RemoteExperts,
    cache_heads,
    run_attention,
)
from coterie.modeling.prepare import Weights, open_weights
from coterie.modeling.step import StepBatch, check_batch, part_of, slots_of
from coterie.modeling.tiles import ROWS, Floats
from coterie.modeling.turns import Part, Steps, sums_of, take_turns

ExpertIds = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a step gives.

    Attributes:
        logits: `[R, V]` float32, of the rows asked for.
        expert_ids: `[T, L, k]` experts that each token chose in each MoE layer, best first; uint8, or uint16 for
            models of more than 256 experts.
    """

    logits: Floats
    expert_ids: ExpertIds


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    attention_norm: Floats
    attention: Attention
    forward_norm: Floats
    forward: Dense | Moe


class Model:
    """A mixture-of-experts decoder whose weights are mapped from a packed file.

    Everything is float32 and no sum's order depends on what else is computed, so a token's logits, keys, values and
    experts are equal, bit for bit, whatever else runs in the same step, however its prompt was cut into chunks and
    whatever of it was cached.  Run BLAS with one thread (`OPENBLAS_NUM_THREADS=1`): products are too small for more.
    """

    def __init__(
        self, weights: Weights, kernel: Kernel, experts: RemoteExperts | None = None, overlap: int | None = None
    ) -> None:
        self.config: ForwardConfig = weights.header.config
        self.kernel = kernel
        self._overlap = overlap
        read = weights.tensors.floats
        self._embedding, self._head, self._norm = read("embedding"), read("head"), read("norm")
        self._cos, self._sin = read("rope.cos"), read("rope.sin")
        self._layers = [_read_layer(kernel, self.config, read, layer, experts) for layer in range(self.config.layers)]
        self._heads = cache_heads(self.config)

    @classmethod
    def open(
        cls,
        path: Path,
        kernel: Kernel | None = None,
        experts: RemoteExperts | None = None,
        overlap: int | None = None,
    ) -> Model:
        """Open a weights file that `prepare` made.

        Args:
            path: of the file.
            kernel: what computes; by default the fastest that can run here.
            experts: what computes routed experts instead of `kernel`; those of the file, if it has any, are not read.
            overlap: tokens, 2 or more, from which on a step is computed as two halves, of which one computes while
                the other waits for `experts`; None for never.

        Raises:
            InputError: it is missing, truncated, or of another version, or it has no experts and none are given.
            UnsupportedError: this machine's BLAS does not give equal rows equal bits.
        """
        keep_freed_memory()
        weights = open_weights(path)
        if weights.header.expert_blocks is None and experts is None:
            raise InputError(f"{path}: has no routed experts; prepare the weights with them, or name their servers")
        model = cls(weights, kernel or next(kernels()), experts, overlap)
        shapes = [
            shape for layer in model._layers for part in (layer.attention, layer.forward) for shape in part.shapes()
        ]
        model.kernel.check([*shapes, *model._heads.shapes, (ROWS, *model._head.shape[1:])])
        return model

    @property
    def geometry(self) -> ModelGeometry:
        """The routed part."""
        return self.config.geometry

    @property
    def vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self.config.vocab

    def kv_shape(self, blocks: int, block_size: int) -> tuple[int, int, int, int]:
        """Shape of a float32 cache: block, layer, token, and what a layer keeps of a token.

        `kv[block]` is contiguous, so a block can be copied from process to process as bytes.

        Raises:
            InputError: `block_size` neither divides the attention's tiles of 64 tokens nor is a multiple of them.
        """
        if block_size < 1 or (KV_TILE % block_size and block_size % KV_TILE):
            raise InputError(f"block_size is {block_size}; it must divide {KV_TILE} or be a multiple of it")
        return blocks, self.config.layers, block_size, self._heads.width

    def forward(self, batch: StepBatch, kv: Floats) -> StepOutput:
        """Compute a step.

        Args:
            batch: the tokens; their blocks in `kv` hold the keys and values of all earlier positions.
            kv: the cache, of `kv_shape`; the tokens' keys and values are written to it.

        Raises:
            InputError: the batch does not fit the cache or the model.
            PartError: the routed experts of some tokens cannot be computed now; nothing of the step counts, and it can
                be computed again.
        """
        self._check_cache(kv)
        limits = {"vocab": self.config.vocab, "max_positions": self.config.max_positions}
        check_batch(batch, kv.shape[0], kv.shape[2], **limits)
        geometry = self.geometry
        dtype = np.uint8 if geometry.experts <= 256 else np.uint16
        ids = np.empty((len(batch.token_ids), geometry.layers, geometry.top_k), dtype)
        hidden = np.concatenate(take_turns(self._parts(batch, kv, ids)))
        wanted = self.kernel.rms_norm(hidden[batch.logits_rows], self._norm, self.config.norm_eps)
        return StepOutput(self.kernel.product(wanted, self._head, self.config.vocab), ids)

    def _parts(self, batch: StepBatch, kv: Floats, ids: ExpertIds) -> list[Part]:
        """The whole step, or two halves of it."""
        tokens = len(ids)
        if self._overlap is None or tokens < self._overlap:
            return [Part(slice(0, tokens), self._run_layers(batch, kv, ids))]
        halves = slice(0, tokens // 2), slice(tokens // 2, tokens)
        return [Part(half, self._run_layers(part_of(batch, half), kv, ids[half])) for half in halves]

    def _run_layers(self, batch: StepBatch, kv: Floats, ids: ExpertIds) -> Steps:
        """Compute hidden states `[T, D]`, and fill in `ids [T, L, k]`; yields whenever experts are under way."""
        eps = self.config.norm_eps
        slots = slots_of(batch, kv.shape[2])
        window = self.config.attention.window if isinstance(self.config.attention, GroupedAttention) else None
        attend = self.kernel.attention(batch, kv, self._heads, window)
        angles = Angles(self._cos[slots.positions, None], self._sin[slots.positions, None])
        hidden: Floats = self._embedding[batch.token_ids]
        moe = 0
        for number, layer in enumerate(self._layers):
            rows = self.kernel.rms_norm(hidden, layer.attention_norm, eps)
            hidden = hidden + run_attention(layer.attention, rows, angles, slots, kv, attend, number)
            rows = self.kernel.rms_norm(hidden, layer.forward_norm, eps)
            if isinstance(layer.forward, Dense):
                hidden = hidden + layer.forward(rows)
            else:
                begun, choice = layer.forward.begin(rows)
                ids[:, moe] = choice.ids
                moe += 1
                hidden = hidden + (yield from sums_of(begun))
        return hidden

    def _check_cache(self, kv: Floats) -> None:
        fits = kv.ndim == 4 and kv.shape == self.kv_shape(kv.shape[0], kv.shape[2])
        if not fits or kv.dtype != np.float32 or not kv.flags.c_contiguous:
            raise InputError(f"cache of shape {kv.shape}, {kv.dtype}: not a contiguous float32 array of kv_shape")


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next one, instead of faulting it in anew.

    glibc returns freed memory to the system beyond twice the largest block freed so far, of at most 32 MiB
    (mallopt(3), M_MMAP_THRESHOLD); other libraries are left as they are.
    """
    np.empty(31 << 20, np.uint8)


def _read_layer(
    kernel: Kernel, config: ForwardConfig, read: Read, number: int, experts: RemoteExperts | None
) -> _Layer:
    def own(name: str) -> Floats:
        return read(f"{number}.{name}")

    kind = config.attention
    attention = (
        Grouped(kernel, config, kind, own) if isinstance(kind, GroupedAttention) else Latent(kernel, config, kind, own)
    )
    forward: Dense | Moe
    if number in config.moe_layers:
        routed = partial(experts.start, config.moe_layers.index(number)) if experts else None
        forward = Moe(kernel, config, own, routed)
    else:
        forward = Dense(kernel, own)
    return _Layer(own("input_layernorm"), attention, own("post_attention_layernorm"), forward)
