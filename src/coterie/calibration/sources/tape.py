"""What the MoE layers of a transformers model chose, kept while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from coterie.calibration.sources.routers import Routers, scores
from coterie.wire import Ids, check_ids, smallest_dtype

if TYPE_CHECKING:
    import torch

Gate = Literal["prob", "logit"]


@dataclass(slots=True, eq=False)
class Tape:
    """A `routers.Listener` that keeps ids, and sums of gate values if asked to.

    Gate values of single tokens are not kept: those of a long prompt would fill more memory than its KV cache.

    Attributes:
        routers: of the model that is listened to.
        gates: whether to sum gate logits and probabilities.
    """

    routers: Routers
    gates: bool = False
    _ids: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    _sums: dict[tuple[Gate, int], torch.Tensor] = field(default_factory=dict)

    def scored(self, layer: int, logits: torch.Tensor) -> None:
        """See `routers.Listener`."""
        if self.gates:
            self._add("logit", layer, logits)
        if self.gates and self.routers.scoring:
            self._add("prob", layer, scores(logits, self.routers.scoring))

    def chosen(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """See `routers.Listener`."""
        del weights
        self._ids.setdefault(layer, []).append(ids)

    def ids(self) -> Ids:
        """Ids of all passes, `[T, L, k]`, in the smallest dtype that holds them.

        Raises:
            WireError: an id is not of an expert, or a token chose one twice.
        """
        import torch

        geometry = self.routers.geometry
        layers = [torch.cat(self._ids[i]) for i in range(geometry.layers)]
        ids: Ids = torch.stack(layers, dim=1).cpu().numpy()
        check_ids(ids, geometry)
        return ids.astype(smallest_dtype(geometry.experts - 1))

    def gate_sums(self, gate: Gate) -> npt.NDArray[np.float32] | None:
        """Sums over all tokens, `[L, E]`; None where they were not asked for or cannot be told."""
        rows = [self._sums[gate, i] for i in range(self.routers.geometry.layers) if (gate, i) in self._sums]
        return np.stack([row.cpu().numpy() for row in rows]).astype(np.float32) if rows else None

    def _add(self, gate: Gate, layer: int, values: torch.Tensor) -> None:
        total = values.double().sum(0)
        before = self._sums.get((gate, layer))
        self._sums[gate, layer] = total if before is None else before + total
