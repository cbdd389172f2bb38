"""Which experts of a checkpoint a server has: said, checked and loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import numpy as np
import numpy.typing as npt

from coterie.core import ModelGeometry
from coterie.errors import InputError
from coterie.experts.members import Held
from coterie.experts.server.kernels import Kernel, WeightsT
from coterie.modeling.expert_tensors import ExpertFiles

Places = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Called with the number of experts loaded so far, and of how many."""

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True, slots=True, eq=False)
class HeldLayer(Generic[WeightsT]):
    """The experts that a server has of one layer.

    Attributes:
        experts: their ids, ascending.
        places: `[E + 1]` place of each expert among them, -1 for those it does not have and for the last, which is what
            id -1 means.
        weights: as the kernel has them.
    """

    experts: tuple[int, ...]
    places: Places
    weights: WeightsT

    def lacks(self, ids: npt.NDArray[np.int32]) -> bool:
        """Whether an expert of `ids` is not among them; -1 is none."""
        if len(self.experts) == len(self.places) - 1:
            return False
        return bool(((self.places[ids] ^ ids) < 0).any())  # one of the two is negative, and the other is not


@dataclass(frozen=True, slots=True, eq=False)
class Holding(Generic[WeightsT]):
    """All experts that a server has.

    Attributes:
        since: membership epoch since when it has them.
        layers: by MoE layer; None where it has none of a layer.
    """

    since: int
    layers: tuple[HeldLayer[WeightsT] | None, ...]

    @property
    def held(self) -> Held:
        """Ids by layer."""
        return tuple(layer.experts if layer else () for layer in self.layers)


def parse_experts(text: str, geometry: ModelGeometry) -> Held:
    """Read which experts a server is to have.

    Args:
        text: `all`; or ranges such as `0-31,40`, of every layer; or those of single layers, `0:0-31;1:32-63`.
        geometry: of the model.

    Raises:
        InputError: it is none of these, names an expert or a layer that the model does not have, or no expert at all.
    """
    if text == "all":
        return tuple(tuple(range(geometry.experts)) for _ in range(geometry.layers))
    if ":" not in text:
        return check_held((_ranges(text),) * geometry.layers, geometry)
    layers: dict[int, tuple[int, ...]] = {}
    for part in text.split(";"):
        layer, _, ranges = part.partition(":")
        if not layer.strip().isdecimal() or (number := int(layer[:10])) in layers or number >= geometry.layers:
            raise InputError(
                f"experts {part[:80]!r}: name each layer once, from 0 to {geometry.layers - 1}, as 0:0-31;1:32-63"
            )
        layers[number] = _ranges(ranges)
    return check_held(tuple(layers.get(layer, ()) for layer in range(geometry.layers)), geometry)


def check_held(held: Held, geometry: ModelGeometry) -> Held:
    """The experts of each layer, ascending.

    Raises:
        InputError: there are none, another number of layers, or an expert that the model does not have or that is there
            twice.
    """
    if len(held) != geometry.layers or not any(held):
        raise InputError(f"experts of {len(held)} layers, {sum(map(len, held))} in all; the model has {geometry}")
    for layer, ids in enumerate(held):
        if len(set(ids)) != len(ids) or (ids and not 0 <= min(ids) <= max(ids) < geometry.experts):
            raise InputError(
                f"experts of layer {layer}: name each once, from 0 to {geometry.experts - 1}; got {str(ids)[:80]}"
            )
    return tuple(tuple(sorted(ids)) for ids in held)


def load_experts(
    files: ExpertFiles, held: Held, kernel: Kernel[WeightsT], *, since: int = 0, progress: Progress | None = None
) -> Holding[WeightsT]:
    """Read a server's experts, and no byte of others.

    Raises:
        InputError: as `check_held`, or a tensor is missing, or of another shape or dtype than it should be.
        UnsupportedError: the kernel cannot compute this model's experts here.
    """
    geometry = files.model.geometry
    held = check_held(held, geometry)
    kernel.check(files.model)
    total, done = sum(map(len, held)), 0
    layers: list[HeldLayer[WeightsT] | None] = []
    for layer, ids in enumerate(held):
        layers.append(_load_layer(files, layer, ids, kernel) if ids else None)
        done += len(ids)
        if progress:
            progress(done, total)
    return Holding(since, tuple(layers))


def _load_layer(files: ExpertFiles, layer: int, ids: tuple[int, ...], kernel: Kernel[WeightsT]) -> HeldLayer[WeightsT]:
    places = np.full(files.model.geometry.experts + 1, -1, np.int64)
    places[list(ids)] = np.arange(len(ids))
    experts = (files.expert(layer, expert) for expert in ids)
    return HeldLayer(ids, places, kernel.pack(files.model, len(ids), experts))


def _ranges(text: str) -> tuple[int, ...]:
    ids: list[int] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last or last - first > 1 << 16:
            raise InputError(f"experts {text[:80]!r}: name them as 0-31,40")
        ids += range(first, last + 1)
    return tuple(ids)
